"""The forward of ``chunk_kda``: two launches, ``prepare`` (chunk-parallel) and ``recurrence`` (sequential).

The layout of what passes between them, and the equations, are in ``kda_core.triton_lib.layout``.

For fragments of sequences that several devices share there are two halves. Fragments are sequences, cut into segments
(``choose.fragments``). The first half ends with the matrix and the addition of each fragment, that a chain makes of the
transitions of its segments. The second begins with the states at the fragments' starts, runs the chain again from them,
for the state at the start of each segment, and the recurrence. A backward does the same from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from kda_core.request import Request, TensorSpec
from kda_core.triton_lib.arguments import named_state_strides, row_strides, state_strides
from kda_core.triton_lib.frame import finish_output, names, outputs, readable
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.plan import (
    Builder,
    Copy,
    Plan,
    Tile,
    View,
    changed,
    handed_over,
    input_layouts,
    matrix_tile,
    received,
    token_tile,
)
from kda_core.triton_lib.segments import (
    cut_into_pieces,
    ends_of,
    in_one,
    one_token_axis,
    segments_of,
    sent,
    written_evenly,
)
from kda_core_nvidia.choose import Chip, ForwardChoice, chunk
from kda_core_nvidia.choose.backward import keeps_states
from kda_core_nvidia.choose.fragments import fragment_slots, fragment_starts_shape
from kda_core_nvidia.plans.segments import (
    KEPT,
    Choice,
    Segments,
    chain_segments,
    cut_into_segments,
    cut_several,
    hopper_tiles,
)
from kda_core_nvidia.prepare import prepare
from kda_core_nvidia.prepare_hopper import prepare_hopper
from kda_core_nvidia.progress_hopper import FLAGS
from kda_core_nvidia.recurrence import recurrence
from kda_core_nvidia.recurrence_hopper import recurrence_hopper

HOPPER_CHANNELS = 64
"""Key channels of a warp of ``prepare_hopper``, and of a block that it copies."""


def aligned(b: Builder, x: View) -> View:
    """``x`` [B, T, H, D], copied where bulk copies cannot take its rows."""
    if chunk.row_aligned(x):
        return x
    copy = b.scratch(f"{x.source}, aligned", x.shape, x.dtype)
    b.step(Copy(copy, x))
    return copy


class Prepared(NamedTuple):
    """Outputs of ``prepare``; shapes in ``triton_lib.layout``. X and norms only for a backward."""

    keys: View
    P: View
    D: View
    X: View | None = None
    norms: View | None = None


class Kept(NamedTuple):
    """Tensors saved for the backward when recomputation is on.

    Attributes:
        inverse: X in float32.
        starts: states at the starts of segments, [segments or more, HV, V, K]; of no meaning where the call is not cut.
    """

    P: View
    inverse: View
    norms: View | None = None
    starts: View | None = None


def kept_of(r: Request) -> Kept:
    """The tensors that a forward saved for ``r``."""
    P, inverse, *rest = r.saved
    norms = rest.pop(0) if r.use_qk_l2norm_in_kernel else None
    return Kept(P, inverse, norms, *rest)


def _prepared_shapes(count: int, HV: int, KP: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of what ``prepare`` writes for so many slots, in the order of ``Prepared``."""
    square = (count, HV, CHUNK, CHUNK)
    return (count, HV, 3, CHUNK, KP), square, (count, HV, KP), square, (count, HV, 2, CHUNK)


