"""Bad input of every argument: refused with its name, what was expected and what came; nothing is written."""

from __future__ import annotations

import re

import pytest
import torch
from example_arguments import (
    HV,
    POOL,
    SLOTS,
    B,
    H,
    K,
    T,
    V,
    call_arguments,
    elsewhere,
    gate,
    packed,
    paged,
    speculative,
)
from torch import tensor, zeros
from toys import Watcher

import kda_core


def snapshots(**changes):
    return call_arguments(return_intermediate_states=True, **changes)


def kept(**changes):
    """Sequences of 128 tokens with two checkpoints each."""
    arguments = {n: t.repeat_interleave(26, 1)[:, :128] for n, t in call_arguments().items()}
    arguments |= {"initial_state": zeros(POOL), "ssm_state_indices": tensor([1, 3])}
    return {**arguments, "checkpoint_indices": tensor([[0, 2], [4, 5]]), "checkpoint_every": 64, **changes}


CHUNK, RECURRENT, GATE = "chunk_kda", "fused_recurrent_kda", "kda_gate"

BAD_CALLS = [
    # (name of the argument that the message begins with, error, call, arguments)
    ("q", TypeError, CHUNK, lambda: call_arguments(q=[1.0])),
    ("q", TypeError, CHUNK, lambda: call_arguments(q=None)),
    ("backend", TypeError, CHUNK, lambda: call_arguments(backend=["cpu"])),
    ("backend", TypeError, GATE, lambda: {"g": zeros(T, HV, K), "lower_bound": -1.0, "backend": 5}),
    ("backend", ValueError, RECURRENT, lambda: call_arguments(backend="")),
    ("scale", ValueError, CHUNK, lambda: call_arguments(scale=10**400)),
    ("pad_slot_id", ValueError, CHUNK, lambda: paged(pad_slot_id=10**20)),
    ("q", TypeError, CHUNK, lambda: call_arguments(q=zeros(B, T, H, K, dtype=torch.int32))),
    ("q", TypeError, CHUNK, lambda: call_arguments(q=zeros(B, T, H, K, dtype=torch.complex64))),
    ("q", TypeError, CHUNK, lambda: call_arguments(q=zeros(B, T, H, K).to_sparse())),
    ("q", ValueError, CHUNK, lambda: call_arguments(q=zeros(B, T, K))),
    ("q", ValueError, CHUNK, lambda: call_arguments(q=zeros(B, T, H, 0))),
    ("q", ValueError, CHUNK, lambda: call_arguments(q=zeros(B, T, 0, K))),
    ("k", ValueError, CHUNK, lambda: call_arguments(k=zeros(B, T, H, K + 1))),
    ("k", TypeError, CHUNK, lambda: call_arguments(k=zeros(B, T, H, K, dtype=torch.bfloat16))),
    ("k", ValueError, CHUNK, lambda: call_arguments(k=zeros(B, T, H, K, device="meta"))),
    ("v", TypeError, CHUNK, lambda: call_arguments(v=zeros(B, T, HV, V, dtype=torch.float64))),
    ("v", ValueError, CHUNK, lambda: call_arguments(v=zeros(B, T + 1, HV, V))),
    ("v", ValueError, CHUNK, lambda: call_arguments(v=zeros(B, T, 3, V))),
    ("v", ValueError, CHUNK, lambda: call_arguments(v=zeros(B, T, HV))),
    ("v", ValueError, CHUNK, lambda: call_arguments(v=zeros(B, T, HV, 0))),
    ("g", ValueError, CHUNK, lambda: call_arguments(g=zeros(B, T, H, K))),
    ("g", TypeError, CHUNK, lambda: call_arguments(g=zeros(B, T, HV, K, dtype=torch.int64))),
    ("beta", ValueError, CHUNK, lambda: call_arguments(beta=zeros(B, T, HV, 1))),
    ("beta", TypeError, CHUNK, lambda: call_arguments(beta=0.5)),
    ("scale", TypeError, CHUNK, lambda: call_arguments(scale="1")),
    ("scale", TypeError, CHUNK, lambda: call_arguments(scale=True)),
    ("scale", ValueError, CHUNK, lambda: call_arguments(scale=float("nan"))),
    ("chunk_size", ValueError, CHUNK, lambda: call_arguments(chunk_size=48)),
    ("chunk_size", TypeError, CHUNK, lambda: call_arguments(chunk_size=64.0)),
    ("output_final_state", TypeError, CHUNK, lambda: call_arguments(output_final_state=1)),
    ("state_v_first", TypeError, CHUNK, lambda: call_arguments(state_v_first=None)),
    ("use_qk_l2norm_in_kernel", TypeError, CHUNK, lambda: call_arguments(use_qk_l2norm_in_kernel="yes")),
    ("allow_neg_eigval", ValueError, CHUNK, lambda: call_arguments(allow_neg_eigval=True)),
    ("A_log", ValueError, CHUNK, lambda: call_arguments(**gate)),
    ("A_log", ValueError, CHUNK, lambda: call_arguments(A_log=zeros(HV))),
    ("A_log", ValueError, CHUNK, lambda: call_arguments(A_log=zeros(H), **gate)),
    ("A_log", TypeError, CHUNK, lambda: call_arguments(A_log=1.0, **gate)),
    ("dt_bias", ValueError, CHUNK, lambda: call_arguments(dt_bias=zeros(HV * K))),
    ("dt_bias", ValueError, CHUNK, lambda: call_arguments(A_log=zeros(HV), dt_bias=zeros(HV), **gate)),
    ("dt_bias", ValueError, CHUNK, lambda: call_arguments(lower_bound=-5.0, dt_bias=zeros(K, HV), **gate)),
    ("lower_bound", ValueError, CHUNK, lambda: call_arguments(lower_bound=5.0)),
    ("lower_bound", ValueError, CHUNK, lambda: call_arguments(lower_bound=0.0, **gate)),
    ("lower_bound", ValueError, CHUNK, lambda: call_arguments(lower_bound=5.0, **gate)),
    ("lower_bound", ValueError, CHUNK, lambda: call_arguments(lower_bound=-float("inf"), **gate)),
    ("lower_bound", TypeError, CHUNK, lambda: call_arguments(lower_bound="-5", **gate)),
    ("lower_bound", ValueError, CHUNK, lambda: call_arguments(A_log=zeros(HV), safe_gate=True, **gate)),
    ("initial_state", ValueError, CHUNK, lambda: call_arguments(initial_state=zeros(B, HV, V, K))),
    ("initial_state", ValueError, CHUNK, lambda: call_arguments(initial_state=zeros(B, HV, K, V), state_v_first=True)),
    ("initial_state", TypeError, CHUNK, lambda: call_arguments(initial_state=zeros(B, HV, K, V, dtype=torch.int32))),
    ("initial_state", TypeError, CHUNK, lambda: call_arguments(initial_state=zeros(B, HV, K, V, dtype=torch.float64))),
    ("initial_state", ValueError, CHUNK, lambda: packed(initial_state=zeros(1, HV, K, V))),
    ("cu_seqlens", ValueError, CHUNK, lambda: packed(cu_seqlens=tensor([1, 4, B * T]))),
    ("cu_seqlens", ValueError, CHUNK, lambda: packed(cu_seqlens=tensor([0, 5, 4]))),
    ("cu_seqlens", ValueError, CHUNK, lambda: packed(cu_seqlens=tensor([0, 4, B * T + 1]))),
    ("cu_seqlens", ValueError, CHUNK, lambda: packed(cu_seqlens=tensor([[0, 4, B * T]]))),
    ("cu_seqlens", ValueError, CHUNK, lambda: packed(cu_seqlens=zeros(0, dtype=torch.int64))),
    ("cu_seqlens", TypeError, CHUNK, lambda: packed(cu_seqlens=tensor([0.0, 4.0]))),
    ("cu_seqlens", TypeError, CHUNK, lambda: packed(cu_seqlens=[0, 4, B * T])),
    ("q", ValueError, CHUNK, lambda: call_arguments(cu_seqlens=tensor([0, 4]))),
    ("cu_seqlens_cpu", ValueError, CHUNK, lambda: call_arguments(cu_seqlens_cpu=tensor([0, 4]))),
    ("cu_seqlens_cpu", ValueError, CHUNK, lambda: packed(cu_seqlens_cpu=tensor([0, 4]))),
    ("cu_seqlens_cpu", ValueError, CHUNK, lambda: packed(cu_seqlens_cpu=tensor([0, 5, B * T]))),
    ("initial_state", ValueError, CHUNK, lambda: call_arguments(ssm_state_indices=tensor([0, 1]))),
    ("initial_state", ValueError, CHUNK, lambda: paged(state_v_first=True)),
    ("ssm_state_indices", ValueError, CHUNK, lambda: {**paged(), "ssm_state_indices": tensor([0])}),
    ("ssm_state_indices", ValueError, CHUNK, lambda: {**paged(), "ssm_state_indices": tensor([0, SLOTS])}),
    ("ssm_state_indices", ValueError, CHUNK, lambda: {**paged(), "ssm_state_indices": tensor([2, 2])}),
    ("ssm_state_indices", ValueError, CHUNK, lambda: {**paged(), "ssm_state_indices": zeros(B, 2, dtype=torch.int32)}),
    ("ssm_state_indices", TypeError, CHUNK, lambda: {**paged(), "ssm_state_indices": tensor([0.0, 1.0])}),
    ("initial_state", ValueError, CHUNK, lambda: {**paged(), "initial_state": zeros(1, HV, K, V).expand(POOL)}),
    ("pad_slot_id", TypeError, CHUNK, lambda: paged(pad_slot_id=None)),
    ("has_initial_state", TypeError, CHUNK, lambda: paged(has_initial_state=[True, False])),
    ("has_initial_state", TypeError, CHUNK, lambda: paged(has_initial_state=tensor([1, 0]))),
    ("has_initial_state", ValueError, CHUNK, lambda: paged(has_initial_state=tensor([True]))),
    ("has_initial_state", ValueError, CHUNK, lambda: paged(has_initial_state=zeros(B, device="meta").bool())),
    ("ssm_state_indices", ValueError, CHUNK, lambda: call_arguments(has_initial_state=tensor([True, False]))),
    ("ssm_state_indices", ValueError, CHUNK, lambda: call_arguments(update_state=False)),
    ("output_final_state", ValueError, CHUNK, lambda: paged(update_state=False, output_final_state=True)),
    ("intermediate_states_dtype", TypeError, CHUNK, lambda: snapshots(intermediate_states_dtype="float32")),
    ("intermediate_states_dtype", TypeError, CHUNK, lambda: snapshots(intermediate_states_dtype=torch.float64)),
    ("intermediate_states_dtype", TypeError, CHUNK, lambda: snapshots(intermediate_states_dtype=torch.int32)),
    ("intermediate_states_dtype", ValueError, CHUNK, lambda: call_arguments(intermediate_states_dtype=torch.float32)),
    ("checkpoint_indices", TypeError, CHUNK, lambda: kept(checkpoint_indices=zeros(B, 2))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([0, 2]))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([[0, 2]]))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: paged(checkpoint_every=64)),
    ("checkpoint_indices", ValueError, CHUNK, lambda: paged(checkpoint_pool=zeros(POOL))),
    ("checkpoint_every", TypeError, CHUNK, lambda: kept(checkpoint_every=64.0)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=0)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=-64)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=8)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=72)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=2**63)),
    ("checkpoint_every", ValueError, CHUNK, lambda: kept(checkpoint_every=96, return_intermediate_states=True)),
    ("checkpoint_pool", ValueError, CHUNK, lambda: kept(update_state=False)),
    ("checkpoint_pool", ValueError, CHUNK, lambda: kept(checkpoint_pool=zeros(SLOTS, HV, V, K))),
    ("checkpoint_pool", TypeError, CHUNK, lambda: kept(checkpoint_pool=zeros(POOL).int())),
    ("initial_state", ValueError, CHUNK, lambda: (lambda a: {**a, "checkpoint_pool": a["initial_state"]})(kept())),
    ("ssm_state_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([[0, 3], [2, 4]]))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([[0, 2], [0, 4]]))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([[0, 0], [2, 4]]))),
    ("checkpoint_indices", ValueError, CHUNK, lambda: kept(checkpoint_indices=tensor([[0, SLOTS], [2, 4]]))),
    (
        "ssm_state_indices",
        ValueError,
        CHUNK,
        lambda: snapshots(checkpoint_indices=tensor([[0], [2]]), checkpoint_every=64),
    ),
    ("update_state", TypeError, CHUNK, lambda: paged(update_state=0)),
    ("final_state_indices", TypeError, CHUNK, lambda: paged(final_state_indices=[0, 1])),
    ("final_state_indices", TypeError, CHUNK, lambda: paged(final_state_indices=tensor([0.0, 1.0]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([0]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([0, 1], device="meta"))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=zeros(B, 2, dtype=torch.int32))),
    ("final_state_indices", ValueError, RECURRENT, lambda: paged(final_state_indices=zeros(B, 2, dtype=torch.int32))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([0, SLOTS]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([0, 0]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([3, 0]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_indices=tensor([0, 2]), update_state=False)),
    ("ssm_state_indices", ValueError, CHUNK, lambda: call_arguments(final_state_indices=tensor([0, 1]))),
    ("final_state_indices", ValueError, CHUNK, lambda: paged(final_state_pool=zeros(POOL))),
    ("final_state_pool", TypeError, CHUNK, lambda: elsewhere(final_state_pool=zeros(POOL).double())),
    ("final_state_pool", ValueError, CHUNK, lambda: elsewhere(final_state_pool=zeros(SLOTS, HV, V, K))),
    ("final_state_pool", ValueError, CHUNK, lambda: elsewhere(final_state_pool=zeros(POOL, device="meta"))),
    ("final_state_pool", ValueError, CHUNK, lambda: elsewhere(final_state_pool=zeros(1, HV, K, V).expand(POOL))),
    ("final_state_indices", ValueError, CHUNK, lambda: elsewhere(final_state_pool=zeros(2, HV, K, V))),
    (
        "final_state_pool",
        ValueError,
        CHUNK,
        lambda: (lambda a: {**a, "final_state_pool": a["initial_state"]})(elsewhere()),
    ),
    (
        "ssm_state_indices",
        ValueError,
        CHUNK,
        lambda: {**paged(update_state=False), "ssm_state_indices": tensor([0, SLOTS])},
    ),
    ("out", ValueError, CHUNK, lambda: call_arguments(out=zeros(B, T, H, V))),
    ("out", TypeError, CHUNK, lambda: call_arguments(out=zeros(B, T, HV, V, dtype=torch.float64))),
    ("out", ValueError, CHUNK, lambda: call_arguments(out=zeros(1, T, HV, V).expand(B, T, HV, V))),
    ("out", ValueError, CHUNK, lambda: (lambda a: {**a, "out": a["v"]})(call_arguments())),
    ("initial_state", ValueError, RECURRENT, lambda: call_arguments(inplace_final_state=True)),
    (
        "num_accepted_tokens",
        ValueError,
        RECURRENT,
        lambda: call_arguments(num_accepted_tokens=torch.ones(B, dtype=torch.int32)),
    ),
    ("num_accepted_tokens", ValueError, RECURRENT, lambda: speculative(num_accepted_tokens=tensor([0, 1]))),
    ("num_accepted_tokens", ValueError, RECURRENT, lambda: speculative(num_accepted_tokens=tensor([1, 4]))),
    ("num_accepted_tokens", ValueError, RECURRENT, lambda: speculative(num_accepted_tokens=tensor([1]))),
    ("num_accepted_tokens", TypeError, RECURRENT, lambda: speculative(num_accepted_tokens=tensor([1.0, 1.0]))),
    ("ssm_state_indices", ValueError, RECURRENT, lambda: {**paged(), "num_accepted_tokens": tensor([1, 1])}),
    ("ssm_state_indices", ValueError, RECURRENT, lambda: speculative(ssm_state_indices=tensor([[0, 1], [2, 3]]))),
    ("ssm_state_indices", ValueError, RECURRENT, lambda: speculative(ssm_state_indices=tensor([[0, 1, 1], [3, 4, 5]]))),
    ("ssm_state_indices", ValueError, RECURRENT, lambda: speculative(ssm_state_indices=tensor([[0, 1, 2], [3, 2, 5]]))),
    ("lower_bound", ValueError, RECURRENT, lambda: call_arguments(lower_bound=5.0)),
    ("g", ValueError, GATE, lambda: {"g": zeros(3), "lower_bound": -1.0}),
    ("g", TypeError, GATE, lambda: {"g": 3.0, "lower_bound": -1.0}),
    ("A_log", ValueError, GATE, lambda: {"g": zeros(T, HV, K)}),
    ("A_log", ValueError, GATE, lambda: {"g": zeros(T, HV, K), "A_log": zeros(2, HV)}),
    ("dt_bias", ValueError, GATE, lambda: {"g": zeros(T, HV, K), "A_log": zeros(HV), "dt_bias": zeros(K, HV)}),
    ("dt_bias", ValueError, GATE, lambda: {"g": zeros(T, HV, K), "lower_bound": -1.0, "dt_bias": zeros(HV)}),
    ("lower_bound", ValueError, GATE, lambda: {"g": zeros(T, HV, K), "lower_bound": 1.0}),
]


def case_id(case):
    return f"{case[2]}-{case[0]}-{case[1].__name__}"


@pytest.mark.parametrize(("argument", "error", "op", "make"), BAD_CALLS, ids=map(case_id, BAD_CALLS))
def test_bad_input_is_refused_before_any_backend_runs(argument, error, op, make):
    """FAILURES 30: shapes are checked before the choice; nothing is written."""
    arguments = make()
    before = {
        name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor) and t.device.type == "cpu"
    }
    with Watcher() as calls, pytest.raises(error, match=rf"^{argument}: expected .*, got ") as caught:
        getattr(kda_core, op)(**arguments)
    assert type(caught.value) is error
    assert calls == []
    for name, t in before.items():
        torch.testing.assert_close(
            arguments[name].to_dense() if t.is_sparse else arguments[name], t.to_dense() if t.is_sparse else t
        )


@pytest.mark.parametrize(("argument", "error", "op", "make"), BAD_CALLS, ids=map(case_id, BAD_CALLS))
def test_explain_refuses_the_same_bad_input(argument, error, op, make):
    with pytest.raises(error, match=rf"^{argument}: expected "):
        kda_core.explain(**make(), op=op)


def test_the_message_holds_both_shapes():
    with pytest.raises(
        ValueError, match=re.escape("k: expected shape [B, T, H, K] of q = [2, 5, 2, 8], got [2, 5, 2, 7]")
    ):
        kda_core.chunk_kda(**call_arguments(k=torch.zeros(B, T, H, K - 1)))


@pytest.mark.parametrize("name", ["out", "ssm_state_indices", "return_intermediate_states"])
def test_what_has_no_gradient_is_refused_where_one_is_needed(name):
    arguments = paged() if name == "ssm_state_indices" else call_arguments()
    arguments["q"].requires_grad_()
    extra = {"out": torch.empty(B, T, HV, V), "return_intermediate_states": True}
    if name in extra:
        arguments[name] = extra[name]
    with pytest.raises(ValueError, match=rf"^{name}: expected no gradient"):
        kda_core.chunk_kda(**arguments)
    with pytest.raises(ValueError, match=rf"^{name}: expected no gradient"):
        kda_core.explain(**arguments)
    with torch.no_grad():
        kda_core.chunk_kda(**arguments)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("leaf", [True, False])
def test_out_that_needs_a_gradient_is_refused(op, leaf):
    """Its history would become the result's, whose gradient would be a lie."""
    out = torch.zeros(B, T, HV, V, requires_grad=True)
    out = out if leaf else 1 * out
    with pytest.raises(ValueError, match=r"^out: expected no gradient"):
        getattr(kda_core, op)(**call_arguments(), out=out)
    assert not out.any()


def test_empty_sequences_at_the_end_change_nothing():
    arguments = packed(cu_seqlens=torch.tensor([0, 4, B * T, B * T]))
    o, _ = kda_core.chunk_kda(**arguments)
    expected, _ = kda_core.chunk_kda(**packed())
    torch.testing.assert_close(o, expected, rtol=0, atol=0)


def test_skipped_rows_may_share_the_padding_index():
    arguments = {**paged(), "ssm_state_indices": torch.tensor([SLOTS + 5, SLOTS + 5]), "pad_slot_id": SLOTS + 5}
    with torch.no_grad():
        o, _ = kda_core.chunk_kda(**arguments)
    assert not o.any()


@pytest.mark.parametrize("slots", [[[-1, 3, 3], [3, 4, 5]], [[-1, 99, 3], [3, 4, 5]]])
def test_what_stands_in_a_skipped_row_is_not_looked_at(slots):
    """Padded tables of slots keep old entries behind the one that says so."""
    arguments = speculative(ssm_state_indices=torch.tensor(slots))
    with torch.no_grad():
        o, _ = kda_core.fused_recurrent_kda(**arguments)
    assert not o[0].any()
    assert arguments["initial_state"].flatten(1).any(1).tolist() == [slot in slots[1] for slot in range(SLOTS)]
    accepted = {"num_accepted_tokens": torch.tensor([2, 1])}
    arguments = speculative(ssm_state_indices=torch.tensor([[-1, 3, 2], [3, 4, 5]]), **accepted)
    with pytest.raises(ValueError, match=r"^ssm_state_indices: expected every slot in one sequence only"):
        kda_core.fused_recurrent_kda(**arguments)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(0,), (0, 1), (0, 3)])
