"""Which kernels and configurations a call gets, on any chip, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import installed
import pytest
import torch

installed.need_backend("nvidia")
installed.need_package("triton")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import CHIPS, INTERPRETED, choose_backward, choose_forward, choose_recurrent
from kda_core_nvidia.choose.backward import (
    WHOLE,
    GradientsConfig,
    GradientsHopperConfig,
    GradientsPersistentConfig,
    backward_config,
)
from kda_core_nvidia.choose.chip import SHARED_LIMIT
from kda_core_nvidia.choose.chunk import (
    HopperConfig,
    PrepareHopperConfig,
    TransitionsHopperConfig,
    as_segments,
    hopper_config,
    prepare_config,
    row_aligned,
    saved_slots,
    split_scale,
    starts_shape,
)
from kda_core_nvidia.choose.forward import recurrence_config
from kda_core_nvidia.choose.recurrent import recurrent_config

from kda_core.request import Request
from kda_core.triton_lib.layout import padded
from kda_core.triton_lib.plan import metadata

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def request(
    B: int = 1, T: int = 64, H: int = 4, K: int = 128, V: int = 0, dtype: torch.dtype = BF16, **options: Any
) -> Request:
    """A call without memory."""
    V = V or K
    fields: dict[str, Any] = {"op": "chunk_kda", "scale": 1.0}
    for name, size in (("q", K), ("k", K), ("v", V), ("g", K)):
        fields[name] = torch.empty(B, T, H, size, dtype=dtype, device="meta")
    fields["beta"] = torch.empty(B, T, H, dtype=dtype, device="meta")
    return Request(**(fields | options))


def backward(**fields: Any) -> Request:
    r = request(**fields)
    return replace(r, grad_o=torch.empty_like(r.v), needs_grad=frozenset("qkv"))


def forward_on(arch: int, r: Request, *misaligned: str):
    return choose_forward(metadata(r, frozenset(misaligned)), CHIPS[arch])


def backward_on(arch: int, r: Request, **options: Any):
    return choose_backward(metadata(r), CHIPS[arch], **options)


def test_every_chip_is_known():
    assert CHIPS.keys() == SHARED_LIMIT.keys()
    assert all(chip.arch == arch for arch, chip in CHIPS.items())


def test_a_choice_is_data():
    """Equal calls have equal choices, which can be keys."""
    assert forward_on(90, request()) == forward_on(90, request())
    assert hash(backward_on(90, backward())) == hash(backward_on(90, backward()))


def test_the_recurrence_for_hopper():
    """On sm_90, with 16-bit rows that a descriptor can read, and no intermediate states."""
    assert isinstance(forward_on(90, request()).recurrence, HopperConfig)
    for arch in CHIPS.keys() - {90}:
        assert not isinstance(forward_on(arch, request()).recurrence, HopperConfig)
    r = request()
    wide = torch.empty(1, 64, 4, 136, dtype=BF16, device="meta")
    plain = [
        request(dtype=FP32),
        request(K=64),
        request(V=96),
        replace(r, return_intermediate_states=True),
        replace(r, v=wide.as_strided((1, 64, 4, 128), (2180, 545, 136, 1), 0)),
    ]
    assert not any(isinstance(forward_on(90, x).recurrence, HopperConfig) for x in plain)
    assert not isinstance(forward_on(90, r, "v").recurrence, HopperConfig)
    assert not isinstance(choose_forward(metadata(r), INTERPRETED).recurrence, HopperConfig)


def test_full_chips_take_wide_blocks():
    """Programs of 128 value channels where there are more of 64 than multiprocessors (132)."""
    assert [forward_on(90, request(H=heads)).recurrence.block_v for heads in (66, 67)] == [64, 128]
    plain = [recurrence_config(CHIPS[90], BF16, 128, 128, heads).block_v for heads in (79, 80)]
    assert plain == [64, 128]
    back = [backward_config(CHIPS[90], BF16, 128, 128, heads).recurrences.block_v for heads in (95, 96)]
    assert back == [64, 128]


def test_the_backward_takes_kernels_for_hopper():
    """Both recurrences or neither, since they are one launch."""

    def kinds(call: Request) -> set[type]:
        choice = backward_on(90, call)
        return {type(choice.states), type(choice.reverse)}

    assert kinds(backward(T=4096, B=2)) == {HopperConfig}
    assert kinds(backward(T=33)) == {HopperConfig}
    assert kinds(replace(backward(T=2048, B=2), grad_o=None)) == {HopperConfig}


def test_programs_of_the_backward_s_recurrences_share_multiprocessors():
    """In one round of 33 heads, two nearly full ones, or three, a program has a multiprocessor to itself."""
    for heads, stages in {1: 4, 33: 4, 34: 3, 61: 3, 62: 4, 67: 4, 99: 4, 100: 3, 256: 3}.items():
        assert hopper_config("states", CHIPS[90], 128, 128, heads).stages == stages
        assert hopper_config("reverse", CHIPS[90], 128, 128, heads).stages == stages
        assert hopper_config("states", CHIPS[90], 256, 256, heads).stages == 3


def test_long_sequences_of_few_heads_are_cut():
    """At least four segments of at least 2,048 rows, as many as the chip runs side by side."""
    for dtype, K in ((FP16, 128), (BF16, 64)):
        call = {"dtype": dtype, "K": K, "V": 128}
        assert forward_on(90, request(T=8191, **call)).segment_rows == 0
        assert forward_on(90, request(T=8192, **call)).segment_rows == 2048
        assert forward_on(90, request(T=32768, **call)).segment_rows == 2048
        assert forward_on(90, request(T=65536, **call)).segment_rows == 4096
        assert backward_on(90, backward(T=8192, **call)).segment_rows == 2048
    for other in (
        request(T=8192, H=34),
        request(T=8192, B=2, dtype=FP16),
        request(T=8192, dtype=FP32),
        request(T=8192, disable_recompute=True),
        request(T=8192, batch_invariant=True),
        request(T=65536, dtype=FP16, batch_invariant=True),
        request(T=8192, cu_seqlens=torch.empty(2, dtype=torch.int32, device="meta"), dtype=FP16),
    ):
        assert forward_on(90, other).segment_rows == 0


def test_hopper_joins_shorter_segments():
    """At least 512 rows of 4,096, and more in longer sequences, so that a segment has twice as many chunks as there are
    segments; of one length where such a number of segments is near the one that fits.
    """

    def rows(T: int, H: int = 4) -> int:
        both = forward_on(90, request(T=T, H=H, save_for_backward=True)), backward_on(90, backward(T=T, H=H))
        assert both[0].segment_rows == both[1].segment_rows
        assert {isinstance(x.transitions, TransitionsHopperConfig) for x in both} == {True}
        if both[0].segment_rows:
            assert {isinstance(x.prepare, PrepareHopperConfig) for x in both} == {True}
        return both[0].segment_rows

    assert rows(4095) == 0
    assert [rows(T) for T in (4096, 4100, 8192, 8256, 16384, 65536)] == [512, 544, 1024, 768, 1024, 4096]
    assert [rows(8192, H) for H in (1, 8, 12, 16, 17, 33)] == [1024, 1024, 2048, 2048, 0, 0]
    assert rows(2**20, 1) == 2**14
    # 5 segments fit: 8,200 rows are no number of equal ones.
    assert rows(8200, 12) == 1664
    for arch, r in ((100, request(T=8192)), (90, request(T=8192, dtype=FP16)), (90, request(T=8192, K=64))):
        assert not isinstance(forward_on(arch, r).transitions, TransitionsHopperConfig)
    assert not isinstance(choose_forward(metadata(request(T=8192)), INTERPRETED).transitions, TransitionsHopperConfig)


def test_a_prefill_is_cut_from_fewer_rows_on_than_a_training_step():
    assert [forward_on(90, request(T=T)).segment_rows for T in (3071, 3072, 3100)] == [0, 512, 544]
    assert [forward_on(90, request(T=3072, H=H)).segment_rows for H in (8, 12, 16, 17)] == [512, 768, 768, 0]
    assert forward_on(90, request(T=4095, save_for_backward=True)).segment_rows == 0
    assert backward_on(90, backward(T=4095)).segment_rows == 0


@pytest.mark.parametrize(("T", "H", "overlaps"), [(2048, 12, True), (8192, 32, True), (8192, 4, False)])
def test_the_recurrence_overlaps_prepare_alone(T: int, H: int, overlaps: bool):
    """It reads initial states before it waits; of segments another kernel writes them."""
    launches = plan_of(request(T=T, H=H), CHIPS[90]).launches
    assert [x.kernel.__name__ for x in launches if x.constants.get("launch_pdl")] == ["recurrence_hopper"] * overlaps
    assert launches[-1].kernel.__name__ == "recurrence_hopper"
    assert (launches[-2].kernel.__name__ == "prepare_hopper") == overlaps


@pytest.mark.parametrize(("fields", "early"), [
    ({}, ["recurrences_hopper", "gradients_hopper_persistent"]),
    ({"H": 33}, []),  # larger ones lose by it
    ({"T": 2080}, ["recurrences_hopper"]),  # the table of pairs is written between
    ({"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}, []),
    ({"T": 4096, "H": 4}, []),  # segments
    # Rows are loaded before the kernel ahead ends, which copies them here.
    ({"q": torch.empty(1, 2048, 12, 129, dtype=BF16, device="meta")[..., :128]}, ["recurrences_hopper"]),
])  # fmt: skip
def test_kernels_of_a_small_backward_start_early(fields: dict[str, Any], early: list[str]):
    launches = plan_of(backward(**{"T": 2048, "H": 12, "safe_gate": True} | fields), CHIPS[90]).launches
    assert [x.kernel.__name__ for x in launches if x.constants.get("launch_pdl")] == early


def test_segments_of_one_length_are_a_batch():
    """Others are packed sequences, whose boundaries are written."""
    even, odd = (as_segments(metadata(request(T=T)), 512) for T in (4096, 4100))
    assert (even.B, even.T, even.N, even.cu_seqlens) == (8, 512, 8, None)
    assert (even.q.shape, even.q.strides) == ((8, 512, 4, 128), (512 * 512, 512, 128, 1))
    assert (even.beta.shape, even.beta.strides) == ((8, 512, 4), (512 * 4, 4, 1))
    assert (odd.B, odd.T, odd.N) == (1, 4100, 9)
    assert even.state_v_first
    assert even.initial_state is None


def test_what_is_saved_of_segments_does_not_depend_on_the_chip():
    """States at their starts, with room for as many as any chip has; none for calls that are never cut."""
    assert starts_shape(metadata(request(T=8192))) == (11, 4, 128, 128)
    assert starts_shape(metadata(request(T=8192, H=16))) == (4, 16, 128, 128)
    assert starts_shape(metadata(request(T=10**6, H=1))) == (66, 1, 128, 128)
    one, three = ({"cu_seqlens": torch.empty(N + 1, dtype=torch.int32, device="meta")} for N in (1, 3))
    assert [starts_shape(metadata(request(T=8192, **more)))[0] for more in ({"B": 2}, one)] == [20, 20]
    never: list[dict[str, Any]] = [{"T": 4095}, {"H": 17}, {"B": 5}, {"K": 64}, {"dtype": FP16}, three]
    for other in (*never, {"disable_recompute": True}, {"batch_invariant": True}):
        assert starts_shape(metadata(request(**({"T": 8192} | other)))) == (), other
    for T, H in ((4096, 1), (8256, 3), (10**6, 16), (10**6, 1)):
        r = request(T=T, H=H)
        assert -(-T // forward_on(90, r).segment_rows) <= starts_shape(metadata(r))[0]
    for T in (1, 8256):
        assert saved_slots(metadata(request(T=T, batch_invariant=True))) == -(-T // 32)


def test_wide_heads_run_by_turns_or_by_halves():
    """Half of the batch, else half of the heads, where half fills the chip."""
    assert backward_on(90, backward(B=4, H=64, K=256)).turns == (slice(0, 2), slice(2, 4))
    assert backward_on(90, backward(B=4, H=16, K=256)).turns == WHOLE
    assert backward_on(90, backward(B=4, H=64, K=128)).turns == WHOLE
    assert len(backward_on(90, backward(B=1, H=256, K=256)).halves) == 2
    assert backward_on(90, backward(B=1, H=64, K=256)).halves == ()
    assert all(half.halves == () for half in backward_on(90, backward(B=1, H=256, K=256)).halves)


def test_which_calls_the_gradients_for_hopper_take():
    """By dtypes and head dimensions; in turns and halves of wide heads, too."""

    def hopper(arch: int = 90, **fields: Any) -> list[bool]:
        choice = backward_on(arch, backward(**fields))
        return [isinstance(x.gradients, GradientsHopperConfig) for x in (choice, *choice.halves)]

    assert hopper(T=96) == hopper(K=256) == hopper(B=4, H=64, K=256) == hopper(T=70, H=1) == [True]
    assert hopper(H=256, K=256) == [True] * 3
    for plain in ({"K": 64}, {"K": 192}, {"V": 64}, {"K": 256, "V": 128}, {"dtype": FP16}, {"arch": 100}):
        assert hopper(**plain) == [False], plain


def test_gradients_read_large_calls_through_descriptors():
    many = backward(T=4096, B=2, H=32)
    assert backward_on(90, many).descriptors
    assert backward_on(90, many).tokens
    assert not backward_on(80, many).descriptors
    assert not backward_on(90, backward()).descriptors
    assert backward_on(90, backward(), many=0).descriptors
    assert not backward_on(90, backward(T=70), many=0).tokens


def test_gradients_take_pairs_of_slots():
    """With a bfloat16 gate and heads that are not grouped, where there are enough of them."""

    def kind(arch: int = 90, **fields: Any) -> type:
        return type(backward_on(arch, backward(**({"T": 4096} | fields))).gradients)

    assert kind() is GradientsHopperConfig
    assert kind(H=16) is GradientsPersistentConfig
    assert kind(safe_gate=True) is GradientsPersistentConfig
    assert kind(T=64, safe_gate=True) is GradientsPersistentConfig
    assert kind(T=64, H=8, B=128) is GradientsHopperConfig, "a sequence's bits do not depend on the others"
    assert kind(T=16384) is GradientsPersistentConfig, "in segments, of one length"
    assert kind(80) is GradientsConfig
    assert kind(K=64) is GradientsConfig
    packed = torch.empty(129, dtype=torch.int32, device="meta")
    for taken in ({"T": 4096 + 32}, {"T": 8200}, {"cu_seqlens": packed[:2]}, {"cu_seqlens": packed[:33]}):
        assert kind(safe_gate=True, H=32, **taken) is GradientsPersistentConfig, taken
        assert kind(H=64, **taken) is GradientsPersistentConfig, taken
        assert kind(H=8, **taken) is GradientsHopperConfig, "decays of any strength"
    assert kind(T=8200, H=16) is GradientsPersistentConfig, "in segments, packed"
    assert kind(T=8192, H=96, cu_seqlens=packed) is GradientsPersistentConfig
    wide_gate = torch.empty(1, 4096, 4, 128, dtype=FP32, device="meta")
    few_heads = torch.empty(1, 4096, 2, 128, dtype=BF16, device="meta")
    others: list[dict[str, Any]] = [
        {"T": 1000, "H": 32},
        {"H": 64, "cu_seqlens": packed},
        {"T": 31, "H": 2048},
        {"H": 4, "cu_seqlens": packed[:2]},
        {"H": 32, "cu_seqlens": packed[:1]},
        {"g": wide_gate},
        {"q": few_heads, "k": few_heads},
    ]
    others += [{"T": T, "H": 64, "batch_invariant": True} for T in (8192, 8200)]
    others = [{"safe_gate": True} | other for other in others]
    for other in others:
        assert kind(**other) is GradientsHopperConfig, other


def test_bounded_decays():
    """Promised, or by a bound of the gate of at least −5; only bfloat16 can use them."""

    def bounded(**options: Any) -> bool:
        return plan_of(request(**options), CHIPS[90]).launches[0].constants["BOUNDED"]

    gate = {"use_gate_in_kernel": True, "A_log": torch.empty(4, device="meta")}
    assert bounded(safe_gate=True)
    assert bounded(lower_bound=-5.0, **gate)
    assert not bounded(lower_bound=-5.5, safe_gate=True, **gate)
    assert not bounded(safe_gate=True, dtype=FP16)
    assert not bounded(**gate)


def test_which_calls_the_prepare_for_hopper_takes():
    """By dtypes and head dimension; from a sequence's company, from heads and from strides nothing follows."""

    def hopper(arch: int = 90, **fields: Any) -> bool:
        first = choose_forward(metadata(request(**fields)), CHIPS[arch]).prepare
        kinds = [first, choose_backward(metadata(backward(**fields)), CHIPS[arch]).prepare]
        taken = [isinstance(kind, PrepareHopperConfig) for kind in kinds]
        assert len(set(taken)) == 1, "both runs of a training step"
        return taken[0]

    g = torch.empty(1, 64, 17, 128, dtype=FP32, device="meta")
    bounds = torch.empty(9, dtype=torch.int64, device="meta")
    shapes = {"B": 3}, {"T": 1}, {"T": 100_000}, {"V": 64}, {"H": 1}, {"H": 500}
    for taken in ({}, {"g": g}, {"cu_seqlens": bounds}, {"K": 256}, *shapes):
        assert hopper(**({"H": 17} | taken)), taken
    for plain in ({"K": 64}, {"K": 192}, {"dtype": FP16}, {"dtype": FP32}, {"T": 0}, {"arch": 100}):
        assert not hopper(**({"H": 17} | plain)), plain
    assert not isinstance(choose_forward(metadata(request(H=17)), INTERPRETED).prepare, PrepareHopperConfig)