def _kept_inverse(square: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the inverses that a forward saves: without their zero tiles, if a second run copies them to 16 bits."""
    return square if dtype == torch.float32 else (*square[:2], 3, 16, 16)


def kept_shapes(r: Request) -> dict[str, tuple[int, ...]]:
    """Shapes of z and the states that a forward saves, by pairs of chunks."""
    lead = slots(r, 2 * CHUNK), r.HV
    return {"z": (*lead, 2 * CHUNK, r.V), "states": (*lead, r.V, r.K)}


def saved_specs(request: Request, on: Chip) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of what a forward saves for its backward.

    With ``disable_recompute``: everything that ``prepare`` wrote, in the order of ``Prepared``, and where
    ``keeps_states`` says so z and states. Without: P, the inverse in float32 and the norms, from which a second
    ``prepare`` need not multiply pairs nor invert, and the states at the starts of segments.
    """
    everything = request.disable_recompute
    rows = slots(request) if everything else chunk.saved_slots(request)
    starts = chunk.starts_shape(request)
    if request.cp_context:
        rows, starts = fragment_slots(request), fragment_starts_shape(request)
    keys, square, decay, _, norms = _prepared_shapes(rows, request.HV, padded(request.K))
    dtype = request.q.dtype
    specs = [TensorSpec(square, dtype), TensorSpec(_kept_inverse(square, dtype), torch.float32)]
    if everything:
        specs = [TensorSpec(keys, dtype), specs[0], TensorSpec(decay, torch.float32), TensorSpec(square, dtype)]
    if request.use_qk_l2norm_in_kernel:
        specs.append(TensorSpec(norms, torch.float32))
    if starts and (request.cp_context or not everything):
        specs.append(TensorSpec(starts, torch.float32))
    kept = kept_shapes(request) if keeps_states(request, on) else {}
    return *specs, *(TensorSpec(shape, dtype) for shape in kept.values())


def _prepare_buffers(
    b: Builder, r: Request, new: Callable[..., View], backward: bool, keep: int, kept: Kept | None
) -> tuple[Prepared, Prepared]:
    """The tensors that a launch writes, and those of an earlier run; arguments as of ``add_prepare``."""
    dtype = r.q.dtype
    shapes = _prepared_shapes(slots(r), r.HV, padded(r.K))
    keys, D = new("keys", shapes[0], dtype), new("D", shapes[2], torch.float32)
    if kept is not None:
        exact = dtype == torch.float32
        X = None if exact else new("X", shapes[3], dtype)
        written = Prepared(keys, None, D, X, kept.norms)
        return written, Prepared(keys, kept.P, D, kept.inverse if exact else X, kept.norms)
    if keep:
        shapes, new = _prepared_shapes(keep, r.HV, padded(r.K)), b.result
    P, X, norms = new("P", shapes[1], dtype), None, None
    if backward or keep:
        X = new("X", _kept_inverse(shapes[3], dtype), torch.float32) if keep else new("X", shapes[3], dtype)
        norms = new("norms", shapes[4], torch.float32) if r.use_qk_l2norm_in_kernel else None
    written = Prepared(keys, P, D, X, norms)
    return written, written


def add_prepare(
    b: Builder, r: Request, choice: Choice, o: View, backward: bool = False, keep: int = 0,
    kept: Kept | None = None, new: Callable[..., View] | None = None, states: dict[str, Any] | None = None,
    progress: View | None = None,
) -> Prepared:  # fmt: skip
    """Add a launch of ``prepare``, or of ``prepare_hopper``.

    Args:
        o: [B, T, HV, V], to be zeroed where no sequence (or a skipped one) has rows.
        backward: also return what only the backward needs.
        keep: also return X in float32, and P, X and norms with room for so many slots: results to be saved.
        kept: what an earlier run saved; for a backward.
        new: allocates all that is not saved; scratch when left out.
        states: of a recurrence (``_states``), where ``prepare_hopper`` finishes sequences.
        progress: where a recurrence follows (``progress_hopper``).
    """
    config = choice.prepare
    written, prepared = _prepare_buffers(b, r, new or b.scratch, backward, keep, kept)
    own = {"inverse": None if kept is None else kept.inverse, "o": o, "scale": chunk.split_scale(r.scale, r.q.dtype)[0]}
    named = names(r) | written._asdict() | own
    if isinstance(config, chunk.PrepareHopperConfig):
        _launch_prepare_hopper(b, r, config, named, states, progress)
        return prepared
    unit, strides = row_strides(q=r.q, k=r.k, g=r.g, b=r.beta, o=o)
    named |= strides | {
        "UNIT": unit, "BK": config.block_k, "BW": config.wide, "STAGES": config.stages,
        "WIDE_STAGES": config.wide_stages,
    }  # fmt: skip
    named |= zip(("TERMS", "DOT", "SMALL_DOT"), choice.precision, strict=True)
    b.pick(prepare, slots(r) * r.HV, config.num_warps, named)
    return prepared


def _chunks(x: View, count: int, by_rows: bool = False) -> Tile:
    """Blocks of so many chunks."""
    return token_tile(x, count * CHUNK, HOPPER_CHANNELS, swizzled=not by_rows, by_rows=by_rows)


def _launch_prepare_hopper(
    b: Builder, r: Request, config: chunk.PrepareHopperConfig, named: dict[str, Any], states: dict[str, Any] | None,
    progress: View | None,
) -> None:  # fmt: skip
    """Add a launch of ``prepare_hopper``.

    Args:
        named: what it takes, by its names, tiles apart.
        states: the same of a recurrence, where sequences are finished.
        progress: as for ``add_prepare``.
    """
    q, k, g = (aligned(b, x) for x in (r.q, r.k, r.g))
    beta, o = one_token_axis(b, r.beta), named["o"]
    # Chunks of a program, and of a block that is copied.
    chunks = 2 if r.K == 128 else 1
    count = 1 if config.paired else chunks
    pairs = r.B * -(-named["chunks"] // chunks) if r.cu_seqlens is None else r.T // (chunks * CHUNK) + r.N + 1
    strides = row_strides(q=q, k=k, g=g, b=beta, o=o)[1] | {"s_ob": o.stride(0) if r.B > 1 else 0}
    tiles = {
        "q": _chunks(q, count), "k": _chunks(k, count), "g": _chunks(g, count, by_rows=True),
        "keys": matrix_tile(named["keys"], CHUNK, r.K, HOPPER_CHANNELS, swizzled=True),
    }  # fmt: skip
    if states is None:
        numbers = ("s_vh", *(f"s_{x}{axis}" for x in "if" for axis in "nhkv"), "s_has", "s_final", "final_slots")
        tensors = ("values", "initial_state", "final_state", "has_state", "final_indices")
        states = {**dict.fromkeys(numbers, 0), **dict.fromkeys(tensors), "o_scale": 1.0}
        # One kernel for every layout of states.
        states |= {"V_FIRST": False, "LAST_CONTIGUOUS": True}
    else:
        tiles["values"] = _chunks(r.v, 1)
    named = {**named, **states, **strides, **tiles, "beta": beta, "G_BITS": 8 * g.itemsize}
    named |= {"PAIRED": config.paired, "FINISHED": config.finishes, "AHEAD": config.ahead}
    # A recurrence that follows has two programs a head.
    named |= {"progress": progress, "followers": 2 * r.N * r.HV, "stay": config.stay}
    b.pick(prepare_hopper, config.programs or pairs * r.HV, config.num_warps, named, maxnreg=config.registers)


def _states(r: Request, o: View, final_state: View | None, whole: Request | None = None) -> dict[str, Any]:
    """Arguments of a recurrence by name, for values, outputs and states; parameters as of ``add_recurrence``."""
    v_first = r.state_v_first
    final_v_first = v_first if whole is None else whole.state_v_first
    unit, strides = row_strides(v=r.v, o=o)
    last = 2 if v_first else 3
    kept = None if r.checkpoint_states is None else getattr(r, r.checkpoint_states)
    states = (r.initial_state, v_first), (final_state, final_v_first), (kept, v_first)
    given = [state_strides(x, first) for x, first in states if x is not None]
    return strides | named_state_strides("i", r.initial_state, v_first) | {
        **named_state_strides("f", final_state, final_v_first), "final_state": final_state, "UNIT": unit,
        "o_scale": chunk.split_scale(r.scale, r.v.dtype)[1], "LAST_CONTIGUOUS": all(s[last] == 1 for s in given),
    }  # fmt: skip


def add_recurrence(
    b: Builder, r: Request, choice: ForwardChoice, prepared: Prepared, o: View, final_state: View | None,
    h: View | None, whole: Request | None = None, kept: Mapping[str, View] = MappingProxyType({}),
    progress: View | None = None,
) -> None:  # fmt: skip
    """Add a launch of ``recurrence``, which writes ``o``, ``final_state`` and ``h``.

    Args:
        whole: the call of which ``r`` has the segments; ``final_state`` is its.
        kept: z and states, to be written as well.
        progress: of ``prepare_hopper``, which this recurrence follows.
    """
    config, (keys, P, D, *_) = choice.recurrence, prepared
    named = names(r) | _states(r, o, final_state, whole) | {
        "o": o, "LAST_STATE": whole is not None, "BV": config.block_v, "STAGES": config.stages,
        "FINISHED": choice.finishes,
    }  # fmt: skip
    if isinstance(config, chunk.HopperConfig):
        named |= hopper_tiles(keys, P, D) | {"values": token_tile(r.v, CHUNK, config.block_v, swizzled=True)}
        named |= {"X": None, "z": None, "states": None, "ODD": False, "progress": progress}
        named["LACKS"] = -r.checkpoint_every % CHUNK
        if kept:
            odd = r.cu_seqlens is not None or -(-r.T // CHUNK) % 2 == 1
            named |= {"X": matrix_tile(prepared.X, CHUNK, CHUNK, swizzled=True), "ODD": odd, **kept}
        grid = r.N * r.HV * (r.V // config.block_v)
        if choice.finishes:
            # Each finds its work, and few have any.
            grid = min(grid, choice.most_programs)
        options = {"maxnreg": config.registers, "launch_pdl": choice.overlap}
        b.pick(recurrence_hopper, grid, config.num_warps, named | config.constants, **options)
        return
    named |= {"keys": keys, "P": P, "D": D, "h": h, "H_EVERY": r.chunk_size // CHUNK, "DOT": choice.precision[1]}
    named["DESCRIPTORS"] = choice.descriptors
    if choice.descriptors:
        named |= {"keys": matrix_tile(keys, CHUNK, padded(r.K)), "P": matrix_tile(P, CHUNK, CHUNK)}
    b.pick(recurrence, (r.N * r.HV, -(-r.V // config.block_v)), config.num_warps, named)


def plan_forward(request: Request, choice: ForwardChoice, h_shape: tuple[int, ...] = ()) -> Plan:
    """The plan of a forward of ``chunk_kda``.

    Args:
        request: metadata alone.
        h_shape: of the intermediate states, which follows from values when packed.

    Returns:
        a plan whose results are o, final_state, h and, for a backward, what is saved, in order.
    """
    b = Builder()
    o, final_state = outputs(b, request)
    r = readable(b, request)
    h = None
    if r.return_intermediate_states:
        # Sequences that are skipped have no state of their own: zeros.
        zeros = r.ssm_state_indices is not None
        h = b.result("h", h_shape, r.h_dtype, zeros)
    if choice.keeps_states:
        r = changed(r, v=aligned(b, r.v))
    training, everything = r.save_for_backward, r.disable_recompute and r.save_for_backward
    keep = choice.saved_slots if training and not everything else 0
    starts = b.result("starts", chunk.starts_shape(r), torch.float32) if keep and chunk.starts_shape(r) else None
    kept = {n: b.result(n, shape, r.q.dtype) for n, shape in kept_shapes(r).items()} if choice.keeps_states else {}
    if choice.segment_rows:
        o = written_evenly(b, o)
        prepared = _add_segments(b, r, choice, o, final_state, keep, starts)
    else:
        new = b.result if everything else b.scratch
        states = _states(r, o, final_state) if choice.finishes else None
        progress = None
        cut = cut_into_pieces(b, r)
        if cut is not r:
            o = written_evenly(b, o)
        if choice.follows:
            progress = b.scratch("progress", (FLAGS.value + slots(r, 2 * CHUNK) * r.HV,), torch.int32, True)
        own = o if cut is r else in_one(o)
        prepared = add_prepare(b, cut, choice, own, everything, keep, new=new, states=states, progress=progress)
        if not (choice.finishes and r.cu_seqlens is None):
            add_recurrence(b, r, choice, prepared, o, final_state, h, kept=kept, progress=progress)
    results: dict[str, View | None] = {"o": finish_output(b, r, o), "final_state": final_state, "h": h}
    if everything:
        results |= prepared._asdict() | kept
    elif training:
        results |= {"P": prepared.P, "X": prepared.X, "norms": prepared.norms, "starts": starts}
    return b.plan(input_layouts(request), results)


def _add_segments(
    b: Builder, r: Request, choice: ForwardChoice, o: View, final_state: View | None, keep: int, starts: View | None
) -> Prepared:
    """Run both kernels with sequences cut into segments; they write ``o`` and ``final_state``.

    Args:
        starts: for the states at the starts of segments, of which a backward for Hopper makes use.
    """
    rows, sequences = choice.segment_rows, None
    hopper = isinstance(choice.transitions, chunk.TransitionsHopperConfig)
    own = starts.cut(0, slice(0, segments_of(r, rows))) if starts and hopper else None
    if chunk.several(r):
        o = in_one(o)
        own = own or b.scratch("states at starts", (segments_of(r, rows), r.HV, r.V, r.K), torch.float32)
        cut, sequences = cut_several(b, r, rows, final_state, own)
    else:
        cut = cut_into_segments(b, r, rows)
        o = chunk.in_parts(o, cut.N) if cut.cu_seqlens is None else o
    prepared = add_prepare(b, cut, choice, o, keep=keep)
    if hopper:
        cut = changed(cut, v=aligned(b, cut.v))
    call = r if sequences else changed(r, initial_state=b.dense(r.initial_state))
    first = Segments(b, cut, choice, prepared, call, sequences).add_starts(own)
    add_recurrence(b, changed(cut, initial_state=first), choice, prepared, o, final_state, None, whole=r)
    return prepared


def like_segments(x: View, cut: Request) -> View:
    """``x`` [B, T, ..] of the call as the segments see it."""
    return chunk.in_parts(x, cut.N) if cut.B != x.shape[0] else x


def plan_begin(request: Request, choice: ForwardChoice) -> Plan:
    """The first half of a forward; results: matrices and additions in one, then what the second half is given."""
    b = Builder()
    summary, results = _add_begin(b, request, choice)
    return b.plan(input_layouts(request), {"matrices": summary, "additions": None, **handed_over(results)})


def _add_begin(b: Builder, request: Request, choice: ForwardChoice) -> tuple[View, dict[str, View | None]]:
    """Add the first half of a forward; its summary, and what the second half needs.

    That is o, of which rows behind the last fragment are written, everything that ``prepare`` wrote, and the segments'
    own transitions. Tensors that the call does not save lie in one.
    """
    r = readable(b, request)
    cut = cut_into_segments(b, r, choice.segment_rows)
    o = b.result("o", (r.B, r.T, r.HV, r.V), r.q.dtype)
    everything = r.save_for_backward and r.disable_recompute
    keep = choice.saved_slots if r.save_for_backward and not everything else 0
    own = Prepared._fields if everything else ("P", "X", "norms") if r.save_for_backward else ()

    def new(name: str, *layout: Any) -> View:
        return b.result(name, *layout) if name in own else b.within(KEPT, *layout)

    prepared = add_prepare(b, cut, choice, like_segments(o, cut), everything, keep, new=new)
    cut = changed(cut, v=_rows(b, cut.v, choice))
    matrices, additions = Segments(b, cut, choice, prepared).add()
    summary = sent(b, r)
    chain_segments(b, r, cut.N, choice, matrices, additions, summary=summary)
    return summary, {"o": o, **prepared._asdict(), "matrices of segments": matrices, "additions of segments": additions}


def plan_finish(request: Request, choice: ForwardChoice) -> Plan:
    """The second half; ``request.saved`` holds what the first half kept, and the states at the fragments' starts.

    Results are those of ``plan_forward``.
    """
    b = Builder()
    r = readable(b, request)
    *kept, starts = r.saved
    _, begun = _add_begin(Builder(), changed(request, saved=()), choice)
    o, keys, P, D, X, norms, *segments = received(begun, kept).values()
    cut = cut_into_segments(b, r, choice.segment_rows)
    make = b.result if r.save_for_backward else b.scratch
    states = make("states at starts", (cut.N, r.HV, r.V, r.K), torch.float32)
    final_state = ends_of(b, r, "final_state", r.state_dtype) if r.output_final_state else None
    chain_segments(b, r, cut.N, choice, *segments, starts=starts, states=states, ends=final_state)
    cut = changed(cut, v=_rows(b, cut.v, choice), initial_state=states)
    add_recurrence(b, cut, choice, Prepared(keys, P, D), like_segments(o, cut), None, None)
    results = {"o": o, "final_state": final_state, "h": None}
    if r.save_for_backward:
        kept = {"P": P, "X": X, "norms": norms, "starts": states}
        results |= {"keys": keys, "P": P, "D": D, **kept} if r.disable_recompute else kept
    return b.plan(input_layouts(request), results)


def _rows(b: Builder, x: View, choice: Choice) -> View:
    """v or do as the transitions take it."""
    return aligned(b, x) if isinstance(choice.transitions, chunk.TransitionsHopperConfig) else one_token_axis(b, x)
