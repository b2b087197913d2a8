"""The nearest case that a limited backend serves: another dtype, other head dimensions, fewer options.

A first kernel may take one dtype and one head dimension. The kit still makes every call on it, and each must be
refused with the declared reason; the kit then tests the nearest call that the backend serves. A case that the backend
serves is never replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from kda_core._plugins import registry
from kda_core.capabilities import BackendInfo, Feature
from kda_core.request import Request
from kda_core.testing.cases import BF16, FP16, FP32, FP64, Case
from kda_core.testing.inputs import Call

Build = Callable[[Case], Call]  # Makes the call of a case: ``Case.call``, or a test's own function

DTYPES = (FP32, BF16, FP16, FP64)

HEAD_DIMS = ((128, 128), (64, 64), (32, 32), (16, 16), (256, 256), (64, 128), (128, 64))
"""Tried where a backend turns down head dimensions that its declared limits allow."""

LENGTHS = (8, 1)  # Tokens of a dense case, tried where a backend turns longer calls down

_helped: dict[tuple[str, str], tuple] = {}
"""By backend and function, the changes that helped last: the next call is mostly refused for the same reason."""


def turned_down(backend: str, call: Call, device: torch.device) -> str | None:
    """The reason with which a backend rejects a call that its capabilities allow, or None; runs nothing."""
    # Contiguous, as the kit passes them by default.
    tensors = {n: t if n == "cu_seqlens_cpu" else t.to(device).contiguous() for n, t in call.tensors.items()}
    request = call.having(**tensors).request()
    return registry.named(backend).call("kda_core_reject", request=request)


def nearest(info: BackendInfo, case: Case, build: Build, serves: Callable[[Call], bool]) -> tuple[Case, Build] | None:
    """The case with as few changes as make ``serves`` accept its call, and what makes that; None: nothing helps."""
    base, key = within(case, info), (info.name, case.op)
    # A call on a pool needs states and has its pool already.
    is_pooled = build(case).has_pool
    if is_pooled and base.state is None:
        return None
    variants = [v for v in _variants(base, info) if not is_pooled or not (v[1] or v[0].get("state", FP32) is None)]
    variants.sort(key=lambda variant: (variant != _helped.get(key), _distance(*variant)))
    for changes, pooled in variants:
        changed = base.having(**changes, name=f"{case.name}, nearby")
        if pooled and (changed.state is None or changed.backward):
            continue
        make = _in_a_pool(build) if pooled else build
        if serves(make(changed)):
            _helped[key] = changes, pooled
            return changed, make
    return None


def within(case: Case, info: BackendInfo) -> Case:
    """The case without what the backend's declared capabilities close."""
    c = info.capabilities
    closed = set(Feature) - c.features
    changes: dict[str, Any] = {}
    if case.dtype not in c.dtypes:
        changes["dtype"] = next((d for d in DTYPES if d in c.dtypes), case.dtype)
        changes["gate_dtype"] = changes["dtype"] if case.gate_dtype == case.dtype else FP32
        if case.state == FP64:
            case = case.having(state=FP32)
    K, V = case.K, case.V or case.K
    if Feature.UNEQUAL_HEAD_DIMS in closed:
        K = V = max(K, V)
    K, V = (_head_dim(d, m, Feature.ODD_HEAD_DIMS in closed) for d, m in ((K, c.max_head_dim_k), (V, c.max_head_dim_v)))
    if Feature.UNEQUAL_HEAD_DIMS in closed:
        K = V = min(K, V)
    changes |= {"K": K, "V": V}
    if Feature.GVA in closed:
        changes["HV"] = case.H
    stateless = case.backward and Feature.STATE_GRADIENT in closed
    if case.state is not None:
        halves = {BF16: Feature.BF16_STATE, FP16: Feature.FP16_STATE}
        changes["state"] = FP32 if halves.get(case.state) in closed else case.state
        if stateless or Feature.INITIAL_STATE in closed:
            changes["state"] = None
    if Feature.FINAL_STATE in closed or stateless:
        changes["final_state"] = False
    if Feature.VARLEN in closed:
        changes["lengths"] = ()
    if Feature.STRIDED_INPUT in closed:
        changes["strided"] = case.strided - {"q", "k", "v", "g", "beta"}
    if Feature.QK_L2NORM in closed:
        changes["l2norm"] = False
    gates = {"softplus": Feature.SOFTPLUS_GATE, "lower bound": Feature.LOWER_BOUND_GATE}
    changes["gate"] = case.gate
    if gates.get(case.gate) in closed:
        changes["gate"] = next((gate for gate, feature in gates.items() if feature not in closed), "given")
    changes["A_log"] = case.A_log or changes["gate"] == "softplus"
    if case.beta == "negative eigenvalues" and Feature.NEG_EIGVAL in closed:
        changes["beta"] = "sigmoid"
    if case.beta in ("sigmoid", "negative eigenvalues") and Feature.BETA_SIGMOID in closed:
        changes["beta"] = "given"
    needed = {f.name: f.metadata["needs"] for f in fields(Request) if "needs" in f.metadata}
    needed["chunk_size"] = Feature.CHUNK_32
    kept = {name: value for name, value in case.options.items() if needed.get(name) not in closed}
    return replace(case, options=kept, **changes)


def _head_dim(size: int, limit: int | None, powers_only: bool) -> int:
    size = size if limit is None else min(size, limit)
    if not powers_only or size & (size - 1) == 0:
        return size
    above = 1 << size.bit_length()
    return above if limit is None or above <= limit else above // 2


def _variants(case: Case, info: BackendInfo) -> Iterator[tuple[dict[str, Any], bool]]:
    """Changes to a case that declared capabilities allow, each with whether its states lie in a pool."""
    features = info.capabilities.features
    dims = [{}] + [{"K": K, "V": V} for K, V in HEAD_DIMS if (K, V) != (case.K, case.V)]
    states: list[dict[str, Any]] = [{}]
    if Feature.INITIAL_STATE in features:
        others = (FP32, BF16) if Feature.BF16_STATE in features else (FP32,)
        states += [{"state": dtype} for dtype in others if dtype != case.state]
    if case.state is not None:
        states.append({"state": None})
    lengths = [{}] + [{"T": T} for T in LENGTHS if T < case.T and not case.lengths]
    pools = (False, True) if Feature.PAGED_STATE in features else (False,)
    for dim, state, length, pooled in itertools.product(dims, states, lengths, pools):
        yield dim | state | length, pooled


def _distance(changes: dict[str, Any], pooled: bool) -> int:
    """Sort key: first a pool and states, then lengths, then head dimensions, which have many values."""
    return 4 * ("K" in changes) + 2 * ("T" in changes) + ("state" in changes) + pooled


def _in_a_pool(build: Build) -> Build:
    """The same call on a pool whose slots hold the states in another order, with unused slots between them."""

    def make(case: Case) -> Call:
        call = build(case)
        if call.has_pool or "initial_state" not in call.tensors:
            return call
        N = len(call.lengths())
        return call.in_pool(torch.arange(N, dtype=torch.int32).flip(0) + 1, N + 2)

    return make
