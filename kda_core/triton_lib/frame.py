"""Arguments that a call's launches share, by the kernels' names of parameters: a launch takes what its kernel names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kda_core.request import DecodeStepRequest, Request
from kda_core.triton_lib.arguments import decays_bounded, gate_kind, has_contiguous_rows, lift, named_state_strides
from kda_core.triton_lib.layout import CHUNK, padded, piece_rows
from kda_core.triton_lib.plan import Builder, Copy, View, changed


def readable(b: Builder, r: Request) -> Request:
    """Metadata of the call as kernels read it: rows, parameters and boundaries are copied where they have gaps."""
    rows = {n: b.rows(getattr(r, n)) for n in "qkvg"}
    return changed(r, cu_seqlens=b.dense(r.cu_seqlens), **rows, **gate_parameters(b, r))


def gate_parameters(b: Builder, r: Request) -> dict[str, View | None]:
    """A_log and dt_bias, contiguous, where the gate uses them."""
    unused = gate_kind(r) == "none"
    return {n: None if unused else b.dense(getattr(r, n)) for n in ("A_log", "dt_bias")}


@lru_cache(maxsize=1)
def names(r: Request) -> dict[str, Any]:
    """Values that follow from a call's metadata, ``readable`` as a rule; a plan's launches ask one after another."""
    indices, group, chunks = r.ssm_state_indices, r.HV // r.H, -(-r.T // CHUNK)
    final, pool = r.final_state_indices, None if r.checkpoint_states is None else getattr(r, r.checkpoint_states)
    table, written = r.checkpoint_indices, None if r.written_states is None else getattr(r, r.written_states)
    return {
        "q": r.q, "k": r.k, "v": r.v, "g": r.g, "beta": r.beta, "A_log": r.A_log, "dt_bias": r.dt_bias,
        "initial_state": r.initial_state, "cu_seqlens": r.cu_seqlens, "indices": indices,
        "s_index": 0 if indices is None else indices.stride(0), "pad_slot_id": r.pad_slot_id,
        # Pieces of sequences have numbers of their own, and no states.
        "slots": 0 if indices is None else r.initial_state.shape[0] if r.initial_state else r.N, "final_indices": final,
        "s_final": 0 if final is None else final.stride(0), "final_slots": 0 if final is None else written.shape[0],
        "has_state": r.has_initial_state, **named_state_strides("c", pool, r.state_v_first),
        "checkpoints": table, "checkpoint_pool": pool, "s_row": 0 if table is None else table.strides[0],
        "s_column": 0 if table is None else table.strides[1], "columns": 0 if table is None else table.shape[1],
        "checkpoint_slots": 0 if pool is None else pool.shape[0], "every": -(-r.checkpoint_every // CHUNK),
        "piece": r.checkpoint_every, "PIECES": piece_rows(r) > 0,
        "s_has": 0 if r.has_initial_state is None else r.has_initial_state.stride(0), "scale": float(r.scale),
        "lower_bound": float(r.lower_bound or 0.0), "T": r.T, "N": r.N, "H": r.H, "HV": r.HV, "group": group,
        "GROUP": group, "chunks": chunks, "NT": chunks, "K": r.K, "V": r.V, "KP": padded(r.K), "VP": padded(r.V),
        "C": CHUNK, "V_FIRST": r.state_v_first, "GATE": gate_kind(r), "BOUNDED": decays_bounded(r),
        "L2NORM": r.use_qk_l2norm_in_kernel, "SIGMOID": r.use_beta_sigmoid_in_kernel,
        "BETA_SIGMOID": r.use_beta_sigmoid_in_kernel, "NEG_EIGVAL": r.allow_neg_eigval,
        "BETA_SCALE": 2.0 if r.allow_neg_eigval else 1.0, "LIFT": lift(r.q.dtype, r.use_qk_l2norm_in_kernel),
    }  # fmt: skip


def outputs(b: Builder, r: Request, any_strides: bool = False) -> tuple[View, View | None]:
    """``o`` as kernels can write it (``finish_output`` puts it where the caller wants it) and the final state.

    Args:
        any_strides: kernels take every stride of value channels.
    """
    o = r.out if any_strides and r.out else output(b, r.out, (r.B, r.T, r.HV, r.V), r.q.dtype)
    if r.inplace_final_state:
        return o, getattr(r, r.written_states) if r.written_states and r.update_state else None
    return o, b.result("final_state", r.state_shape, r.state_dtype) if r.output_final_state else None


def output(b: Builder, out: View | None, shape: tuple[int, ...], dtype: torch.dtype) -> View:
    """The caller's buffer if its rows are contiguous, else room that ``finish_output`` copies to it if there is one."""
    if out is not None and has_contiguous_rows(out):
        return out
    return (b.result if out is None else b.scratch)("o", shape, dtype)


def finish_output(b: Builder, r: Request | DecodeStepRequest, o: View) -> View:
    """The result, in the caller's buffer if there is one."""
    if r.out is not None and o is not r.out:
        b.step(Copy(r.out, o))
    return o if r.out is None else r.out
