"""What ``python -m kda_core_nvidia.aot`` compiles, and what it objects to; the sweep is a step of its own in CI."""

from __future__ import annotations

import re
from dataclasses import replace

import installed
import pytest
import torch
from addresses import hazards

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia import aot
from kda_core_nvidia.aot import TOOL, step_case
from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS
from kda_core_nvidia.choose.recurrent import DRAFT_TOKENS, LAYER_STEPS, RECURRENT_CONFIGS, STEP_CONFIGS
from kda_core_nvidia.machine_code import uses_stack_pointer
from triton._C.libtriton import ir
from triton.backends.compiler import BaseBackend
from triton.compiler.compiler import make_backend
from triton.runtime.jit import native_specialize_impl

from kda_core.triton_lib.ahead_of_time import Job, inference

KERNELS = {
    "prepare", "recurrence", "recurrences_kernel", "gradients_kernel", "finish_kernel", "recurrent", "blocks_prepare",
    "blocks_recurrence", "gate_forward_kernel", "gate_backward_kernel", "join_kernel", "chain_kernel",
    "segments_kernel", "convolution_forward_kernel", "convolution_backward_kernel",
    "norm_forward_kernel", "norm_backward_kernel", "convolution_step_kernel", "norm_step_kernel", "commit_kernel",
    "sums_kernel",
}  # fmt: skip
HOPPER = {
    "gradients_hopper", "gradients_hopper_persistent", "join_hopper", "layer_step", "prepare_hopper",
    "recurrence_hopper", "pairs_kernel", "recurrences_hopper", "recurrent_draft", "recurrent_step",
    "reverse_transitions_hopper", "first_segments_kernel", "transitions_hopper",
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_is_compiled(arch: int):
    """Forward, backward, gate and decoding, with --quick, too."""
    kernels = KERNELS | HOPPER if arch == 90 else KERNELS
    assert {job.launch.name for job in TOOL.shipped(str(arch))} == kernels
    assert {job.launch.name for job in TOOL.shipped(str(arch), quick=True)} == kernels


@pytest.mark.parametrize("arch", [80, 90])
def test_fusion_is_stated(arch: int):
    """Triton's defaults differ from version to version, and bits of results with it."""
    stated = {job.launch.name: TOOL.source(job)[1].get("enable_fp_fusion") for job in TOOL.shipped(str(arch))}
    exact = {"recurrent", "recurrent_draft", "recurrent_step", "blocks_prepare", "blocks_recurrence", "commit_kernel"}
    exact |= {"layer_step", "norm_step_kernel"}
    assert stated == {name: name not in exact for name in stated}


def test_every_configuration_of_decoding_is_compiled():
    """Each row of the table is among what is compiled."""
    names = ("V_FIRST", "BV", "KS", "EVICTION", "num_warps")
    compiled = set()
    for launch in TOOL.shipped("90", "recurrent recurrent"):
        state = launch.arguments["initial_state"]
        if launch.arguments["K"] == 128 and state is not None:
            compiled.add((state.dtype, *(launch.arguments[n] for n in names)))
    for (v_first, half), table in RECURRENT_CONFIGS.items():
        dtype = torch.bfloat16 if half else torch.float32
        for _, c in table:
            share = c.row_bytes // dtype.itemsize if v_first else 128
            assert (dtype, v_first, c.block_v, share, c.eviction, c.num_warps) in compiled, f"{dtype}, {v_first}, {c}"
    steps = {(x.arguments["maxnreg"], x.arguments["PARTS"]) for x in TOOL.shipped("90", "recurrent_step recurrent")}
    assert steps == {(c.registers, c.parts) for _, c in STEP_CONFIGS}
    names = ("V_FIRST", "STAGED", "TURNS")
    drafts = {tuple(x.arguments[n] for n in names) for x in TOOL.shipped("90", "recurrent_draft")}
    from_float32 = {(False, True, 1), (False, False, 1), (True, False, 1)}
    assert drafts == from_float32 | {(v_first, True, turns) for v_first in (False, True) for turns in (1, 2)}
    names = ("V_FIRST", "maxnreg", "STAGED", "TURNS")
    steps = {(x.arguments["state"].dtype, *(x.arguments[n] for n in names)) for x in TOOL.shipped("90", "layer_step")}
    dtypes = (torch.float32, torch.bfloat16)
    tables = {(v_first, dtypes[half]): table for (v_first, half), table in LAYER_STEPS.items()}
    assert steps == {(x, v, c.registers, c.staged, c.turns) for (v, x), table in tables.items() for _, c in table}


@pytest.mark.end_to_end
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["a step", "two tokens", "packed"])
def test_rows_of_a_tile_are_summed_alike_in_tiles_of_any_size(state: torch.dtype, form: str):
    """Where the number of states decides how many rows (V first) a tile has, no other part of its layout changes."""
    layouts = set()
    for N in (1, 8, 129):
        case = step_case(N, 2 if form == "two tokens" else 1, True, state)
        if form == "packed":
            case = case.having(B=1, T=N, lengths=(1,) * N)
        one = Job(plan_of(inference(case), CHIPS[90]).launches[0], "90")
        assert one.launch.name == "recurrent"
        code = TOOL.compile(one).asm["ttgir"]
        share = one.arguments["KS"]
        tile = rf"tensor<{one.arguments['BV']}x{128 // share}x{share}xf32, (#\w+)>"
        kinds = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<{.*}>)", code, re.MULTILINE))
        layouts.add(frozenset(kinds[name] for name in re.findall(tile, code)))
    assert len(layouts) == 1
    assert all(layouts)


