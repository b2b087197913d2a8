"""Repeated calls with a context, as ranks make them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rank_jobs import register_halves

import kda_core
from kda_core._plugins import registry
from kda_core.distributed import _call, build_cp_context
from kda_core.testing import call_checks

T = 64


@contextmanager
def counted(*functions: Callable[..., Any]) -> Iterator[list[str]]:
    """The names of these functions, each as often as it is called."""
    codes, found = {f.__code__: f.__name__ for f in functions}, []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            found.append(codes[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


class Calls:
    """Calls of this rank with a context, and how many of them were repeated ones."""

    def __init__(self, group: Any, inputs: dict, backend: str | None, **options: Any) -> None:
        register_halves()
        registry._forget_choices()
        self.group, self.repeated = group, 0
        self.context = build_cp_context([0, 10, T], group, tokens=T, fragments=2)
        self.given: dict[str, Any] = {
            n: self.context.local(t) if t.shape[1:2] == (T,) else t for n, t in inputs.items()
        }
        self.given |= {"cp_context": self.context, "backend": backend, "output_final_state": True, **options}

    def __call__(self, **changes: Any) -> Any:
        """Results and gradients, or the error's text."""
        given = self.given | changes
        leaves = {n: t for n, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad}

        with counted(_call.Ranks.on) as seen:
            try:
                results = kda_core.chunk_kda(**given)
            except (ValueError, TypeError, RuntimeError) as error:
                return type(error).__name__, str(error)
            finally:
                self.repeated += len(seen)
        if not results[0].requires_grad:
            return [t.clone() for t in results]
        loss = sum((t * (1 + i)).square().sum() for i, t in enumerate(results))
        return [*(t.detach() for t in results), *torch.autograd.grad(loss, list(leaves.values()))]

    def other(self, bounds: list[int], **more: Any) -> Any:
        """Another context."""
        return build_cp_context(bounds, self.group, **{"tokens": T, "fragments": 2, **more})

    def warm(self) -> None:
        """The third call of a kind is a repeated one."""
        for _ in range(2):
            self()
        assert not self.repeated
        self()
        assert self.repeated == 1
        self.repeated = 0

    def both(self, **changes: Any) -> tuple[Any, bool, Any]:
        """A call, whether it was a repeated one, and the same where nothing is known."""
        found, repeated = self(**changes), self.repeated > 0
        registry._forget_choices()
        return found, repeated, self(**changes)


CHANGES: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "values": lambda k: (
        {n: t.detach() + 0.25 for n, t in k.given.items() if isinstance(t, torch.Tensor)}
        | {n: (t.detach() + 0.25).requires_grad_() for n, t in k.given.items() if getattr(t, "requires_grad", False)}
    ),
    "boundaries": lambda k: {"cp_context": k.other([0, 50, T])},
    "cut elsewhere": lambda k: {"cp_context": k.other([0, 10, T], layout=[[(32, T)], [(0, 32)]])},
    "sequences": lambda k: {"cp_context": k.other([0, T])},
    "rows of the context": lambda k: {"cp_context": k.other([0, 10, 2 * T], tokens=2 * T)},
    "cells": lambda k: {
        "cp_context": k.other([0, 16, T], deterministic_degree=True, grid=16, fragments=1),
        **({"backend": None} if k.given["backend"] == "edges" else {}),
    },
    "dense": lambda k: {"cp_context": build_cp_context(tokens=T, group=k.group), "initial_state": None},
    "gathered": lambda k: {"cp_context": k.other([0, 10, T], gather=True)},
    "no context": lambda k: {"cp_context": "a context"},
    "its name": lambda k: {"cp_context": k.context.kinds[1]},
    "shape": lambda k: {"beta": k.given["beta"][..., :3]},
    "rows": lambda k: {n: k.given[n][:, 1:] for n in ("q", "k", "v", "g", "beta")},
    "dtype": lambda k: {"k": k.given["k"].float()},
    "dtype of states": lambda k: {"initial_state": k.given["initial_state"].bfloat16()},
    "states": lambda k: {"initial_state": k.given["initial_state"][:1]},
    "strides": lambda k: {"v": k.given["v"].detach().transpose(1, 2).contiguous().transpose(1, 2)},
    "a negative view": lambda k: {
        "g": torch.randn(k.given["q"].shape, dtype=torch.cdouble).conj().imag[..., : k.given["g"].shape[-1]]
    },
    "device": lambda k: {"k": k.given["k"].to("meta")},
    "gradients": lambda k: {"q": k.given["q"].detach().requires_grad_(not k.given["q"].requires_grad)},
    "an option": lambda k: {"scale": 2.0},
    "a wrong option": lambda k: {"chunk_size": 48},
    "NumPy's": lambda k: {"output_final_state": np.True_},
    "boundaries beside it": lambda k: {"cu_seqlens": torch.tensor([0, 9, k.given["q"].shape[1]])},
    "its own boundaries": lambda k: {"cu_seqlens": k.context.cu_seqlens},
    "out": lambda k: {"out": torch.empty_like(k.given["v"])},
    "h": lambda k: {"return_intermediate_states": True},
    "backend": lambda k: {"backend": "reference"},
    "v first": lambda k: {"state_v_first": True, "initial_state": k.given["initial_state"].mT.contiguous()},
}
"""Arguments of a call that differs in one thing, for some calls."""
MAY_REPEAT = ("values", "boundaries", "gathered", "cut elsewhere")
"""Changes that checks and choices ask nothing of."""


