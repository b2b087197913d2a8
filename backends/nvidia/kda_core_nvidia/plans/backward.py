"""The backward of ``chunk_kda``: prepare once more (unless the forward saved all its results), two recurrences, one
chunk-parallel kernel.

1. prepare: what the recurrences need of every chunk, from the inverses that the forward saved (prepare);
2. recurrences: forward, for residuals and the state of every slot (backward_states; not if the forward saved them), and
   at the same time backward, for dv and the state gradient of every slot (backward_reverse);
3. gradients: dq, dk, dg, dβ and partial sums for A_log and dt_bias (backward_gradients);
4. finish: sums over channel blocks and grouped heads, the gradient of the row norms (finish_kernels);
5. sums: those of A_log and dt_bias over the slots (finish_kernels).

Nothing synchronises with the host: with ``cu_seqlens`` the slots of each sequence are found on the device, in buffers
whose size T and N bound. Sums over value heads and over slots are ordered, so that results repeat bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_core.request import Request
from kda_core.triton_lib.arguments import gate_kind
from kda_core.triton_lib.finish_kernels import finish_kernel, sums_kernel
from kda_core.triton_lib.frame import gate_parameters, names
from kda_core.triton_lib.layout import CHUNK, padded, slots
from kda_core.triton_lib.plan import (
    Builder,
    Copy,
    Plan,
    View,
    changed,
    handed_over,
    input_layouts,
    matrix_tile,
    received,
    token_tile,
)
from kda_core.triton_lib.segments import ends_of, in_one, sent_back
from kda_core_nvidia.backward_gradients import gradients_kernel
from kda_core_nvidia.backward_hopper import recurrences_hopper
from kda_core_nvidia.backward_reverse import recurrences_kernel
from kda_core_nvidia.choose import BackwardChoice
from kda_core_nvidia.choose.backward import (
    WHOLE,
    GradientsHopperConfig,
    GradientsPersistentConfig,
    heads_of,
    mildest,
    rows_readable,
)
from kda_core_nvidia.choose.chunk import ROWS, HopperConfig, TransitionsHopperConfig, in_parts, several, split_scale
from kda_core_nvidia.plans.forward import Prepared, add_prepare, aligned, kept_of, like_segments
from kda_core_nvidia.plans.gradients_hopper import CHANNELS, launch_gradients_hopper, launch_gradients_persistent
from kda_core_nvidia.plans.segments import (
    KEPT,
    Segments,
    add_first_segments,
    chain_segments,
    cut_into_segments,
    cut_several,
    hopper_tiles,
)

FINISH_ELEMENTS = 2048
"""Elements of a tile of ``finish_kernel``."""

SUM_CHANNELS, SUM_ROWS = 16, 256
"""Tile of ``sums_kernel``."""

Grads = dict[str, View | None]


def plan_backward(call: Request, choice: BackwardChoice) -> Plan:
    """The plan of a backward of ``chunk_kda``; ``call`` is metadata alone.

    Returns:
        a plan whose results are the gradients of q, k, v, g, beta, and of A_log, dt_bias and initial_state where the
        call has them, each in the shape and dtype of its input, contiguous.
    """
    b = Builder()
    grads = _by_halves(b, call, choice) if choice.halves else _Backward(b, call, choice, _sums(b.result, call)).add()
    return b.plan(input_layouts(call), {n: x for n, x in grads.items() if x is not None})


def plan_begin_backward(call: Request, choice: BackwardChoice) -> Plan:
    """The first half of a backward; ``call.saved`` is what the second half of the forward saved.

    Results: matrices (none: those of the forward, transposed), additions, then what the second half is given: dv, the
    keys, D and X of a second ``prepare`` if there is one, and what the segments do to gradients of states.
    """
    b = Builder()
    summary, sums, results = _add_begin(b, call, choice)
    return b.plan(input_layouts(call), {"matrices": summary, "additions": sums, **handed_over(results)})


READ_FIRST = "kept for the recurrences"
"""The result that holds what the second half reads first."""


def _add_begin(
    b: Builder, call: Request, choice: BackwardChoice
) -> tuple[View | None, View | None, dict[str, View | None]]:
    """Add the first half of a backward; matrices, additions, and what the second half needs."""
    w = _Backward(b, call, choice, {})
    dv = w.new("dv", (w.B, w.T, w.HV, w.V), w.dtype)
    prepared, new = _prepared_before(w.r)[0], {}
    if not call.disable_recompute:
        prepared = w.prepare(dv, lambda name, *layout: b.within(KEPT if name == "D" else READ_FIRST, *layout))
        new = {"keys": prepared.keys, "D": prepared.D, "X": prepared.X}
    segments = Segments(b, w.r, choice, prepared).add(reverse=True)
    summary, sums = sent_back(b, call)
    chain_segments(b, w.whole, w.r.N, choice, *segments, reverse=True, summary=summary, sums=sums)
    return summary, sums, {"dv": dv, **new, **{f"segments {i}": x for i, x in enumerate(segments)}}


def plan_finish_backward(call: Request, choice: BackwardChoice) -> Plan:
    """The second half; behind what the forward saved ``call.saved`` holds what the first half kept, and the gradients
    of the states at the fragments' ends. Results are those of ``plan_backward``.
    """
    b = Builder()
    count = (5 if call.disable_recompute else 3) + call.use_qk_l2norm_in_kernel
    saved, (*kept, ends) = call.saved[:count], call.saved[count:]
    first = changed(call, saved=saved)
    dv, *segments = received(_add_begin(Builder(), first, choice)[2], kept).values()
    w = _Backward(b, first, choice, _sums(b.result, call))
    r, (prepared, starts), given = w.r, _prepared_before(w.r), ()
    if not call.disable_recompute:
        keys, D, X, *segments = segments
        prepared, given = prepared._replace(keys=keys, D=D, X=X), tuple(x for x in kept if x.source == keys.source)
    last = b.scratch("gradients at ends", (r.N, r.HV, r.V, r.K), torch.float32)
    grad_starts = ends_of(b, call, "dinitial_state", torch.float32) if "initial_state" in call.needs_grad else None
    chain_segments(b, w.whole, r.N, choice, *segments, reverse=True, starts=ends, states=last, ends=grad_starts)
    exact = (starts, last) if r.cu_seqlens is not None or r.T <= CHUNK else (None, None)
    grads = w.finish(prepared, like_segments(dv, r), _States(starts, last, None, exact), given)
    grads |= {"initial_state": grad_starts}
    return b.plan(input_layouts(call), {n: x for n, x in grads.items() if x is not None})


def _prepared_before(r: Request) -> tuple[Prepared, View]:
    """The results of the forward's ``prepare``, as far as it was saved, and the states at the starts of segments."""
    if r.disable_recompute:
        *everything, starts = r.saved
        return Prepared(*everything), starts
    kept = kept_of(r)
    return Prepared(None, kept.P, None, None, kept.norms), kept.starts


