"""The executor of the NVIDIA backend: what it launches first and again, and which plan it finds for a call.

Tensors lie on the CPU, kernels are stand-ins that note what they are launched with, and nothing is computed.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import installed
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches everything itself", allow_module_level=True)
installed.need_backend("nvidia")
installed.need_package("triton")

import triton
from kda_core_nvidia import plugin, run, triton_private
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS
from planned_backend import PlannedBackend

from kda_core import _eager, _ops, api, chunk_kda, fused_recurrent_kda
from kda_core._plugins import Registry
from kda_core.request import Request
from kda_core.triton_lib.calls import Calls
from kda_core.triton_lib.plan import Builder, Copy, Plan, View, layout, matrix_tile


def parameter(name: str) -> Any:
    return SimpleNamespace(name=name, do_not_specialize=name == "n", annotation_type="", is_constexpr=name == "K")


class Kernel:
    """A jitted kernel of tensors x and y, a stride, a number and a constant."""

    __name__ = "kernel"
    arg_names = ("x", "y", "s_x", "n", "K")
    params = tuple(map(parameter, arg_names))


KERNEL = Kernel()
CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch):
    """Triton as the executor sees it; gives what was launched: (way, grid, addresses and numbers)."""
    launched: list[Any] = []

    def flat(x: Any) -> Any:
        return x.data_ptr() if hasattr(x, "data_ptr") else x.base.data_ptr() if hasattr(x, "base") else x

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def run(self, *arguments: Any) -> None:
            grid, stream, (function, metadata, *hooks) = arguments[:3], arguments[3], arguments[4:9]
            assert (stream, function, metadata, hooks) == ("stream", "function", "metadata", [None] * 3)
            launched.append(("again", grid, tuple(map(flat, arguments[9:]))))

    def launch(kernel: Any, grid: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
        constants = [options[n] for n in kernel.arg_names[len(arguments) :]]
        assert options["enable_fp_fusion"] in (True, False)
        assert options["num_warps"] in (1, 2, 4, 8)
        launched.append(("triton", grid, tuple(map(flat, [*arguments, *constants]))))
        return Compiled()

    monkeypatch.setattr(triton_private, "launch", launch)
    monkeypatch.setattr(triton_private, "current_stream", lambda: lambda device: "stream")
    monkeypatch.setattr(triton_private, "VERSION", "0.0")
    monkeypatch.setattr(run, "_entries", {})
    return launched


def plan_with(x: torch.Tensor, number: int = 5, tile: bool = False, copies: bool = False) -> Plan:
    """y = kernel(x), z = kernel(y); a part of x where there are copies."""
    b = Builder()
    own = layout("x", x)
    y, z = b.scratch("y", (4, 32), torch.float32), b.result("z", (4, 32), torch.float32)
    if copies:
        half = b.scratch("half", (2, 32), torch.float32)
        b.step(Copy(half, own.cut(0, slice(2, 4))))
        own = own.cut(0, slice(0, 2))
    shared = {"s_x": 32, "n": number}
    b.launch(KERNEL, (3, 2, 1), 4, {"K": 16}, x=matrix_tile(own, 4, 32) if tile else own, y=y, **shared)
    b.launch(KERNEL, (1, 1, 1), 4, {"K": 16}, x=y.cut(0, slice(1, 3)), y=z, **shared)
    return b.plan({"x": layout("x", x)}, {"z": z, "given": layout("x", x), "none": None})


def bound_to(plan: Plan, x: torch.Tensor) -> Any:
    bound = run.Bound(plan, ("x",), CPU)
    return lambda x=x: bound([x], [x.data_ptr()])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("tile", [False, True])
def test_a_repeated_call_is_given_what_the_first_one_was(fake, tile: bool, copies: bool):
    """Addresses of this call's tensors, at the same offsets; grids and numbers alike."""
    x = torch.randn(4, 32)
    call = bound_to(plan_with(x, tile=tile, copies=copies), x)
    for way in ("triton", "again", "again"):
        fake.clear()
        x = torch.randn(4, 32)
        made = call(x)
        assert [launch[0] for launch in fake] == [way] * 2
        (_, first, (x0, y0, *numbers)), (_, second, (x1, y1, *again)) = fake
        assert (first, second) == ((3, 2, 1), (1, 1, 1))
        assert numbers == again == [32, 5, 16]
        assert x0 == x.data_ptr()
        assert x1 == y0 + 32 * 4
        assert y1 == made["z"].data_ptr()
        assert made["given"] is x
        assert made["none"] is None


