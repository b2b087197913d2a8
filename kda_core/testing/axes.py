"""Coverage axes: the value of each axis that a call exercises."""

from __future__ import annotations

import torch

from kda_core.request import Request

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}

AXES: dict[str, tuple[str, ...]] = {
    "function": ("chunk_kda", "fused_recurrent_kda", "kda_gate"),
    "direction": ("forward", "backward"),
    "layout": ("dense", "packed"),
    "dtype": tuple(DTYPES.values()),
    "gate": ("given", "softplus", "lower bound"),
    "beta": ("given", "sigmoid", "negative eigenvalues"),
    "q and k": ("as given", "l2norm"),
    "initial state": (
        "none", "float32", "bfloat16", "float16", "pool", "bfloat16 pool", "float16 pool", "slot for every token",
    ),
    "final state": ("no", "yes"),
    "state layout": ("K first", "V first"),
    "intermediate states": ("no", "yes"),
    "heads": ("one to one", "grouped values"),
    "head dimensions": ("K = V", "K != V", "no power of two"),
    "length": ("one token", "below a chunk", "a chunk", "past a chunk"),
    "chunk": ("64", "32"),
    "recompute": ("on", "off"),
    "inputs": ("contiguous", "strided"),
    "out": ("fresh", "given"),
}  # fmt: skip
"""Every axis with its values, in the order of the report."""


def axes(r: Request) -> dict[str, list[str]]:
    """The values of every axis that a request exercises."""
    state = r.initial_state
    if state is None:
        initial = "none"
    elif r.inplace_final_state:
        half = f"{DTYPES[state.dtype]} " if state.dtype.itemsize == 2 else ""
        initial = "slot for every token" if r.writes_every_token else f"{half}pool"
    else:
        initial = DTYPES[state.dtype] if state.dtype.itemsize == 2 else "float32"
    odd = any(d & (d - 1) for d in (r.K, r.V))
    longest = r.T if r.cu_seqlens is None else int(r.cu_seqlens.diff().amax()) if r.N else 0
    if longest == 1:
        length = "one token"
    else:
        length = ("below a chunk", "a chunk", "past a chunk")[(longest >= r.chunk_size) + (longest > r.chunk_size)]
    return {
        "function": [r.op],
        "direction": ["forward", "backward"] if r.save_for_backward else ["forward"],
        "layout": ["dense" if r.cu_seqlens is None else "packed"],
        "dtype": [DTYPES[r.q.dtype]],
        "gate": ["given" if not r.use_gate_in_kernel else "softplus" if r.lower_bound is None else "lower bound"],
        "beta": [
            "negative eigenvalues" if r.allow_neg_eigval else "sigmoid" if r.use_beta_sigmoid_in_kernel else "given"
        ],
        "q and k": ["l2norm" if r.use_qk_l2norm_in_kernel else "as given"],
        "initial state": [initial],
        "final state": ["yes" if r.output_final_state else "no"],
        "state layout": ["V first" if r.state_v_first else "K first"],
        "intermediate states": ["yes" if r.return_intermediate_states else "no"],
        "heads": ["one to one" if r.H == r.HV else "grouped values"],
        "head dimensions": ["K = V" if r.K == r.V else "K != V"] + ["no power of two"] * odd,
        "length": [length],
        "chunk": [str(r.chunk_size)],
        "recompute": ["off" if r.disable_recompute else "on"],
        "inputs": ["contiguous" if all(t.is_contiguous() for t in (r.q, r.k, r.v, r.g, r.beta)) else "strided"],
        "out": ["fresh" if r.out is None else "given"],
    }