def test_short_sequences():
    """By their mean length: kernels whose results have the same bits as others'."""

    def kinds(**fields: Any) -> tuple[bool, bool, bool]:
        fields = {"T": 48 * N, "H": 40, "cu_seqlens": bounds, "safe_gate": True} | fields
        choice = choose_forward(metadata(request(**fields)), CHIPS[90])
        return getattr(choice.prepare, "paired", False), choice.finishes, choice.recurrence.stages == 3

    N = 60
    bounds = torch.empty(N + 1, dtype=torch.int64, device="meta")
    # Decays without a bound as others.
    assert kinds() == kinds(safe_gate=False) == (True, True, True)
    assert kinds(T=48 * N + 1) == kinds(T=64 * N) == kinds(T=64 * N, safe_gate=False) == (False, True, True)
    assert kinds(T=64 * N + 1) == kinds(T=96 * N) == (True, False, True)
    assert kinds(T=96 * N + 1) == (False, False, False)
    # Few sequences and heads: a recurrence with its programs finishes them.
    assert kinds(H=4) == (True, False, True)
    assert kinds(H=5) == kinds(H=5, safe_gate=False) == (True, True, True)
    assert kinds(H=2, T=64 * N) == (True, False, True)
    assert kinds(H=3, T=64 * N) == (False, True, True)
    # Their keys are read by others.
    assert kinds(save_for_backward=True) == (True, True, True)
    assert kinds(save_for_backward=True, disable_recompute=True) == (True, False, True)
    assert kinds(V=64) == (True, False, False)
    # States are fetched ahead where they are float32, and there is room for them, whatever decays do.
    for dtype, gate, promised, ahead in (
        (FP32, BF16, True, True), (FP32, BF16, False, True), (BF16, BF16, True, False), (None, BF16, True, False),
        (FP32, FP32, True, False),
    ):  # fmt: skip
        state = None if dtype is None else torch.empty(N, 40, 128, 128, dtype=dtype, device="meta")
        g = torch.empty(1, 48 * N, 40, 128, dtype=gate, device="meta")
        r = request(T=48 * N, H=40, cu_seqlens=bounds, initial_state=state, g=g, safe_gate=promised)
        prepare = choose_forward(metadata(r), CHIPS[90]).prepare
        assert (prepare.ahead, prepare.registers == 255) == (ahead, ahead or gate == FP32)
    h = request(T=48 * N, H=40, cu_seqlens=bounds, return_intermediate_states=True)
    h = choose_forward(metadata(h), CHIPS[90])
    assert h.prepare.paired
    assert not h.finishes
    dense = [{"T": 32}, {"T": 33}, {"T": 32, "H": 33}]
    kernels = [plan_of(request(**({"B": 8, "H": 34} | fields)), CHIPS[90]).kernels for fields in dense]
    both = ("prepare_hopper", "recurrence_hopper")
    assert kernels == [("prepare_hopper",), both, both]


