"""KDA_CHECK and checked_calls(): wrong backends are caught, and right ones pass."""

from __future__ import annotations

import inspect
import os
import pickle
import random

import draft_mutants
import mutants
import pytest
import quiet_mutants
import torch
from checked import inputs, registered

import kda_core
from kda_core import CheckFailed, CheckWarning
from kda_core._bind import bind
from kda_core._plugins import registry
from kda_core.hookspecs import hookimpl
from kda_core.request import BackwardResult
from kda_core.testing.call_samples import Sample
from kda_core.testing.cases import select
from kda_core.testing.inputs import Call

NAN = float("nan")


pytestmark = pytest.mark.usefixtures("one_thread")


def states(n, K=16, V=8):
    return torch.randn(n, 4, K, V, generator=torch.Generator().manual_seed(1))


def failure_of(call, **settings):
    """The error that a checked call ends in."""
    with kda_core.checked_calls(**settings), pytest.raises(CheckFailed) as caught:
        call()
    return caught.value


def problems_of(call):
    """The findings of a checked call, by the argument or result that comes first in each sentence."""
    return {sentence.partition(":")[0]: sentence for sentence in failure_of(call).problems}


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_a_wrong_forward_is_caught_with_its_place_and_budget(op):
    with registered(mutants.OutputBeforeTheUpdate) as name, torch.no_grad():
        found = problems_of(lambda: getattr(kda_core, op)(**inputs(), output_final_state=True, backend=name))
    assert found.keys() == {"o"}
    assert "budget" in found["o"]
    assert "token" in found["o"]
    assert "head" in found["o"]


def test_one_wrong_row_is_found_where_it_is():
    with registered(mutants.OneWrongRow) as name, torch.no_grad():
        found = problems_of(lambda: kda_core.chunk_kda(**inputs(B=1), backend=name))
    assert "token 64 of sequence 0, head 0" in found["o"]


def test_a_wrong_gradient_is_caught_alone():
    x = inputs(grad=True)
    with registered(mutants.GroupedGradientOfOneHead) as name:
        o, _ = kda_core.chunk_kda(**x, backend=name)
        found = problems_of(lambda: o.sum().backward())
    assert found.keys() == {"dq"}


def test_the_message_names_the_call():
    with registered(mutants.ScaleIgnored) as name:
        error = failure_of(lambda: kda_core.chunk_kda(**inputs(), scale=0.5, backend=name))
    message = str(error)
    assert (error.op, error.backend, error.direction) == ("chunk_kda", name, "forward")
    assert "q: [2, 70, 2, 16] float32 on cpu" in message
    assert "scale=0.5" in message
    assert "compared: all of it" in message
    assert isinstance(error, kda_core.KdaError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.problems, str(copy)) == (error.problems, message)


def test_a_compiled_call_is_checked_inside_the_operator():
    x = inputs()
    with registered(mutants.ScaleIgnored) as name, torch.no_grad():
        compiled = torch.compile(
            lambda x: kda_core.chunk_kda(**x, scale=0.5, backend=name)[0], backend="aot_eager", fullgraph=True
        )
        compiled(x)
        assert problems_of(lambda: compiled(x)).keys() == {"o"}


def test_decoding_from_the_wrong_slot_is_caught():
    x, pool, slots = inputs(T=2), states(5), torch.tensor([[3, 1], [0, 4]])
    accepted = torch.tensor([2, 2])
    with registered(quiet_mutants.FirstSlotRead) as name, torch.no_grad():
        found = problems_of(
            lambda: kda_core.fused_recurrent_kda(
                **x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=accepted, backend=name
            )
        )
    assert found.keys() == {"o", "final_state"}
    assert "slot" in found["final_state"]


@mutants.answered
def checkpoint_slots_rounded(r, result):
    """Checkpoints are rounded, and slot 0 of their pool is written by nobody."""
    pool = getattr(r, r.checkpoint_states)
    pool[1:] *= 1.001
    pool[0] = 0


