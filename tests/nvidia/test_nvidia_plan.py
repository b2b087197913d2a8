"""Plans of the NVIDIA backend as data, for any chip: what a call allocates and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import installed
import pytest
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.aot import chunk_case, trained
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS
from kda_core_nvidia.triton_private import shared_layout
from triton.experimental.gluon import language as gl

from kda_core.request import GateRequest, Request
from kda_core.triton_lib.plan import Builder, Copy, Launch, Plan, Release, Sum, Tile, View, metadata

BF16 = torch.bfloat16


def request(
    B: int = 2, T: int = 64, H: int = 2, K: int = 64, HV: int = 0, dtype: torch.dtype = BF16, **options: Any
) -> Request:
    """A call without memory."""
    HV = HV or H

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, g, beta = empty(B, T, H, K), empty(B, T, H, K), empty(B, T, HV, K), empty(B, T, HV, K), empty(B, T, HV)
    fields = {"op": "chunk_kda", "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 1.0}
    return Request(**(fields | options))


def backward(everything: bool = False, **fields: Any) -> Request:
    """A backward with what its forward saved."""
    r = request(**fields, save_for_backward=True, disable_recompute=everything)
    plan = plan_of(r, CHIPS[90])
    saved = [plan.buffers[x] for n, x in plan.results.items() if n not in ("o", "final_state", "h") and x]
    tensors = tuple(torch.empty(b.shape, dtype=b.dtype, device="meta") for b in saved)
    return replace(r, saved=tensors, grad_o=torch.empty_like(r.v), needs_grad=frozenset(["q", "k", "v", "g", "beta"]))


def launch_of(plan: Plan, name: str) -> Launch:
    (found,) = (x for x in plan.launches if x.name == name)
    return found


def test_a_forward():
    """Two launches; scratch is what passes between them."""
    plan = plan_of(request(), CHIPS[90])
    assert plan.kernels == ("prepare", "recurrence")
    assert {n: b.role for n, b in plan.buffers.items()} == {
        "o": "result",
        "keys": "scratch",
        "D": "scratch",
        "P": "scratch",
    }
    assert plan.results == {"o": "o", "final_state": None, "h": None}
    assert launch_of(plan, "prepare").grid == (2 * 2 * 2, 1, 1)
    assert plan.peak_scratch == sum(b.nbytes for b in plan.buffers.values() if b.role == "scratch")


def test_a_plan_holds_no_tensor():
    """So that a plan that is kept holds no memory."""
    plan = plan_of(request(), CHIPS[90])
    values = [x for launch in plan.launches for x in (*launch.arguments.values(), *launch.constants.values())]
    assert {type(x) for x in values} <= {View, Tile, int, float, bool, str, type(None)}


def test_equal_calls_have_equal_plans():
    assert plan_of(request(), CHIPS[90]) == plan_of(request(), CHIPS[90])
    assert plan_of(request(), CHIPS[90]) != plan_of(request(scale=2.0), CHIPS[90])
    assert plan_of(request(), CHIPS[90]) != plan_of(request(), CHIPS[90], frozenset(["q"]))


def test_what_a_backward_holds_ends_as_early_as_it_can():
    """Inputs of the recurrences end before ``gradients`` allocates its results; ``finish`` holds no states."""
    assert len(plan_of(backward(), CHIPS[90]).epochs) == 1
    plan = plan_of(backward(T=2**17), CHIPS[90])
    assert plan.kernels == ("prepare", "recurrences_kernel", "gradients_kernel", "finish_kernel")
    kernels = [[s.name for s in steps] for steps in plan.epochs]
    assert kernels == [["prepare", "recurrences_kernel"], ["gradients_kernel"], ["finish_kernel"]]
    epochs = {n: b.epochs for n, b in plan.buffers.items() if b.role == "scratch"}
    assert epochs == {
        "keys": (0, 0), "X": (0, 0), "D": (0, 1), "z": (0, 1), "states": (0, 1), "state_grads": (0, 1),
        "dbeta by channel block": (1, 2),
    }  # fmt: skip
    assert plan.buffers["dg"].epochs[0] == 1


def test_the_second_half_of_a_backward_gives_back_what_the_first_made():
    """The keys are as large as the gradients of q, k and g, which are allocated next; small ones wait."""

    def halves(T: int) -> list[Plan]:
        r = replace(backward(B=1, T=T), cp_context=True)
        r = replace(r, saved=(*r.saved, torch.empty(1, 2, 64, 64, device="meta")))
        begin = plan_of(r, CHIPS[90], half="begin_backward")
        made = [begin.whole(x) for x in list(begin.results.values())[2:] if x]
        more = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in made]
        states = torch.empty(1, 2, 64, 64, device="meta")
        return [begin, plan_of(replace(r, saved=(*r.saved, *more, states)), CHIPS[90], half="finish_backward")]

    assert not [x for x in halves(64)[1].steps if isinstance(x, Release)]
    begin, plan = halves(2**17)
    steps = plan.epochs[plan.buffers["dg"].epochs[0] - 1]
    given = [x.target for x in steps if isinstance(x, Release)]
    assert [x.shape for x in given] == [begin.whole("kept for the recurrences").shape]
    later = [x.source for epoch in plan.epochs[plan.buffers["dg"].epochs[0] :] for s in epoch for x in s.views()]
    assert not {x.source for x in given} & {*later}
    tensor = torch.ones(3)
    Release(View("x", (3,), (1,), torch.float32)).run(tensor[:2])
    assert not tensor.untyped_storage().nbytes()


def test_a_backward_of_all_that_the_forward_made_launches_no_prepare():
    assert "prepare" not in plan_of(backward(everything=True), CHIPS[90]).kernels
    assert plan_of(replace(backward(), saved=()), CHIPS[90]).kernels[0] == "prepare"


def test_a_tensor_that_is_given_twice():
    """Inputs have names, so that q that is its k is two inputs."""
    r = request()
    plan = plan_of(replace(r, k=r.q), CHIPS[90])
    arguments = launch_of(plan, "prepare").arguments
    assert (arguments["q"].source, arguments["k"].source) == ("q", "k")


def test_inputs_that_kernels_cannot_read_are_copied():
    """Rows with gaps between channels, and parameters with gaps."""
    r = request()
    plan = plan_of(replace(r, q=torch.empty(2, 64, 64, 2, dtype=BF16, device="meta").mT), CHIPS[90])
    (copy,) = (s for s in plan.steps if isinstance(s, Copy))
    assert (copy.source.source, copy.target.source) == ("q", "q, contiguous")
    assert launch_of(plan, "prepare").arguments["q"] == copy.target
    out = replace(r, out=torch.empty(2, 64, 64, 2, dtype=BF16, device="meta").mT)
    plan = plan_of(out, CHIPS[90])
    assert isinstance(plan.steps[-1], Copy)
    assert plan.steps[-1].target.source == plan.results["o"] == "out"


def test_a_pool_is_advanced_in_place():
    state = torch.empty(5, 2, 64, 64, device="meta")
    slots = torch.empty(2, dtype=torch.int32, device="meta")
    r = request(initial_state=state, ssm_state_indices=slots, inplace_final_state=True)
    arguments = launch_of(plan_of(r, CHIPS[90]), "recurrence").arguments
    assert arguments["initial_state"] == arguments["final_state"]
    assert arguments["final_state"].source == "initial_state"


@pytest.mark.parametrize(("K", "kernels"), [
    (64, ("prepare", "recurrences_kernel", "chain_kernel", "recurrence")),
    (128, ("prepare_hopper", "transitions_hopper", "join_hopper", "recurrence_hopper")),
])  # fmt: skip
def test_a_long_sequence_is_cut_into_segments(K: int, kernels: tuple[str, ...]):
    """The states at the starts of segments replace the call's own. Segments of one length need nothing but launches."""
    r = request(B=1, T=8192, H=1, HV=1, K=K, output_final_state=True)
    plan = plan_of(r, CHIPS[90])
    assert plan.kernels == kernels
    assert len(plan.steps) == 4
    recurrence = plan.launches[-1]
    assert recurrence.arguments["initial_state"].source == "states at starts"
    assert recurrence.arguments["final_state"].source == "final_state"
    assert recurrence.constants["LAST_STATE"]
    odd = plan_of(request(B=1, T=8193, H=1, HV=1, K=K, output_final_state=True), CHIPS[90])
    assert odd.kernels == ("segments_kernel", *kernels)
    assert len(odd.steps) == 5