def summed_layouts(tags: set[str], N: int, v_first: bool, state: torch.dtype) -> list[str]:
    """The layout of every operand of a sum in ``recurrent`` for a draft, in order."""
    case = step_case(N, DRAFT_TOKENS + 1, v_first, state, tags=frozenset(tags))
    one = Job(plan_of(inference(case), CHIPS[90]).launches[0], "90")
    assert one.launch.name == "recurrent"
    code = TOOL.compile(one).asm["ttgir"]
    kinds = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<{.*}>)", code, re.MULTILINE))
    operands = re.findall(r"^ *}\) : \((tensor<.*?>)\) ->", code, re.MULTILINE)
    return [re.sub(r"#\w+", lambda name: kinds.get(name[0], name[0]), operand) for operand in operands]


@pytest.mark.end_to_end
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("N", [1, 129])
def test_drafts_that_record_sum_as_those_that_keep_states(N: int, v_first: bool, state: torch.dtype):
    """The layouts decide over the bits of outputs and records."""
    expected = summed_layouts({"drafts"}, N, v_first, state)
    assert expected
    for more in (set(), {"commits"}, {"trees"}, {"trees", "commits"}):
        assert summed_layouts({"pool", "records", *more}, N, v_first, state) == expected


@pytest.mark.end_to_end
def test_both_kernels_of_a_step_sum_a_tile_alike():
    """The threads of ``recurrent_step`` hold the channels that those of ``recurrent`` hold: the same bits."""
    layouts = []
    for T in (1, 2):
        plan = plan_of(inference(step_case(129, T, False, torch.bfloat16)), CHIPS[90])
        one = Job(plan.launches[0], "90")
        assert one.launch.name == ("recurrent_step" if T == 1 else "recurrent")
        code = TOOL.compile(one).asm["ttgir"]
        kinds = re.findall(r"^(#\w+) = #ttg.blocked<{(.*), warpsPerCTA = .*}>", code, re.MULTILINE)
        # ``recurrent`` has one more dimension, of one.
        kinds = {name: kind.replace("[1, 1, 8]", "[1, 8]").replace("[1, 8, 4]", "[8, 4]") for name, kind in kinds}
        tile = r"tensor<(?:1x)?128x(?:32|128)xf32, (#\w+)>"
        layouts.append({kinds[name] for name in re.findall(tile, code)})
    assert layouts[0] == layouts[1]
    assert len(layouts[0]) == 1


@pytest.mark.end_to_end
@pytest.mark.parametrize(("name", "most"), [("transitions_hopper", 40), ("reverse_transitions_hopper", 50)])
def test_products_of_transitions_are_under_way_together(name: str, most: int):
    """Where registers are few ptxas orders each after the one before, without a spill: 124 such instructions at 128."""
    for one in (x for x in TOOL.shipped("90", name, quick=True) if x.launch.name == name):
        code = aot._tool("-sass", TOOL.compiled(one).machine_code)
        assert 20 < len(re.findall(r"\bWARPGROUP\.", code)) < most, one.name


@pytest.mark.end_to_end
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_neighbouring_channels_of_a_finished_state_are_stored_together(state: torch.dtype):
    """States V first, of sequences that ``prepare_hopper`` finishes: in single numbers a batch of short prompts took a
    third longer.
    """
    case = aot.chunk_case(torch.bfloat16, 128, 128, aot.MANY, "bounded")
    case = case.having(T=128, lengths=(64, 64), state=state, options={"state_v_first": True}, tags=frozenset())
    launch = next(x for x in plan_of(inference(case), CHIPS[90]).launches if x.name == "prepare_hopper")
    code = aot._tool("-sass", TOOL.compiled(Job(launch, "90")).machine_code)
    # A thread has 64 numbers of a block of a state.
    wide = re.findall(r"STG\.E\.64 " if state.itemsize == 4 else r"STG\.E ", code)
    assert len(wide) >= 32