def _sums(make: Callable[..., View], call: Request, suffix: str = "") -> dict[str, View]:
    """Tensors for the gradients of the gate's parameters."""
    given = {n: x for n in ("A_log", "dt_bias") if (x := getattr(call, n)) is not None and gate_kind(call) != "none"}
    return {n: make(f"d{n}{suffix}", x.shape, x.dtype) for n, x in given.items()}


def _by_halves(b: Builder, call: Request, choice: BackwardChoice) -> Grads:
    """The gradients, half of the heads at a time; those of q, k and g are written in place."""
    whole = {n: b.result(f"d{n}", getattr(call, n).shape, getattr(call, n).dtype) for n in "qkg"}
    parts: list[Grads] = []
    for i, half in enumerate(choice.halves):
        own, own_v = (slice(i * n // 2, (i + 1) * n // 2) for n in (call.H, call.HV))
        into = {n: x.cut(2, own_v if n == "g" else own) for n, x in whole.items()}
        part = heads_of(call, i)
        into |= _sums(b.scratch, part, " of half the heads")
        part = changed(part, saved=tuple(b.dense(x) for x in part.saved))
        parts.append({n: x for n, x in _Backward(b, part, half, into).add().items() if n not in whole})
    axes = {"v": 2, "beta": 2, "initial_state": 1, "A_log": 0, "dt_bias": 0}
    for n, axis in axes.items():
        first, second = (part.get(n) for part in parts)
        if first is not None and second is not None:
            size, shape = first.shape[axis], list(first.shape)
            shape[axis] *= 2
            whole[n] = b.result(f"d{n}", shape, first.dtype)
            b.step(Copy(whole[n].cut(axis, slice(0, size)), first))
            b.step(Copy(whole[n].cut(axis, slice(size, 2 * size)), second))
    return dict(whole)


class _States(NamedTuple):
    """The call's state and the gradient of its final state as the recurrences read them.

    Attributes:
        initial, grad_final: of the sequences, or of the segments that stand for them.
        grad_initial: is written; or None.
        exact: the call's own, where sequences may be of one chunk and states are stored in 16 bits.
    """

    initial: View | None
    grad_final: View | None
    grad_initial: View | None
    exact: tuple[View | None, View | None]


class _Backward:
    """Adds the launches of a backward.

    Args:
        call: the call, or a part of its heads.
        into: where the gradients of q, k and g are to be written if not to tensors of their own, and those of A_log and
            dt_bias.
    """

    def __init__(self, b: Builder, call: Request, choice: BackwardChoice, into: dict[str, View]) -> None:
        if call.grad_o is None:
            call = changed(call, grad_o=b.scratch("do", call.v.shape, call.v.dtype, True))
        self.b, self.call, self.choice, self.into = b, call, choice, into
        self.part = "q" in into
        cut = call.cp_context or choice.segment_rows
        self.whole = changed(call, cu_seqlens=b.dense(call.cu_seqlens)) if cut else call
        # Whose the segments of several sequences are.
        self.sequences: View | None = None
        if choice.segment_rows and several(call) and not call.cp_context:
            r, self.sequences = cut_several(b, self.whole, choice.segment_rows)
        else:
            r = cut_into_segments(b, self.whole, choice.segment_rows) if cut else call
        r = changed(r, **{n: x if rows_readable(x := getattr(r, n)) else b.dense(x) for n in ROWS})
        if cut and isinstance(choice.transitions, TransitionsHopperConfig):
            r = changed(r, **{n: aligned(b, getattr(r, n)) for n in ("v", "grad_o")})
        r = changed(r, cu_seqlens=b.dense(r.cu_seqlens), **gate_parameters(b, r))
        self.r, self.dtype = r, r.q.dtype
        self.B, self.T, self.H, self.K = r.q.shape
        self.HV, self.V = r.v.shape[2:]
        self.kp, self.vp = padded(self.K), padded(self.V)
        self.NT = -(-self.T // CHUNK)
        # Whether ``gradients`` takes pairs of slots, of which each has one state then; those are never in turns.
        self.paired = isinstance(choice.gradients, GradientsPersistentConfig)
        self.of_state = 2 if self.paired else 1
        self.states = slots(r, CHUNK * self.of_state)
        # Channel blocks whose parts of dβ are summed afterwards.
        self.hopper = self.paired or isinstance(choice.gradients, GradientsHopperConfig)
        self.blocks = self.kp // (CHANNELS if self.hopper else choice.gradients.block_k)
        # The kernels for Hopper do the gradients of norms where they know sums over a row's channels.
        self.whole_rows = self.paired or (self.hopper and self.blocks == 1)
        # Whether ``gradients`` leaves nothing for ``finish``.
        self.finished = self.whole_rows and self.H == self.HV
        # Batch and token strides of one long token axis.
        views = [getattr(r, n) for n in ROWS]
        self.collapsed = self.B == 1 or all(x.strides[0] == x.strides[1] * self.T for x in views)

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        """A result of the call [B, T, ..], or scratch where it is a part of one."""
        if self.part:
            return self.b.scratch(name, shape, dtype)
        if self.B == self.call.B:
            return self.b.result(name, shape, dtype)
        if self.sequences is not None:
            return in_one(self.b.result(name, (self.call.B, self.call.T, *shape[2:]), dtype))
        # Segments are a batch here.
        return in_parts(self.b.result(name, (1, self.B * self.T, *shape[2:]), dtype), self.B)

    def grad(self, name: str, x: View) -> View:
        """The gradient of ``x``: a part of that of all heads, or a tensor of its own."""
        return self.into[name] if self.part else self.new(f"d{name}", x.shape, x.dtype)

    def add(self) -> Grads:
        """Add all launches; the gradients by input."""
        b, r, call, dtype = self.b, self.r, self.call, self.dtype
        dv = self.new("dv", (self.B, self.T, self.HV, self.V), dtype)
        everything, count = r.saved if r.disable_recompute else (), 4 + r.use_qk_l2norm_in_kernel
        prepared = Prepared(*everything[:count]) if everything else self.prepare(dv)
        want = call.initial_state is not None and "initial_state" in call.needs_grad
        make = b.scratch if self.part else b.result
        grad_state = make("dinitial_state", call.state_shape, call.state_dtype) if want else None
        states = self._states(prepared, grad_state)
        grads = self.finish(prepared, dv, states, kept=everything[count:] if self.choice.kept else ())
        if self.sequences is not None and grad_state is not None:
            add_first_segments(b, self.whole, self.choice.segment_rows, states.grad_initial, grad_state)
        elif states.grad_initial is not grad_state:
            first = states.grad_initial.cut(0, slice(0, 1))
            b.step(Copy(grad_state, first if call.state_v_first else first.mT))
        return grads | {"initial_state": grad_state}

    def prepare(self, dv: View, new: Callable[..., View] | None = None) -> Prepared:
        """Results of ``prepare``, from what the forward saved if it did; ``dv`` and ``new`` as for ``add_prepare``."""
        kept = kept_of(self.r) if self.r.saved else None
        return add_prepare(self.b, self.r, self.choice, dv, backward=True, kept=kept, new=new)

    def _states(self, prepared: Prepared, grad_state: View | None) -> _States:
        """The states that the recurrences start from, joined over segments where the call is cut."""
        b, r = self.b, self.r
        initial, grad_final = b.dense(self.call.initial_state), b.dense(self.call.grad_final_state)
        short = r.cu_seqlens is not None or self.T <= CHUNK
        exact = short and self.dtype.itemsize == 2 and not self.choice.segment_rows
        exact = exact and initial is not None and grad_final is not None
        if not self.choice.segment_rows:
            return _States(initial, grad_final, grad_state, (initial, grad_final) if exact else (None, None))
        # The states at the starts of the segments and their gradients at the ends stand for those of packed sequences.
        call = changed(self.call, initial_state=initial, grad_final_state=grad_final)
        segments = Segments(b, r, self.choice, prepared, call, self.sequences)
        # A forward for Hopper has saved the states.
        kept = kept_of(r).starts if r.saved and segments.hopper else None
        first = segments.add_starts() if kept is None else kept.cut(0, slice(0, r.N))
        last = segments.add_ends()
        own = None if grad_state is None else b.scratch("gradients at starts", first.shape, first.dtype)
        # Some of several sequences may be of one chunk.
        return _States(first, last, own, (first, last) if self.sequences is not None else (None, None))

    def finish(
        self, prepared: Prepared, dv: View, states: _States, given: tuple[View, ...] = (), kept: tuple[View, ...] = ()
    ) -> Grads:
        """The recurrences and ``gradients`` for the sequences of each turn, and ``finish``.

        Args:
            given: inputs that a first half made for this one, which the recurrences are the last to read.
            kept: z and states, if the forward has stored them.
        """
        b, turns = self.b, self.choice.turns
        most = self.states if turns == WHOLE else max(turn.stop - turn.start for turn in turns) * self.NT
        z = (CHUNK * self.of_state, self.vp)
        shapes = {"z": z, "states": (self.vp, self.kp), "state_grads": (self.vp, self.kp)}
        own = dict(zip(("z", "states"), kept, strict=False))
        own |= {n: b.scratch(n, (most, self.HV, *shapes[n]), self.dtype) for n in shapes if n not in own}
        out: dict[str, View | None] = {}
        for turn in turns:
            self._add_recurrences(turn, prepared, states, dv, own)
            if turn is turns[-1]:
                b.free(prepared.keys, prepared.P, prepared.X)
                b.release(*given)
            out = out or self._outputs()
            self._add_gradients(turn, prepared, states, dv, own, out)
        b.free(*own.values(), prepared.D, prepared.norms)
        return self._finish(dv, out)

    def _slots_of(self, turn: slice | None) -> slice | None:
        return turn and slice(turn.start * self.NT, turn.stop * self.NT)

    def _names(self) -> dict[str, Any]:
        """Arguments that the launches share."""
        r, strides = self.r, {}
        for letter, x in {"q": r.q, "k": r.k, "v": r.v, "g": r.g, "b": r.beta, "o": r.grad_o}.items():
            batch, token, head = x.strides[:3]
            strides |= {f"s_{letter}b": 0 if self.collapsed else batch, f"s_{letter}t": token, f"s_{letter}h": head}
        return names(r) | strides | {
            "T_row": self.T if self.collapsed else 0, "o_scale": split_scale(r.scale, self.dtype)[1],
            "rows": self.B * self.T, "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
            "EVERY_SECOND": self.paired,
            "ODD": self.paired and (r.cu_seqlens is not None or self.NT % 2 == 1),
            # Value heads of the tensor that the gradient of g is a part of.
            "HO": self.into["g"].stride(1) // self.K if self.part else self.HV,
        }  # fmt: skip

    def _add_recurrences(
        self, turn: slice | None, prepared: Prepared, states: _States, dv: View, own: dict[str, View]
    ) -> None:
        """States and reverse, in one launch; reverse alone where the forward has stored states and z."""
        choice, r, slots_of = self.choice, self.r, self._slots_of(turn)
        keys, X, P, D = (x.cut(0, slots_of) for x in (prepared.keys, prepared.X, prepared.P, prepared.D))
        v, do = r.v.cut(0, turn), r.grad_o.cut(0, turn)
        first, last = choice.states, choice.reverse
        programs = self.vp // first.block_v * self.HV * (r.N if turn is None else turn.stop - turn.start)
        named = self._names() | own | {"v": v, "do": do, "dv": dv.cut(0, turn), "programs": programs}
        for name in ("initial", "grad_final", "grad_initial"):
            x = getattr(states, name)
            named[f"{name}_state"] = x and x.cut(0, turn)
        if isinstance(first, HopperConfig):
            kernel = recurrences_hopper
            named |= first.constants | {"STAGES_REVERSE": last.stages, "OUT_REVERSE": last.out}
            named |= hopper_tiles(keys, P, D) | {"X": matrix_tile(X, CHUNK, CHUNK, swizzled=True)}
            tiles = {"values": v, "gradients": do}
            if choice.kept:
                named |= {"X": None, "values": None, "programs": None}
                del tiles["values"]
            named |= {n: token_tile(x, CHUNK, first.block_v, swizzled=True) for n, x in tiles.items()}
            options = {"maxnreg": first.registers, "launch_pdl": choice.overlap}
        else:
            kernel, options = recurrences_kernel, {}
            named |= {"BV": first.block_v, "STAGES": first.stages, "V_AS_OPERAND": choice.operand}
            named |= {"keys": keys, "X": X, "P": P, "D": D, "transitions": None, "additions": None}
        self.b.pick(kernel, programs if choice.kept else 2 * programs, first.num_warps, named, **options)

    def _outputs(self) -> dict[str, View | None]:
        """Outputs of ``gradients``: dq and dk by value heads, and partial sums."""
        b, r = self.b, self.r
        shape, blocks = (self.B, self.T, self.HV, self.K), self.blocks
        found = {"dg": self.grad("g", r.g)}
        if self.HV == self.H:
            found |= {f"d{n}": self.grad(n, getattr(r, n)) for n in "qk"}
        else:
            found |= {n: b.scratch(f"{n} by value head", shape, torch.float32) for n in ("dq", "dk")}
        if self.finished:
            found["dbeta"] = self.new("dbeta", shape[:3], r.beta.dtype)
        else:
            found["dbeta"] = b.scratch("dbeta by channel block", (blocks, *shape[:3]), torch.float32)
        # Slots that hold nothing write no summand; only packed calls have such.
        count, packed = self.states, r.cu_seqlens is not None
        if self.paired:
            blocks *= self.choice.gradients.num_warps
        sums = {"A_log": ("dA_partial", blocks), "dt_bias": ("dbias_partial", self.K)}
        for name, (parameter, size) in sums.items():
            found[parameter] = None
            if getattr(r, name) is not None:
                found[parameter] = b.scratch(parameter, (count, self.HV, size), torch.float32, packed)
        return found

    def _add_gradients(
        self, turn: slice | None, prepared: Prepared, states: _States, dv: View, own: dict[str, View],
        out: dict[str, View | None],
    ) -> None:  # fmt: skip
        r, choice, config, slots_of = self.r, self.choice, self.choice.gradients, self._slots_of(turn)
        data = {n: getattr(r, n).cut(0, turn) for n in ROWS}
        part, do, dv = changed(r, **data), data["grad_o"], dv.cut(0, turn)
        exact = [x and x.cut(0, turn) for x in states.exact]
        named = self._names() | own | data | {"do": do, "dv": dv}
        named["dbeta"] = out["dbeta"].cut(out["dbeta"].dim() - 3, turn)
        named |= {n: (x := getattr(prepared, n)) and x.cut(0, slots_of) for n in ("D", "norms")}
        named |= {n: out[n].cut(0, turn) for n in ("dq", "dk", "dg")}
        named |= {n: out[n] and out[n].cut(0, slots_of) for n in ("dA_partial", "dbias_partial")}
        named |= {"initial_state": exact[0], "grad_final_state": exact[1]}
        if self.paired:
            launch_gradients_persistent(self.b, r, config, choice.overlap, named)
            return
        if self.hopper:
            launch_gradients_hopper(self.b, part, config, named | {"N": part.N}, self.B * self.T)
            return
        named |= {
            "BK": config.block_k, "BV": config.block_v, "STAGES": config.stages, "LEVELS": CHUNK.bit_length() - 1,
            "MILD": mildest(self.dtype, r.use_qk_l2norm_in_kernel), "DESCRIPTORS": choice.descriptors,
            "TOKENS": choice.tokens,
        }  # fmt: skip
        if choice.descriptors:
            named["z"] = matrix_tile(own["z"], CHUNK, self.vp, config.block_v)
            for n in ("states", "state_grads"):
                named[n] = matrix_tile(own[n], config.block_v, self.kp, config.block_k)
        if choice.tokens:
            named |= {"do": token_tile(do, CHUNK, config.block_v), "dv": token_tile(dv, CHUNK, config.block_v)}
        blocks = (slots(r) if turn is None else slots_of.stop - slots_of.start) * self.HV * self.kp // config.block_k
        self.b.pick(gradients_kernel, blocks, config.num_warps, named)

    def _add_finish(self, out: dict[str, View | None]) -> dict[str, View]:
        """Sums over channel blocks and grouped heads, and the gradients of norms if they are not done: dq, dk, dβ."""
        b, r = self.b, self.r
        written = {n: out[n] for n in ("dq", "dk")} | {"dbeta": self.new("dbeta", r.beta.shape, r.beta.dtype)}
        if self.HV != self.H:
            written |= {f"d{n}": self.grad(n, getattr(r, n)) for n in "qk"}
        tile = max(1, FINISH_ELEMENTS // self.kp)
        named = self._names() | written | {
            "dq_hat": out["dq"], "dk_hat": out["dk"], "dbeta_partial": out["dbeta"], "NK": self.blocks, "R": tile,
            "L2NORM": r.use_qk_l2norm_in_kernel and not self.whole_rows,
        }  # fmt: skip
        b.pick(finish_kernel, (-(-self.B * self.T // tile), self.H), 4, named)
        return written

    def _finish(self, dv: View, out: dict[str, View | None]) -> Grads:
        """The gradients by input, after ``finish`` and the sums over slots, where these are needed."""
        final = out | {"dv": dv} | ({} if self.finished else self._add_finish(out))
        sums = {n: x for n in ("A_log", "dt_bias") if (x := self.into.get(n)) is not None}
        if sums:
            dA = out["dA_partial"]
            named = names(self.r) | out | {f"d{n}": sums.get(n) for n in ("A_log", "dt_bias")} | {
                "count": (dA or out["dbias_partial"]).shape[0], "NA": 1 if dA is None else dA.shape[2],
                "BK": SUM_CHANNELS, "R": SUM_ROWS,
            }  # fmt: skip
            self.b.pick(sums_kernel, (-(-self.K // SUM_CHANNELS), self.HV), 4, named)
        return {n: final[f"d{n}"] for n in ("q", "k", "v", "g", "beta")} | sums
