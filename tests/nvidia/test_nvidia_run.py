"""The executor of the NVIDIA backend: what it launches first and again.

Tensors lie on the CPU, kernels are stand-ins that note what they are launched with, and nothing is computed.
"""

from __future__ import annotations

import os
import threading
import weakref
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
from kda_core_nvidia import run, triton_private

from kda_core.triton_lib.lengths import Notes
from kda_core.triton_lib.plan import (
    ALIGNMENT,
    Builder,
    Copy,
    Launch,
    Plan,
    View,
    handed_over,
    layout,
    matrix_tile,
    received,
)
from kda_core.triton_lib.run import part


def parameter(name: str) -> Any:
    return SimpleNamespace(name=name, do_not_specialize=name == "n", annotation_type="", is_constexpr=name == "K")


class Kernel:
    """A jitted kernel of tensors x and y, a stride, a number and a constant."""

    __name__ = "kernel"
    arg_names = ("x", "y", "s_x", "n", "K")
    params = tuple(map(parameter, arg_names))


KERNEL = Kernel()
CPU = torch.device("cpu")


class Fake(list):
    """The launches, and ``bind``: ``Bound`` with another triton, of some version, and nothing compiled yet."""

    def __init__(self, launch: Any, version: str) -> None:
        own = {"launch": launch, "current_stream": lambda: lambda device: "stream"}
        own["entry"] = partial(triton_private.entry, version=version)
        self.bind = partial(run.Bound, private=SimpleNamespace(**{**vars(triton_private), **own}), entries={})


@pytest.fixture
def fake():
    """Triton as the executor sees it; gives what was launched: (way, grid, addresses and numbers)."""

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

    launched = Fake(launch, "0.0")
    return launched


def launch(b: Builder, grid: tuple[int, int, int], warps: int = 4, K: int = 16, /, **arguments: Any) -> None:
    b.step(Launch(KERNEL, grid, arguments, {"K": K}, warps))


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
    launch(b, (3, 2, 1), x=matrix_tile(own, 4, 32) if tile else own, y=y, **shared)
    launch(b, (1, 1, 1), x=y.cut(0, slice(1, 3)), y=z, **shared)
    return b.plan({"x": layout("x", x)}, {"z": z, "given": layout("x", x), "none": None})


def bound_to(fake: Fake, plan: Plan, x: torch.Tensor) -> Any:
    bound = fake.bind(plan, ("x",), CPU)
    return lambda x=x: bound([x], [x.data_ptr()])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("tile", [False, True])
def test_a_repeated_call_is_given_what_the_first_one_was(fake, tile: bool, copies: bool):
    """Addresses of this call's tensors, at the same offsets; grids and numbers alike."""
    x = torch.randn(4, 32)
    call = bound_to(fake, plan_with(x, tile=tile, copies=copies), x)
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


def test_tensors_that_a_first_half_hands_on_lie_in_one_allocation(fake):
    """Each at its own place there, where the second half finds it; triton is given them as tensors of their dtypes."""
    b, x = Builder(), torch.randn(4, 32)
    own = layout("x", x)
    kept = {"P": b.within("kept", (3, 7), torch.bfloat16), "D": b.within("kept", (4, 32), torch.float32)}
    made = {"o": b.result("o", (4, 32), torch.float32), **kept}
    launch(b, (1, 1, 1), x=own, y=kept["P"], s_x=32, n=5)
    launch(b, (1, 1, 1), x=kept["D"], y=made["o"], s_x=32, n=5)
    call = bound_to(fake, b.plan({"x": own}, handed_over(made)), x)
    for _ in range(2):  # through triton, then again
        fake.clear()
        o, memory = call().values()
        assert memory.dtype == torch.uint8
        assert len(memory) == 2 * ALIGNMENT
        assert [launch[2][:2] for launch in fake] == [
            (x.data_ptr(), memory.data_ptr()), (memory.data_ptr() + ALIGNMENT, o.data_ptr()),
        ]  # fmt: skip
    found = received(made, [layout("saved[0]", o), layout("saved[1]", memory)])
    places = {"o": "saved[0]", "P": "saved[1]", "D": "saved[1]"}
    assert found == {n: made[n]._replace(source=place) for n, place in places.items()}
    # No kernel has written there: the numbers may be NaN.
    assert part(memory, found["D"]).view(torch.int32).equal(memory[ALIGNMENT:].view(torch.int32).view(4, 32))


def test_what_is_compiled_is_found_for_other_lengths(fake):
    """A plan with another number is bound at once; another stride, alignment or constant is compiled."""
    x = torch.randn(4, 32)
    bound_to(fake, plan_with(x), x)()
    fake.clear()
    bound_to(fake, plan_with(x, number=6), x)()
    assert [way for way, *_ in fake] == ["again"] * 2
    fake.clear()
    bound_to(fake, plan_with(x, number=2**31), x)()
    assert [way for way, *_ in fake] == ["triton"] * 2