@pytest.mark.end_to_end
def test_prepare_with_levels_is_short():
    """Instructions that a program jumps over delay those behind them: with 10,080 a small call took half as long again,
    and one of strong decays, which needs them all, two and a half times as long.
    """
    case = aot.chunk_case(torch.bfloat16, 128, 128, aot.FEW, "softplus")
    launch = next(x for x in plan_of(inference(case), CHIPS[90]).launches if x.name == "prepare_hopper")
    compiled = TOOL.compiled(Job(launch, "90"))
    code = aot._tool("-sass", compiled.machine_code)
    assert len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", code, re.MULTILINE)) < 7000
    # Three programs' shared memory leaves no first cache for more; with 72 a prefill took 5% longer.
    assert compiled.stack <= 40


def test_descriptors_only_where_the_chip_has_them():
    """TensorDescriptor from sm_90 on, pointers before."""

    def kinds(arch: int) -> set[str]:
        recurrence = TOOL.shipped(str(arch), "recurrence fp32", quick=True)
        return {type(launch.arguments["keys"]).__name__ for launch in recurrence}

    assert kinds(90) == {"Tile"}
    assert kinds(80) == {"View"}


def test_problems():
    """Stack beyond the stated bytes, more shared memory than the chip has."""
    launch = TOOL.shipped("80", "prepare bf16", quick=True)[0]
    limit = aot.stack_limit(launch)
    assert aot.Resources(255, limit, 163 * 1024, b"").problems(launch) == []
    spilled, large = aot.Resources(255, limit + 8, 163 * 1024 + 1, b"").problems(launch)
    assert "stack" in spilled
    assert "shared memory" in large


@pytest.mark.parametrize(
    ("code", "used"),
    [
        # As ptxas 12.8 wrote them: a descriptor restored from R1, itself or moved.
        ("R2UR UR8, R1 ; UMOV UR9, 0x40 ; HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;", True),
        ("R2UR UR9, R1 ; UMOV UR13, UR9 ; UMOV UR9, URZ ; HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24 ;", True),
        # The upper half of a pair, moved and written anew; two coordinates are what the load reads.
        ("R2UR UR21, R1 ; UMOV UR29, UR21 ; UIADD3 UR21, UR53, 0x3, URZ ; UTMALDG.2D [UR24], [UR40] ; "
         "UTMALDG.2D [UR20], [UR32] ; UIADD3.X UR29, URZ, UR15, URZ, UP6, !UPT ; UMOV UR23, UR29 ;", False),
        ("R2UR UR21, R1 ; UTMALDG.4D [UR16], [UR40] ; UMOV UR21, URZ ;", True),
        ("R2UR UR21, R1 ; UIADD3 UR30, UR21, 0x3, URZ ; UMOV UR21, URZ ;", True),
        ("R2UR UR21, R1 ; UIMAD.WIDE UR30, UR20, 0x3, UR10 ; UMOV UR21, URZ ;", True),
        ("R2UR UR21, R1 ; STG.E.128 desc[UR20][R4.64], R12 ; UMOV UR21, URZ ;", True),
        ("R2UR UR21, R1 ; STG.E.128 desc[UR14][R4.64], R12 ; UMOV UR21, URZ ;", False),
        ("R2UR UR21, R1 ; ULDC.64 UR20, c[0x0][0x198] ; UMOV UR2, UR21 ; BRA 0x10 ;", False),
        # A register that is written under a predicate, or still live at a branch, may be read.
        ("R2UR UR21, R1 ; @P0 UMOV UR21, URZ ; UIADD3 UR30, UR21, 0x3, URZ ;", True),
        ("R2UR UR21, R1 ; @P0 BRA 0x7f0 ; UMOV UR21, URZ ;", True),
        ("R2UR UR8, R14 ; HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;", False),
    ],
)  # fmt: skip
def test_computing_with_the_stack_pointer_is_found(code: str, used: bool):
    """In machine code as ``cuobjdump`` prints it."""
    lines = [f"        /*{16 * i:04x}*/    {x.strip()} ;   /* 0x0000 */" for i, x in enumerate(code.split(";")[:-1])]
    assert uses_stack_pointer("\n".join(lines)) == used