def test_segments_are_of_rows_that_bulk_copies_can_take():
    """Others are copied, and the copies' strides are what kernels get: with any other the copy engine faults."""
    forward, backward = trained(chunk_case(BF16, 128, 128, 4, "bounded", T=8192))
    wide = torch.empty(1, 8192, 4, 129, dtype=BF16, device="meta")[..., 1:]
    plan = plan_of(replace(forward, v=wide), CHIPS[90], frozenset({"v"}))
    assert plan.kernels == plan_of(forward, CHIPS[90]).kernels
    first = launch_of(plan, "transitions_hopper").arguments
    assert (first["values"].base.source, first["s_vh"]) == ("v, aligned", 128)
    assert launch_of(plan, "recurrence_hopper").arguments["v"].source == "v, aligned"
    plan = plan_of(replace(backward, v=wide, grad_o=wide), CHIPS[90], frozenset({"v", "grad_o"}))
    assert plan.kernels == plan_of(backward, CHIPS[90]).kernels
    second = launch_of(plan, "reverse_transitions_hopper").arguments
    assert (second["gradients"].base.source, second["s_oh"]) == ("grad_o, aligned", 128)
    both = launch_of(plan, "recurrences_hopper").arguments
    assert (both["v"].source, both["do"].source) == ("v, aligned", "grad_o, aligned")


