"""A decoding step of a layer in one call: beside its parts, sequence by sequence, and with bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toys

from kda_core import checked_calls, empty_records
from kda_core._plugins import registry
from kda_core.hookspecs import hookimpl
from kda_core.nn import _decode, kda_decode_step
from kda_core.testing.layer_steps import DRAFTS, STEPS, drafts_with_records, expected, step, with_slots

SLOTS = {"state_indices": torch.arange(3)}
RECORDED = SLOTS | {"records": empty_records(3, 1, 2, 32, 32)}
COMMIT = {
    "commit": empty_records(3, 2, 2, 32, 32).zero_(), "num_committed": torch.tensor([0, 2, 1]),
    "commit_inputs": torch.zeros(3, 2, 192),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_is_its_parts(name: str, backend: str):
    """Twice: the second call of a kind is not checked like the first."""
    o, state, conv_state = expected(step(name))
    for call in (step(name), step(name)):
        before = {n: t.clone() for n, t in call.items() if isinstance(t, torch.Tensor)}
        found = kda_decode_step(**call, backend=backend)
        exact = torch.finfo(call["mixed_qkv"].dtype).eps
        torch.testing.assert_close(found, o, rtol=20 * exact, atol=20 * exact)
        own = torch.finfo(call["state"].dtype).eps
        torch.testing.assert_close(call["state"], state, rtol=20 * own, atol=2 * own)
        assert torch.equal(call["conv_state"], conv_state)
        others = [n for n in before if n not in ("state", "conv_state")]
        assert [n for n in others if not torch.equal(before[n], call[n])] == []


def test_skipped_sequences_and_other_slots_are_left_alone():
    """Slot 2 is the null slot of those who count from it, and holds NaN; so does the output."""
    call = step("one token")
    call |= {"state_indices": torch.tensor([4, -1, 2]), "pad_slot_id": 2}
    for name in ("state", "conv_state"):
        call[name][[0, 1, 2, 3, 5]] = torch.nan
    kept = call["state"].clone(), call["conv_state"].clone()
    out = torch.full_like(call["norm_gate"], torch.nan)
    o = kda_decode_step(**call, out=out)
    assert o is out
    assert torch.equal(o[1:], torch.zeros_like(o[1:]))
    assert not o[0].isnan().any()
    for name, before in zip(("state", "conv_state"), kept, strict=True):
        others = [0, 1, 2, 3, 5, 6]
        assert torch.equal(call[name][others].nan_to_num(7), before[others].nan_to_num(7))
        assert not torch.equal(call[name][4], before[4])


def test_all_sequences_skipped():
    call = step("one token")
    call["state_indices"] = torch.tensor([-1, -1, -1])
    kept = call["state"].clone(), call["conv_state"].clone()
    assert not kda_decode_step(**call).any()
    assert torch.equal(call["state"], kept[0])
    assert torch.equal(call["conv_state"], kept[1])


def test_a_pool_without_slots():
    call = step("one token") | {"state_indices": torch.tensor([-1, -1, -1])}
    for name in ("state", "conv_state"):
        call[name] = call[name][:0]
    assert not kda_decode_step(**call).any()
    assert not kda_decode_step(**call | {"records": empty_records(3, 1, 2, 32, 32)} | COMMIT).any()
    with pytest.raises(ValueError, match=r"^state_indices: expected slots below 0"):
        kda_decode_step(**call | SLOTS)


def test_numpys_scalars_are_taken_for_pythons():
    given = {"scale": np.float32(0.5), "norm_eps": np.float32(0.25), "lower_bound": np.float64(-2), "pad_slot_id": np.int32(2)}  # fmt: skip # noqa: E501
    given |= {"allow_neg_eigval": np.True_, "state_v_first": np.False_}
    call, other = step("one token") | SLOTS, step("one token") | SLOTS
    o = kda_decode_step(**call | {name: value.item() for name, value in given.items()})
    assert torch.equal(kda_decode_step(**other | given), o)
    assert torch.equal(call["state"], other["state"])


def test_drafts_continue_from_the_accepted_token():
    """Three drafts, of which one or two are accepted, and the next step: as if only these had come."""
    call = step("one token", T=3)
    draft = with_slots(call, torch.arange(9).view(3, 3))
    draft["state"][::3], draft["conv_state"][::3] = call["state"][:3], call["conv_state"][:3]
    accepted = torch.tensor([1, 2, 3])
    by_token = ("mixed_qkv", "g", "beta", "norm_gate")
    kda_decode_step(**draft)
    following = {n: step("one token", seed=5)[n].unsqueeze(1) for n in by_token}
    o = kda_decode_step(**draft | following, num_accepted_tokens=accepted)
    for n, count in enumerate(accepted.tolist()):
        alone = {**call, "state": call["state"][n : n + 1].clone(), "conv_state": call["conv_state"][n : n + 1].clone()}
        kda_decode_step(**alone | {m: call[m][n : n + 1, :count] for m in by_token})
        plain = kda_decode_step(**alone | {m: following[m][n : n + 1] for m in by_token})
        torch.testing.assert_close(o[n : n + 1], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "slot"), [(-(2**63), 3), (0, 3), (2, 4), (2**40, 4)])
def test_a_count_that_nobody_reads_is_clamped(count: int, slot: int):
    """On a device no check sees it; less 1, the least number of 64 bits would be the largest."""
    table, accepted, pool = torch.tensor([[3, 4]]), torch.tensor([count]), torch.zeros(7, 1, 2, 2)
    call = {"indices": table, "accepted": accepted, "state": pool, "conv_state": torch.zeros(7, 3, 6)}
    _, first, _ = _decode._slots(SimpleNamespace(**call, x=torch.zeros(1, 2, 6), memo=None, pad_slot_id=-1))
    assert first.tolist() == [slot]


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_with_records_have_the_bits_of_a_slot_for_every_token(name: str):
    """Four drafts, of which 0 to 3 tokens are accepted, one after another; pools advance by accepted tokens alone."""
    for found, plain in drafts_with_records(name, "cpu"):
        assert torch.equal(found, plain)


def test_drafts_of_skipped_sequences_leave_their_slots_alone():
    call = step("one token", T=2) | {"state_indices": torch.tensor([4, -1, 2]), "pad_slot_id": 2}
    call |= {n: call[n].index_fill(0, torch.tensor([0, 1, 2, 3, 5]), torch.nan) for n in ("state", "conv_state")}
    kept = call["state"].clone(), call["conv_state"].clone()
    records, before = (empty_records(3, 2, 2, 32, 32).zero_() for _ in range(2))
    inputs = torch.randn(3, 2, 192)
    committed = {"commit": before, "num_committed": torch.tensor([1, 2, 2]), "commit_inputs": inputs}
    o = kda_decode_step(**call, records=records, **committed)
    assert not o.isnan().any()
    assert not o[1:].any()
    others = [0, 1, 2, 3, 5, 6]
    for name, old in zip(("state", "conv_state"), kept, strict=True):
        assert torch.equal(call[name][others].nan_to_num(7), old[others].nan_to_num(7))
    assert torch.equal(call["conv_state"][4], torch.cat([kept[1][4, 1:], inputs[0, :1]]))


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["slots", "drafts", "records"])
def test_one_graph_of_a_compiler(name: str):
    call = step("one token") | RECORDED | COMMIT if name == "records" else step(name)
    own = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    with torch.no_grad():
        found = torch.compile(kda_decode_step, fullgraph=True, backend="aot_eager")(**own)
    torch.testing.assert_close(found, kda_decode_step(**call))
    torch.testing.assert_close(own["state"], call["state"])
    assert torch.equal(own["conv_state"], call["conv_state"])


@pytest.mark.parametrize("name", ["one token", "records"])
def test_autocast_of_another_16_bit_dtype_changes_nothing(name: str):
    def bits(enabled: bool) -> list[torch.Tensor]:
        call = step("one token") | (RECORDED | COMMIT if name == "records" else {})
        halved = ("mixed_qkv", "conv_state", "commit_inputs")
        call |= {n: call[n].bfloat16() for n in halved if n in call}
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            return [kda_decode_step(**call), call["state"], call["conv_state"]]

    assert all(map(torch.equal, bits(True), bits(False)))


def test_meta_tensors_have_a_shape():
    call = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in step("drafts").items()}
    assert kda_decode_step(**call).shape == (3, 3, 2, 32)


@pytest.mark.parametrize(("N", "T"), [(0, 1), (0, 2), (3, 0)])
@pytest.mark.parametrize("slots", [None, [2, 0, 5]])
def test_nothing_to_do(N: int, T: int, slots: list[int] | None):
    call = step("one token")
    for n in ("mixed_qkv", "g", "beta", "norm_gate"):
        call[n] = call[n][:N, None].expand(N, T, *call[n].shape[1:])
    kept = {n: call[n].clone() for n in ("state", "conv_state")}
    call["state_indices"] = None if slots is None else torch.tensor(slots[:N], dtype=torch.int64)
    assert kda_decode_step(**call).shape == (N, T, 2, 32)
    if slots is not None:
        commit = empty_records(N, 2, 2, 32, 32).zero_(), torch.zeros(N, dtype=torch.int64), torch.zeros(N, 2, 192)
        kda_decode_step(
            **call, records=empty_records(N, T, 2, 32, 32),
            **dict(zip(("commit", "num_committed", "commit_inputs"), commit, strict=True)),
        )  # fmt: skip
    assert all(torch.equal(t, call[n]) for n, t in kept.items())


BLOCK = torch.zeros(7 * 2 * 32 * 32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "channels": ({"mixed_qkv": torch.zeros(3, 33)}, ValueError, "mixed_qkv: expected 2 · H"),
    "heads": ({"g": torch.zeros(3, 3, 32)}, ValueError, "mixed_qkv: expected 2 · H"),
    "weight": ({"conv_weight": torch.zeros(4, 4)}, ValueError, "conv_weight: expected shape"),
    "taps": ({"conv_weight": torch.zeros(192, 1)}, ValueError, "at least two taps"),
    "conv state": ({"conv_state": torch.zeros(7, 2, 192)}, ValueError, "conv_state: expected shape"),
    "half a norm": ({"norm_weight": None}, ValueError, "both or neither"),
    "gate's shape": ({"norm_gate": torch.zeros(3, 2, 31)}, ValueError, "norm_gate: expected shape"),
    "slots": ({"state_indices": torch.tensor([0, 1, 7])}, ValueError, "slots below 7"),
    "a slot twice": ({"state_indices": torch.tensor([0, 1, 1])}, ValueError, "^state_indices: .* one sequence only"),
    "float slots": ({"state_indices": torch.zeros(3)}, TypeError, "^state_indices: expected dtype"),
    "states of 64 bits": ({"state": torch.zeros(7, 2, 32, 32).double()}, TypeError, "^state: expected dtype"),
    "inputs of 8 bits": ({"mixed_qkv": torch.zeros(3, 192).to(torch.float8_e5m2)}, TypeError, "^mixed_qkv: expected"),
    "few states": (
        {"state": torch.zeros(2, 2, 32, 32), "conv_state": torch.zeros(2, 3, 192)},
        ValueError,
        "a slot for",
    ),
    "gradients": ({"conv_bias": torch.zeros(192, requires_grad=True)}, ValueError, "not differentiable"),
    "records without slots": ({"records": empty_records(3, 1, 2, 32, 32)}, ValueError, "^state_indices"),
    "records' shape": ({"records": empty_records(3, 2, 2, 32, 32), **SLOTS}, ValueError, "records: expected shape"),
    "records and slots of tokens": (
        {"records": empty_records(3, 1, 2, 32, 32), "state_indices": torch.arange(6).view(3, 2)},
        ValueError,
        "state_indices: expected",
    ),
    "a commit alone": (SLOTS | COMMIT, ValueError, "records: expected a tensor"),
    "no inputs": (RECORDED | COMMIT | {"commit_inputs": None}, ValueError, "commit, commit_inputs: expected both"),
    "inputs' shape": (
        RECORDED | COMMIT | {"commit_inputs": torch.zeros(3, 1, 192)},
        ValueError,
        "commit_inputs: expected shape",
    ),
    "inputs' dtype": (RECORDED | COMMIT | {"commit_inputs": torch.zeros(3, 2, 192).half()}, TypeError, "commit_inputs"),
    "too many accepted": (RECORDED | COMMIT | {"num_committed": torch.tensor([0, 3, 1])}, ValueError, "num_committed"),
    "out": ({"out": torch.zeros(3, 2, 32, dtype=torch.bfloat16)}, TypeError, "out: expected"),
    "out needs a gradient": ({"out": torch.zeros(3, 2, 32, requires_grad=True)}, ValueError, "out: kda_decode_step"),
    "eps": ({"norm_eps": -1.0}, ValueError, "norm_eps: expected a finite"),
    "eps is a flag": ({"norm_eps": True}, TypeError, "norm_eps: expected a number"),
    "conv state's memory": ({"conv_state": torch.zeros(1, 3, 192).expand(7, -1, -1)}, ValueError, "conv_state: exp"),
    "shared memory": (
        {"state": BLOCK.view(7, 2, 32, 32), "conv_state": BLOCK[: 7 * 3 * 192].view(7, 3, 192)},
        ValueError,
        "conv_state: expected memory of its own",
    ),
    "out in the inputs": (
        {"mixed_qkv": BLOCK[:576].view(3, 192), "out": BLOCK[:192].view(3, 2, 32)},
        ValueError,
        "^out: expected memory of its own",
    ),
    "out is the norm's gate": (
        {"norm_gate": (gate := torch.zeros(3, 2, 32)), "out": gate},
        ValueError,
        "^out: expected memory",
    ),
    "out's memory": ({"out": torch.zeros(1, 2, 32).expand(3, -1, -1)}, ValueError, "^out: expected memory of its own"),
    "the norm's gate in the state": (
        {"state": BLOCK.view(7, 2, 32, 32), "norm_gate": BLOCK[:192].view(3, 2, 32)},
        ValueError,
        "^state: expected memory of its own",
    ),
    "inputs of a commit in the conv state": (
        RECORDED | COMMIT | {"conv_state": BLOCK[:4032].view(7, 3, 192), "commit_inputs": BLOCK[:1152].view(3, 2, 192)},
        ValueError,
        "^conv_state: expected memory of its own",
    ),
    "a commit that is none": (RECORDED | COMMIT | {"commit": [1]}, TypeError, "^commit: expected a tensor"),
    "a commit's dimensions": (RECORDED | COMMIT | {"commit": torch.zeros(3, 2, 96)}, ValueError, "^commit: expected 4"),
    "inputs that are none": (RECORDED | COMMIT | {"commit_inputs": 3}, TypeError, "^commit_inputs: expected a tensor"),
    "a number": ({"mixed_qkv": 3}, TypeError, "mixed_qkv: expected a tensor"),
    "dimensions": ({"mixed_qkv": torch.zeros(192)}, ValueError, "mixed_qkv: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_before_anything_is_written(name: str):
    changed, error, message = WRONG[name]
    call = step("one token") | changed
    kept = {n: call[n].clone() for n in ("state", "conv_state")}
    with pytest.raises(error, match=message):
        kda_decode_step(**call)
    assert all(torch.equal(t, call[n]) for n, t in kept.items())


class Stepping(toys.Toy):
    """A backend with a step of its own, which looks at no slot."""

    steps = 0

    @hookimpl
    def kda_core_decode_step(self, request):
        request.memo["planned"] = True
        self.steps += 1
        return torch.zeros_like(request.norm_gate)


@pytest.mark.parametrize(
    "name", ["shared memory", "out in the inputs", "out is the norm's gate", "the norm's gate in the state"]
)
def test_repeated_steps_of_a_backend_compare_memory(name: str):
    changed, error, message = WRONG[name]
    shared = step("one token") | changed
    tensors = {n: t for n, t in shared.items() if isinstance(t, torch.Tensor)}
    apart = shared | {n: t.new_empty_strided(t.shape, t.stride()).copy_(t) for n, t in tensors.items()}
    with toys.installed(toy := Stepping("stepping", features=())):
        for _ in range(3):
            kda_decode_step(**apart)
        assert toy.steps == 3
        with pytest.raises(error, match=message):
            kda_decode_step(**shared)
    assert toy.steps == 3


@pytest.mark.parametrize("name", ["g", "conv_weight", "state", "state_indices", "norm_weight"])
def test_repeated_steps_of_a_backend_compare_devices(name: str):
    """A kernel would take the address for one of its own device."""
    call = step("one token") | SLOTS
    with toys.installed(toy := Stepping("stepping", features=())):
        kda_decode_step(**call)
        kda_decode_step(**call)
        with pytest.raises(ValueError, match=f"^{name}: expected .*cpu"):
            kda_decode_step(**call | {name: call[name].to("meta")})
    assert toy.steps == 2


def test_checked_calls_look_at_the_slots_of_a_step():
    """A backend's own step is no operator, and checks of a kind's first call are not made again."""
    with toys.installed(toy := Stepping("stepping", features=())):
        kda_decode_step(**step("one token") | SLOTS)
        past = step("one token") | {"state_indices": torch.tensor([0, 7, 1])}
        kda_decode_step(**past)
        call, plain = step("one token") | SLOTS, step("one token") | SLOTS
        with checked_calls():
            o = kda_decode_step(**call)
            with pytest.raises(ValueError, match=r"^state_indices: expected slots below 7"):
                kda_decode_step(**past)
        assert toy.steps == 2
    assert torch.equal(o, kda_decode_step(**plain))
    assert torch.equal(call["state"], plain["state"])


REPEATED = (
    "slots", "a slot twice", "too many accepted", "eps", "eps is a flag", "shared memory", "out in the inputs",
    "out is the norm's gate", "the norm's gate in the state", "inputs of a commit in the conv state",
)  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_a_later_call_of_a_kind_is_refused_like_the_first(name: str):
    """With layouts that were seen, and checked, with right values and in memory of their own."""
    call, messages = step("one token") | WRONG[name][0], []
    right = {"state_indices": torch.arange(3), "num_committed": torch.tensor([0, 2, 1]), "norm_eps": 1.0}
    tensors = {n: t for n, t in call.items() if isinstance(t, torch.Tensor)}
    apart = {n: t.new_empty_strided(t.shape, t.stride()).copy_(t) for n, t in tensors.items()}
    for calls_before in (0, 3):
        registry._forget_choices()
        for _ in range(calls_before):
            kda_decode_step(**call | apart | {n: value for n, value in right.items() if n in call})
        kept = {n: call[n].clone() for n in ("state", "conv_state")}
        with pytest.raises(WRONG[name][1]) as refused:
            kda_decode_step(**call)
        messages.append(str(refused.value))
        assert all(torch.equal(t, call[n]) for n, t in kept.items())
    assert messages[0] == messages[1]


@pytest.mark.parametrize("backend", ["cpu", "stepping"])
def test_a_kind_of_calls_has_devices_and_types(backend: str):
    """A backend's step took True for an eps of 1.0, and a tensor of another device for one of the first call's."""
    good = step("one token") | {"norm_eps": 1.0, "backend": backend}
    with toys.installed(Stepping("stepping", features=())):
        for _ in range(3):
            kda_decode_step(**good)
        with pytest.raises(TypeError, match=r"^norm_eps: expected a number"):
            kda_decode_step(**good | {"norm_eps": True})
        with pytest.raises(ValueError, match=r"^conv_weight: expected cpu"):
            kda_decode_step(**good | {"conv_weight": good["conv_weight"].to("meta")})