@pytest.mark.parametrize("apart", [False, True], ids=["in the pool", "in another pool"])
def test_wrong_checkpoints_are_caught(apart):
    x = inputs(T=128) | {"initial_state": states(6), "ssm_state_indices": torch.tensor([5, 4]), "checkpoint_every": 64}
    x |= {"checkpoint_indices": torch.tensor([[1, 2], [-1, 3]]), "checkpoint_pool": states(4) if apart else None}
    where = "checkpoint_pool" if apart else "initial_state"
    with torch.no_grad():
        with registered(checkpoint_slots_rounded) as name:
            found = problems_of(lambda: kda_core.chunk_kda(**x, backend=name))
        assert {"checkpoints", where} <= found.keys()
        assert "slot 0 changed" in found[where]
        with registered(quiet_mutants.checkpoint_at_the_end_forgotten) as name:
            found = problems_of(lambda: kda_core.chunk_kda(**x, backend=name))
    assert found.keys() == {"checkpoints"}
    assert "128 tokens of sequence" in found["checkpoints"]


@pytest.mark.parametrize("form", ["dense", "packed", "tree"])
def test_wrong_records_are_caught(form):
    x = inputs(B=1 if form == "packed" else 2, T=6) | {"initial_state": states(5)}
    x |= {"ssm_state_indices": torch.tensor([3, 0]), "records": kda_core.empty_records(*x["beta"].shape, 16, 8)}
    if form == "packed":
        x["cu_seqlens"] = torch.tensor([0, 4, 6])
    if form == "tree":
        x["parents"] = torch.tensor([[-1, 0, 0, 1, 1, -1], [-1, 0, 1, 2, 3, 4]])
    with registered(draft_mutants.records_one_token_off) as name, torch.no_grad():
        found = problems_of(lambda: kda_core.fused_recurrent_kda(**x, backend=name))
    assert found.keys() == {"records"}
    assert "of sequence" in found["records"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parents": [[-1, 0], [2, 0]]}, "parents: expected a token before token 0 of sequence 1"),
        ({"num_committed": [0, 3]}, "num_committed: expected values from 0 to 2"),
        ({"ssm_state_indices": [3, 5]}, "ssm_state_indices: expected slots below 5"),
    ],
    ids=["parents", "counts", "slots"],
)
def test_values_of_a_call_that_begins_with_a_commit_are_looked_at_before_it(changed, message):
    """As on a device, where nothing else looks at them."""
    x = inputs(T=2) | {"ssm_state_indices": torch.tensor([3, 0]), "num_committed": torch.tensor([1, 2])}
    x |= {"records": kda_core.empty_records(2, 2, 4, 16, 8), "commit": torch.ones(2, 2, 4, 40)}
    x |= {name: torch.tensor(value) for name, value in changed.items()} | {"initial_state": states(5)}
    request = Call("fused_recurrent_kda", x, {"update_state": False}).request()
    with kda_core.checked_calls(), pytest.raises(ValueError, match=message):
        registry.named("cpu").result("kda_core_recurrent_forward", request)
    assert torch.equal(x["initial_state"], states(5))


def test_a_slot_that_padding_wrote_is_caught():
    x, pool = inputs(T=1), states(5)
    with registered(quiet_mutants.PaddingSlotWritten) as name, torch.no_grad():
        found = problems_of(
            lambda: kda_core.fused_recurrent_kda(
                **x, initial_state=pool, ssm_state_indices=torch.tensor([2, -1]), backend=name
            )
        )
    assert found == {"initial_state": "initial_state: slot 4 changed, which this call must not write"}


def test_an_input_that_was_modified_is_caught():
    with registered(mutants.InputModified) as name, torch.no_grad():
        found = problems_of(lambda: kda_core.chunk_kda(**inputs(), backend=name))
    assert "the backend modified it" in found["v"]


def test_a_result_of_the_wrong_dtype_is_caught():
    state = states(2).bfloat16()
    with registered(mutants.WrongDtype) as name, torch.no_grad():
        found = problems_of(
            lambda: kda_core.chunk_kda(**inputs(), initial_state=state, output_final_state=True, backend=name)
        )
    expected = "final_state: expected [2, 4, 16, 8] bfloat16 on cpu, got [2, 4, 16, 8] float32 on cpu"
    assert found == {"final_state": expected}