def test_a_backward_reads_the_states_at_the_starts_of_segments():
    """As the forward for Hopper saved them; without them it makes them again."""
    forward, backward = trained(chunk_case(BF16, 128, 128, 4, "bounded", T=8192))
    first, second = plan_of(forward, CHIPS[90]), plan_of(backward, CHIPS[90])
    assert first.buffers[first.results["starts"]].shape == (11, 4, 128, 128)
    starts = launch_of(second, "recurrences_hopper").arguments["initial_state"]
    assert starts.source == "saved[3]"
    assert second.kernels == (
        "prepare_hopper", "reverse_transitions_hopper", "join_hopper", "recurrences_hopper",
        "gradients_hopper_persistent", "sums_kernel",
    )  # fmt: skip
    assert {second.buffers[second.results[n]].shape for n in "qkvg"} == {(1, 8192, 4, 128)}
    again = plan_of(replace(backward, saved=()), CHIPS[90])
    assert again.kernels[:4] == ("prepare_hopper", "transitions_hopper", "join_hopper", "reverse_transitions_hopper")


def test_pairs_of_slots_have_one_state():
    """The recurrences store every second state, and partial sums are by pairs and warps."""
    r = replace(metadata(trained(chunk_case(BF16, 128, 128, 256, "bounded", T=1024))[1]), saved=())
    plan = plan_of(r, CHIPS[90])
    _, recurrences, gradients, sums = plan.launches
    assert sums.name == "sums_kernel"
    assert gradients.name == "gradients_hopper_persistent"
    assert recurrences.constants["EVERY_SECOND"]
    shapes = {n: gradients.arguments[n].shape for n in ("dA_partial", "dbias_partial")}
    assert shapes == {"dA_partial": (16, 256, 8), "dbias_partial": (16, 256, 128)}
    shapes = {n: recurrences.arguments[n].shape for n in ("z", "states", "state_grads")}
    assert shapes == {"z": (16, 256, 64, 128), "states": (16, 256, 128, 128), "state_grads": (16, 256, 128, 128)}
    assert gradients.grid == (132, 1, 1)


@pytest.mark.parametrize(("multiprocessors", "programs"), [(132, 132), (7, 6), (1, 2)])
def test_neighbours_share_the_key_channels_of_a_row(multiprocessors: int, programs: int):
    """Programs of 256 channels come in twos, which tell each other their sums: nothing is left for ``finish``."""
    r = metadata(trained(chunk_case(BF16, 256, 256, 256, "bounded"))[1])
    plan = plan_of(r, replace(CHIPS[90], multiprocessors=multiprocessors))
    assert "finish_kernel" not in plan.kernels
    gradients = launch_of(plan, "gradients_hopper_persistent")
    assert gradients.grid == (programs, 1, 1)
    exchange = gradients.arguments["exchange"]
    assert exchange.shape == (programs, 2, 256)
    assert plan.buffers[exchange.source].zeros