@pytest.mark.parametrize("name", ["q", "k", "g", "beta"])
def test_rows_that_bulk_copies_cannot_take_are_copied(name: str):
    r = request(B=2, H=17)
    x = getattr(r, name)
    longer = torch.empty(2, 70, *x.shape[2:], dtype=BF16, device="meta")[:, :64]
    plain, copied = (plan_of(replace(r, **{name: rows}), CHIPS[90]) for rows in (x, longer))
    assert plain.kernels == copied.kernels == ("prepare_hopper", "recurrence_hopper")
    assert (len(plain.steps), len(copied.steps)) == (2, 3)
    if name != "beta":
        assert len(plan_of(r, CHIPS[90], frozenset({name})).steps) == 3


def test_descriptors_only_where_the_chip_has_them():
    assert {arch: forward_on(arch, request()).descriptors for arch in (80, 89, 90, 100, 120)} == {
        80: False, 89: False, 90: True, 100: True, 120: True,
    }  # fmt: skip


@pytest.mark.parametrize("arch", sorted(CHIPS))
@pytest.mark.parametrize("heads", [1, 500])
def test_configurations_fit_their_sizes(arch: int, heads: int):
    for dtype, size in itertools.product((BF16, FP16, FP32), (1, 16, 60, 128, 200, 256)):
        assert prepare_config(size, dtype).block_k <= padded(size)
        config = recurrence_config(CHIPS[arch], dtype, size, size, heads)
        assert 16 <= config.block_v <= padded(size)
        back = backward_config(CHIPS[arch], dtype, padded(size), padded(size), heads)
        assert all(16 <= x.block_v <= padded(size) for x in (back.recurrences, back.gradients))
        assert 16 <= back.gradients.block_k <= padded(size)


