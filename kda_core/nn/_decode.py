"""One call for a decoding step of a layer: everything between its projections."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import _expect, _loaded
from kda_core._bind import build_request, by_head
from kda_core._checks import PYTHON, check, check_values, python_value
from kda_core._loaded import Backend
from kda_core._torch_private import cat
from kda_core.api import fused_recurrent_kda
from kda_core.capabilities import Feature
from kda_core.nn import _convolution, _norm
from kda_core.nn._checks import expect_convolution, expect_eps, expect_same_device, expect_shape, expect_tensor
from kda_core.nn._convolution import convolve
from kda_core.nn._dispatch import backend_for, is_eager
from kda_core.nn._norm import norm
from kda_core.request import DecodeStepRequest, Request

FLAGS = (
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
)  # fmt: skip
TENSORS = (
    "x", "g", "beta", "conv_state", "weight", "state", "bias", "A_log", "dt_bias", "norm_gate", "norm_weight",
    "out", "records", "commit", "commit_inputs",
)  # fmt: skip
"""Fields of a request that may require gradients."""
_RECORDS = frozenset({Feature.DRAFT_RECORDS})
_OWN_NAMES = {"q": "mixed_qkv", "initial_state": "state", "ssm_state_indices": "state_indices"}
"""Arguments of ``fused_recurrent_kda`` that have another name here."""
_PUBLIC = {
    "x": "mixed_qkv", "weight": "conv_weight", "bias": "conv_bias", "indices": "state_indices",
    "accepted": "num_accepted_tokens",
}  # fmt: skip
"""Fields of a request that have another name in the function."""
_IN_TORCH, _PLACES, _MOST_PLACES = "no hooks", "places in memory", 256
"""Keys of the memo of a kind of calls: whether no backend has hooks for the convolution and the norm; where the tensors
of earlier calls lay, and the most of them that are kept."""
_FLAGS = {"output_final_state": False, "inplace_final_state": False, "silu": True}
"""Options of the convolution."""


def kda_decode_step(
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    state: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
    records: Tensor | None = None,
    commit: Tensor | None = None,
    num_committed: Tensor | None = None,
    commit_inputs: Tensor | None = None,
) -> Tensor:
    """A decoding step of a KDA layer between its projections: short convolution, recurrence and gated RMS norm.

    ``short_convolution`` of q, k and v side by side, ``fused_recurrent_kda``, ``gated_rms_norm``, for one token of each
    of N sequences, or for T of each (drafts), with both states advanced in place. Not differentiable. The GPU backends
    take it as one call of one to three launches; elsewhere it is these three calls.
    Symbols as in ``chunk_kda``; D = 2·H·K + HV·V channels, W taps.

    Args:
        mixed_qkv: [N, D], or [N, T, D]: the projections of q, k and v side by side, any strides. H follows from D.
        g: [N, HV, K], or [N, T, HV, K]; raw values of the gate, or log decays without ``use_gate_in_kernel``.
        beta: [N, HV], or [N, T, HV]; logits, or values without ``use_beta_sigmoid_in_kernel``.
        conv_state: [slots, W - 1, D], any floating dtype, any strides: the inputs before the first token, oldest first.
        conv_weight: [D, W] or [D, 1, W].
        state: [slots, HV, K, V], as ``initial_state`` of ``fused_recurrent_kda``.
        conv_bias: [D] or None.
        A_log: as in ``fused_recurrent_kda``; so are dt_bias, scale, lower_bound, allow_neg_eigval and state_v_first,
            and the three flags, but that q and k are normalised, and gate and beta computed, unless you say no.
        norm_gate: [N, HV, V], or [N, T, HV, V]: logits; None, together with ``norm_weight``: no norm.
        norm_weight: [V].
        state_indices: the slots of both states: [N], or [N, T] and more with one for every token, which then holds the
            states behind this token. None: slot n of sequence n. Negative ones, and ``pad_slot_id``, are skipped as in
            ``fused_recurrent_kda``; the norm then sees zeros, and ``norm_gate`` there must be finite. Past the end:
            ValueError on the CPU, skipped on other devices.
        num_accepted_tokens: [N], beside [N, T] slots: sequence n starts from slot [n, accepted - 1].
        norm_eps: as ``eps`` of ``gated_rms_norm``.
        out: [N, HV, V], or [N, T, HV, V], in the dtype of ``mixed_qkv``: written and returned; no overlap with the
            other tensors.
        backend: name of a backend, as in ``chunk_kda``.
        records: [N, T, HV, 2K + V] of ``empty_records``, T = 1 for one token: as in ``fused_recurrent_kda`` the tokens
            are recorded, and both states stay as they are until a later call commits some of them. Needs
            ``state_indices`` [N].
        commit: the records of the draft before, [N, T', HV, 2K + V]: both states first advance by the first
            ``num_committed`` [N] of its tokens (0 to T'). Only beside ``records``.
        num_committed: as in ``fused_recurrent_kda``.
        commit_inputs: [N, T', D] (or [N, D]): the ``mixed_qkv`` of the draft that ``commit`` recorded.

    Returns:
        [N, HV, V], or [N, T, HV, V], in the dtype of ``mixed_qkv``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, value or combination, or an input that requires a gradient.
        UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``.
    """
    for name, value in (("mixed_qkv", mixed_qkv), ("g", g), ("beta", beta), ("state", state)):
        expect_tensor(name, value)
    if mixed_qkv.dim() not in (2, 3):
        raise ValueError(f"mixed_qkv: expected [N, D] or [N, T, D], got shape {list(mixed_qkv.shape)}")
    single = mixed_qkv.dim() == 2

    def by_token(name: str, t: Tensor | None, rank: int) -> Tensor | None:
        if t is None:
            return None
        expect_tensor(name, t, rank - single)
        return t.unsqueeze(1) if single else t

    weight = conv_weight.squeeze(1) if isinstance(conv_weight, Tensor) and conv_weight.dim() == 3 else conv_weight
    tensors: dict[str, Any] = {
        "x": by_token("mixed_qkv", mixed_qkv, 3), "g": by_token("g", g, 4), "beta": by_token("beta", beta, 3),
        "conv_state": conv_state, "weight": weight, "state": state, "bias": conv_bias, "indices": state_indices,
        "accepted": num_accepted_tokens, "A_log": by_head(A_log, g, 1),
        "dt_bias": by_head(dt_bias, g, 2), "norm_gate": by_token("norm_gate", norm_gate, 4), "norm_weight": norm_weight,
        "out": by_token("out", out, 4), "records": records, "commit": commit, "num_committed": num_committed,
        "commit_inputs": commit_inputs,
    }  # fmt: skip
    if isinstance(commit_inputs, Tensor) and commit_inputs.dim() == 2:
        tensors["commit_inputs"] = commit_inputs.unsqueeze(1)
    options: dict[str, Any] = {
        "norm_eps": norm_eps, "scale": g.shape[-1] ** -0.5 if scale is None else scale, "lower_bound": lower_bound,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first, "pad_slot_id": pad_slot_id,
    }  # fmt: skip
    options = {n: value if type(value) in PYTHON else python_value(value) for n, value in options.items()}
    x, *others = tensors.values()
    own: Backend | None = None
    memo: Any = None
    if x.numel():
        features = frozenset() if records is None else _RECORDS
        own, memo = backend_for("decode_step", x, tuple(others), tuple(options.values()), backend, features)
    request = build_request({**tensors, **options, "memo": memo}, DecodeStepRequest)
    # At every call: layouts, by which calls are of one kind, do not say it.
    for name in TENSORS if torch.is_grad_enabled() else ():
        if getattr(tensors[name], "requires_grad", False):
            raise ValueError(f"{name}: kda_decode_step is not differentiable; use torch.no_grad(), or detach it")
    if memo is None:
        _check(request)
        o = _in_parts(request, backend)
    else:
        o = _of_a_kind(request, own, backend, [t for t in tensors.values() if t is not None])
    return out if out is not None else o.squeeze(1) if single else o


def _check(r: DecodeStepRequest) -> None:
    """All that the three functions do not check, or would check too late: nothing may have been written."""
    N, T, D = r.x.shape
    if r.state.dim() != 4:
        raise ValueError(f"state: expected 4 dimensions, got shape {list(r.state.shape)}")
    HV, K = r.g.shape[2:]
    if r.H < 1 or D != 2 * r.H * K + HV * r.V or HV % r.H:
        expected = f"2 · H · {K} + {HV * r.V} channels, H a divisor of {HV}"
        raise ValueError(f"mixed_qkv: expected {expected} (K and HV as of g, V as of state), got {D}")
    expect_tensor("conv_state", r.conv_state)
    expect_convolution(D, r.state.shape[0], conv_weight=r.weight, conv_bias=r.bias, conv_state=r.conv_state)
    if (r.norm_gate is None) != (r.norm_weight is None):
        raise ValueError("norm_gate, norm_weight: expected both or neither")
    if r.norm_gate is not None and r.norm_weight is not None:
        expect_shape("norm_gate", r.norm_gate, (N, T, HV, r.V))
        expect_tensor("norm_weight", r.norm_weight, 1)
        expect_shape("norm_weight", r.norm_weight, (r.V,))
        expect_eps("norm_eps", r.norm_eps)
    if r.out is not None:
        expect_shape("out", r.out, (N, T, HV, r.V))
        if r.out.dtype != r.x.dtype:
            raise TypeError(f"out: expected {r.x.dtype}, the dtype of mixed_qkv, got {r.out.dtype}")
    if (r.commit is None) != (r.commit_inputs is None):
        raise ValueError("commit, commit_inputs: expected both or neither")
    if r.commit is not None and r.commit_inputs is not None:
        expect_tensor("commit", r.commit, 4)
        expect_tensor("commit_inputs", r.commit_inputs, 3)
        expect_shape("commit_inputs", r.commit_inputs, (N, *r.commit.shape[1:2], D))
        if r.commit_inputs.dtype != r.x.dtype:
            raise TypeError(f"commit_inputs: expected {r.x.dtype}, as mixed_qkv, got {r.commit_inputs.dtype}")
    if r.records is not None and r.indices is not None and r.indices.shape[1:].numel() > 1:
        raise ValueError(f"state_indices: expected [N] beside records, got shape {list(r.indices.shape)}")
    if r.indices is None and r.state.shape[0] < N:
        raise ValueError(f"state: expected a slot for each of {N} sequences, got {r.state.shape[0]}")
    for name in FLAGS:
        _expect.flag(name, getattr(r, name))
    layer = {
        "conv_state": r.conv_state, "conv_weight": r.weight, "conv_bias": r.bias, "norm_gate": r.norm_gate,
        "norm_weight": r.norm_weight, "out": r.out, "commit_inputs": r.commit_inputs,
    }  # fmt: skip
    expect_same_device(r.x, layer)
    if not torch.compiler.is_compiling():
        # A compiled call's operator makes these checks itself, before anything is written.
        request = Request(op="fused_recurrent_kda", **_recurrence(r, r.x))
        try:
            check(request)
            check_values(request)
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"\w+", lambda word: _OWN_NAMES.get(word[0], word[0]), str(error))) from None
        for name, t in (("conv_state", r.conv_state), ("out", r.out)):
            if t is not None:
                _expect.no_overlap(name, t)
        _expect_own_memory(r)


def _of_a_kind(r: DecodeStepRequest, own: Backend | None, backend: str | None, tensors: list[Tensor]) -> Tensor:
    """An eager step, by a backend's own hook or in parts.

    Later calls of a kind have the same layouts and options. Their tensors may lie elsewhere, and share memory. Slots
    and counts are checked by the recurrence (a backend's own hook looks at none), before anything is written.
    """
    memo: dict[Any, Any] = r.memo  # type: ignore[assignment]
    seen = memo.get(_PLACES)
    if seen is None:
        _check(r)
        seen, parts = (), ("short_convolution", "gated_rms_norm")
        memo[_IN_TORCH] = all(backend_for(part, r.x, (), (), backend)[0] is None for part in parts)
    try:
        place = tuple([t.data_ptr() for t in tensors])
        if seen and place not in seen:
            _expect_own_memory(r)
        # Checked calls (KDA_CHECK=1) look at the operators' requests: those of the three calls.
        in_parts = own is None or _loaded.watch is not None
        o: Tensor = _in_parts(r, backend) if in_parts else own.result("kda_core_decode_step", r)  # type: ignore[union-attr]
    except (RuntimeError, TypeError, ValueError):
        _check(r)  # its errors have the names of this function's arguments
        raise
    if place not in seen:
        memo[_PLACES] = {place, *seen} if len(seen) < _MOST_PLACES else {place}
    return o


def _expect_own_memory(r: DecodeStepRequest) -> None:
    """Refuse tensors to write to that share memory with another one."""
    given = {_PUBLIC.get(name, name): t for name, t in vars(r).items() if isinstance(t, Tensor)}
    if is_eager(*given.values()):
        _expect.own_memory(given, ("out", "conv_state", "state", "records"))


def _recurrence(r: DecodeStepRequest, y: Tensor) -> dict[str, Any]:
    """Arguments of the recurrence behind a convolution with the result y [N, T, D]."""
    (N, T, HV, K), H = r.g.shape, r.H
    q, k, v = y.split_with_sizes([H * K, H * K, HV * r.V], -1)
    state = r.state if r.indices is not None else r.state[:N]
    return r.recurrence_arguments(q.view(N, T, H, K), k.view(N, T, H, K), v.view(N, T, HV, r.V), state)


def _in_parts(r: DecodeStepRequest, backend: str | None) -> Tensor:
    """The step in three calls of checked arguments; without a synchronisation, so that a CUDA graph can hold it."""
    if not r.conv_state.shape[0]:  # all sequences are skipped: a row to read and write in their place
        r = replace(r, conv_state=r.conv_state.new_zeros(1, *r.conv_state.shape[1:]))
    places, first, masked = _slots(r)
    before = r.conv_state[: len(r.x)] if first is None else r.conv_state.index_select(0, first)
    if r.commit_inputs is not None and r.num_committed is not None:
        every = cat([before, r.commit_inputs.to(before.dtype)], 1)
        count = r.num_committed.long().clamp(0, r.commit_inputs.shape[1])
        taken = count[:, None] + torch.arange(before.shape[1], device=count.device)
        before = every.gather(1, taken[:, :, None].expand(-1, -1, every.shape[2]))
    in_torch = r.memo is not None and r.memo.get(_IN_TORCH)
    if in_torch:
        y, _ = _convolution.in_torch(r.x, r.weight, r.bias, before, None, True, False)
    else:
        (y,), _ = convolve(r.x, r.weight, r.bias, before, None, _FLAGS, (r.x.shape[2:],), backend)
    o, _ = fused_recurrent_kda(**_recurrence(r, y), backend=backend)
    if r.records is None:
        _keep_inputs(r, places, before, masked)
    elif r.commit is not None:
        _write(r, places, before, masked)
    if r.norm_gate is not None and r.norm_weight is not None:
        if in_torch:
            o = _norm.in_torch(o, r.norm_gate, r.norm_weight, r.norm_eps)
        else:
            o = norm(o, r.norm_gate, r.norm_weight, r.norm_eps, backend)
    return o if r.out is None else r.out.copy_(o)


def _slots(r: DecodeStepRequest) -> tuple[Tensor | None, Tensor | None, bool]:
    """Slots to be written [N · T], or [N] after the last token; those to start from [N]; whether some may be skipped.

    None: slot n of sequence n. A slot that is not to be written is -1, and one that is not to be read any other.
    """
    if r.indices is None:
        return None, None, False
    slots, table = r.state.shape[0], r.indices.long()
    table = first = table if table.dim() == 1 else table.squeeze(1)
    if table.dim() == 2:
        first = table[:, 0]
        if r.accepted is not None:
            first = table.gather(1, r.accepted.long().clamp(1, table.shape[1])[:, None] - 1)[:, 0]
        table = table[:, : r.x.shape[1]]
    # Without a memo the values may be traced ones.
    if r.memo is not None and table.is_cpu:
        used = r.indices.flatten().tolist()
        if 0 <= min(used) <= max(used) < slots and r.pad_slot_id not in used:
            return table.flatten(), first, False
    skipped = (first < 0) | (first == r.pad_slot_id) | (first >= slots)
    unused = (table < 0) | (table == r.pad_slot_id) | (table >= slots)
    unused = unused | (skipped if table.dim() == 1 else skipped[:, None])
    return table.masked_fill(unused, -1).flatten(), first.clamp(0, len(r.conv_state) - 1), True


def _keep_inputs(r: DecodeStepRequest, places: Tensor | None, before: Tensor, masked: bool) -> None:
    """Write the W - 1 inputs behind each token, or behind the last one, to its slot."""
    T, reach = r.x.shape[1], before.shape[1]
    if not T:
        return
    every = cat([before, r.x.type_as(before)], 1)
    last = r.indices is None or r.indices.shape[1:].numel() == 1
    rows = every.narrow(1, T, reach) if last else every.unfold(1, reach, 1)[:, 1:].transpose(2, 3).flatten(0, 1)
    _write(r, places, rows, masked)


def _write(r: DecodeStepRequest, places: Tensor | None, rows: Tensor, masked: bool) -> None:
    """Write rows [N', W - 1, D] to slots [N'], with ``masked`` -1 for none; None: to the first ones."""
    if places is None:
        r.conv_state[: len(rows)] = rows
        return
    if not masked:
        r.conv_state.index_copy_(0, places, rows)
        return
    if not len(places):
        return
    # A row without a slot repeats one that has a slot, with the same numbers: writing needs no order, and no wait.
    used = places >= 0
    source = torch.where(used, torch.arange(len(places), device=places.device), used.int().argmax())
    places, rows = places[source].clamp(min=0), rows[source]
    r.conv_state[places] = torch.where(used.any(), rows, r.conv_state[places])