@pytest.mark.parametrize(("lengths", "T", "pairs"), [((900, 100), 1000, 18), ((), 1000, 16), ((), 990, 16)])
def test_sequences_that_end_within_pairs_have_a_table(lengths: tuple[int, ...], T: int, pairs: int):
    """Its size is known to the host. A chunk that is in no pair has a launch of its own, and the caller's states where
    a sequence may have one chunk."""
    case = chunk_case(BF16, 128, 128, 256, "bounded", T=T).having(lengths=lengths)
    plan = plan_of(replace(metadata(trained(case)[1]), saved=()), CHIPS[90])
    last = ("gradients_hopper",) if lengths or T == 990 else ()
    pairs_of_two_kinds = ("gradients_hopper_persistent",) * (1 if T == 990 else 2)
    kernels = ("recurrences_hopper", "pairs_kernel", *last, *pairs_of_two_kinds, "sums_kernel")
    assert plan.kernels[-len(kernels) :] == kernels
    gradients = next(x.arguments for x in plan.launches if x.name == "gradients_hopper_persistent")
    assert gradients["table"].shape == (2 * pairs, 4)
    assert launch_of(plan, "recurrences_hopper").arguments["states"].shape == (pairs, 256, 128, 128)
    assert gradients["dA_partial"].shape == (pairs, 256, 8)
    if last:
        chunks = launch_of(plan, "gradients_hopper")
        assert chunks.grid == (256 * max(1, len(lengths)), 1, 1)
        assert (chunks.arguments["initial_state"] is not None) == bool(lengths)
        assert chunks.arguments["dA_partial"] is gradients["dA_partial"]


def test_sums_of_parameters_gradients():
    r = backward(HV=4, use_gate_in_kernel=True)
    gate = {"A_log": torch.empty(4, device="meta"), "dt_bias": torch.empty(4, 64, device="meta")}
    plan = plan_of(replace(r, **gate), CHIPS[90])
    sums = launch_of(plan, "sums_kernel")
    assert (sums.arguments["dA_log"].source, sums.arguments["ddt_bias"].source) == ("dA_log", "ddt_bias")
    assert sums.arguments["count"] == sums.arguments["dA_partial"].shape[0] == sums.arguments["dbias_partial"].shape[0]
    assert sums.grid == (4, 4, 1)
    assert plan.results["A_log"] == "dA_log"


def states_held(r: Request, axis: int) -> list[int]:
    return [
        x.arguments["states"].base.shape[axis]
        if isinstance(x.arguments["states"], Tile)
        else x.arguments["states"].shape[axis]
        for x in plan_of(r, CHIPS[90]).launches
        if x.name in ("gradients_kernel", "gradients_hopper")
    ]


@pytest.mark.parametrize(("size", "heads", "held"), [(256, 64, [4, 4]), (256, 16, [8]), (128, 64, [8])])
def test_states_of_wide_heads_are_held_for_half_of_the_batch(size: int, heads: int, held: list[int]):
    """Slots of the buffer of states in each turn of a batch of four; where half would leave the chip idle, one turn."""
    r = trained(chunk_case(BF16, size, size, heads, "given"))[1]
    names = ("q", "k", "v", "g", "beta", "initial_state", "grad_o", "grad_final_state")
    r = replace(r, **{n: torch.cat([getattr(r, n)] * 4) for n in names}, saved=())
    assert states_held(r, 0) == held