def test_blocks_of_states_that_are_stored_fit_shared_memory():
    """128 value channels with 256 key channels took 306 KiB where states are stored at chunks, of the 227 of sm_90."""
    launches = TOOL.shipped("90", "recurrence bf16 K 256 V 256")
    assert {launch.arguments["BV"] for launch in launches if launch.arguments.get("h") is not None} == {64}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_everything_that_is_shipped(arch: int):
    """Resources of every configuration: CI compiles the commonest ones."""
    assert TOOL.main(["--arch", str(arch), "--jobs", "2"]) == 0


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        # 264 bytes of 256 with 16 value channels at a time.
        (120, "gradients_kernel bf16 K 64 V 64 H 4 given"),
        (120, "prepare fp32 K 64 V 64 H 16 softplus"),
        (90, "gradients_kernel bf16 K 64 V 64 H 4 given"),
        (90, "recurrences_hopper bf16 K 256 V 256 H 16 bounded"),
    ],
)
def test_what_is_nearest_to_its_limit(arch: int, name: str):
    """Kernels that spill nearly what they may; --quick compiles others, and triton's next version may take more."""
    launches = TOOL.shipped(str(arch), name)
    assert launches
    for launch in launches:
        assert TOOL.compiled(launch).problems(launch) == []


def test_one_kernel_compiles():
    """Registers and stack are read from the machine code."""
    (launch,) = TOOL.shipped("80", "finish_kernel bf16 K 128", quick=True)
    found = TOOL.compiled(launch)
    assert 16 < found.registers < 255
    assert found.problems(launch) == []


@pytest.mark.parametrize("kernel", ["convolution_step_kernel", "recurrent_draft", "recurrence_hopper"])
def test_numbers_have_the_types_of_a_launch(kernel: str):
    """A number of 1 is a constant to triton where the kernel does not name its type."""
    for one in TOOL.shipped("90", kernel):
        signature = TOOL.source(one)[0].signature
        for parameter in one.kernel.params:
            value = one.arguments[parameter.name]
            if isinstance(value, int) and not parameter.is_constexpr:
                kind = native_specialize_impl(BaseBackend, value, False, not parameter.do_not_specialize, True)[0]
                assert signature[parameter.name] == (parameter.annotation_type or kind), parameter.name


def _as_emitted(one: Job, passes: bool = True) -> str:
    """A kernel's IR as triton emits it, or before any pass."""
    src, options = TOOL.source(one)
    target = TOOL.target(one)
    context = ir.context()
    ir.load_dialects(context)
    backend = make_backend(target)
    backend.load_dialects(context)
    options = backend.parse_options(options)
    given = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    module = src.make_ir(target, *given)
    return str(backend.make_ttir(module, {}, options, target.arch) if passes else module)


@pytest.mark.parametrize(
    ("kernel", "v_first"), [("recurrent_step", False), ("recurrent_draft", False), ("recurrent_draft", True)]
)
def test_rows_of_states_may_lie_far_apart(kernel: str, v_first: bool):
    """A pool may hold a row of every state side by side: 64 rows of 2^25 elements are 2^31."""
    drafts = kernel == "recurrent_draft"
    tags = frozenset({"pool", "records"} if drafts else {"pool"})
    r = inference(step_case(129, 3 if drafts else 1, v_first, torch.bfloat16, tags=tags))
    strides = (128, 128 * len(r.initial_state), 1 << 25, 1)
    far = torch.empty_strided(r.initial_state.shape, strides, dtype=torch.bfloat16, device="meta")
    one = Job(plan_of(replace(r, initial_state=far), CHIPS[90]).launches[0], "90")
    assert one.launch.name == kernel
    emitted = _as_emitted(one, passes=False)
    # A constant of 32 bits is one where a product takes it; triton 3.6 widens others first.
    given = re.findall(rf"(%\w+) = arith.constant {1 << 25} : i32", emitted)
    products = re.findall(r"arith.muli (%\w+), (%\w+) .*: i32", emitted)
    assert str(1 << 25) in emitted
    assert products
    assert not {name for pair in products for name in pair} & set(given)


@pytest.mark.parametrize("kernel", sorted(KERNELS | HOPPER))
def test_no_product_of_a_stride_wraps(kernel: str):
    """FAILURES 15: an index of 32 bits times a stride of 32 bits is 64 bits wide. (Lengths of a sequence, rows and
    channels of a tile stay small, or the host looks.)
    """
    for arch in (80, 90) if kernel in KERNELS else (90,):
        seen = set()
        for one in TOOL.shipped(str(arch), quick=True):
            form = tuple(one.arguments.get(n) for n in ("DESCRIPTORS", "K", "CHUNK"))
            if one.launch.name == kernel and form not in seen:
                seen.add(form)
                found = [x.reason for x in hazards(_as_emitted(one, passes=not one.kernel.is_gluon()))]
                assert [x for x in found if re.search(r"arith\.muli .*%s_\w+.* : i32", x)] == []
        assert seen