def decode(N: int = 128, T: int = 1, **options: Any) -> Request:
    """A step of 32 heads on a pool in bfloat16."""
    r = request(B=N, T=T, H=32)
    state = torch.empty(N, 32, 128, 128, dtype=BF16, device="meta")
    return replace(r, op="fused_recurrent_kda", **({"initial_state": state, "inplace_final_state": True} | options))


def recurrent_on(arch: int, r: Request, *misaligned: str):
    return choose_recurrent(metadata(r, frozenset(misaligned)), CHIPS[arch])


def test_steps_of_many_states():
    """sm_90 has a kernel for bfloat16 states, K first, with aligned rows; more states are stored in parts."""
    assert recurrent_on(90, decode()).step.parts == 0
    assert recurrent_on(90, decode(256)).step.parts == 4
    assert recurrent_on(90, decode()).short is None
    state = torch.empty(128, 32, 128, 128, device="meta")
    others = [decode(7), decode(T=2), decode(state_v_first=True), decode(initial_state=state)]
    assert all(recurrent_on(90, r).step is None and recurrent_on(90, r).short for r in others)
    assert recurrent_on(100, decode()).step is None
    for name in ("q", "k", "g", "initial_state"):
        assert recurrent_on(90, decode(), name).step is None
    assert recurrent_on(90, decode(), "v").step is not None