def test_gradients_of_wide_heads_are_finished():
    """A program has half of a row's channels: what all add to is summed afterwards. Each turn has its part of that."""
    r = request(B=4, T=70, H=64, K=256, use_qk_l2norm_in_kernel=True)
    r = replace(r, grad_o=torch.empty_like(r.v), needs_grad=frozenset("qkv"))
    plan = plan_of(r, CHIPS[90])
    first, second = (x for x in plan.launches if x.name == "gradients_hopper")
    finish = launch_of(plan, "finish_kernel")
    assert first.grid == second.grid == (2 * 3 * 64 * 2, 1, 1)
    partial = finish.arguments["dbeta_partial"]
    assert (partial.shape, partial.dtype) == ((2, 4, 70, 64), torch.float32)
    offsets = {n: [x.arguments[n].offset for x in (first, second)] for n in ("dbeta", "dq_rows", "dg_rows", "D")}
    rows = 2 * 70 * 64
    assert offsets == {"dbeta": [0, rows], "dq_rows": [0, rows * 256], "dg_rows": [0, rows * 256], "D": [0, 98304]}
    assert first.arguments["tokens"] == second.arguments["tokens"] == 4 * 70
    assert [x.arguments["q"].base.offset for x in (first, second)] == [0, rows * 256]
    assert first.arguments["q"].block == (32, 128)
    assert finish.constants["L2NORM"]


@pytest.mark.parametrize(("size", "heads", "held"), [(256, 256, [128, 128]), (256, 64, [64]), (128, 256, [256])])
def test_states_of_wide_heads_are_held_for_half_of_them(size: int, heads: int, held: list[int]):
    """Heads of the buffer of states in each turn of a packed call; where half would leave the chip idle, one turn."""
    r = trained(chunk_case(BF16, size, size, heads, "given", everything=True))[1]
    assert states_held(r, 1) == held
    plan = plan_of(r, CHIPS[90])
    shapes = {n: plan.buffers[x].shape for n, x in plan.results.items()}
    assert shapes == {n: tuple(getattr(r, n).shape) for n in r.needs_grad if n in shapes}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_programs_of_many_sequences_and_heads_lie_on_the_first_axis(op: str, packed: bool):
    """FAILURES 24: the other axes of a grid end at 65,535."""
    if packed:
        bounds = torch.empty(2049, dtype=torch.int32, device="meta")
        r = request(B=1, T=8192, H=33, K=16, op=op, cu_seqlens=bounds)
    else:
        r = request(B=683, T=2, H=96, K=16, op=op)
    back = replace(r, grad_o=r.v, needs_grad=frozenset("q"))
    grids = [x.grid for call in (r, back) for x in plan_of(call, CHIPS[90]).launches]
    assert max(grid[0] for grid in grids) > 65535
    assert all(max(grid[1:]) <= 65535 for grid in grids)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_an_integer_scale_launches_what_a_number_does(dtype: torch.dtype):
    """Triton tells integers from numbers; a kernel compiled for the one cannot be launched with the other."""
    for scale in (0, 1):
        plans = [plan_of(request(dtype=dtype, scale=x), CHIPS[90]) for x in (scale, float(scale))]
        kinds = [[type(x) for launch in plan.launches for x in launch.arguments.values()] for plan in plans]
        assert kinds[0] == kinds[1]
        assert plans[0] == plans[1]


def test_the_gate():
    r = GateRequest(g=torch.empty(3, 40, 4, 128, dtype=BF16, device="meta"), A_log=torch.empty(4, device="meta"))
    assert plan_of(r, CHIPS[90]).kernels == ("gate_forward_kernel",)
    back = replace(r, grad_output=r.g, needs_grad=frozenset(["g", "A_log"]))
    plan = plan_of(back, CHIPS[90])
    assert [type(s) for s in plan.steps] == [Launch, Sum]
    assert set(plan.results) == {"g", "A_log"}
    empty = replace(r, g=torch.empty(0, 4, 128, device="meta"))
    assert plan_of(empty, CHIPS[90]).kernels == ()


def test_bytes():
    """Each step's tensors once; the floor is inputs and results."""
    b = Builder()
    x = View("x", (4, 8), (8, 1), torch.float32)
    y, z = b.scratch("y", (4, 8), torch.float32), b.result("z", (4, 8), BF16)
    b.step(Copy(y, x))
    b.step(Copy(z, y))
    plan = b.plan({"x": x, "not read": x}, {"z": z})
    assert plan.bytes_moved == 128 + 128 + 128 + 64
    assert plan.bytes_floor == 128 + 64
    assert plan.peak_scratch == 128


