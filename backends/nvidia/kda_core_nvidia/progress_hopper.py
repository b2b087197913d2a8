"""How ``recurrence_hopper`` follows ``prepare_hopper`` pair by pair, while both run.

``progress`` is int32, zeros before the launch: the pairs of slots that programs have taken, the programs that have
left early, the programs on each multiprocessor (``LINES`` at most), and of each pair and head, in the order in which
they are taken, whether it is prepared.

All programs of ``prepare_hopper`` have begun before the first of the recurrence. Only the recurrence waits, and half of
the programs prepare to the end wherever they run. So nothing is lost but time where others have multiprocessors.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_core_nvidia.hopper import block_barrier

LINES = gl.constexpr(512)
FLAGS = gl.constexpr(2 + LINES.value)
"""The place of the first pair's flag."""


@gluon.jit
def _instruction(TEXT: gl.constexpr):
    """An instruction without operands."""
    gl.inline_asm_elementwise(TEXT + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _special_register(NAME: gl.constexpr):
    return gl.inline_asm_elementwise("mov.u32 $0, " + NAME + ";", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def leaves_room(progress, programs, stay):
    """Whether this program is to end at once, because one of the recurrence's ``programs`` is to take its place.

    On so many multiprocessors, spread over all of them, ``stay`` programs stay.
    """
    own, count = _special_register("%smid"), _special_register("%nsmid")
    rank = gl.atomic_add(progress + 2 + gl.minimum(own, LINES - 1), 1, sem="relaxed")
    leaves = (own * programs // count != (own + 1) * programs // count) & (rank >= stay)
    if leaves:
        leaves = gl.atomic_add(progress + 1, 1, sem="relaxed") < gl.num_programs(0) // 2
    return leaves


@gluon.jit
def next_pair(progress):
    return gl.atomic_add(progress, 1, sem="relaxed")


@gluon.jit
def tell(progress, item):
    """Tell that a pair is in memory."""
    _instruction("cp.async.bulk.wait_group 0;")
    _instruction("fence.proxy.async;")
    block_barrier()
    gl.atomic_add(progress + FLAGS + item, 1, sem="release")


@gluon.jit
def prepared(progress, pair, pairs, heads):
    """Wait until a sequence's pair is in memory for bulk copies; a later one before which all are.

    Args:
        progress: of the sequence's head.
        heads: of all sequences.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout=LANES)
    at = (progress + FLAGS + gl.minimum(pair + lane, pairs - 1) * heads).to(gl.int64)
    count = 0
    while count == 0:
        there = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )
        count = gl.min(gl.where(there == 0, lane, 32), axis=0)
    _instruction("fence.proxy.async;")
    return pair + count
