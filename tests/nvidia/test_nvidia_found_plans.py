"""Which plan is found for a call of the NVIDIA backend: tensors lie on the CPU, and nothing is computed."""

import os
from dataclasses import replace
from typing import Any, ClassVar

import installed
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches everything itself", allow_module_level=True)
installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS
from kda_core_nvidia.plans.forward import saved_specs
from kda_core_nvidia.plugin import BACKEND
from planned_backend import PlannedBackend

from kda_core import _autograd, chunk_kda, fused_recurrent_kda, kda_gate
from kda_core._plugins import registry
from kda_core.request import Request
from kda_core.triton_lib.calls import Calls
from kda_core.triton_lib.lengths import filled
from kda_core.triton_lib.plan import Plan


class Noted:
    """Stands for a bound plan: notes the plan and allocates the results."""

    calls: ClassVar[list[tuple[Plan, tuple[torch.Tensor | None, ...], bool]]] = []

    def __init__(self, plan: Plan, names: Any, device: torch.device) -> None:
        self.plan, self.names, self.device, self.new, self.ready = plan, names, device, True, True

    def at(self, values: Any) -> Any:
        return Noted(filled(self.plan, values), self.names, self.device)

    def __call__(self, inputs: Any, places: Any) -> dict[str, torch.Tensor | None]:
        Noted.calls.append((self.plan, tuple(inputs), self.new))
        self.new = False
        given = dict(zip(self.names, inputs, strict=True))
        made = {b.name: torch.zeros(b.shape, dtype=b.dtype) for b in self.plan.buffers.values() if b.role == "result"}
        return {n: None if x is None else (given | made)[x] for n, x in self.plan.results.items()}


MOST_PLANS = 200


class NotedCalls(Calls):
    """The calls as on an H200, but that plans are noted instead of run.

    Attributes:
        pairs: of every call, its plan, the one to expect, and whether it was bound for this call.
        memos: of every call.
    """

    def __init__(self) -> None:
        super().__init__(plan_of, lambda device: CHIPS[90], saved_specs=saved_specs, bind=Noted, most=MOST_PLANS)
        self.pairs: list[tuple[Plan, Plan, bool]] = []
        self.memos: list[Any] = []

    def run(self, request: Any, key: Any, names: Any, inputs: Any, saved: Any = None, half: Any = ()) -> Any:
        made = super().run(request, key, names, inputs, saved, half)
        self.memos.append(request.memo)
        used, given, new = Noted.calls.pop()
        crooked = frozenset(n for n, x in zip(names, given, strict=True) if x is not None and x.data_ptr() & 15)
        planned = request if saved is None else replace(request, saved=saved)
        self.pairs.append((used, plan_of(planned, CHIPS[90], crooked, *half), new))
        return made


@pytest.fixture
def calls():
    """The ``NotedCalls`` of a backend that every call goes to."""
    noted = NotedCalls()
    backend = PlannedBackend(BACKEND, noted, name="noted", device_types=("cpu",), priority=10**6)
    registry.load()
    assert registry.register(backend).state == "loaded"
    yield noted
    registry.unregister("noted")


def inputs(B: int = 2, T: int = 64, H: int = 2, K: int = 64, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    q, k, v = torch.randn(3, B, T, H, K).to(dtype)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(B, T, H, K).to(dtype), "beta": torch.rand(B, T, H).to(dtype)}