def test_what_is_compiled_is_found_for_other_lengths(fake):
    """A plan with another number is bound at once; another stride, alignment or constant is compiled."""
    x = torch.randn(4, 32)
    bound_to(plan_with(x), x)()
    fake.clear()
    bound_to(plan_with(x, number=6), x)()
    assert [way for way, *_ in fake] == ["again"] * 2
    fake.clear()
    bound_to(plan_with(x, number=2**31), x)()
    assert [way for way, *_ in fake] == ["triton"] * 2


def test_a_kernel_is_compiled_for_what_triton_looks_at(fake):
    x = View("x", (4, 32), (32, 1), torch.float32)

    def kind(x: Any = x, s_x: int = 7, n: int = 5, K: int = 16, warps: int = 4, device: int = 0) -> Any:
        b = Builder()
        b.launch(KERNEL, (1, 1, 1), warps, {"K": K}, x=x, y=None, s_x=s_x, n=n)
        return run._compiled_for(b.plan({"x": View("x", (), (), torch.float32)}, {}).launches[0], device)

    assert kind() == kind(n=6) == kind(x.cut(0, slice(1, 2)))
    others = [
        kind(replace(x, aligned=False)), kind(replace(x, dtype=torch.bfloat16)), kind(None),
        kind(matrix_tile(x, 2, 32)), kind(s_x=8), kind(n=2**31), kind(n=-(2**31) - 1), kind(K=32), kind(warps=8),
        kind(device=1),
    ]  # fmt: skip
    # Numbers of 64 bits are alike, above and below.
    assert len({kind(), *others}) == 10


def test_scratch_is_one_allocation_where_it_lasts_alike_and_is_given_back(fake):
    """An epoch's scratch is freed after its last step; what takes its place is allocated after it."""
    b = Builder()
    first = [b.scratch(n, (100,), torch.float32) for n in "ab"]
    held = b.scratch("held", (4,), torch.float32)
    shared = {"s_x": 1, "n": 5}
    b.launch(KERNEL, (1, 1, 1), 4, {"K": 16}, x=first[0], y=first[1], **shared)
    b.free(*first)
    c = b.scratch("c", (4,), torch.float32)
    b.launch(KERNEL, (1, 1, 1), 4, {"K": 16}, x=held, y=c, **shared)
    bound = run.Bound(b.plan({}, {}), (), CPU)
    bound([], [])
    alive: list[weakref.ref[torch.Tensor]] = []
    seen = []

    def make(before: Any) -> Any:
        def noted() -> torch.Tensor:
            x = before()
            alive.append(weakref.ref(x))
            return x

        return noted

    def note(*arguments: Any) -> None:
        seen.append([x() is not None for x in alive])

    bound._epochs = tuple(
        e._replace(
            allocations=tuple((make(before), parts) for before, parts in e.allocations),
            calls=tuple(c._replace(function=note) for c in e.calls),
        )
        for e in bound._epochs
    )
    bound([], [])
    assert seen == [[True, True], [False, True, True]]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_repeated_ones(fake, name: str):
    x = torch.randn(4, 32)
    call = bound_to(plan_with(x), x)
    call()
    hook = getattr(triton.knobs.runtime, name)

    def watch(metadata: Any) -> None:
        pass

    hook.add(watch)
    try:
        fake.clear()
        call()
    finally:
        hook.remove(watch)
    assert [way for way, *_ in fake] == ["triton"] * 2
    fake.clear()
    call()
    assert [way for way, *_ in fake] == ["again"] * 2