def test_a_call_that_cannot_be_saved_is_reported_all_the_same(tmp_path):
    with registered(mutants.ScaleIgnored) as name:
        failure = failure_of(
            lambda: kda_core.chunk_kda(**inputs(), scale=0.5, backend=name), dump=tmp_path / "missing" / "call.pt"
        )
    assert failure.problems[0].startswith("o: relative error")
    assert "could not be saved in" in str(failure)


def test_padding_that_was_not_written_is_caught():
    x, out = inputs(B=1), torch.zeros(1, 70, 4, 8)
    with registered(mutants.PaddingUnwritten) as name, torch.no_grad():
        found = problems_of(
            lambda: kda_core.chunk_kda(**x, cu_seqlens=torch.tensor([0, 30, 60]), out=out, backend=name)
        )
    assert "row [0, 60], which belongs to no sequence" in found["o"]


def test_results_that_are_not_finite_are_located():
    x = inputs(B=1) | {"g": torch.full((1, 70, 4, 16), -5.0)}
    with registered(mutants.NaiveDecay) as name:
        failure = failure_of(lambda: kda_core.chunk_kda(**x, backend=name))
    assert "o: nan at [0, 0, 0, 0] (token 0 of sequence 0), 2240 of 2240 elements" in failure.problems[0]


class WrongGate(mutants.Mutant):
    """The gate is off by a hundredth, and so is its gradient for A_log."""

    @hookimpl
    def kda_core_gate_forward(self, request):
        return 1.01 * self.cpu.kda_core_gate_forward(request=request)

    @hookimpl
    def kda_core_gate_backward(self, request):
        grads = self.cpu.kda_core_gate_backward(request=request).grads
        return BackwardResult({n: t * (1.01 if n == "A_log" else 1) for n, t in grads.items()})


def test_a_wrong_gate_and_one_wrong_gradient_of_it_are_caught():
    g, A_log = inputs()["g"].requires_grad_(), torch.zeros(4, requires_grad=True)
    with registered(WrongGate) as name:
        y = kda_core.kda_gate(g, A_log, backend=name)
        assert problems_of(lambda: y.sum().backward()).keys() == {"dA_log"}
        assert problems_of(lambda: kda_core.kda_gate(g, A_log, backend=name)).keys() == {"gate"}


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta"])
def test_nan_in_an_input_is_located_before_the_call(argument):
    x, out = inputs(), torch.zeros(2, 70, 4, 8)
    index = (1, 33, 1, 2)[: x[argument].dim()]
    x[argument][index] = NAN
    x[argument][1, 50] = NAN
    with torch.no_grad():
        found = problems_of(lambda: kda_core.chunk_kda(**x, out=out, backend="cpu"))
    assert found.keys() == {argument}
    assert f"{argument}: nan at {list(index)} (token 33 of sequence 1)" in found[argument]
    assert not out.any()


def test_nan_is_located_in_packed_sequences_states_slots_and_gradients():
    x, cu_seqlens = inputs(B=1, grad=True), torch.tensor([0, 20, 20, 60])
    o, _ = kda_core.chunk_kda(**x, cu_seqlens=cu_seqlens, backend="cpu")
    grad = torch.zeros_like(o)
    grad[0, 25, 3, 1] = float("inf")
    found = problems_of(lambda: torch.autograd.grad(o, x["q"], grad))
    assert found.keys() == {"grad_o"}
    assert "inf at [0, 25, 3, 1] (token 5 of sequence 2), 1 of 2240" in found["grad_o"]
    with torch.no_grad():
        state = states(2)
        state[1, 2, 3, 4] = NAN
        found = problems_of(lambda: kda_core.chunk_kda(**inputs(), initial_state=state, backend="cpu"))
        assert "nan at [1, 2, 3, 4]" in found["initial_state"]
        pool = states(7)
        pool[0] = NAN  # nobody's: no fault
        pool[5, 1] = NAN
        found = problems_of(
            lambda: kda_core.fused_recurrent_kda(
                **inputs(T=1), initial_state=pool, ssm_state_indices=torch.tensor([2, 5]), backend="cpu"
            )
        )
        assert "(slot 5)" in found["initial_state"]