def changed_call(group: Any, rank: int, inputs: dict, backend: str | None, what: str, grad: bool) -> bool:
    """Whether a call was a repeated one that differs in one thing; raises unless it answers as it would by itself."""
    torch.manual_seed(0)
    calls = Calls(group, {n: t.requires_grad_(grad) for n, t in inputs.items()}, backend)
    calls.given |= {n: calls.given[n].detach().requires_grad_(grad) for n in inputs}
    calls.warm()
    found, repeated, expected = calls.both(**CHANGES[what](calls))
    assert len(found) == len(expected), (found, expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (what, a, b)
    return repeated


def never_repeated(group: Any, rank: int, inputs: dict, backend: str | None) -> list[str]:
    """Calls that none repeats: their checks ask for values, or a context is told by more than its kind."""
    found = []
    for what in ("its own boundaries", "h", "cells", "NumPy's", "a negative view"):
        calls = Calls(group, inputs, backend)
        changes = CHANGES[what](calls)
        for _ in range(4):
            calls(**changes)
        found += [what] * (calls.repeated > 0)
        if what == "its own boundaries":
            error = calls(cu_seqlens=calls.context.cu_seqlens + 0)
            assert error[1].startswith("cu_seqlens: expected None with cp_context"), error
    one = {"cp_context": build_cp_context([0, T], group, tokens=T, fragments=1), "initial_state": None}
    for _ in range(3):
        calls(**one)
    assert calls.repeated
    calls.repeated = 0
    calls(**CHANGES["dense"](calls))
    return found + ["dense"] * (calls.repeated > 0)


def changed_mode(group: Any, rank: int, inputs: dict, backend: str | None) -> None:
    """Bits under other modes are those of a first call, and so is what is recorded."""
    calls = Calls(group, {n: t.requires_grad_() for n, t in inputs.items()}, backend)
    calls.given |= {n: calls.given[n].detach().requires_grad_() for n in inputs}
    for mode in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        registry._forget_choices()
        calls.repeated = 0
        calls.warm()
        with mode:
            found, _, expected = calls.both()
        assert all(map(torch.equal, found, expected))
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]


def checked(group: Any, rank: int, inputs: dict) -> tuple[list[str], list[str]]:
    """Functions that ran while calls were checked: in a repeated call, and in a first one."""
    calls = Calls(group, inputs, "cpu")
    calls.warm()
    given = calls.given
    with kda_core.checked_calls():
        with counted(call_checks.run_checked, _call.Ranks.on) as repeated:
            kda_core.chunk_kda(**given)
        registry._forget_choices()
        with counted(call_checks.run_checked, _call.Ranks.on) as first:
            kda_core.chunk_kda(**given)
    return repeated, first


def refreshed_between(group: Any, rank: int, inputs: dict, backend: str | None, grad: bool) -> str:
    """A repeated call after ``refresh`` has the bits of a new context; what a backward behind one raises."""
    calls = Calls(group, {n: t.requires_grad_(grad) for n, t in inputs.items()}, backend)
    calls.given |= {n: calls.given[n].detach().requires_grad_(grad) for n in inputs}
    calls.warm()
    calls.context.refresh([0, 44, T])
    found, repeated, _ = calls.both()
    assert repeated
    new = calls(cp_context=build_cp_context([0, 44, T], group, tokens=T, fragments=2))
    assert all(map(torch.equal, found, new))
    if not grad:
        return ""
    o, _ = kda_core.chunk_kda(**calls.given)
    calls.context.refresh([0, 10, T])
    try:
        o.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def left_behind(group: Any, rank: int, inputs: dict, backend: str | None, grad: bool) -> list[str]:
    """Arguments of repeated calls that outlive them."""
    calls = Calls(group, {n: t.requires_grad_(grad) for n, t in inputs.items()}, backend)
    calls.given |= {n: calls.given[n].detach().clone().requires_grad_(grad) for n in inputs}
    calls.warm()
    left = {n: weakref.ref(x) for n, x in calls.given.items() if isinstance(x, torch.Tensor) or n == "cp_context"}
    left["tables"] = weakref.ref(calls.context.fragments)
    del calls
    gc.collect()
    return [n for n, x in left.items() if x() is not None]