def test_threads_that_run_the_same_plan_use_their_own_tensors(fake):
    given = [torch.randn(4, 32) for _ in range(4)]
    call = bound_to(plan_with(given[0]), given[0])
    call()
    fake.clear()
    threads = [threading.Thread(target=lambda x=x: [call(x) for _ in range(50)]) for x in given]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seen = [arguments[0] for _, grid, arguments in fake if grid == (3, 2, 1)]
    assert sorted(seen) == sorted([x.data_ptr() for x in given] * 50)


def test_descriptors_stay_bounded(fake, monkeypatch):
    """One for every address that comes again, and not for every address that ever was."""
    monkeypatch.setattr(run, "MAX_ENCODED", 3)
    given = [torch.randn(4, 32) for _ in range(9)]
    plan = plan_with(given[0], tile=True)
    bound = run.Bound(plan, ("x",), CPU)
    for x in given:
        bound([x], [x.data_ptr()])
    maps = [m for epoch in bound._epochs for call in epoch.calls for m in call.maps]
    assert maps
    assert all(0 < len(m.known) <= 3 for m in maps)


class Triton36:
    """Triton 3.6's launcher of a compiled kernel, of which nothing but the last function is called."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, launched: list[Any], tiles: int) -> None:
        def function(x: int, y: int, z: int, stream: str, *arguments: Any) -> None:
            assert arguments[:9] == ("function", "cooperative", "pdl", None, None, "metadata", None, None, None)
            launched.append(arguments[9:])

        def wrapped(launcher: Any) -> Any:
            return lambda *_: pytest.fail(f"{launcher} was to be called")

        self.launch = wrapped(function) if tiles else function


@pytest.mark.parametrize("tile", [False, True])
def test_where_triton_is_known_its_last_function_is_called(fake, monkeypatch, tile: bool):
    """Descriptors are encoded, their shapes and strides follow them, as triton's own launcher has it."""
    launched: list[Any] = []

    def launch(kernel: Any, grid: Any, arguments: list[Any], options: Any) -> Any:
        tiles = sum(hasattr(x, "block_shape") for x in arguments)
        kinds = SimpleNamespace(tensordesc_meta=["kind"] * tiles)
        made = SimpleNamespace(function="function", packed_metadata="metadata", metadata=kinds)
        made.run = Triton36(launched, tiles)
        return made

    def encoded(descriptor: Any, kind: str) -> list[Any]:
        assert kind == "kind"
        return [("encoded", descriptor.base.data_ptr()), "shape", "strides"]

    monkeypatch.setattr(triton_private, "launch", launch)
    monkeypatch.setattr(triton_private, "VERSION", "3.6")
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encoded)
    x = torch.randn(4, 32)
    call = bound_to(plan_with(x, tile=tile), x)
    call()
    for _ in range(2):
        launched.clear()
        x = torch.randn(4, 32)
        call(x)
        expected = (("encoded", x.data_ptr()), 4, 32, 32, 1) if tile else (x.data_ptr(),)
        assert launched[0][: len(expected)] == expected
        assert launched[0][-3:] == (32, 5, 16)


def test_this_triton_was_looked_at():
    """A new version may move what ``triton_private`` uses: check that file, then add the version to SEEN."""
    assert triton_private.VERSION in triton_private.SEEN
    from triton.backends.nvidia import driver

    assert callable(driver.make_tensordesc_arg)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        assert hasattr(triton.knobs.runtime, name)


# Which plan is found for a call ---------------------------------------------------------------------------------------


class Noted:
    """Stands for a bound plan: notes the plan and allocates the results."""

    calls: ClassVar[list[tuple[Plan, tuple[torch.Tensor | None, ...], bool]]] = []

    def __init__(self, plan: Plan, names: Any, device: torch.device) -> None:
        self.plan, self.names, self.new = plan, names, True

    def __call__(self, inputs: Any, places: Any) -> dict[str, torch.Tensor | None]:
        Noted.calls.append((self.plan, tuple(inputs), self.new))
        self.new = False
        given = dict(zip(self.names, inputs, strict=True))
        made = {b.name: torch.zeros(b.shape, dtype=b.dtype) for b in self.plan.buffers.values() if b.role == "result"}
        return {n: None if x is None else (given | made)[x] for n, x in self.plan.results.items()}


MOST_PLANS = 200