def trained(
    function: Any, tensors: dict[str, Any], of: str = "os", to: str = "", shape: Any = torch.ones_like, **options: Any
) -> None:
    """Gradients of the output (o) and the final state (s), to all inputs in a floating dtype or to these alone."""
    leaves = {n: x for n, x in (tensors | options).items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    for n, x in leaves.items():
        x.requires_grad_(to in ("", n))
    o, state = function(**tensors, **options)
    outputs = [x for name, x in (("o", o), ("s", state)) if x is not None and name in of]
    wanted = [x for x in leaves.values() if x.requires_grad]
    torch.autograd.grad(outputs, wanted, [shape(x) for x in outputs], allow_unused=True)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """The same, with heads ahead of tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


GATE = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
NORM = {"use_qk_l2norm_in_kernel": True}


def parameters() -> dict[str, Any]:
    return {"A_log": torch.randn(2), "dt_bias": torch.randn(2, 64), **GATE}


def states(V_first: bool = False) -> dict[str, Any]:
    return {"initial_state": torch.zeros(2, 2, 64, 64), "output_final_state": True, "state_v_first": V_first}


def chunk(a: dict[str, Any], train: bool = False, **options: Any) -> Any:
    if train:
        return trained(chunk_kda, a, **options)
    with torch.no_grad():
        return chunk_kda(**a, **options)


def only(name: str, change: Any, **options: Any) -> Any:
    """A call one of whose tensors is changed."""

    def make() -> Any:
        a = inputs()
        return chunk({**a, name: change(a[name])}, **options)

    return make


def step(a: dict[str, Any]) -> Any:
    pool = torch.zeros(128, 2, 128, 128, dtype=torch.bfloat16)
    return fused_recurrent_kda(**a, initial_state=pool, ssm_state_indices=torch.arange(128))


def packed_h(bounds: list[int]) -> Any:
    x = torch.tensor(bounds)
    return chunk(inputs(B=1), cu_seqlens=x, cu_seqlens_cpu=x, return_intermediate_states=True)


BOUNDS = torch.tensor([0, 30, 64])


def kinds() -> dict[str, Any]:
    """Calls that differ from the first in one thing that a plan's key must hold, each with tensors of its own."""
    return {
        "plain": lambda: chunk(inputs()),
        "float16": lambda: chunk(inputs(dtype=torch.float16)),
        "g in float32": only("g", torch.Tensor.float),
        "longer": lambda: chunk(inputs(T=96)),
        "norms": lambda: chunk(inputs(), **NORM),
        "scale": lambda: chunk(inputs(), scale=0.5),
        "no scale": lambda: chunk(inputs(), scale=0.0),
        "no scale, negative": lambda: chunk(inputs(), scale=-0.0),
        "safe gate": lambda: chunk(inputs(), safe_gate=True),
        "gate": lambda: chunk(inputs(), **parameters()),
        "states": lambda: chunk(inputs(), **states()),
        "states, V first": lambda: chunk(inputs(), **states(True)),
        "bfloat16 states": lambda: chunk(inputs(), initial_state=torch.zeros(2, 2, 64, 64).bfloat16()),
        "h": lambda: chunk(inputs(), return_intermediate_states=True),
        "h, packed": lambda: packed_h([0, 64, 64]),
        "h, packed otherwise": lambda: packed_h([0, 1, 64]),
        "packed": lambda: chunk(inputs(B=1), cu_seqlens=BOUNDS),
        "packed, int32": lambda: chunk(inputs(B=1), cu_seqlens=BOUNDS.int()),
        "128 channels": lambda: chunk(inputs(K=128)),
        "128 channels, v misaligned": lambda: (a := inputs(K=128)) and chunk({**a, "v": misaligned(a["v"])}),
        "v by heads": only("v", by_heads),
        "q with gaps": only("q", lambda x: torch.cat([x, x], 3)[..., :64]),
        "q that must be copied": only("q", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        "q and k alike": lambda: (a := inputs()) and chunk({**a, "k": a["q"]}),
        "a pool": lambda: chunk(inputs(), **states(), ssm_state_indices=torch.tensor([1, 0])),
        "a pool, strided indices": lambda: chunk(
            inputs(), **states(), ssm_state_indices=torch.tensor([[1, 5], [0, 5]])[:, 0]
        ),
        "out": lambda: chunk(inputs(), out=torch.empty(2, 64, 2, 64).bfloat16()),
        "out by heads": lambda: chunk(inputs(), out=by_heads(torch.empty(2, 64, 2, 64).bfloat16())),
        "out that is written in a copy": lambda: chunk(inputs(), out=torch.empty(2, 64, 64, 2).bfloat16().mT),
        "token by token": lambda: fused_recurrent_kda(**inputs()),
        "one token": lambda: fused_recurrent_kda(**inputs(T=1), **states()),
        "a step of many states": lambda: step(inputs(B=128, T=1, K=128)),
        "a step of many states, q misaligned": lambda: (
            (a := inputs(B=128, T=1, K=128)) and step({**a, "q": misaligned(a["q"])})
        ),
        **{f"{name} misaligned": only(name, misaligned) for name in ("q", "k", "v", "g", "beta")},
    }


def training_kinds() -> dict[str, Any]:
    """The same with gradients."""
    return {
        "training": lambda: chunk(inputs(), True),
        "training, norms": lambda: chunk(inputs(), True, **NORM),
        "training, all kept": lambda: chunk(inputs(), True, disable_recompute=True, **NORM),
        "training, gate, states": lambda: chunk(inputs(), True, **parameters(), **states()),
        "training, gate, packed": lambda: chunk(inputs(B=1), True, **parameters(), cu_seqlens=BOUNDS),
        "training, a gradient by heads": lambda: chunk(inputs(), True, shape=lambda x: by_heads(torch.ones_like(x))),
        "training, a gradient that must be copied": lambda: chunk(
            inputs(), True, shape=lambda x: torch.ones(1, dtype=x.dtype).expand(x.shape)
        ),
        "training, states": lambda: chunk(inputs(), True, **states()),
        "training, states, o alone": lambda: chunk(inputs(), True, of="o", **states()),
        "training, states, the last alone": lambda: chunk(inputs(), True, of="s", **states()),
        "training, states, to q alone": lambda: chunk(inputs(), True, to="q", **states()),
        "training, states, to the first alone": lambda: chunk(inputs(), True, to="initial_state", **states()),
        "training token by token": lambda: trained(fused_recurrent_kda, inputs()),
        "training, 128 channels": lambda: chunk(inputs(K=128), True),
        "training, long, 128 channels": lambda: chunk(inputs(B=1, T=4096, K=128), True),
        **{f"training, {name} misaligned": only(name, misaligned, train=True) for name in ("q", "k", "v", "g", "beta")},
    }


def test_the_plan_that_is_found_is_the_plan_of_the_call(calls):
    """Calls of every kind in turn, again and again, so that a plan of the wrong kind would be found."""
    found = kinds() | training_kinds()
    for turn in range(3):
        for name, make in found.items():
            calls.pairs.clear()
            make()
            assert calls.pairs, name
            for used, expected, new in calls.pairs:
                assert repr(used) == repr(expected), name
                assert used == expected, name
                assert not (turn and new), name


def of_lengths() -> dict[str, Any]:
    """Calls by batch, tokens and sequences."""

    def bounds(T: int, N: int) -> torch.Tensor:
        return torch.linspace(0, T, N + 1).int()

    def prompts(B: int, T: int, N: int) -> Any:
        pool, bits = torch.zeros(40, 2, 64, 64), torch.ones(N, dtype=torch.bool)
        slots = {"ssm_state_indices": torch.arange(N), "has_initial_state": bits, "initial_state": pool}
        out = torch.empty(1, T, 2, 64).bfloat16()
        return chunk(inputs(1, T), cu_seqlens=bounds(T, N), **slots, **parameters(), out=out)

    def prompts_cut(B: int, T: int, N: int) -> Any:
        slots = {"ssm_state_indices": torch.arange(N), "initial_state": torch.zeros(40, 1, 128, 128)}
        return chunk(inputs(1, 99 * T, 1, 128), cu_seqlens=bounds(99 * T, N), **slots)

    def state(N: int, K: int = 64) -> dict[str, Any]:
        return {"initial_state": torch.zeros(N, 2, K, K), "output_final_state": True}

    def sliced(B: int, T: int, N: int) -> Any:
        a = inputs(B, T)
        q, k, v = torch.cat([a["q"], a["k"], a["v"]], -1).chunk(3, -1)
        return chunk({**a, "q": q, "k": k, "v": v})

    return {
        "plain": lambda B, T, N: chunk(inputs(B, T)),
        "sliced": sliced,
        "prompts": prompts,
        "packed": lambda B, T, N: chunk(inputs(1, T), cu_seqlens=bounds(T, N), **state(N)),
        "packed, lengths on the host": lambda B, T, N: chunk(
            inputs(1, T), cu_seqlens=(x := bounds(T, N)), cu_seqlens_cpu=x.clone()
        ),
        "training": lambda B, T, N: chunk(inputs(B, T), True, **parameters(), **NORM),
        "training, packed": lambda B, T, N: chunk(inputs(1, T), True, cu_seqlens=bounds(T, N), **state(N)),
        "training, all kept": lambda B, T, N: chunk(inputs(B, T), True, disable_recompute=True),
        "training, states kept": lambda B, T, N: chunk(
            inputs(1, 64 * (2 + T % 16), 32, 128), True, safe_gate=True, disable_recompute=True
        ),
        "training, cut": lambda B, T, N: chunk(inputs(1, 40 * T, 2, 128), True),
        "prompts, cut": prompts_cut,
        "batch, cut": lambda B, T, N: chunk(inputs(B, 40 * T, 2, 128), **state(B, 128)),
        "token by token": lambda B, T, N: fused_recurrent_kda(**inputs(B, T), **state(B)),
        "gate": lambda B, T, N: kda_gate(inputs(B, T)["g"], lower_bound=-5.0),
    }


@pytest.mark.parametrize("kind", of_lengths())
def test_the_plan_for_other_lengths_is_the_plan_of_the_call(calls, monkeypatch, kind: str):
    """Lengths at which decisions change as well; most plans are found, not made."""
    made = []
    monkeypatch.setattr(calls, "_plan_of", lambda *of: made.append(of) or plan_of(*of))
    lengths = [(2, 64, 3), (2, 65, 3), (1, 64, 1), (3, 1, 1), (2, 130, 2), (1, 33, 4), (2, 96, 2), (1, 500, 2)]
    lengths += [(2, T, N) for T, N in zip(range(100, 116), range(2, 18), strict=True)]
    for call in lengths:
        calls.pairs.clear()
        of_lengths()[kind](*call)
        assert all(used == expected for used, expected, _ in calls.pairs), call
    assert len(made) < (2 if "training" in kind else 1) * len(lengths) / 2
    assert any(calls._families.values())


def test_the_plan_of_a_half_is_that_of_the_half():
    """Four halves share one memo, a backward without a gradient of o, too; what they are handed may lie crooked."""
    noted, memo = NotedCalls(), {}

    def remembered(**values: Any) -> Request:
        r = Request(op="chunk_kda", scale=1.0, output_final_state=True, cp_context=True, **inputs(B=1), **values)
        r.__dict__["memo"] = memo
        return r

    for turn in range(3):
        for crooked in (False, True):
            states = torch.randn(1, 2, 64, 64)
            states = misaligned(states) if crooked else states
            r = remembered(save_for_backward=True)
            saved = noted.chunk_finish(r, noted.chunk_begin(r).kept, states).saved
            for grad_o in (None, r.v):
                r = remembered(save_for_backward=True, saved=saved, grad_o=grad_o, needs_grad=frozenset("qkv"))
                noted.chunk_finish_backward(r, noted.chunk_begin_backward(r).kept, states)
        assert all(used == expected for used, expected, _ in noted.pairs)
        assert not (turn and any(new for *_, new in noted.pairs))
        noted.pairs.clear()


def test_a_backward_of_offloaded_tensors_does_not_take_the_plan_of_others(calls):
    """Slices of one projection come back contiguous: a plan for slices has other strides, past their ends."""

    def sliced() -> dict[str, Any]:
        a = inputs()
        q, k, v = torch.cat([a["q"], a["k"], a["v"]], -1).chunk(3, -1)
        return {**a, "q": q.detach(), "k": k.detach(), "v": v.detach()}

    def plans(offload: bool) -> list[Plan]:
        calls.pairs.clear()
        if offload:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                trained(chunk_kda, sliced(), **NORM)
        else:
            trained(chunk_kda, sliced(), **NORM)
        assert all(used == expected for used, expected, _ in calls.pairs)
        return [used for used, *_ in calls.pairs]

    assert plans(False) != plans(True)
    for _ in range(3):
        plans(True)
        plans(False)


def test_plans_stay_bounded(calls):
    for T in range(1, MOST_PLANS + 9):
        for _ in range(2):
            with torch.no_grad():
                chunk_kda(**inputs(T=T, H=1, K=16))
    plans = [p for _, memo in registry._choices.values() for p in memo.values() if isinstance(p, Noted)]
    assert len(plans) == MOST_PLANS


def test_a_memo_belongs_to_one_signature(calls):
    """Shared by calls that are alike, a backward's with its forward's; a changed copy of a request has none."""
    with torch.no_grad():
        chunk_kda(**inputs())
        chunk_kda(**inputs())
        chunk_kda(**inputs(), scale=2.0)
        chunk_kda(**inputs(T=32))
    trained(chunk_kda, inputs())
    first, second, *others, forward, backward = calls.memos
    assert first is second
    assert forward is backward
    assert len({id(x) for x in (first, *others, forward)}) == 4
    r = Request(op="chunk_kda", **inputs(), scale=1.0)
    r.__dict__["memo"] = {}
    assert replace(r, scale=2.0).memo is None
    first, second = (_autograd._kind(r, _autograd._given(r, vars(r))) for _ in range(2))
    assert first is second
