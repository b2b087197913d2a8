"""Small calls that launch every kernel of this backend, compared with the float64 oracle; for compute-sanitizer.

    compute-sanitizer --tool racecheck python -m pytest tests/nvidia/test_sanitized.py

Each call is made three times with the same bits, and the memory around its tensors is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import installed
import pytest
import torch
from plan_runs import run_on_nvidia as run_plan

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.aot import TOOL
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, choose_backward
from kda_core_nvidia.plans.backward import plan_backward
from kda_core_nvidia.plans.forward import saved_specs
from kda_core_nvidia.run import chip

from kda_core.request import AnyRequest, CommitRequest, LayerRequest
from kda_core.testing import fragments, gate, references
from kda_core.testing.cases import BF16, BFLOAT16, FP16, FP32, Case
from kda_core.testing.inputs import Call
from kda_core.testing.subject import Subject
from kda_core.testing.targets import find_target
from kda_core.triton_lib.ahead_of_time import halves, layer_calls
from kda_core.triton_lib.plan import metadata

on_gpu = pytest.mark.platform("nvidia")

MANY = 150
"""Heads: more than a chip has multiprocessors."""

BOUNDARIES = (0, 1, 33, 70, 0, 32)

RAW = {"l2norm": True, "beta": "sigmoid", "state": FP32, "backward": True}
PACKED = RAW | {"T": 140, "lengths": BOUNDARIES, "HV": 4, "K": 128}
SEGMENTS = {"H": 1, "K": 128, "dtype": BF16, "decay": "slow", "state": FP32, "backward": True}
STEP = {"op": "fused_recurrent_kda", "K": 128, "HV": 4, "dtype": BF16, "state": FP32}

CASES = [
    Case(name="float32, K 64", T=100, K=64, gate="softplus", **RAW),
    Case(name="float32, K 256", T=33, K=256, gate="lower bound", **RAW),
    Case(name="float16, many heads", T=33, H=MANY, K=64, dtype=FP16, gate="softplus", **RAW),
    Case(name="bfloat16, many heads", T=64, H=MANY, K=128, gate="lower bound", **BFLOAT16, **RAW),
    Case(name="padded channels", B=2, T=70, HV=4, K=100, V=60, dtype=BF16, state=FP32, backward=True),
    Case(name="packed", dtype=BF16, strided=frozenset({"q", "k", "v", "g", "beta", "grad_o"}), **PACKED),
    Case(name="packed, everything saved", dtype=FP16, options={"disable_recompute": True}, **PACKED),
    # As many heads as prepare for Hopper takes; decays that keep and that pass the range of its factors.
    Case(name="20 heads, bounded", dtype=BF16, gate_dtype=BF16, gate="lower bound", **(PACKED | {"HV": 20, "H": 20})),
    Case(
        name="in pairs",
        gate="lower bound",
        **BFLOAT16,
        **(PACKED | {"H": 80, "HV": 80, "T": 820, "lengths": (33, 65, 300, 400)}),
    ),
    Case(name="20 heads, strong decays", dtype=BF16, decay=-20.0, **(PACKED | {"HV": 20, "H": 20})),
    # Two chunks a sequence, on average.
    Case(name="20 heads, pairs", T=260, lengths=(64, 0, 66, 63, 65), HV=20, K=128, gate="softplus", **BFLOAT16, **RAW),
    Case(
        name="states kept",
        gate="lower bound",
        options={"disable_recompute": True},
        **BFLOAT16,
        **(PACKED | {"H": 80, "HV": 80, "T": 820, "lengths": (33, 65, 300, 400)}),
    ),
    # Whole chunks, whose backward has kernels for many rows, and sequences that are cut into segments.
    Case(name="rows", B=2, T=2060, H=1, K=128, dtype=BF16, state=FP32, backward=True),
    Case(name="rows, K 256", B=2, T=1030, H=1, K=256, dtype=BF16, state=FP32, backward=True),
    Case(name="in pairs, K 256", B=2, T=128, H=3, K=256, gate="lower bound", **BFLOAT16, **RAW),
    Case(name="whole chunks", B=2, T=2048, H=4, K=128, dtype=BF16, state=FP32, backward=True),
    Case(name="segments, float16", T=8300, H=1, K=128, dtype=FP16, decay="slow", state=FP32, backward=True),
    Case(name="segments, K 256", **(SEGMENTS | {"T": 8300, "K": 256})),
    Case(name="segments", T=4130, H=2, K=128, dtype=BF16, decay="slow", state=FP32, backward=True),
    # Segments of one length, of which some are forgotten by the next.
    Case(name="segments, mixed decays", T=4096, H=1, K=128, dtype=BF16, decay="isolated", state=FP32, backward=True),
    # Packed ones, and a batch, of which prefills are cut.
    Case(name="segments, packed", lengths=(60, 4130, 8500), **(SEGMENTS | {"T": 12700})),
    Case(name="segments, batch", **(SEGMENTS | {"B": 2, "T": 4110})),
    Case(name="prefill, batch", **(SEGMENTS | {"B": 2, "T": 3100, "backward": False})),
    # Enough heads that the recurrence runs beside prepare.
    Case(name="16 heads", T=1060, H=16, K=128, gate="softplus", **BFLOAT16, **RAW),
    Case(name="tokens", B=3, T=7, gate="lower bound", **STEP),
    Case(name="prompts", T=136, lengths=BOUNDARIES, gate="softplus", **STEP),
    Case(name="prompts, K 256", B=2, T=40, **(STEP | {"K": 256, "V": 64})),
]
POOLS = [
    Case(name="pool", T=140, lengths=BOUNDARIES, HV=4, K=128, dtype=BF16, state=FP32),
    Case(name="pool, 20 heads", T=140, lengths=BOUNDARIES, HV=20, K=128, **BFLOAT16, state=FP32),
    Case(name="pool, 20 heads, pairs", T=260, lengths=(64, 0, 66, 63, 65), HV=20, K=128, **BFLOAT16, state=FP32).having(
        options={"state_v_first": True}
    ),
    Case(name="pool, segments", T=9300, lengths=(4130, 60, 5000), H=1, K=128, dtype=BF16, state=BF16),
    Case(name="pool, V first, states", T=140, lengths=BOUNDARIES, HV=4, K=64, dtype=BF16, state=BF16).having(
        options={"state_v_first": True, "return_intermediate_states": True}
    ),
    Case(name="step", B=20, T=1, gate="softplus", **STEP),
    Case(name="step, V first", B=20, T=1, options={"state_v_first": True}, **STEP),
    Case(name="step, many states", B=256, T=1, **(STEP | {"H": 32, "HV": 0, "state": BF16})),
]


HALVES = [
    (Case(name="halves", T=1100, H=2, K=128, dtype=BF16, decay="slow", state=FP32, backward=True), (1060,)),
    (Case(name="halves, packed", dtype=BF16, **(PACKED | {"T": 1300, "lengths": (1100, 0, 190)})), ()),
    (Case(name="halves, float16", dtype=FP16, **PACKED), (50, 50)),
]
"""Calls in halves, and where their rows are cut between processes."""


def served(case: Case) -> Iterator[Call]:
    """The case with what servers ask of a pool, and with indices past its end, which count as padding."""
    N = case.N
    slots, others = torch.arange(N, dtype=torch.int32) * 2 + 1, torch.arange(N, dtype=torch.int32) * 2
    fresh = torch.arange(N) % 2 == 0
    call = case.having(final_state=False).call()
    yield call.having(has_initial_state=fresh).in_pool(slots, 2 * N + 1).written_elsewhere(others)
    yield call.in_pool(slots, 2 * N + 1).written_elsewhere(others.flip(0), 2 * N, BF16)
    if case.op == "chunk_kda":
        table = torch.full((N, 3), 2**30, dtype=torch.int32)
        table[:, 0] = others
        keeping = replace(call, options=call.options | {"chunk_size": 32}).having(checkpoint_indices=table)
        # Within chunks, too, but beside intermediate states.
        for every in (32,) if case.options.get("return_intermediate_states") else (32, 48):
            yield keeping.having(checkpoint_every=every).in_pool(slots, 2 * N + 1)
    yield call.having(update_state=False, has_initial_state=~fresh).in_pool(slots, 2 * N + 1)


LAYER = list(layer_calls())


def in_pool(case: Case) -> Call:
    """The case on a pool with an unused slot after every used one; the second sequence is skipped."""
    slots = torch.arange(case.N, dtype=torch.int32) * 2 + 1
    slots[1] = -1
    return case.call().in_pool(slots, 2 * case.N + 1)


def drafts() -> Call:
    """A slot for every token, from the last accepted one."""
    case = Case(name="drafts", B=3, T=4, gate="lower bound", **STEP)
    slots = torch.arange(case.N * case.T, dtype=torch.int32).view(case.N, case.T).flip(0)
    return case.call().in_pool(slots, case.N * case.T + 1, torch.arange(case.N) % case.T + 1)


def recorded(state: torch.dtype = FP32) -> Call:
    """Drafts with records."""
    case = Case(name="records", B=3, T=4, gate="lower bound", final_state=False, **(STEP | {"state": state}))
    return case.call().in_pool(torch.tensor([4, 0, 2], dtype=torch.int32), 6).recorded()


def tree(state: torch.dtype = FP32) -> Call:
    """Drafts with records that are trees."""
    parents = torch.tensor([[-1, 0, 0, 1], [-1, -1, 0, 1], [-1, 0, 1, -1]], dtype=torch.int32)
    return recorded(state).having(parents=parents)


def commit(records: torch.Tensor) -> CommitRequest:
    """None, one and more tokens than there are; one slot past the pool."""
    counts, slots = (torch.tensor(x, dtype=torch.int32) for x in ([9, 0, 1], [2**30, 0, 3]))
    pool = torch.zeros(6, 4, 128, 128)
    return CommitRequest(pool=pool, records=records, num_accepted=counts, state_indices=slots)


def commit_of_a_path(records: torch.Tensor) -> CommitRequest:
    """The same of tokens past the draft."""
    path = torch.tensor([[0, 2**30], [1, 2], [9, -5]], dtype=torch.int32)
    return replace(commit(records), path=path)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(find_target("nvidia"))


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls(subject: Subject, case: Case):
    subject.check(case.call())


@on_gpu
@pytest.mark.parametrize(("case", "cuts"), HALVES, ids=lambda x: getattr(x, "name", ""))
def test_halves(subject: Subject, case: Case, cuts: tuple[int, ...]):
    call = case.call()
    subject.compare(call, fragments.run(subject, call, cuts))


@on_gpu
@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_pools(subject: Subject, case: Case):
    subject.check(in_pool(case))


@on_gpu
@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_what_servers_ask(subject: Subject, case: Case):
    for call in served(case):
        subject.check(call)


@pytest.mark.parametrize("case", POOLS[:-1], ids=lambda case: case.name)
def test_the_oracle_takes_what_servers_ask(case: Case):
    """Without a GPU: slots past the pool, which a check of values on the CPU would refuse; small heads, for time."""
    for call in served(case.having(H=2, HV=2, K=16)):
        results = references.results(call)
        assert results["o"].isfinite().all()


def test_the_core_takes_what_drafts_ask():
    """Without a GPU, too: the arguments of drafts that leave records."""
    for call in (recorded(), tree(BF16)):
        o, _ = call(call.tensors, "reference")
        assert o.isfinite().all()


@on_gpu
def test_drafts(subject: Subject):
    subject.check(drafts())


@on_gpu
def test_records(subject: Subject):
    """Slot 3 alone is written; values are compared by the kit."""
    for state in (FP32, BF16):
        subject.check(recorded(state))
        subject.check(tree(state))
        call = tree(state)
        given = call.tensors | {"commit": torch.zeros(3, 4, 4, 3 * 128), "num_committed": torch.tensor([9, 0, 4])}
        o, _ = call({n: t.cuda() for n, t in given.items()}, "nvidia")
        assert o.isfinite().all()
    for made in (commit, commit_of_a_path):
        r = made(torch.ones(3, 4, 4, 3 * 128))
        r = replace(r, **{n: x.cuda() for n, x in vars(r).items() if isinstance(x, torch.Tensor)})
        run_plan(plan_of(r, chip(r.device)), r)
        assert r.pool[3].eq(1).all()
        assert not r.pool[[0, 1, 2, 4, 5]].any()


@on_gpu
@pytest.mark.parametrize("bound", [None, -5.0])
def test_gates(subject: Subject, bound: float | None):
    for backward in (False, True):
        gate.check(subject, gate.arguments((2, 40, 4, 128), BF16), bound, backward=backward)


@on_gpu
@pytest.mark.parametrize("call", [pytest.param(call, id=f"{i} {name}") for i, (name, call) in enumerate(LAYER)])
def test_calls_around_the_operator(call: LayerRequest):
    """Their values are compared elsewhere; here the sanitizer looks at addresses and races."""
    tensors = {n: torch.zeros_like(x, device="cuda") for n, x in vars(call).items() if isinstance(x, torch.Tensor)}
    if getattr(call, "cu_seqlens", None) is not None:
        tensors["cu_seqlens"] = torch.tensor([0, 61, call.x.shape[1]], dtype=torch.int32, device="cuda")
    request = replace(call, **tensors)
    run_plan(plan_of(request, chip(request.device)), request)


@on_gpu
@pytest.mark.parametrize("lengths", [(), BOUNDARIES])
def test_gradients_through_descriptors(lengths: tuple[int, ...]):
    """Only very large calls use descriptors otherwise; the bits are those of pointers."""
    case = Case(name="descriptors", T=140, lengths=lengths, HV=4, K=128, dtype=BF16, state=FP32, backward=True)
    request = case.call().request()
    tensors = {n: x.cuda() for n, x in vars(request).items() if isinstance(x, torch.Tensor)}
    needed = frozenset({"q", "k", "v", "g", "beta"})
    request = replace(request, **tensors, grad_o=tensors["v"], needs_grad=needed)
    r = metadata(request)
    plans = (plan_backward(r, choose_backward(r, chip(tensors["q"].device), many=many)) for many in (0, 2**31))
    first, second = (run_plan(plan, request) for plan in plans)
    assert [n for n, x in first.items() if not torch.equal(x, second[n])] == []


def requests() -> Iterator[AnyRequest | LayerRequest]:
    """Plans of the calls above, but the gates and the descriptors."""
    yield from (call for _, call in LAYER)
    yield from (recorded().request(), commit(torch.ones(3, 4, 4, 3 * 128)))
    yield from (call.request() for call in (*map(in_pool, POOLS), *(c for p in POOLS for c in served(p)), drafts()))
    for case in CASES:
        r = replace(case.call().request(), save_for_backward=case.backward)
        yield r
        if case.backward:
            saved = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in saved_specs(r, CHIPS[90]))
            grads = {"grad_o": r.v, "grad_final_state": r.initial_state}
            needed = frozenset({"q", "k", "v", "g", "beta", "initial_state"})
            yield replace(r, saved=saved, needs_grad=needed, **grads)


def test_every_kernel_is_launched():
    """Planned for an H100, without a GPU."""
    launched = {name for r in requests() for name in plan_of(r, CHIPS[90]).kernels}
    for case, _ in HALVES:
        plans = halves(case, lambda r, half: plan_of(r, CHIPS[90], half=half), lambda r: saved_specs(r, CHIPS[90]))
        launched |= {name for _, plan in plans for name in plan.kernels}
    shipped = {job.launch.name for job in TOOL.shipped("90")} - {"gate_forward_kernel", "gate_backward_kernel"}
    assert shipped - launched == set()
