"""Calls of the NVIDIA backend that repeat the launches of one before: the same launches as the long way's, always.

Kernels are stand-ins that note what they are launched with; tensors lie on the CPU, and nothing is computed.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import installed
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches everything itself", allow_module_level=True)
installed.need_backend("nvidia")
installed.need_package("triton")

import triton
from kda_core_nvidia import chunk_backward, chunk_forward, hopper, launch, plan, plugin, recurrent_launch, segments
from torch.utils._python_dispatch import TorchDispatchMode

from kda_core import api, chunk_kda, eager, fused_recurrent_kda, ops
from kda_core.plugins import Registry
from kda_core.request import Request

MODULES = (chunk_forward, chunk_backward, recurrent_launch, segments)


class Stub:
    """Stands for a jitted kernel: what it compiles is named by what triton would compile it for."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches
        self.params, self.arg_names = kernel.params, kernel.arg_names
        self.compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def jit(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            kinds = []
            for parameter, x in zip(self.params, arguments, strict=False):
                if isinstance(x, torch.Tensor):
                    kinds.append((x.dtype, x.data_ptr() % 16 == 0))
                elif launch.is_descriptor(x):
                    kinds.append((x.base.dtype, *x.block_shape))
                elif x is None or parameter.do_not_specialize:
                    kinds.append(x is None)
                else:
                    kinds.append((x == 1, x % 16 == 0))
            key = self.kernel.__name__, num_warps, tuple(kinds), tuple(constants.items())
            found = self.compiled.setdefault(key, Compiled(key, self.launches))
            rest = [constants[n] for n in self.arg_names[len(arguments) :]]
            found.note(grid, "stream", (*map(_address, arguments), *rest))
            return found

        return jit


class Compiled:
    """Stands for a compiled kernel."""

    packed_metadata = "metadata"

    def __init__(self, key: Any, launches: list[Any]) -> None:
        self.function, self.launches = key, launches

    def note(self, grid: Any, stream: str, arguments: tuple[Any, ...]) -> None:
        self.launches.append((self.function, tuple(grid), stream, tuple(map(_address, arguments))))

    def run(self, x: int, y: int, z: int, stream: str, function: Any, metadata: str, *arguments: Any) -> None:
        assert function == self.function
        assert metadata == "metadata"
        assert arguments[:3] == (None, None, None)
        self.note((x, y, z), stream, arguments[3:])

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append(("watched", self.function))


def _address(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return (x.base.data_ptr(), *x.shape, *x.strides) if launch.is_descriptor(x) else x


@pytest.fixture
def gpu(monkeypatch):
    """The backend as on an H200, but for its kernels; gives what was launched and every tensor that was allocated."""
    launches: list[Any] = []
    made: list[torch.Tensor] = []
    chip = launch.Chip((9, 0), 132)
    for module in MODULES:
        if hasattr(module, "chip"):
            monkeypatch.setattr(module, "chip", lambda device: chip)
        for x in vars(module).values():
            if isinstance(x, launch.Launcher):
                monkeypatch.setattr(x, "kernel", Stub(x.kernel, launches))
                monkeypatch.setattr(x, "_compiled", {})
    stubs = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(launch, "driver", stubs)
    monkeypatch.setattr(plan, "driver", stubs)
    monkeypatch.setattr(launch, "_KNOWN_DRIVER", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plugin, "_INFO", replace(plugin._INFO, device_types=("cpu",), priority=100))
    monkeypatch.setattr(plugin, "INTERPRET", True)
    registry = Registry(entry_points=False)
    assert registry.register(plugin).state == "loaded"
    for module in (api, ops):
        monkeypatch.setattr(module, "registry", registry)

    # An address means one tensor only as long as none is given back.
    for owner, name in (
        (torch, "empty_strided"),
        (torch, "zeros"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_zeros"),
    ):
        before = getattr(owner, name)

        def noted(*args: Any, before: Any = before, **kwargs: Any) -> torch.Tensor:
            made.append(before(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(owner, name, noted)
    return SimpleNamespace(launches=launches, made=made, registry=registry)


def inputs(B: int = 2, T: int = 64, H: int = 2, K: int = 64, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    q, k, v = torch.randn(3, B, T, H, K).to(dtype)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(B, T, H, K).to(dtype), "beta": torch.rand(B, T, H).to(dtype)}


def launched(gpu: Any, run: Any) -> list[Any]:
    """What ``run()`` launches, with addresses numbered in the order of their first use."""
    gpu.launches.clear()
    held = run()
    numbers: dict[int, str] = {}

    def number(x: Any) -> Any:
        if isinstance(x, tuple):
            return number(x[0]), *x[1:]
        return numbers.setdefault(x, f"address {len(numbers)}") if isinstance(x, int) and x > 1 << 32 else x

    del held
    return [(function, grid, stream, tuple(map(number, a))) for function, grid, stream, a in gpu.launches]


def trained(
    function: Any, tensors: dict[str, Any], of: str = "os", to: str = "", shape: Any = torch.ones_like, **options: Any
) -> list[torch.Tensor]:
    """Gradients of the output (o) and the final state (s), to all inputs in a floating dtype or to these alone."""
    leaves = {n: x for n, x in (tensors | options).items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    for n, x in leaves.items():
        x.requires_grad_(to in ("", n))
    o, state = function(**tensors, **options)
    outputs = [x for name, x in (("o", o), ("s", state)) if x is not None and name in of]
    wanted = [x for x in leaves.values() if x.requires_grad]
    return [*torch.autograd.grad(outputs, wanted, [shape(x) for x in outputs], allow_unused=True), *outputs]


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
        def run() -> Any:
            a = inputs()
            return chunk({**a, name: change(a[name])}, **options)

        return run

    def step(a: dict[str, Any]) -> Any:
        pool = torch.zeros(128, 2, 128, 128, dtype=torch.bfloat16)
        return fused_recurrent_kda(**a, initial_state=pool, ssm_state_indices=torch.arange(128))

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


def test_repeated_calls_launch_what_the_long_way_launches(gpu, monkeypatch):
    """Calls of every kind in turn, again and again, so that a plan of the wrong kind would be found."""
    found = kinds()
    with monkeypatch.context() as m:
        m.setattr(plan, "INTERPRET", True)
        expected = {name: launched(gpu, run) for name, run in found.items()}
    assert all(expected.values())
    assert {function[0] for found in expected.values() for function, *_ in found} >= {"recurrent", "recurrent_step"}
    repeats = []
    monkeypatch.setattr(plan.Plan, "repeat", lambda *a, f=plan.Plan.repeat: repeats.append(0) or f(*a))
    repeated = set()
    for _ in range(4):
        for name, run in found.items():
            repeats.clear()
            assert launched(gpu, run) == expected[name], name
            repeated |= {name} if repeats else set()
    assert found.keys() - repeated == {"no scale", "no scale, negative", "q that must be copied"}


def test_calls_through_operators_repeat_their_launches_as_well(gpu, monkeypatch):
    """Forward and backward, as in compiled graphs and under modes."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    def run() -> Any:
        with Mode():
            return trained(chunk_kda, inputs(), **NORM)

    repeats = []
    monkeypatch.setattr(plan.Plan, "repeat", lambda *a, f=plan.Plan.repeat: repeats.append(0) or f(*a))
    expected = launched(gpu, run)
    counts = []
    for _ in range(4):
        repeats.clear()
        assert launched(gpu, run) == expected
        counts.append(len(repeats))
    assert counts == [0, 2, 2, 2]


def test_a_backward_of_offloaded_tensors_does_not_repeat_launches_of_others(gpu, monkeypatch):
    """Slices of one projection come back contiguous: what was noted for slices has other strides, past their ends."""

    def sliced() -> dict[str, Any]:
        a = inputs()
        q, k, v = torch.cat([a["q"], a["k"], a["v"]], -1).chunk(3, -1)
        return {**a, "q": q.detach(), "k": k.detach(), "v": v.detach()}

    def step() -> Any:
        return trained(chunk_kda, sliced(), **NORM)

    def offloaded() -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return trained(chunk_kda, sliced(), **NORM)

    with monkeypatch.context() as without_plans:
        without_plans.setattr(plan, "INTERPRET", True)
        expected = {run: launched(gpu, run) for run in (step, offloaded)}
    assert expected[step] != expected[offloaded]
    for _ in range(4):
        for run in (offloaded, step):
            assert launched(gpu, run) == expected[run]


def plain() -> Any:
    with torch.no_grad():
        return chunk_kda(**inputs())


@pytest.mark.parametrize(("run", "most"), [(plain, 2), (lambda: trained(chunk_kda, inputs(), **NORM), 13)])
def test_a_repeated_call_allocates_its_results_and_little_else(gpu, run, most):
    """Scratch that lives alike is one allocation."""
    for _ in range(3):
        run()
    gpu.made.clear()
    run()
    assert len(gpu.made) <= most


def test_scratch_is_given_back_as_early_as_in_the_call_that_was_noted(gpu, monkeypatch):
    """So that a repeated backward's peak is no higher: what takes its place is allocated after it has ended."""
    a = {n: x.requires_grad_() for n, x in inputs().items()}
    for _ in range(2):
        o = chunk_kda(**a)[0]
        torch.autograd.grad(o, list(a.values()), torch.ones_like(o))
    (memo,) = (m for _, m in gpu.registry._choices.values())
    (repeated,) = (p for key, p in memo.items() if isinstance(key, tuple))
    scratch: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def make(before: Any) -> torch.Tensor:
        x = before()
        gpu.made.clear()
        scratch.append(weakref.ref(x))
        return x

    def call(*arguments: Any) -> None:
        alive.append([x() is not None for x in scratch])

    epochs = []
    for epoch in repeated._epochs:
        arenas = tuple((partial(make, before), parts) for before, parts in epoch.arenas)
        epochs.append(epoch._replace(arenas=arenas, launches=tuple(x._replace(call=call) for x in epoch.launches)))
    monkeypatch.setattr(repeated, "_epochs", tuple(epochs))
    o = chunk_kda(**a)[0]
    torch.autograd.grad(o, list(a.values()), torch.ones_like(o))
    # prepare, states and reverse; gradients, without the recurrences' factors; finish, without states.
    assert alive == [[True, True]] * 3 + [[False, True, True], [False, False, True]]


class Triton36:
    """Stands for triton 3.6's launcher of a compiled kernel, of which nothing but the function in the end is called."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, compiled: Compiled) -> None:
        head = (compiled.function, "cooperative", "pdl", None, None, "metadata", None, None, None)

        def function(x: int, y: int, z: int, stream: str, *arguments: Any) -> None:
            assert arguments[:9] == head
            compiled.note((x, y, z), stream, arguments[9:])

        def wrapped(launcher: Any) -> Any:
            return lambda *_: pytest.fail(f"{launcher} was to be called")

        # (dtype, rows, columns); of tensors (dtype, aligned).
        descriptors = [kind for kind in compiled.function[2] if isinstance(kind, tuple) and len(kind) == 3]
        self.kinds = [f"kind {n}" for n in range(len(descriptors))]
        self.launch = wrapped(function) if descriptors else function


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, tuple) else [x]


@pytest.mark.parametrize("K", [64, 128])
def test_where_triton_is_known_its_last_function_is_called_with_encoded_descriptors(gpu, monkeypatch, K):
    """The long way and again: the same addresses, shapes and strides as triton's own launcher is given elsewhere."""

    def encoded(descriptor: Any, kind: str) -> list[Any]:
        assert kind.startswith("kind ")
        return [descriptor.base.data_ptr(), "shape", "strides"]

    def run() -> Any:
        with torch.no_grad():
            return chunk_kda(**inputs(K=K), **NORM)

    def arguments() -> list[Any]:
        return [flat(arguments) for *_, arguments in launched(gpu, run)]

    expected = arguments()
    assert len(expected) == 2
    monkeypatch.setattr(launch, "_KNOWN_DRIVER", True)
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encoded)
    for x in vars(chunk_forward).values():
        if isinstance(x, launch.Launcher):
            x._compiled.clear()
            x.kernel.compiled.clear()

    def compiled(self: Compiled, key: Any, launches: list[Any]) -> None:
        self.function, self.launches = key, launches
        self.run = Triton36(self)
        self.metadata = SimpleNamespace(tensordesc_meta=self.run.kinds)

    monkeypatch.setattr(Compiled, "__init__", compiled)
    gpu.registry._forget_choices()
    for _ in range(5):
        assert arguments() == expected


def test_tensors_that_are_given_twice_are_told_apart_afterwards(gpu):
    """A first call whose q is its k must not make those after it read k from q."""
    with torch.no_grad():
        for _ in range(3):
            a = inputs()
            chunk_kda(**{**a, "k": a["q"]})
        for _ in range(3):
            a = inputs()
            gpu.launches.clear()
            chunk_kda(**a)
            assert gpu.launches[0][3][:2] == (a["q"].data_ptr(), a["k"].data_ptr())


def test_threads_that_repeat_the_same_plan_use_their_own_tensors(gpu):
    with torch.no_grad():
        for _ in range(3):
            chunk_kda(**inputs())
        gpu.launches.clear()
        given = [inputs() for _ in range(4)]

        def work(a: dict[str, Any]) -> None:
            with torch.no_grad():
                for _ in range(50):
                    chunk_kda(**a)

        threads = [threading.Thread(target=work, args=(a,)) for a in given]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    seen = [arguments[:4] for (name, *_), _, _, arguments in gpu.launches if name == "prepare"]
    expected = [tuple(a[n].data_ptr() for n in ("q", "k", "g", "beta")) for a in given]
    assert sorted(seen) == sorted(expected * 50)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_repeated_ones(gpu, name):
    def watch(metadata: Any) -> None:
        pass

    hook = getattr(triton.knobs.runtime, name)
    for _ in range(3):
        plain()
    hook.add(watch)
    try:
        gpu.launches.clear()
        plain()
    finally:
        hook.remove(watch)
    assert [kind for kind, _ in gpu.launches] == ["watched", "watched"]


def test_plans_stay_bounded(gpu, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    monkeypatch.setattr(plan, "_holders", type(plan._holders)())
    for T in range(1, 9):
        for _ in range(3):
            with torch.no_grad():
                chunk_kda(**inputs(T=T))
    plans = [p for _, memo in gpu.registry._choices.values() for p in memo.values() if isinstance(p, plan.Plan)]
    assert len(plans) == 3


def test_descriptors_stay_bounded(gpu, monkeypatch):
    """One for every address that comes again, and not for every address that ever was."""
    monkeypatch.setattr(plan, "MAX_ENCODED", 3)
    with torch.no_grad():
        for _ in range(9):
            chunk_kda(**inputs(K=128))
    (memo,) = (m for _, m in gpu.registry._choices.values())
    maps = [m for epoch in memo["forward"]._epochs for entry in epoch.launches for m in entry.maps]
    assert maps
    assert all(0 < len(m.known) <= 3 for m in maps)


def test_a_memo_belongs_to_one_signature(gpu):
    """Shared by calls that are alike, a backward's with its forward's; a changed copy of a request has none."""
    seen = []

    def spy(backend: Any, r: Request, before: Any = ops.forward) -> Any:
        seen.append(r.memo)
        return before(backend, r)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(ops, "forward", spy)
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
    assert eager._kind(r) is eager._kind(r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_integer_scale_launches_what_a_number_does(gpu, dtype):
    """Triton tells integers from numbers; a kernel compiled for the one cannot be launched with the other."""
    kinds = {}
    for scale in (0, 0.0, 1, 1.0):
        gpu.launches.clear()
        with torch.no_grad():
            chunk_kda(**inputs(dtype=dtype), scale=scale)
        kinds[repr(scale)] = [[type(x) for x in given] for _, _, _, given in gpu.launches]
    assert kinds["0"] == kinds["0.0"] != []
    assert kinds["1"] == kinds["1.0"] != []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
def test_programs_of_many_sequences_and_heads_lie_on_the_first_axis(gpu, function, packed):
    """FAILURES 24: the other axes of a grid end at 65,535."""
    if packed:
        bounds = {"cu_seqlens": torch.arange(0, 8193, 4, dtype=torch.int32)}
        arguments = inputs(B=1, T=8192, H=33, K=16)
    else:
        bounds, arguments = {}, inputs(B=683, T=2, H=96, K=16)
    gpu.launches.clear()
    trained(function, arguments, of="o", **bounds)
    assert max(grid[0] for _, grid, _, _ in gpu.launches) > 65535
    assert all(max(grid[1:]) <= 65535 for _, grid, _, _ in gpu.launches)


def test_a_scale_enters_float16_operands_where_they_have_digits():
    """As a power of two between 2⁻⁶ and 1; of smaller scales q times them would have few digits left."""
    for scale in (1e-5, -1e-4, 0.01, 0.0884, 0.9, 300.0):
        power, rest = launch.split_scale(scale, torch.float16)
        assert 2.0**-6 <= power <= 1
        assert power * rest == scale
    assert launch.split_scale(1e-4, torch.bfloat16)[0] == 2.0**-13


def test_rows_of_no_token_have_no_descriptor():
    """The driver takes none of an empty matrix; packed calls without any token go the plain way."""
    assert hopper.row_aligned(torch.empty(1, 32, 2, 128, dtype=torch.bfloat16))
    assert not hopper.row_aligned(torch.empty(1, 0, 2, 128, dtype=torch.bfloat16))