def test_a_buffer_is_used_while_it_lasts():
    b = Builder(small=0)
    y, z = (b.scratch(n, (4,), torch.float32) for n in "yz")
    b.step(Copy(y, z))
    b.free(y)
    b.step(Copy(z, y))
    with pytest.raises(ValueError, match="'y' lasts for epochs"):
        b.plan({}, {})
    with pytest.raises(ValueError, match="neither an input nor a buffer"):
        Plan({}, {}, ((Copy(y, z),),), {})


def test_a_launch_names_every_parameter():
    launch = launch_of(plan_of(request(), CHIPS[90]), "prepare")
    arguments = {n: x for n, x in launch.arguments.items() if n != "s_qt"}
    with pytest.raises(TypeError, match=r"prepare: missing \['s_qt'\], unknown \['s_tq'\]"):
        replace(launch, arguments=arguments | {"s_tq": 1})


def test_views():
    """Layouts, offsets and alignment of parts."""
    x = View("x", (2, 6, 4), (24, 4, 1), BF16)
    part = x.cut(1, slice(2, 4))
    assert (part.shape, part.strides, part.offset, part.aligned) == ((2, 2, 4), (24, 4, 1), 8, True)
    assert not x.cut(1, slice(1, 2)).aligned
    assert not part.is_contiguous()
    assert part.contiguous().strides == (8, 4, 1)
    assert x.cut(0, slice(1, 2)).is_contiguous()
    assert part.mT.shape == (2, 4, 2)
    t = torch.empty(2, 6, 4, dtype=BF16)
    assert metadata(GateRequest(g=t.mT)).g.strides == t.mT.stride()
    assert metadata(GateRequest(g=t.mT)).g.is_contiguous() == t.mT.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_descriptors_of_gradients_lie_as_the_kernel_allocates_them(dtype: torch.dtype):
    """Triton 3.6 does not compare them: with another layout fewer bytes arrive than a barrier expects, and it hangs."""
    r = trained(chunk_case(BF16, 128, 128, 16, "bounded", T=96))[1]
    r = replace(r, g=r.g.to(dtype))
    (launch,) = (x for x in plan_of(r, CHIPS[90]).launches if x.name == "gradients_hopper")
    tile = launch.arguments["g"]
    element = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    expected = gl.NVMMASharedLayout.get_default_for(list(tile.block), element)
    assert shared_layout(tile.base.dtype, tile.block, tile.by_rows) == expected


@pytest.mark.parametrize(("H", "T", "more", "each", "stay"), [
    (15, 2048, {}, 0, 0),  # as fast without
    (16, 2048, {}, 2, 0),
    (20, 8192, {}, 2, 0),
    (21, 8192, {}, 3, 0),
    (18, 8192, {"gate": "softplus"}, 2, 0),
    (19, 8192, {"gate": "softplus"}, 3, 0),
    (24, 8192, {"gate_dtype": torch.float32}, 2, 0),
    (32, 8192, {}, 3, 1),
    (32, 8192, {"gate_dtype": torch.float32}, 2, 1),
    (34, 8192, {}, 0, 0),  # the recurrence takes too many multiprocessors
    (16, 1024, {}, 0, 0),  # one round
    (4, 8192, {}, 0, 0),  # segments
    (32, 2048, {"K": 256, "V": 256}, 0, 0),
    (32, 2048, {"lengths": (1024, 1024)}, 0, 0),
])  # fmt: skip
def test_recurrences_of_some_heads_follow_prepare(H: int, T: int, more: dict[str, Any], each: int, stay: int):
    case = chunk_case(torch.bfloat16, 128, 128, H, "bounded", T=T).having(**{"gate_dtype": torch.bfloat16} | more)
    prepare, *_, recurrence = plan_of(trained(case)[0], CHIPS[90]).launches
    assert (prepare.arguments["progress"] is None) == (each == 0)
    if each:
        assert prepare.grid[0] == each * 132
        assert prepare.arguments["stay"] == stay
        assert prepare.arguments["progress"] == recurrence.arguments["progress"]


def test_a_forward_that_keeps_states_waits_for_prepare():
    case = chunk_case(torch.bfloat16, 128, 128, 32, "bounded", T=8192).having(gate_dtype=torch.bfloat16)
    prepare, *_ = plan_of(replace(trained(case)[0], disable_recompute=True), CHIPS[90]).launches
    assert prepare.arguments["progress"] is None
