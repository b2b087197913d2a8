"""The allocations and launches of one call, as ``kda explain --plan`` shows it; backends answer with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import dtype


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One launch of a kernel, or a small step of torch.

    Attributes:
        name: of the kernel, or of the step.
        grid: programs along each axis; () for a step of torch.
        num_warps: of a program; 0 where that has no meaning.
        registers: most registers of a thread, where the plan bounds them; None: the compiler decides.
    """

    name: str
    grid: tuple[int, ...] = ()
    num_warps: int = 0
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One allocation.

    Attributes:
        role: "result" (outlives the call) or "scratch".
        steps: numbers of the first and the last step between which it is held.
        nbytes: its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: dtype
    role: str
    steps: tuple[int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The allocations and launches of one call.

    Attributes:
        name: "forward" or "backward".
        chip: name of the chip that it is made for.
        steps: in order.
        buffers: in the order of their allocation.
        bytes_moved: bytes of each step's tensors, each counted once a step.
        bytes_floor: bytes of the inputs that are read and of the results.
        peak_scratch: bytes of scratch that are held at once, at most.
    """

    name: str
    chip: str
    steps: tuple[PlannedStep, ...]
    buffers: tuple[PlannedBuffer, ...]
    bytes_moved: int
    bytes_floor: int
    peak_scratch: int