def test_what_the_contract_lets_be_infinite_or_anything_is_no_fault():
    with torch.no_grad(), kda_core.checked_calls():
        x = inputs(B=1)
        x["g"][0, 10] = -float("inf")
        x["v"][0, 60:] = NAN
        kda_core.chunk_kda(**x, cu_seqlens=torch.tensor([0, 30, 60]), backend="cpu")
        x = inputs(T=1)
        for t in x.values():
            t[1] = NAN  # the row of a sequence that is skipped
        kda_core.fused_recurrent_kda(
            **x, initial_state=states(3), ssm_state_indices=torch.tensor([2, -1]), backend="cpu"
        )
        raw = inputs()["g"]
        raw[0, 0, 0, 0], raw[1, 1] = float("inf"), -float("inf")
        kda_core.kda_gate(raw, torch.zeros(4), backend="cpu")


FEW = ("gradients",)
CASES = [pytest.param(c, id=c.name, marks=[] if c.name in FEW else pytest.mark.slow) for c in select("verify")]


@pytest.mark.parametrize("case", CASES)
def test_the_kits_cases_pass_on_the_cpu_backend(case):
    call = case.call()
    tensors = {n: t.clone().requires_grad_(bool(call.grads) and t.is_floating_point()) for n, t in call.tensors.items()}
    with kda_core.checked_calls():
        results = dict(zip(("o", "final_state", "h"), call(tensors, "cpu"), strict=False))
        if call.grads:
            torch.autograd.backward([results[n] for n in call.grads], list(call.grads.values()))


def test_decoding_over_pools_passes():
    slots, x = torch.tensor([3, -1]), inputs(T=1)
    with torch.no_grad(), kda_core.checked_calls():
        for layout in (False, True):
            pool = states(5, K=8 if layout else 16, V=16 if layout else 8).bfloat16()
            options = {"initial_state": pool, "state_v_first": layout, "backend": "cpu"}
            kda_core.fused_recurrent_kda(**x, ssm_state_indices=slots, **options)
            kda_core.chunk_kda(**inputs(), ssm_state_indices=slots[:, None], **options)
        drafts = torch.tensor([[4, 0, -1], [2, 1, 3]])
        for accepted in (None, torch.tensor([2, 1])):
            kda_core.fused_recurrent_kda(
                **inputs(T=3), initial_state=states(5), ssm_state_indices=drafts, num_accepted_tokens=accepted
            )
        kda_core.fused_recurrent_kda(**inputs(T=3), initial_state=states(2), inplace_final_state=True)
        packed = inputs(B=1, T=9)
        kda_core.fused_recurrent_kda(
            **packed,
            initial_state=states(5),
            ssm_state_indices=torch.tensor([1, 4, 0]),
            cu_seqlens=torch.tensor([0, 4, 4, 7]),
        )
        kda_core.fused_recurrent_kda(
            **packed, initial_state=states(5), ssm_state_indices=torch.tensor([-1]), out=torch.empty(1, 9, 4, 8)
        )


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_what_servers_ask_of_a_pool_passes(op):
    """Starts from zero over slots of NaN, outputs alone, states in other slots and in another pool of another dtype."""
    call, x, slots = getattr(kda_core, op), inputs(T=3), torch.tensor([2, 1])
    fresh, nowhere = torch.tensor([True, False]), {"backend": "cpu", "ssm_state_indices": slots}
    other = torch.full_like(states(6), float("nan")).bfloat16()
    with torch.no_grad(), kda_core.checked_calls():
        pool = states(5)
        pool[1] = float("nan")
        call(**x, initial_state=pool.clone(), has_initial_state=fresh, **nowhere)
        call(**x, initial_state=pool.clone(), has_initial_state=fresh, update_state=False, **nowhere)
        pool = states(5)
        call(**x, initial_state=pool, ssm_state_indices=slots[:1].expand(2), final_state_indices=torch.tensor([0, -1]))
        call(**x, initial_state=pool, final_state_indices=torch.tensor([5, 0]), final_state_pool=other, **nowhere)
        call(**x, initial_state=pool, has_initial_state=fresh, final_state_indices=torch.tensor([3, 4]), **nowhere)
        if op == "chunk_kda":
            kept = {"checkpoint_indices": torch.tensor([[0, 4], [-1, 3]]), "checkpoint_every": 64}
            call(**inputs(T=130), initial_state=pool, **kept, **nowhere)
            call(**inputs(T=130), initial_state=pool, checkpoint_pool=other, update_state=False, **kept, **nowhere)
        if op == "fused_recurrent_kda":
            drafts = torch.tensor([[4, 0, -1], [2, 1, 3]])
            call(**x, initial_state=pool, final_state_indices=drafts, final_state_pool=other, **nowhere)


