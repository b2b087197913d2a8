"""The public functions: bind the arguments to a request, choose a backend, call it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kda_core import _autograd, _checks, _expect, _ops, _plugins
from kda_core._autograd import Repeated, note, to_front, with_kind
from kda_core._bind import bind, is_sharded
from kda_core._ledger import LedgerEntry
from kda_core._plugins import registry
from kda_core._torch_private import needs_operator
from kda_core.request import GateRequest, Request


# For type checkers: how many results there are depends on return_intermediate_states alone.
# fmt: off
@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: Literal[False] = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, ssm_state_indices: Tensor | None = None, pad_slot_id: int = -1,
    out: Tensor | None = None, backend: str | None = None, has_initial_state: Tensor | None = None,
    update_state: bool = True, final_state_indices: Tensor | None = None, final_state_pool: Tensor | None = None,
    intermediate_states_dtype: torch.dtype | None = None, checkpoint_indices: Tensor | None = None,
    checkpoint_every: int = 0, checkpoint_pool: Tensor | None = None, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    *, return_intermediate_states: Literal[True], state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, ssm_state_indices: Tensor | None = None, pad_slot_id: int = -1,
    out: Tensor | None = None, backend: str | None = None, has_initial_state: Tensor | None = None,
    update_state: bool = True, final_state_indices: Tensor | None = None, final_state_pool: Tensor | None = None,
    intermediate_states_dtype: torch.dtype | None = None, checkpoint_indices: Tensor | None = None,
    checkpoint_every: int = 0, checkpoint_pool: Tensor | None = None, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, ssm_state_indices: Tensor | None = None, pad_slot_id: int = -1,
    out: Tensor | None = None, backend: str | None = None, has_initial_state: Tensor | None = None,
    update_state: bool = True, final_state_indices: Tensor | None = None, final_state_pool: Tensor | None = None,
    intermediate_states_dtype: torch.dtype | None = None, checkpoint_indices: Tensor | None = None,
    checkpoint_every: int = 0, checkpoint_pool: Tensor | None = None, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...
# fmt: on


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, ssm_state_indices: Tensor | None = None,
    pad_slot_id: int = -1, out: Tensor | None = None, backend: str | None = None,
    has_initial_state: Tensor | None = None, update_state: bool = True, final_state_indices: Tensor | None = None,
    final_state_pool: Tensor | None = None, intermediate_states_dtype: torch.dtype | None = None,
    checkpoint_indices: Tensor | None = None, checkpoint_every: int = 0, checkpoint_pool: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    r"""Kimi Delta Attention over whole sequences, in chunks: for training and prefill.

    Per value head, with state S in R^{K x V}:
    ``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T`` and ``o_t = scale * S_t^T q_t``.
    Source: Kimi Linear, arXiv 2510.26692. Symbols: B batch, T tokens, H query/key heads, HV value heads
    (a multiple of H; value head i reads query/key head i // (HV // H)), K and V head dimensions, N
    sequences (B, or len(cu_seqlens) - 1). Tensors are dense and may have any strides; none is modified,
    except a pool and ``out``. Numbers and flags are Python's or NumPy's scalars.

    Args:
        q: [B, T, H, K], bfloat16, float16, float32 (or float64 where the backend takes it).
        k: [B, T, H, K], dtype of q; of unit norm, or with ``use_qk_l2norm_in_kernel``.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV, K] ([..., HV, K] in ``kda_gate``), any floating dtype: natural-log decay <= 0, from the caller's
            gate; or the raw gate input with ``use_gate_in_kernel`` and in ``kda_gate``.
        beta: [B, T, HV], any floating dtype: in [0, 1]; or logits with ``use_beta_sigmoid_in_kernel``.
        scale: factor of the output: 0, or a normal number of float32 (of float64 with float64 q); None: K ** -0.5.
        initial_state: [N, HV, K, V] float32, bfloat16 or float16 (float64 with float64 q): state before the first
            token; None: zero. With ``ssm_state_indices`` a pool [slots, HV, K, V], read and advanced in place.
        output_final_state: return the state after the last token.
        use_qk_l2norm_in_kernel: replace q and k by x / sqrt(sum x^2 + 1e-6), computed in float32.
        use_gate_in_kernel: g is raw; the decay is ``-exp(A_log) * softplus(g + dt_bias)``, or with ``lower_bound`` b:
            ``b * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: beta holds logits; its sigmoid is used.
        allow_neg_eigval: use 2 * sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        safe_gate: a promise that decays lie within [lower_bound, 0) ([-5, 0) without a bound); a backend may use it for
            speed. A broken promise may give wrong results (decays below the bound may count as the bound), but never
            NaN. With ``use_gate_in_kernel`` it needs ``lower_bound``.
        lower_bound: negative, as ``scale``; chooses the bounded gate. Beside given decays it is the bound that
            ``safe_gate`` promises, and without ``safe_gate`` it changes nothing.
        disable_recompute: save what the chunks' backward would compute again: faster, more memory, the same gradients.
            In fla it saves every intermediate. Here a backend may save only some, or none: its ``kda_core_saved_spec``
            says which, and the guide to training lists them.
        return_intermediate_states: also return the state at the start of every chunk; not differentiable.
        state_v_first: states are stored [..., V, K].
        cu_seqlens: [N+1] int32 or int64, on the device of q: boundaries of packed sequences (B = 1), from 0, not
            decreasing. A sequence may be empty (its state passes through); the last boundary may lie before T. Rows
            behind it may hold anything; their output is zero, and so are their gradients.
        cu_seqlens_cpu: [N+1] copy of ``cu_seqlens`` on the CPU; lets a backend plan without waiting. On other devices
            ``return_intermediate_states`` needs it.
        cp_context: from ``kda_core.distributed.build_cp_context`` (or fla's): q, k, v, g and beta hold this rank's rows
            of sequences that several ranks share; states are of all N. Every rank makes the call and its backward.
        A_log: [HV], log of the gate's rate; optional with ``lower_bound``. Dimensions of size 1 may stand around it.
        dt_bias: [HV * K] or [HV, K], added to g in the gate; dimensions of size 1 as well.
        chunk_size: 32 or 64: distance of the intermediate states, and a backend's block size.
        ssm_state_indices: [N] or [N, 1], int32 or int64, any stride: each sequence's slot of the pool.
            ``fused_recurrent_kda`` also takes [N, 1+S], a slot for every token.
        pad_slot_id: a sequence with this index, or any negative one, is skipped: its output is zero and no slot is
            touched.
        out: [B, T, HV, V], dtype of q: written in full and returned as ``o``; no overlap with the inputs.
        backend: name of the backend; never falls back to another. None: ``use_backend``, then ``KDA_BACKEND``, then the
            best one for the tensors' device.
        has_initial_state: [N] bool, on the device of q, beside ``ssm_state_indices``: a sequence with False starts from
            zero. Its slot is not read, may hold anything, and is written like any other.
        update_state: False leaves the pool as it was and computes outputs alone; needs ``ssm_state_indices``, and no
            ``output_final_state``.
        final_state_indices: [N] or [N, 1], int32 or int64, any stride, beside ``ssm_state_indices``: slots that states
            are written to, while ``ssm_state_indices`` are read. Two sequences may read one slot. A slot that one
            writes no other may read or write: refused as other wrong slots are. ``pad_slot_id`` and negative indices
            drop the state. ``fused_recurrent_kda`` also takes [N, 1+S], a slot for every token.
        final_state_pool: [slots, HV, K, V], of any dtype that ``initial_state`` may have, beside
            ``final_state_indices``: the pool that they point into, while ``initial_state`` is only read.
        checkpoint_indices: [N, M] int32 or int64, beside ``ssm_state_indices`` and ``checkpoint_every``: slot [n, j]
            takes the state after (j + 1) * checkpoint_every tokens of sequence n, if it has so many; ``pad_slot_id``
            and negative indices drop it. A sequence may have more of them than columns. No slot is written twice.
        checkpoint_every: tokens between checkpoints, a multiple of 16; of ``chunk_size`` beside intermediate states.
        checkpoint_pool: [slots, HV, K, V], of any dtype that ``initial_state`` may have: the pool that checkpoints go
            to; None: the one that final states go to.
        intermediate_states_dtype: dtype of h, beside ``return_intermediate_states``; one that states may have. None:
            that of the initial state.
        batch_invariant: a sequence's output, states and gradients have the same bits alone and in any batch, packed
            among packed ones or dense among dense ones; a backend may be slower. The gradients of A_log and dt_bias are
            sums over the batch.

    Returns:
        ``(o, final_state)``, or ``(o, final_state, h)`` with ``return_intermediate_states``.
        o: [B, T, HV, V], dtype of q.
        final_state: [N, HV, K, V] in the initial state's dtype (default float32); the pool that was written when one
            was given; None unless ``output_final_state``.
        h: [B, NT, HV, K, V], in the initial state's dtype unless another was asked for; NT = sum of
            ceil(length / chunk_size); zero where a sequence is skipped.

    Raises:
        ValueError: a wrong shape, device, value or combination; nothing has been written.
        TypeError: a wrong type or dtype; a nested, sparse, quantized or masked tensor.
        UnsupportedCall: no installed backend, or not the named one, can serve the call.
        BackendNotFound, BrokenBackend: the named backend is not installed, or could not be loaded.
    """
    # Written out: compilers do not know ``locals()``.
    values = (
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
        return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, A_log, dt_bias, chunk_size,
        ssm_state_indices, pad_slot_id, out, has_initial_state, update_state, final_state_indices, final_state_pool,
        intermediate_states_dtype, checkpoint_indices, checkpoint_every, checkpoint_pool, batch_invariant,
    )  # fmt: skip
    return call("chunk_kda", values, backend, cp_context)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, inplace_final_state: bool = False, pad_slot_id: int = -1,
    out: Tensor | None = None, backend: str | None = None, safe_gate: bool = False,
    has_initial_state: Tensor | None = None, update_state: bool = True, final_state_indices: Tensor | None = None,
    final_state_pool: Tensor | None = None, records: Tensor | None = None, commit: Tensor | None = None,
    num_committed: Tensor | None = None, parents: Tensor | None = None, commit_path: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    r"""Kimi Delta Attention token by token, with the state kept on chip: for decoding and short sequences.

    The same function as ``chunk_kda`` (see there for the equation, the symbols and every argument that is
    not listed here), from T = 1 up. Differentiable when nothing of the caller's is written.

    Args:
        q: as in ``chunk_kda``; so are k, v, g and beta.
        initial_state: [N, HV, K, V]; a pool [slots, HV, K, V] with ``ssm_state_indices``.
        ssm_state_indices: [N], the slot of each sequence, read before its first token and written after its last; or,
            for speculative decoding, [N, 1+S]: slot [n, i] is written after token i, and the first is read unless
            ``num_accepted_tokens`` says otherwise. On the CPU and under ``KDA_CHECK=1``, an index past the pool and a
            slot that one row writes and another uses raise ValueError; elsewhere nothing is read back to check it: an
            index past the pool counts as padding, and such rows race.
        num_accepted_tokens: [N], from 1 to 1+S: sequence n starts from slot [n, accepted - 1]. Out of range: ValueError
            on the CPU; clamped into the range on other devices.
        inplace_final_state: write the final state over ``initial_state`` [N, HV, K, V] (a pool always is advanced in
            place).
        pad_slot_id: a row that starts at this index, or at any negative one, is skipped: its output is zero and no slot
            is touched; such an index for a later token means that its state is dropped.
        records: [B, T, HV, 2K + V] float32 (float64 with float64 q), one contiguous row a token and head, as
            ``empty_records`` makes it; beside ``ssm_state_indices``. The call writes there what ``commit_kda`` needs to
            advance the states by any number of first tokens, and leaves the pool as it was. No
            ``output_final_state`` nor ``final_state_indices``. Rows of skipped sequences are not written.
        commit: [N, T', HV, 2K + V]: records of the drafts before, in another buffer than ``records``, beside it and
            without ``cu_seqlens``. The call then begins with ``commit_kda``: each state is advanced by the first
            ``num_committed`` of these tokens and written to its slot, and the call starts from there.
        num_committed: [N] int32 or int64, as ``num_accepted`` of ``commit_kda``.
        parents: [N, T] int32 or int64, T <= 64, beside ``records`` and without ``cu_seqlens``: the draft is a tree.
            Token t continues from the state after token ``parents[n, t] < t``, or from the sequence's state before the
            call where that is negative; t - 1 everywhere is a plain draft. A token has the bits that it has in a
            plain draft of its ancestors (from 16-bit states: if neither has more than 8 tokens). A number from t on:
            ValueError on the CPU and under ``KDA_CHECK=1``; t - 1 on other devices.
        commit_path: [N, M], as ``path`` of ``commit_kda``, beside ``commit``.

    Returns:
        ``(o, final_state)``: o [B, T, HV, V], dtype of q; final_state as in ``chunk_kda`` (``initial_state``
        itself when that was advanced in place), None unless ``output_final_state``.

    Raises:
        ValueError, TypeError, UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``.
    """
    values = (
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
        ssm_state_indices, num_accepted_tokens, inplace_final_state, pad_slot_id, out, safe_gate, has_initial_state,
        update_state, final_state_indices, final_state_pool, records, commit, num_committed, parents, commit_path,
    )  # fmt: skip
    return call("fused_recurrent_kda", values, backend)


def kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """The log decay that ``use_gate_in_kernel`` computes, as a function of its own; differentiable.

    ``-exp(A_log) * softplus(g + dt_bias)``, or with ``lower_bound`` b: ``b * sigmoid(exp(A_log) * (g + dt_bias))``.
    Source: Kimi Linear, arXiv 2510.26692.

    Args:
        g: [..., HV, K], any floating dtype: the raw gate input.
        A_log: [HV], or with dimensions of size 1 around it; optional with ``lower_bound``.
        dt_bias: [HV * K] or [HV, K], or with dimensions of size 1; or None.
        lower_bound: negative, or None for the softplus gate.
        backend: as in ``chunk_kda``.

    Returns:
        [..., HV, K], float32 (float64 for float64 g): natural-log decay, <= 0.

    Raises:
        ValueError, TypeError, UnsupportedCall: as ``chunk_kda``.
    """
    return call("kda_gate", (g, A_log, dt_bias, lower_bound), backend)


def commit_kda(
    pool: Tensor, records: Tensor, num_accepted: Tensor, state_indices: Tensor, cu_seqlens: Tensor | None = None,
    state_v_first: bool = False, pad_slot_id: int = -1, backend: str | None = None, path: Tensor | None = None,
) -> None:  # fmt: skip
    """Advance states of a pool by the accepted tokens of drafts, in one read and one write of each state.

    ``S <- D * S + k u^T`` for the first ``num_accepted[n]`` tokens of sequence n (of its path, if the draft was a
    tree), from the records that ``fused_recurrent_kda`` wrote. A float32 state has the bits that the call with a slot
    for every token would have left in the slot of the last accepted one, on the same backend; a 16-bit one may be
    rounded otherwise. Not differentiable; nothing waits for the device.

    Args:
        pool: [slots, HV, K, V], as ``initial_state`` of the call that wrote the records.
        records: [B, T, HV, 2K + V], written by the backend that commits them.
        num_accepted: [N] int32 or int64, on the device of the pool: from 0, which leaves the slot as it was, to the
            sequence's tokens, or to M with ``path``. Out of range: ValueError on the CPU and under ``KDA_CHECK=1``;
            clamped on other devices.
        state_indices: [N] int32 or int64: the slot of each sequence. Negative ones and ``pad_slot_id`` are skipped. A
            slot past the pool, or twice: ValueError in the same cases; otherwise one past the pool is skipped, and
            sequences that share a slot race.
        cu_seqlens: [N+1], as in the call that wrote the records; then B = 1.
        state_v_first: states are stored [..., V, K].
        pad_slot_id: as in ``fused_recurrent_kda``.
        backend: as in ``chunk_kda``.
        path: [N, M] int32 or int64: the accepted tokens of sequence n by their numbers in its draft, from the root of
            the tree on; entries behind ``num_accepted[n]`` are not read. Out of range: as ``num_accepted``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or value; nothing has been written.
        UnsupportedCall, BackendNotFound, BrokenBackend: as ``chunk_kda``.
    """
    values = (pool, records, num_accepted, state_indices, cu_seqlens, state_v_first, pad_slot_id, path)
    call("commit_kda", values, backend)


def empty_records(
    B: int, T: int, HV: int, K: int, V: int, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """A buffer for the ``records`` of ``fused_recurrent_kda``, with any content.

    It takes ``4 * (2 * K + V)`` bytes a token and value head: 1.5 KiB at K = V = 128, where a float32 state takes 64.
    Slices of it along B, T and HV are buffers, too.

    Args:
        B: batch rows of q.
        T: tokens of q.
        HV: value heads.
        K: key channels.
        V: value channels.
        device: that of q.
        dtype: float32; float64 for float64 q.

    Returns:
        [B, T, HV, 2K + V]: for each token and head k, the decay and u of ``S <- D * S + k u^T``, in a form that the
        backend which writes it reads again.
    """
    return torch.empty(B, T, HV, 2 * K + V, device=device, dtype=dtype)


def backends() -> tuple[LedgerEntry, ...]:
    """Every backend wheel that was found, loaded or not, with its identity card or the reason.

    The built-in oracle ``reference`` comes first; it serves only when it is named.
    """
    return registry.ledger


_NAMES = {
    f.__name__: tuple(n for n in f.__code__.co_varnames[: f.__code__.co_argcount] if n != "backend")
    for f in (chunk_kda, fused_recurrent_kda, kda_gate, commit_kda)
}


_PLACES = tuple(map(_NAMES["chunk_kda"].index, ("cp_context", "cu_seqlens", "initial_state")))


def call(op: str, given: tuple[Any, ...], backend: str | None, context: Any = None) -> Any:
    """Make a call of the function ``op``; ``given``: its arguments in their order, without ``backend``."""
    values = None
    if not (torch.compiler.is_compiling() or needs_operator()):
        values = given if context is None else with_kind(given, *_PLACES)
    if values is None:
        return call_bound(bind(op, dict(zip(_NAMES[op], given, strict=True))), backend)
    name = _plugins.requested_name(backend)
    latest, asked = registry.repeated.get(op, ()), (name, torch.is_grad_enabled())
    for known in latest:
        if known.asked == asked and (tensors := known.same(values)) is not None:
            if known is not latest[0]:
                to_front(registry.repeated, known)
            break
    else:
        arguments = dict(zip(_NAMES[op], given, strict=True))
        r = bind(op, arguments.copy())
        result = call_bound(r, backend, arguments)
        if r.memo is not None and Repeated in r.memo:
            choose: Any = registry.choose
            if context is not None:
                from kda_core.distributed._call import serving as choose
            note(registry.repeated, r, asked, values, _NAMES[op], partial(choose, r, name))
        return result
    serving = known.backend if context is None else known.backend.on(context)
    if known.has_values or not known.saves:
        r = known.request(known.values(tensors), known.memo)
        if known.has_values:
            _checks.check_values(r)
    if known.saves:
        return _differentiable(known.output_final_state, *_autograd.repeat(known, serving, tensors))
    result = serving.forward(r)
    if known.has_values:
        _ops.count_writes(r)
    return (result.o, result.final_state) if known.is_plain else _outputs(r, result)


def _differentiable(output_final_state: bool, o: Tensor, *states: Tensor) -> Any:
    return (o, states[0] if output_final_state else None) if states else o


def call_bound(r: Any, backend: str | None, arguments: dict[str, Any] | None = None) -> Any:
    """Make the call of a request as ``bind`` gives it; ``arguments``: that it was made of, None: its own values."""
    if torch.compiler.is_compiling() or (isinstance(r, Request) and r.cp_context is not None):
        return _watched(r, backend, arguments)
    if needs_operator(*((r.q,) if isinstance(r, Request) else vars(r).values())):
        return _watched(r, backend, arguments)
    chosen = registry.choose(r, _plugins.requested_name(backend))
    # A call without a signature has no memo: one of its other tensors may be a wrapped one.
    if chosen is None or (r.memo is None and needs_operator(*vars(r).values())):
        return _watched(r, backend, arguments)
    if not r.save_for_backward:
        result = chosen.forward(r)
        _ops.count_writes(r)
        return _outputs(r, result)
    return _differentiable(getattr(r, "output_final_state", False), *_autograd.call(chosen, r, arguments or vars(r)))


def _watched(r: Any, backend: str | None, arguments: dict[str, Any] | None) -> Any:
    """The same where a compiler, a mode or a transform must see the call, or several devices make it."""
    compiling = torch.compiler.is_compiling()
    if is_sharded(getattr(r, "q", getattr(r, "g", None))):
        from kda_core.distributed import _shards

        return _shards.run(r, lambda local: call_bound(bind(r.op, local), backend))
    name = _plugins.traced_name(backend) if compiling else _plugins.requested_name(backend)
    # Traced tensors have lost their tangents: refuse every call under forward mode.
    _autograd.refuse_tangents(r.op, *(() if compiling else vars(r).values()))
    if isinstance(r, Request) and r.cp_context is not None:
        from kda_core.distributed import _call

        return _outputs(r, _call.run(r, name, arguments))
    if not compiling:
        # The dispatcher runs before an operator's own checks, and its errors name no argument.
        _checks.convert_scalars(r)
        for argument, t in vars(r).items():
            if isinstance(t, Tensor):
                _expect.dense(argument, t)
        _checks.check(r)
    return _outputs(r, _ops.call(r, name))


def _outputs(r: Any, result: Any) -> Any:
    """The results of the public function."""
    if not isinstance(r, Request):
        return result if isinstance(r, GateRequest) else None
    written = r.written_states
    final_state = result.final_state if written is None else getattr(r, written)
    outputs = (result.o, final_state if r.output_final_state else None)
    return (*outputs, result.h) if r.return_intermediate_states else outputs