def test_no_sequence_leaves_a_pool_as_it_is(backend, shape):
    """A rank of a server that has nothing to decode makes the call all the same."""
    pool = torch.randn(POOL)
    before = pool.clone()
    slots = torch.zeros(shape, dtype=torch.int32)
    arguments = {name: t[:0, :1] for name, t in call_arguments().items()}
    with torch.no_grad():
        o, _ = kda_core.fused_recurrent_kda(**arguments, initial_state=pool, ssm_state_indices=slots, backend=backend)
        assert o.shape == (0, 1, HV, V)
        if shape != (0, 3):
            nothing = packed(cu_seqlens=torch.tensor([0]), initial_state=pool, ssm_state_indices=slots)
            o, _ = kda_core.chunk_kda(**nothing, backend=backend)
            assert not o.any()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_pool_without_slots_where_every_row_is_skipped(backend):
    slots = torch.tensor([-1, -1])
    with torch.no_grad():
        o, _ = kda_core.fused_recurrent_kda(
            **call_arguments(), initial_state=torch.zeros(0, HV, K, V), ssm_state_indices=slots, backend=backend
        )
    assert not o.any()


def test_a_bias_by_head_and_channel_is_one_in_a_row():
    """Every backend gets [HV, K], whichever of the two was given."""
    given = {"use_gate_in_kernel": True, "A_log": zeros(HV)}
    bias = torch.randn(HV, K)
    with Watcher() as calls:
        for t in (bias, bias.flatten()):
            kda_core.chunk_kda(**call_arguments(dt_bias=t, **given))
    assert all(torch.equal(r.dt_bias, bias) for r in calls)
    assert len(calls) == 2