def test_drafts_with_records():
    """sm_90 has a kernel for up to eight tokens; from float32 states for chains with aligned rows."""

    def draft(N: int = 3, T: int = 4, **options: Any) -> Request:
        records = torch.empty(N, T, 32, 384, device="meta")
        slots = torch.empty(N, dtype=torch.int32, device="meta")
        fields = {"update_state": False, "records": records, "ssm_state_indices": slots}
        return decode(N, T, **(fields | options))

    parents = torch.empty(3, 4, dtype=torch.int32, device="meta")
    half = torch.empty(3, 32, 128, 128, dtype=torch.float16, device="meta")
    committed = {"num_committed": torch.empty(3, dtype=torch.int32, device="meta")}
    many = committed | {"commit": torch.empty(3, 9, 32, 384, device="meta")}
    few = committed | {"commit": many["commit"][:, :8]}
    for r in (draft(), draft(T=1), draft(T=8), draft(state_v_first=True), draft(**few)):
        assert recurrent_on(90, r).draft
        assert recurrent_on(90, r).short is None
    full = {"initial_state": torch.empty(3, 32, 128, 128, device="meta")}
    own = draft(parents=parents), draft(**many)
    assert all(recurrent_on(90, r).draft for r in own)
    others = draft(T=9), draft(initial_state=half), *(replace(r, **full) for r in own)
    for r in others:
        assert not recurrent_on(90, r).draft
        assert recurrent_on(90, r).short is not None
    assert not recurrent_on(100, draft()).draft
    assert not recurrent_on(90, draft(), "initial_state").draft
    for name in ("q", "k", "g"):
        assert not recurrent_on(90, draft(**full), name).draft
        assert recurrent_on(90, draft(), name).draft
    assert recurrent_on(90, draft(**full), "v").draft