class NotedCalls(Calls):
    """The calls as on an H200, but that plans are noted instead of run: pairs of the plan and the one to expect."""

    def __init__(self) -> None:
        super().__init__(plan_of, lambda device: CHIPS[90], bind=Noted, most=MOST_PLANS)
        self.pairs: list[tuple[Plan, Plan, bool]] = []

    def run(self, request: Any, key: Any, names: Any, inputs: Any, saved: Any = None, half: Any = ()) -> Any:
        made = super().run(request, key, names, inputs, saved, half)
        used, given, new = Noted.calls.pop()
        crooked = frozenset(n for n, x in zip(names, given, strict=True) if x is not None and x.data_ptr() & 15)
        planned = request if saved is None else replace(request, saved=saved)
        self.pairs.append((used, plan_of(planned, CHIPS[90], crooked, *half), new))
        return made


@pytest.fixture
def calls(monkeypatch):
    """A registry whose only backend has ``NotedCalls``."""
    noted = NotedCalls()
    registry = Registry(entry_points=False)
    backend = PlannedBackend(plugin, noted, device_types=("cpu",), priority=100)
    assert registry.register(backend).state == "loaded"
    for module in (api, _ops):
        monkeypatch.setattr(module, "registry", registry)
    return SimpleNamespace(pairs=noted.pairs, registry=registry)


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


def kinds() -> dict[str, Any]:
    """Calls that differ from the first in one thing that a plan's key must hold, each with tensors of its own."""

    def chunk(a: dict[str, Any], train: bool = False, **options: Any) -> Any:
        if train:
            return trained(chunk_kda, a, **options)
        with torch.no_grad():
            return chunk_kda(**a, **options)

    def only(name: str, change: Any, **options: Any) -> Any:
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

    bounds = torch.tensor([0, 30, 64])
    found = {
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
        "packed": lambda: chunk(inputs(B=1), cu_seqlens=bounds),
        "packed, int32": lambda: chunk(inputs(B=1), cu_seqlens=bounds.int()),
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
        "training": lambda: chunk(inputs(), True),
        "training, norms": lambda: chunk(inputs(), True, **NORM),
        "training, all kept": lambda: chunk(inputs(), True, disable_recompute=True, **NORM),
        "training, gate, states": lambda: chunk(inputs(), True, **parameters(), **states()),
        "training, gate, packed": lambda: chunk(inputs(B=1), True, **parameters(), cu_seqlens=bounds),
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
    }
    for name in ("q", "k", "v", "g", "beta"):
        found[f"{name} misaligned"] = only(name, misaligned)
        found[f"training, {name} misaligned"] = only(name, misaligned, train=True)
    return found


def test_the_plan_that_is_found_is_the_plan_of_the_call(calls):
    """Calls of every kind in turn, again and again, so that a plan of the wrong kind would be found."""
    found = kinds()
    for turn in range(3):
        for name, make in found.items():
            calls.pairs.clear()
            make()
            assert calls.pairs, name
            for used, expected, new in calls.pairs:
                assert repr(used) == repr(expected), name
                assert used == expected, name
                assert not (turn and new), name


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
    plans = [p for _, memo in calls.registry._choices.values() for p in memo.values() if isinstance(p, Noted)]
    assert len(plans) == MOST_PLANS


def test_a_memo_belongs_to_one_signature(calls):
    """Shared by calls that are alike, a backward's with its forward's; a changed copy of a request has none."""
    seen = []

    def spy(backend: Any, r: Request, before: Any = _ops.forward) -> Any:
        seen.append(r.memo)
        return before(backend, r)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(_ops, "forward", spy)
        with torch.no_grad():
            chunk_kda(**inputs())
            chunk_kda(**inputs())
            chunk_kda(**inputs(), scale=2.0)
            chunk_kda(**inputs(T=32))
        chunk_kda(**{n: x.requires_grad_() for n, x in inputs().items()})
    assert seen[0] is seen[1]
    assert len({id(x) for x in seen}) == 4
    r = Request(op="chunk_kda", **inputs(), scale=1.0)
    r.__dict__["memo"] = {}
    assert replace(r, scale=2.0).memo is None
    assert _eager._kind(r) is _eager._kind(r)
