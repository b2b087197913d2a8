"""Decoding steps of whole layers, and what they must give: by dense calls of the parts, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kda_core import empty_records, fused_recurrent_kda
from kda_core.nn import gated_rms_norm, kda_decode_step, short_convolution

STEPS: dict[str, dict[str, Any]] = {
    "one token": {},
    "slots": {"slots": [4, 0, 2]},
    "three tokens": {"T": 3},
    "a column of slots": {"T": 3, "slots": [[4], [0], [2]]},
    "no slots to pad": {"T": 2, "pad_slot_id": 1},
    "drafts": {
        "H": 1, "T": 3, "v_first": True, "slots": [[1, 5, 2], [6, 0, 9], [3, 4, 8]], "lower_bound": -5.0,
    },
    "odd channels": {"v_first": True, "V": 20, "K": 48, "slots": [1, 3, 0]},
    "float16": {"dtype": torch.float16, "state_dtype": torch.bfloat16, "W": 2, "HV": 4},
    "wide": {"K": 160, "V": 33, "H": 1, "HV": 1},
    "no norm": {"norm": False, "slots": [0, 1, 3]},
}  # fmt: skip

DRAFTS = ("one token", "odd channels", "float16")  # Steps whose sizes drafts with records take


def step(name: str, N: int = 3, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Arguments of ``kda_decode_step``."""
    sizes = {"T": 1, "H": 2, "HV": 2, "K": 32, "V": 32, "W": 4} | STEPS[name] | more
    T, H, HV, K, V, W = (sizes[n] for n in ("T", "H", "HV", "K", "V", "W"))
    HV = max(H, HV)
    dtype, D, v_first = sizes.get("dtype", torch.float32), 2 * H * K + HV * V, sizes.get("v_first", False)
    torch.manual_seed(seed)
    tokens = (N, T) if T > 1 else (N,)
    slots = torch.tensor(sizes["slots"]) if "slots" in sizes else None
    count = max(7, 0 if slots is None else int(slots.max()) + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    state = torch.randn(count, HV, V, K) if v_first else torch.randn(count, HV, K, V)
    call = {
        # A part of a wider tensor, as of one projection.
        "mixed_qkv": normal(*tokens, D + 11)[..., 5 : 5 + D], "g": normal(*tokens, HV, K), "beta": normal(*tokens, HV),
        "conv_state": normal(count, W - 1, D), "conv_weight": torch.randn(D, W), "conv_bias": torch.randn(D),
        "state": state.to(sizes.get("state_dtype", torch.float32)), "A_log": torch.rand(HV),
        "dt_bias": torch.randn(HV, K), "state_v_first": v_first, "lower_bound": sizes.get("lower_bound"),
    }  # fmt: skip
    if "pad_slot_id" in sizes:
        call["pad_slot_id"] = sizes["pad_slot_id"]
    if sizes.get("norm", True):
        call |= {"norm_gate": normal(*tokens, HV, V), "norm_weight": torch.randn(V), "norm_eps": 1e-3}
    return call if slots is None else with_slots(call, slots)


def with_slots(call: dict[str, Any], slots: torch.Tensor) -> dict[str, Any]:
    """The same call in pools that have these slots."""
    count = max(call["state"].shape[0], int(slots.max()) + 1)
    pools = {n: torch.randn(count, *call[n].shape[1:]).to(call[n].dtype) for n in ("state", "conv_state")}
    return call | pools | {"state_indices": slots}


def drafts_with_records(name: str, backend: str, device: str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs of four drafts of three tokens and the states behind them, beside drafts with a slot for every token."""
    accepted, T, slots = [[1, 3, 2], [0, 1, 2], [2, 0, 3], [3, 1, 0]], 3, torch.arange(9).view(3, 3)

    def on_device(call: dict[str, Any]) -> dict[str, Any]:
        return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in call.items()}

    pools, by_token = ("state", "conv_state"), ("mixed_qkv", "g", "beta", "norm_gate")
    call = on_device(with_slots(step(name, T=T), torch.tensor([5, 0, 2]))) | {"backend": backend}
    states = {n: call[n][call["state_indices"]] for n in pools}
    HV, K, V = *call["g"].shape[-2:], call["norm_gate"].shape[-1]
    before: dict[str, Any] = {}
    for seed, counts in enumerate(torch.tensor(accepted, device=device)):
        call |= {n: t for n, t in on_device(step(name, T=T, seed=seed)).items() if n in by_token}
        records = empty_records(3, T, HV, K, V, device=device)
        found = kda_decode_step(**call, records=records, **before)
        before = {"commit": records, "num_committed": counts, "commit_inputs": call["mixed_qkv"]}
        every = call | on_device({"state_indices": slots})
        every |= {n: t.repeat_interleave(T, 0) for n, t in states.items()}
        yield found, kda_decode_step(**every)
        for n, t in states.items():
            last = every[n][every["state_indices"].gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]]
            states[n] = torch.where((counts > 0).view(-1, *[1] * (t.dim() - 1)), last, t)
    kda_decode_step(**call, records=torch.empty_like(records), **before)
    for n, t in states.items():
        yield call[n][call["state_indices"]], t


def expected(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, states and the convolution's states behind the call, by the reference in float64; slots as they are."""
    x, g, beta = (call[n] if call["g"].dim() == 4 else call[n].unsqueeze(1) for n in ("mixed_qkv", "g", "beta"))
    N, T, HV, K = g.shape
    V = call["state"].shape[2 if call["state_v_first"] else 3]
    H = (x.shape[2] - HV * V) // (2 * K)
    state, conv_state, rows = call["state"].clone(), call["conv_state"].clone(), []
    slots = call.get("state_indices", torch.arange(N))
    for n in range(N):
        places = slots[n].reshape(-1).tolist()
        S, c = (call[m][places[0]][None].double() for m in ("state", "conv_state"))
        for t in range(T):
            at = (slice(n, n + 1), slice(t, t + 1))
            y, c = short_convolution(
                x[at].double(), call["conv_weight"], call["conv_bias"], c, output_final_state=True, backend="reference"
            )
            y = y.to(x.dtype).double()
            q, k, v = y.split([H * K, H * K, HV * V], -1)
            o, S = fused_recurrent_kda(
                q.view(1, 1, H, K), k.view(1, 1, H, K), v.view(1, 1, HV, V), g[at].double(), beta[at].double(),
                A_log=call["A_log"].double(), dt_bias=call["dt_bias"].double(), initial_state=S,
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, lower_bound=call["lower_bound"], state_v_first=call["state_v_first"],
                backend="reference",
            )  # fmt: skip
            if "norm_gate" in call:
                gate = call["norm_gate"].view(N, T, HV, V)[at].double()
                o = gated_rms_norm(o, gate, call["norm_weight"], call["norm_eps"], backend="reference")
            rows.append(o)
            place = places[t] if len(places) > 1 else places[0]
            state[place], conv_state[place] = S[0].to(state.dtype), c[0].to(conv_state.dtype)
    o = torch.cat(rows, 1).view(N, T, HV, V).to(x.dtype)
    return o if call["g"].dim() == 4 else o[:, 0], state, conv_state