@pytest.mark.parametrize(
    ("slots", "more"),
    [
        ([3, 9], {}),
        ([3, 3], {}),
        ([3, 1], {"final_state_indices": torch.tensor([1, 2])}),
        ([3, 1], {"final_state_indices": torch.tensor([2, 2])}),
        ([3, 1], {"final_state_indices": torch.tensor([0, 9])}),
        ([3, 9], {"update_state": False}),
    ],
)
def test_slots_on_a_device_are_looked_at(slots, more):
    """Under KDA_CHECK=1 as on the CPU; the router reads none on other devices."""
    arguments = {"initial_state": states(5), "ssm_state_indices": torch.tensor(slots), **more}
    with torch.no_grad(), kda_core.checked_calls():
        # As for a device: the router's own checks of values are left out.
        given = inspect.signature(kda_core.chunk_kda).bind(**inputs(), **arguments)
        given.apply_defaults()
        request = bind("chunk_kda", given.arguments)
        with pytest.raises(ValueError, match=r"_indices: expected"):
            registry.named("cpu").call("kda_core_chunk_forward", request=request)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_calls_without_a_token_or_a_sequence_pass(op):
    call = getattr(kda_core, op)
    with kda_core.checked_calls():
        for B, T in ((0, 5), (2, 0), (0, 0)):
            o, s = call(**inputs(B, T, grad=True), output_final_state=True)
            (o.sum() + s.sum()).backward()
        for boundaries in ([0], [0, 0, 0]):
            call(**inputs(1, 9), cu_seqlens=torch.tensor(boundaries), output_final_state=True)
        call(**inputs(2, 0), initial_state=torch.zeros(0, 4, 16, 8), ssm_state_indices=torch.tensor([-1, -1]))
        kda_core.kda_gate(torch.zeros(0, 4, 8), torch.zeros(4))


