"""Runs plans through triton's public ``kernel[grid](...)``: in the interpreter, where a kernel is not compiled yet, and
for backends that have no way of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda_core._torch_private import empty_strided_on
from kda_core.triton_lib.lengths import filled
from kda_core.triton_lib.plan import Launch, Plan, Step, Tile, View, contiguous_strides

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors (read once: triton reads it once as well)."""

Results = dict[str, Tensor | None]

# Without torch's question whether CUDA has begun, which takes longer than the answer: there are tensors on the device.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def is_current(device: torch.device) -> bool:
    """Whether launches go to ``device`` as it is."""
    index = device.index
    return index is None or device.type != "cuda" or index == _current_device()


def compile_options(launch: Launch) -> dict[str, Any]:
    """Constants and options of a launch as triton is given them.

    Whether multiplications and additions become one instruction is always stated: it decides the bits of results, and
    triton warns (3.9) that its default is going to change.
    """
    return {"enable_fp_fusion": True, **launch.constants, "num_warps": launch.num_warps}


def launch_publicly(launch: Launch, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    launch.kernel[launch.grid](*arguments, **options)


def maker(
    shape: tuple[int, ...], dtype: torch.dtype, zeros: bool, device: torch.device, strides: tuple[int, ...]
) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor, while ``device`` is current; ``strides``: its."""
    if zeros:
        return partial(torch.zeros, shape, dtype=dtype, device=device)
    return partial(empty_strided_on(device.type), shape, strides, dtype)


def part(base: Tensor, x: View) -> Tensor:
    if base.dtype != x.dtype:  # within bytes
        base = base.view(x.dtype)
    if not x.offset and tuple(base.shape) == x.shape and base.stride() == x.strides:
        return base
    return base.as_strided(x.shape, x.strides, base.storage_offset() + x.offset)


class PublicPlan:
    """A plan that runs for calls of one kind on one device, every buffer an allocation of its own.

    It holds no tensor, and threads share it.

    Attributes:
        ready: whether ``at`` is of use.

    Args:
        names: of the inputs, in the order in which calls give them.
        launch: launches a kernel with the values of its parameters, constants apart, and the compiler's options.
        descriptor: makes triton's descriptor of a tile and the tensor that it begins in.
    """

    ready = True

    def __init__(
        self, plan: Plan, names: Sequence[str], device: torch.device,
        launch: Callable[[Launch, Sequence[Any], Mapping[str, Any]], None] = launch_publicly,
        descriptor: Callable[[Tile, Tensor], Any] | None = None,
    ) -> None:  # fmt: skip
        self._launch, self._descriptor = launch, descriptor
        self._plan, self._rest = plan, (names, device, launch, descriptor)
        numbers = {n: i for i, n in enumerate(names)}
        epochs = []
        for n, steps in enumerate(plan.epochs):
            begun = [b for b in plan.buffers.values() if b.epochs[0] == n]
            numbers |= {b.name: len(numbers) + i for i, b in enumerate(begun)}
            ended = [b.name for b in plan.buffers.values() if b.role == "scratch" and b.epochs[1] == n]
            makers = [maker(b.shape, b.dtype, b.zeros, device, contiguous_strides(b.shape)) for b in begun]
            epochs.append((makers, [self._step(s, plan, numbers) for s in steps], [numbers[x] for x in ended]))
        self._epochs = tuple(epochs)
        self._results = tuple((n, x if x is None else numbers[x]) for n, x in plan.results.items())

    def at(self, values: Sequence[Any]) -> PublicPlan:
        """The same for a plan with ``Number``, with these values."""
        return PublicPlan(filled(self._plan, values), *self._rest)

    def __call__(self, inputs: Sequence[Tensor | None], places: Sequence[int] = ()) -> Results:
        """Run for ``inputs``; the results by name. Addresses (``places``) are not looked at."""
        held = list(inputs)
        for makers, steps, ended in self._epochs:
            held += [make() for make in makers]
            for step in steps:
                step(held)
            for n in ended:
                held[n] = None
        return {name: None if n is None else held[n] for name, n in self._results}

    def _step(self, step: Step, plan: Plan, numbers: Mapping[str, int]) -> Callable[[list[Any]], None]:
        """A function of the tensors that are held."""

        def tensor(x: View) -> Callable[[list[Any]], Tensor]:
            number, whole = numbers[x.source], plan.whole(x.source)
            if not x.offset and (x.shape, x.strides) == (whole.shape, whole.strides):
                return lambda held: held[number]
            return lambda held: part(held[number], x)

        if not isinstance(step, Launch):
            views = [tensor(x) for x in step.views()]
            return lambda held: step.run(*[x(held) for x in views])
        values = [step.arguments[n] for n in step.kernel.arg_names if n in step.arguments]
        options = compile_options(step)
        tensors = [(i, tensor(x)) for i, x in enumerate(values) if isinstance(x, View)]
        tiles = [(i, x, tensor(x.base)) for i, x in enumerate(values) if isinstance(x, Tile)]

        def launch(held: list[Any]) -> None:
            arguments = values.copy()
            for i, x in tensors:
                arguments[i] = x(held)
            for i, tile, base in tiles:
                arguments[i] = self._descriptor(tile, base(held))
            self._launch(step, arguments, options)

        return launch
