"""The host side of ``kda_core.triton_lib``: layouts, arguments and segments, without triton and without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from environments import run

from kda_core.request import Request
from kda_core.triton_lib import arguments, layout, segments
from kda_core.triton_lib.calls import h_shape
from kda_core.triton_lib.plan import Builder, Copy
from kda_core.triton_lib.plan import layout as layout_of


def request(B: int = 2, T: int = 70, HV: int = 4, K: int = 24, V: int = 40, dtype=torch.bfloat16, **options) -> Request:
    """A forward of ``chunk_kda``, of which only the metadata matters."""
    qk = torch.empty(B, T, 2, K, dtype=dtype)
    v = torch.empty(B, T, HV, V, dtype=dtype)
    g = torch.empty(B, T, HV, K)
    return Request(op="chunk_kda", q=qk, k=qk, v=v, g=g, beta=g[..., 0], scale=1.0, **options)


def packed(*lengths: int, rest: int = 0, **options) -> Request:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return request(B=1, T=sum(lengths) + rest, cu_seqlens=bounds, **options)


@pytest.mark.end_to_end
def test_the_host_side_imports_no_triton():
    names = ", ".join(f"kda_core.triton_lib.{name}" for name in ("arguments", "layout", "plan", "segments"))
    code = f"import {names}, sys; print('triton' in sys.modules)"
    assert run(sys.executable, "-c", code).strip() == "False"


@pytest.mark.parametrize(("size", "expected"), [(1, 16), (16, 16), (17, 32), (100, 128), (128, 128), (256, 256)])
def test_padded(size: int, expected: int):
    assert layout.padded(size) == expected


def test_slots_of_dense_sequences_are_exact():
    assert layout.slots(request(B=3, T=70)) == 9
    assert layout.slots(request(B=3, T=0)) == 0


@pytest.mark.parametrize(
    ("lengths", "rest"), [((33, 0, 31, 32, 1), 0), ((1, 1, 1), 40), ((64,), 0), ((0, 0), 0), ((31, 33, 95), 5)]
)
def test_packed_slots_are_apart_and_below_the_bound(lengths: tuple[int, ...], rest: int):
    """slot(n, i) = cu_seqlens[n] // C + n + i, and "sequence" N is the rest."""
    call = packed(*lengths, rest=rest)
    first, taken = 0, []
    for n, length in enumerate((*lengths, rest)):
        taken += [first // layout.CHUNK + n + i for i in range(-(-length // layout.CHUNK))]
        first += length
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < layout.slots(call)


@pytest.mark.parametrize("size", [32, 64])
def test_shape_of_intermediate_states(size: int):
    state = (4, 24, 40)
    call = request(chunk_size=size, return_intermediate_states=True)
    assert h_shape(call) == (2, -(-70 // size), *state)
    lengths = (33, 0, 64, 65)
    call = packed(*lengths, chunk_size=size, state_v_first=True, return_intermediate_states=True)
    assert h_shape(call) == (1, sum(-(-x // size) for x in lengths), 4, 40, 24)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lower_bound": -5.0}, "none"),
        ({"use_gate_in_kernel": True}, "softplus"),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0}, "bounded"),
    ],
)
def test_gate_kind(options: dict, expected: str):
    assert arguments.gate_kind(request(**options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False), ({"safe_gate": True}, True), ({"safe_gate": True, "dtype": torch.float16}, False),
        ({"safe_gate": True, "dtype": torch.float32}, False), ({"safe_gate": True, "lower_bound": -6.0}, False),
        ({"use_gate_in_kernel": True}, False), ({"use_gate_in_kernel": True, "lower_bound": -5.0}, True),
        ({"use_gate_in_kernel": True, "lower_bound": -5.1}, False),
    ],
)  # fmt: skip
def test_decays_bounded(options: dict, expected: bool):
    assert arguments.decays_bounded(request(**options)) is expected


def test_rows_are_copied_only_where_they_must_be():
    x = torch.empty(2, 3, 4, 8)
    for same in (x, x[:, ::2], x[..., :3], x[..., :1].expand(2, 3, 4, 1), x.transpose(1, 2)):
        b, given = Builder(), layout_of("x", same)
        assert b.rows(given) is given
    for other in (x[..., ::2], x.transpose(2, 3), x[..., :1].expand(2, 3, 4, 8)):
        b, given = Builder(), layout_of("x", other)
        copy = b.rows(given)
        assert copy.is_contiguous()
        assert b.plan({"x": given}, {}).steps == (Copy(copy, given),)


def test_row_strides():
    x, y = torch.empty(2, 3, 4, 8), torch.empty(2, 5, 4, 8)
    rows = {"s_xt": 32, "s_xh": 8, "s_yt": 32, "s_yh": 8}
    assert arguments.row_strides(x=x, y=y) == (8, {"s_xb": 12, "s_yb": 20} | rows)
    assert arguments.row_strides(x=x, y=torch.empty(2, 3, 1))[1]["s_yb"] == 3
    assert arguments.row_strides(x=x, y=torch.empty(2, 3, 1))[0] == 1
    # The stride of a batch of one is not used.
    assert arguments.row_strides(x=x[:1], y=y[:1, :3]) == (8, {"s_xb": 0, "s_yb": 0} | rows)


@pytest.mark.parametrize("v_first", [False, True])
def test_state_strides(v_first: bool):
    """In the order (sequence, head, K, V), whatever the layout and the strides."""
    state = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)[:, :, ::2]
    s_n, s_h, s_k, s_v = arguments.state_strides(state, v_first)
    k, v = (3, 1) if v_first else (1, 3)
    element = state[1, 2, v, k] if v_first else state[1, 2, k, v]
    assert state.as_strided((), (), s_n + 2 * s_h + k * s_k + v * s_v) == element
    assert arguments.named_state_strides("f", state, v_first) == {"s_fn": s_n, "s_fh": s_h, "s_fk": s_k, "s_fv": s_v}
    assert arguments.state_strides(None, v_first) == (0, 0, 0, 0)


@pytest.mark.parametrize("v_first", [False, True])
def test_segments_are_packed_sequences_without_states(v_first: bool):
    state = torch.zeros(1, 4, 24, 40)
    call = request(B=1, T=200, initial_state=state, grad_final_state=state, state_v_first=not v_first)
    b = Builder()
    cut = segments.write_bounds(b, call, segments.packed_segments(call, 64, v_first), 64)
    (launch,) = b.plan({}, {}).launches
    assert (launch.name, launch.grid, launch.arguments["bounds"]) == ("segments_kernel", (5, 1, 1), cut.cu_seqlens)
    assert (cut.cu_seqlens.shape, cut.cu_seqlens.dtype) == ((5,), torch.int64)
    assert (cut.initial_state, cut.grad_final_state, cut.state_v_first) == (None, None, v_first)
    assert call.initial_state is state
