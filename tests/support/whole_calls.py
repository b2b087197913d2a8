"""Calls of whole sequences: their inputs, what the oracle makes of them, and what ranks made of parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core.request import DATA as ROWS
from kda_core.testing.cases import FP64, SOFTPLUS, Case

RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(
    T: int, N: int = 0, *, B: int = 1, H: int = 2, HV: int = 4, K: int = 8, V: int = 6, seed: int = 0, gate: bool = True
) -> dict[str, Tensor]:
    """Tensors of a call in float64, with N initial states."""
    raw = SOFTPLUS if gate else {"beta": "sigmoid"}
    case = Case(name=f"whole {seed}", B=B, T=T, H=H, HV=HV, K=K, V=V, rate=1.5, raw_scale=0.5, **raw)
    found = {n: t.double() for n, t in case.call().tensors.items()}
    if N:
        states = Case(name=f"states {seed}", B=N, T=0, H=HV, K=K, V=V, state=FP64).call()
        found["initial_state"] = states.tensors["initial_state"]
    return found


def oracle(tensors: dict[str, Tensor], grads: dict[str, Tensor], cu: list[int] | None, options: dict) -> dict[str, Any]:
    """Results and gradients of one process in float64."""
    leaves = {n: t.detach().double().clone().requires_grad_(bool(grads)) for n, t in tensors.items()}
    packed = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    o, state, *h = kda_core.chunk_kda(**leaves, **packed, **options, backend="reference")
    found = {"o": o.detach(), "final_state": None if state is None else state.detach()}
    if h:
        found["h"] = h[0]
    if grads:
        outputs = {"o": o, "final_state": state}
        torch.autograd.backward([outputs[n] for n in grads], [t.double() for t in grads.values()])
        found |= {f"d{n}": t.grad for n, t in leaves.items()}
    return found


def assembled(parts: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any]:
    """The results of all ranks together: rows at their places, everything else summed."""
    found: dict[str, Any] = {}
    for name, t in like.items():
        if t is None or name == "h":
            continue
        if name.removeprefix("d") not in ("o", *ROWS):
            found[name] = sum(part[name] for part in parts)
            continue
        whole = torch.full_like(t, float("nan"))
        for part in parts:
            at = 0
            for a, b in part["ranges"]:
                whole[:, a:b] = part[name][:, at : at + b - a]
                at += b - a
        found[name] = whole
    return found


def worst(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest relative error (of the Frobenius norm) and whose it is."""
    errors = {
        n: float((found[n].double() - t).norm() / t.norm().clamp_min(1e-30)) if t.numel() else 0.0
        for n, t in expected.items()
        if n in found
    }
    if any(e != e for e in errors.values()):
        return float("nan"), str({n: e for n, e in errors.items() if e != e})
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name


def assert_close(parts: list[dict[str, Any]], expected: dict[str, Any], limit: float) -> None:
    """Check that all ranks together have the expected results; ``limit``: above the largest relative error."""
    error, name = worst(assembled(parts, expected), expected)
    assert error < limit, name