def test_modes_strides_and_dtypes_of_the_caller_make_no_difference():
    with kda_core.checked_calls():
        with torch.inference_mode():
            pool, slots = states(5), torch.tensor([3, 1])
            kda_core.fused_recurrent_kda(**inputs(2, 1), initial_state=pool, ssm_state_indices=slots)
        x = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in inputs(T=9).items()}
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            kda_core.chunk_kda(**x, backend="cpu")
        for dtype in (torch.bfloat16, torch.float16):
            x = {name: t.to(dtype).requires_grad_() for name, t in inputs(B=1, T=9).items()}
            with torch.autocast("cpu", dtype=torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
                o, _ = kda_core.chunk_kda(**x, cu_seqlens=torch.tensor([0, 4, 8]))
                o.sum().backward()
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            x = inputs(T=9)
            x |= {name: x[name].to(dtype).requires_grad_() for name in ("q", "k", "v")}
            o, _ = kda_core.chunk_kda(**x, chunk_size=32, disable_recompute=True)
            o[:, 3].sum().backward()  # the others get an expanded zero
        raw = torch.randn(3, 2, 5, 4, 8, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        kda_core.kda_gate(raw, torch.zeros(4), lower_bound=-5.0).sum().backward()
    with kda_core.checked_calls(elements=1024):  # some tokens of one head
        kda_core.kda_gate(raw, torch.zeros(4, requires_grad=True), torch.ones(32)).sum().backward()


def test_of_larger_calls_a_sample_passes_and_is_named():
    """One head, some sequences, or the first tokens; gradients that others add to are left out."""
    x = inputs(B=1, T=80, H=3, HV=6, grad=True)
    of_head, options = 2 * 16 * 8, {"output_final_state": True, "chunk_size": 32}
    for elements in (80 * of_head, 50 * of_head, 10 * of_head):
        with kda_core.checked_calls(elements=elements):
            o, s = kda_core.chunk_kda(**x, cu_seqlens=torch.tensor([0, 45, 45, 80]), **options)
            (o.sum() + s.sum()).backward()
        with kda_core.checked_calls(elements=elements), torch.no_grad():
            _, _, h = kda_core.chunk_kda(**x, **options, return_intermediate_states=True)
            assert h.shape[1] == 3
    with registered(mutants.ScaleIgnored) as name, torch.no_grad():
        failure = failure_of(lambda: kda_core.chunk_kda(**x, scale=0.5, backend=name), elements=10 * of_head)
    assert "of 6, sequences 0 of 1, their first 10 tokens" in str(failure)


def test_samples_move_and_stay_within_what_is_allowed():
    r = Call("chunk_kda", inputs(B=6, T=40, H=4, HV=8)).request()
    heads, sequences = set(), set()
    for seed in range(40):
        for elements in (240 * 256 * 2, 240 * 256, 90 * 256):
            sample = Sample(r, None, elements, random.Random(seed))
            width = sample.value_heads.stop - sample.value_heads.start
            assert sum(sample.lengths) * width * 16 * 8 <= elements
            heads.add(sample.heads.start)
            sequences.update(sample.sequences if not sample.whole else ())
    assert heads == {0, 1, 2, 3}
    assert sequences == set(range(6))


def test_a_warning_goes_on_with_the_result():
    warned = pytest.warns(CheckWarning, match="o: relative error")
    with registered(mutants.ScaleIgnored) as name, torch.no_grad(), kda_core.checked_calls(warn=True), warned:
        o, _ = kda_core.chunk_kda(**inputs(), scale=0.5, backend=name)
    assert o.shape == (2, 70, 4, 8)


def test_the_first_call_that_fails_is_saved_and_can_be_made_again(tmp_path):
    file, pool = tmp_path / "call-{pid}.pt", states(5)
    kept, slots = pool.clone(), torch.tensor([3, 1])
    with registered(mutants.NormIgnoredByDecoding) as name, torch.no_grad():
        options = {"use_qk_l2norm_in_kernel": True, "ssm_state_indices": slots, "backend": name}
        with kda_core.checked_calls(warn=True, dump=file):
            with pytest.warns(CheckWarning, match="saved in"):
                o, _ = kda_core.fused_recurrent_kda(**inputs(T=1), initial_state=pool, **options)
            with pytest.warns(CheckWarning, match=r"inplace_final_state=True$"):
                kda_core.fused_recurrent_kda(**inputs(T=1), scale=0.1, initial_state=pool, **options)
        saved = torch.load(tmp_path / f"call-{os.getpid()}.pt", weights_only=True)
        assert saved["problems"][0].startswith("o: relative error")
        assert torch.equal(saved["results"]["o"], o)
        assert torch.equal(saved["tensors"]["initial_state"], kept[[1, 3]])
        again, _ = getattr(kda_core, saved["op"])(**saved["tensors"], **saved["options"], backend=saved["backend"])
    assert torch.equal(again, o)


def test_a_gradient_that_fails_is_saved_with_what_it_started_from(tmp_path):
    x = inputs(grad=True)
    with registered(mutants.GroupedGradientOfOneHead) as name:
        o, _ = kda_core.chunk_kda(**x, backend=name)
        with kda_core.checked_calls(dump=tmp_path / "call.pt"), pytest.raises(CheckFailed):
            o.sum().backward()
    saved = torch.load(tmp_path / "call.pt", weights_only=True)
    tensors = {n: t.requires_grad_(n in saved["needs_grad"]) for n, t in saved["tensors"].items()}
    with registered(mutants.GroupedGradientOfOneHead) as name:
        o, _ = getattr(kda_core, saved["op"])(**tensors, **saved["options"], backend=name)
        o.backward(saved["grads"]["grad_o"])
    assert torch.equal(tensors["q"].grad, saved["results"]["dq"])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_intermediate_states_without_rows_are_no_failure(backend):
    """The check expected them without chunks."""
    q, k, v = torch.randn(3, 0, 70, 2, 4)
    with kda_core.checked_calls(), torch.no_grad():
        *_, h = kda_core.chunk_kda(q, k, v, q, q[..., 0], return_intermediate_states=True, backend=backend)
    assert h.shape == (0, 2, 2, 4, 4)