@pytest.mark.parametrize("tile", [False, True])
def test_a_plan_with_numbers_launches_what_a_plan_of_its_lengths_launches(fake, tile: bool):
    """Grids, numbers and parts of buffers follow lengths; it is bound once, where its kernels are compiled."""

    def plan_of(rows: Any) -> Plan:
        b = Builder(small=2**20)
        own = View("x", (rows, 32), (32, 1), torch.float32)
        y, u = (b.scratch(n, (2 * rows, 32), torch.float32) for n in "yu")
        z = b.result("z", (rows, 32), torch.float32)
        shared = {"s_x": 32, "n": 3 * rows + 1}
        launch(b, (-(-rows // 16), 2, 1), x=matrix_tile(own, 4, 32) if tile else own, y=u, **shared)
        launch(b, (rows, 1, 1), x=u, y=y, **shared)
        half = b.scratch("half", (rows, 32), torch.float32)
        b.step(Copy(half, own))
        launch(b, (rows, 1, 1), x=y, y=z, **shared)
        return b.plan({"x": own}, {"z": z})

    def launches(bound: Any, x: torch.Tensor) -> list[Any]:
        fake.clear()
        z = bound([x], [x.data_ptr()])["z"]
        names = {x.data_ptr(): "x", z.data_ptr(): "z"}
        assert z.shape == x.shape
        first = fake[0][2][1]
        return [(way, grid, [names.get(a, a - first if a > 2**20 else a) for a in given]) for way, grid, given in fake]

    notes = Notes((40,))
    assert not fake.bind(plan_of(*notes.lengths), ("x",), CPU).ready
    launches(fake.bind(plan_of(40), ("x",), CPU), torch.randn(40, 32))
    notes = Notes((40,))
    noted = fake.bind(plan_of(*notes.lengths), ("x",), CPU)
    assert noted.ready

    def followed(rows: int) -> list[Any] | None:
        values = notes.at((rows,))
        return values if notes.follow(values) is None else None

    for rows in (40, 41, 7, 300):
        x = torch.randn(rows, 32)
        found = noted.at(followed(rows))
        expected = launches(fake.bind(plan_of(rows), ("x",), CPU), x)
        assert launches(found, x) == launches(found, x) == expected
        assert {way for way, *_ in expected} == {"again"}
        assert found.plan == plan_of(rows)
    # Scratch of another size takes other epochs, and numbers of 64 bits another kernel.
    assert followed(2**20) is None
    assert followed(2**31) is None


def test_a_kernel_is_compiled_for_what_triton_looks_at(fake):
    x = View("x", (4, 32), (32, 1), torch.float32)

    def kind(x: Any = x, s_x: int = 7, n: int = 5, K: int = 16, warps: int = 4, device: int = 0) -> Any:
        b = Builder()
        launch(b, (1, 1, 1), warps, K, x=x, y=None, s_x=s_x, n=n)
        return run._compiled_for(b.plan({"x": View("x", (), (), torch.float32)}, {}).launches[0], device)

    assert kind() == kind(n=6) == kind(s_x=8) == kind(x.cut(0, slice(1, 2)))
    others = [
        kind(x._replace(aligned=False)), kind(x._replace(dtype=torch.bfloat16)), kind(None),
        kind(matrix_tile(x, 2, 32)), kind(s_x=16), kind(s_x=1), kind(s_x=2**31 + 1), kind(n=2**31),
        kind(n=-(2**31) - 1), kind(K=32), kind(warps=8), kind(device=1),
    ]  # fmt: skip
    # Numbers of 64 bits are alike, above and below.
    assert len({kind(), *others}) == 12


def test_scratch_is_one_allocation_where_it_lasts_alike_and_is_given_back(fake):
    """An epoch's scratch is freed after its last step; what takes its place is allocated after it."""
    b = Builder(small=0)
    first = [b.scratch(n, (100,), torch.float32) for n in "ab"]
    held = b.scratch("held", (4,), torch.float32)
    shared = {"s_x": 1, "n": 5}
    launch(b, (1, 1, 1), x=first[0], y=first[1], **shared)
    b.free(*first)
    c = b.scratch("c", (4,), torch.float32)
    launch(b, (1, 1, 1), x=held, y=c, **shared)
    bound = fake.bind(b.plan({}, {}), (), CPU)
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
    call = bound_to(fake, plan_with(x), x)
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
    call = bound_to(fake, plan_with(given[0]), given[0])
    call()
    fake.clear()
    threads = [threading.Thread(target=lambda x=x: [call(x) for _ in range(50)]) for x in given]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seen = [arguments[0] for _, grid, arguments in fake if grid == (3, 2, 1)]
    assert sorted(seen) == sorted([x.data_ptr() for x in given] * 50)


def test_a_thread_that_has_no_context_yet_gets_one():
    """The driver encodes descriptors; seen where the backward was the first thing that autograd's thread did."""
    begun: list[int] = []

    def encode(x: int) -> int:
        if not begun:
            raise RuntimeError("Triton Error [CUDA]: Failed to create tensor map descriptor: invalid device context")
        return x

    assert triton_private.in_context(encode, 3, begin=lambda: begun.append(1)) == 3
    assert begun == [1]

    def full() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        triton_private.in_context(full)


def test_descriptors_stay_bounded(fake):
    """One for every address that comes again, and not for every address that ever was."""
    given = [torch.randn(4, 32) for _ in range(9)]
    plan = plan_with(given[0], tile=True)
    bound = fake.bind(plan, ("x",), CPU)
    for x in given[:2]:
        bound([x], [x.data_ptr()])
    tables = [known for epoch in bound._epochs for call in epoch.calls for _, _, known in call.maps]
    assert tables
    for known in tables:
        known.most = 3
    for x in given:
        bound([x], [x.data_ptr()])
    assert all(0 < len(known) <= 3 for known in tables)


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
def test_where_triton_is_known_its_last_function_is_called(monkeypatch, tile: bool):
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

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encoded)
    x = torch.randn(4, 32)
    call = bound_to(Fake(launch, "3.6"), plan_with(x, tile=tile), x)
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