def test_tiles_of_decoding_do_not_depend_on_the_number_of_states():
    """With another tile sums are taken in another order, and a sequence's bits would show its company (FAILURES 28)."""
    for v_first, dtype in itertools.product((False, True), (FP32, BF16)):
        for K in (32, 64, 128, 256):
            tiles = set()
            for states in (1, 32, 64, 65, 512, 513, 1024, 1025, 4096, 10**6):
                c = recurrent_config(states, K, 128, v_first, dtype)
                # Stored V first, a row is summed on its own (test_aot shows that its layout stays the same).
                block_v = 0 if v_first and K == 128 else c.block_v
                tiles.add((block_v, c.num_warps, c.row_bytes))
            assert len(tiles) == 1, (v_first, dtype, K)


def test_a_scale_enters_float16_operands_where_they_have_digits():
    """As a power of two between 2⁻⁶ and 1; of smaller scales q times them would have few digits left."""
    for scale in (1e-5, -1e-4, 0.01, 0.0884, 0.9, 300.0):
        power, rest = split_scale(scale, FP16)
        assert 2.0**-6 <= power <= 1
        assert power * rest == scale
    assert split_scale(1e-4, BF16)[0] == 2.0**-13


def test_rows_of_no_token_have_no_descriptor():
    """The driver takes none of an empty matrix; packed calls without any token go the plain way."""
    assert row_aligned(metadata(request(T=32)).v)
    assert not row_aligned(metadata(request(T=0)).v)
