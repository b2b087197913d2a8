"""Calls of ``fused_recurrent_kda`` that are compiled ahead of time (``kda_core_nvidia.aot``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kda_core.request import Request

QUICK = 3


def shipped() -> Iterator[tuple[str, Request]]:
    """Small calls, on the CPU, that between them launch every configuration and take every path of the kernels.

    The first QUICK ones launch every kernel.
    """
    yield "recurrent, a step", example(1, 1, False, torch.float32)
    yield "recurrent, a step, bfloat16", example(8, 1, False, torch.bfloat16)
    yield "recurrent, prompts", example(8, 64, False, torch.float32)
    for v_first in (False, True):
        for state_dtype in (torch.float32, torch.bfloat16):
            name = f"recurrent, prompts, {v_first=}, {state_dtype}"
            yield name, example(8, 64, v_first, state_dtype)
    for K, V in ((16, 16), (64, 32), (128, 64), (256, 256)):
        yield f"recurrent, prompts, {K=}, {V=}", example(2, 9, True, torch.float32, K, V)
    yield "recurrent, prompts, softplus gate", replace(example(2, 9, False, torch.float32), lower_bound=None)
    exact = example(2, 9, False, torch.float32)
    exact = replace(exact, **{n: getattr(exact, n).float() for n in ("q", "k", "v", "g", "beta")})
    yield "recurrent, prompts, float32", exact
    for v_first in (False, True):
        for state_dtype in (torch.float32, torch.bfloat16):
            for T in (1, 2):
                for N in (1, 8, 129, 256):
                    layout = "V first" if v_first else "K first"
                    yield f"recurrent, {layout}, {state_dtype}, N={N}, T={T}", example(N, T, v_first, state_dtype)
    for v_first in (False, True):
        wide = example(9, 2, v_first, torch.float32, K=256)
        yield f"recurrent, K = V = 256, {v_first=}", wide
        step = example(2, 1, v_first, torch.float32, K=256)
        yield f"recurrent, K = V = 256, T = 1, {v_first=}", step
    few = example(2, 3, False, torch.float32)
    table = torch.zeros(2, 3, dtype=torch.int32)
    yield "recurrent, drafts", replace(few, ssm_state_indices=table, num_accepted_tokens=table[:, 0])
    own = {"ssm_state_indices": None, "inplace_final_state": False, "output_final_state": True}
    yield "recurrent, softplus gate, states in and out", replace(few, lower_bound=None, **own)
    bounds = torch.zeros(3, dtype=torch.int32)
    many = example(2, 9, True, torch.float32)
    for name, call in (("recurrent, prompts packed", many), ("recurrent, packed", few)):
        packed = {n: getattr(call, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
        yield name, replace(call, cu_seqlens=bounds, **packed)
    plain = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "lower_bound": None}
    yield (
        "recurrent, packed, decay given, no states",
        replace(few, cu_seqlens=bounds, initial_state=None, **packed, **own, **plain),
    )


def example(N: int, T: int, v_first: bool, state_dtype: torch.dtype, K: int = 128, V: int = 0) -> Request:
    """A decoding step (or a short prefill) of K3: everything in the kernel, states in a pool. V = 0 means K."""
    H, V = 32, V or K
    x = torch.empty(N, T, H, K, dtype=torch.bfloat16)
    return Request(
        op="fused_recurrent_kda", q=x, k=x, v=torch.empty(N, T, H, V, dtype=torch.bfloat16), g=x,
        beta=x[..., 0].contiguous(), scale=K**-0.5, A_log=torch.empty(H), dt_bias=torch.empty(H, K),
        initial_state=torch.empty(N, H, *((V, K) if v_first else (K, V)), dtype=state_dtype),
        ssm_state_indices=torch.empty(N, dtype=torch.int32), lower_bound=-5.0, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, inplace_final_state=True, state_v_first=v_first,
    )  # fmt: skip
