"""Choosing a backend: names, priority, availability, capabilities, explanations, wrappers, errors."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Toy, Watcher, inputs, installed

import kda_core
from kda_core import _signature
from kda_core._plugins import Registry
from kda_core._signature import _OPTIONS, _TENSORS, Same, signature
from kda_core.capabilities import Feature, Slack, Unavailable
from kda_core.hookspecs import ENTRY_POINT_GROUP, hookimpl, hookspec
from kda_core.request import BackwardResult, GateRequest, Request


def test_the_highest_priority_that_accepts_serves_in_any_order_of_registration():
    high, low = Toy("high", 2000, value=2.0), Toy("low", 1500, value=1.0)
    for order in ((high, low), (low, high)):
        with installed(*order):
            assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [2.0]
            assert kda_core.explain(*inputs()).chosen == "high"
    fussy = Toy("fussy", 3000, reject="not today")
    with installed(fussy, low):
        assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [1.0]
        assert "fussy: refused (not today)" in str(kda_core.explain(*inputs()))


def test_a_named_backend_never_falls_back(monkeypatch):
    fussy = Toy("fussy", reject="not today")
    with installed(fussy):
        with pytest.raises(kda_core.UnsupportedCall, match="'fussy' cannot serve this call: not today"):
            kda_core.chunk_kda(*inputs(), backend="fussy")
        with kda_core.use_backend("fussy"), pytest.raises(kda_core.UnsupportedCall, match="not today"):
            kda_core.chunk_kda(*inputs())
        monkeypatch.setenv("KDA_BACKEND", "fussy")
        with pytest.raises(kda_core.UnsupportedCall, match="not today"):
            kda_core.chunk_kda(*inputs())
        assert kda_core.explain(*inputs()).chosen is None


def test_argument_beats_context_beats_environment(monkeypatch):
    a, b, c = (Toy(n, None, value=x) for n, x in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    with installed(a, b, c):
        monkeypatch.setenv("KDA_BACKEND", "a")
        assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [1.0]
        with kda_core.use_backend("b"):
            assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [2.0]
            assert kda_core.chunk_kda(*inputs(), backend="c")[0].unique().tolist() == [3.0]
        assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [1.0]
        monkeypatch.setenv("KDA_BACKEND", "")
        assert kda_core.explain(*inputs()).chosen not in ("a", "b", "c")


def test_a_backend_without_priority_serves_only_when_named():
    with installed(Toy("shy", None)):
        explanation = kda_core.explain(*inputs())
        assert explanation.chosen != "shy"
        assert [v.reason for v in explanation.verdicts if v.backend == "shy"] == ["only when named"]
        assert kda_core.explain(*inputs(), backend="shy").chosen == "shy"


def test_unknown_names_say_what_is_installed_and_how_to_install_known_wheels():
    with pytest.raises(kda_core.BackendNotFound, match=r"'nope' is not installed .*reference"):
        kda_core.chunk_kda(*inputs(), backend="nope")
    with pytest.raises(kda_core.BackendNotFound), kda_core.use_backend("nope"):
        pass
    with pytest.raises(kda_core.BackendNotFound):
        kda_core.explain(*inputs(), backend="nope")
    empty = Registry(entry_points=())
    with pytest.raises(kda_core.BackendNotFound, match=r"pip install \./backends/cpu in a checkout"):
        empty.named("cpu")


def test_a_call_that_nobody_serves_lists_every_backend_with_its_reason():
    toy = Toy("toy", dtypes=(torch.float16,), availability=Unavailable("its driver is too old"))
    with installed(toy), FakeTensorMode(), pytest.raises(kda_core.UnsupportedCall) as caught:
        kda_core.chunk_kda(*(torch.empty(t.shape, device="xpu") for t in inputs()))
    text = str(caught.value)
    assert "no backend can serve this call" in text
    assert "toy: unavailable (serves tensors on cpu, not on xpu)" in text
    assert "reference: unavailable (" in text
    with installed(toy), pytest.raises(kda_core.UnsupportedCall, match="its driver is too old"):
        kda_core.chunk_kda(*inputs(), backend="toy")


def test_capabilities_are_compared_before_the_backend_is_asked():
    reason = "its matrix unit has no room for it"
    toy = Toy("toy", max_head_dim=4, closed={Feature.VARLEN: reason})
    with installed(toy):
        for call, expected in (
            ({"cu_seqlens": torch.tensor([0, 3])}, rf"does not serve packed sequences \(cu_seqlens\): {reason}"),
            ({"output_final_state": True}, "does not serve a final state"),
        ):
            with pytest.raises(kda_core.UnsupportedCall, match=expected):
                kda_core.chunk_kda(*inputs(), **call, backend="toy")
        with pytest.raises(kda_core.UnsupportedCall, match=r"does not take float64 \(takes float32\)"):
            kda_core.chunk_kda(*inputs(dtype=torch.float64), backend="toy")
        with pytest.raises(kda_core.UnsupportedCall, match="head dimensions K up to 4, not 8"):
            kda_core.chunk_kda(*inputs(K=8), backend="toy")
        assert toy.rejections == []


def test_another_object_is_no_context():
    with pytest.raises(TypeError, match=r"^cp_context: expected a context of .*, got object"):
        kda_core.chunk_kda(*inputs(), cp_context=object())


def test_the_choice_is_cached_by_signature_and_forgotten_when_backends_change():
    toy = Toy("toy", 5000)
    with installed(toy):
        for _ in range(3):
            kda_core.chunk_kda(*inputs())
        assert len(toy.rejections) == 1
        kda_core.chunk_kda(*inputs(T=4))
        kda_core.chunk_kda(*inputs(), scale=0.25)
        transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs()]
        with pytest.raises(kda_core.UnsupportedCall, match="not contiguous"):
            kda_core.chunk_kda(*transposed, backend="toy")
        assert len(toy.rejections) == 3
        with installed(Toy("better", 6000, value=7.0)):
            assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [7.0]
        assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [1.0]


def test_calls_of_two_kinds_in_turn_keep_their_own_backends():
    """The last choice is tried first, and only for its like."""
    with installed(Toy("short", 5000, reject=None, max_head_dim=4, value=2.0)), installed(Toy("long", 4000)):
        for _ in range(3):
            assert kda_core.chunk_kda(*inputs(K=4))[0].unique().tolist() == [2.0]
            assert kda_core.chunk_kda(*inputs(K=8))[0].unique().tolist() == [1.0]
            assert kda_core.chunk_kda(*inputs(K=4), backend="long")[0].unique().tolist() == [1.0]


@pytest.mark.parametrize("scale", [torch.tensor([0.5, 0.25]), torch.tensor(0.5), "0.5"])
def test_a_value_that_does_not_compare_is_refused_by_name_after_a_call_that_was_served(scale):
    with installed(Toy("toy", 5000)):
        for _ in range(3):
            kda_core.chunk_kda(*inputs(), scale=0.5)
        with pytest.raises(TypeError, match="scale: expected a number"):
            kda_core.chunk_kda(*inputs(), scale=scale)


def test_the_cache_stays_bounded():
    own = Registry(entry_points=(), most_choices=4)
    own.register(Toy("toy"))
    q, k, v, g, beta = inputs()
    for n in range(10):
        own.choose(Request(op="chunk_kda", q=q, k=k, v=v, g=g, beta=beta, scale=float(n)), "toy")
        assert 0 < len(own._choices) <= 4


def test_an_exception_in_a_hook_is_never_taken_for_a_refusal():
    """FAILURES 30."""
    for toy in (Toy("bad", 9000, reject=RuntimeError("boom")), Toy("bad", 9000, value=RuntimeError("boom"))):
        with installed(toy), pytest.raises(RuntimeError, match="boom"):
            kda_core.chunk_kda(*inputs())


def test_an_exception_in_reject_names_the_backend_and_the_hook():
    reason = "backend 'bad': kda_core_reject failed: ValueError: boom"
    with installed(Toy("bad", 9000, reject=ValueError("boom")), Toy("good", 8000)):
        for ask in (kda_core.chunk_kda, kda_core.explain):
            with pytest.raises(kda_core.ContractViolation) as caught:
                ask(*inputs())
            assert str(caught.value) == reason
            assert isinstance(caught.value.__cause__, ValueError)
        explanation = kda_core.explain(*inputs(), backend="good")
        assert explanation.chosen == "good"
        assert f"bad: broken ({reason})" in str(explanation)


def test_a_backend_whose_availability_raises_is_unavailable_and_others_serve():
    class Careless(Toy):
        @hookimpl
        def kda_core_availability(self, device):
            raise ValueError("boom")

    with installed(Careless("bad", 9000), Toy("good", 8000, value=3.0)):
        assert kda_core.chunk_kda(*inputs())[0].unique().tolist() == [3.0]
        assert kda_core.default_device() == torch.device("cpu")
        reason = "kda_core_availability failed: ValueError: boom"
        assert f"bad: unavailable ({reason})" in str(kda_core.explain(*inputs()))
        with pytest.raises(kda_core.UnsupportedCall, match=f"backend 'bad' cannot serve this call: {reason}"):
            kda_core.chunk_kda(*inputs(), backend="bad")


def test_breaking_the_contract_while_serving_is_an_error():
    with installed(Toy("toy", 9000, value=None)), pytest.raises(kda_core.ContractViolation, match="returned None"):
        kda_core.chunk_kda(*inputs())
    with installed(Toy("toy", 9000, reject=True)), pytest.raises(kda_core.ContractViolation, match="kda_core_reject"):
        kda_core.chunk_kda(*inputs())
    with (
        installed(Toy("toy", 9000, availability=None)),
        pytest.raises(kda_core.ContractViolation, match="expected Available"),
    ):
        kda_core.chunk_kda(*inputs())
    toy = Toy("toy", 9000, features=(Feature.CHUNK, Feature.BACKWARD), gradients=BackwardResult({}))
    with installed(toy):
        q, *rest = inputs()
        o, _ = kda_core.chunk_kda(q.clone().requires_grad_(), *rest)
        with pytest.raises(kda_core.ContractViolation, match="no gradient of q"):
            o.sum().backward()


def test_saving_something_else_than_announced_is_an_error():
    toy = Toy("toy", 9000, features=(Feature.CHUNK, Feature.BACKWARD), saved=(torch.zeros(3, 2),))
    with installed(toy):
        q, *rest = inputs()
        with pytest.raises(kda_core.ContractViolation, match=r"saved tensors of \[\(\(3, 2\), .* says \[\]"):
            kda_core.chunk_kda(q.clone().requires_grad_(), *rest)


def test_the_backward_goes_to_the_forwards_backend():
    toy = Toy("toy", None, features=(Feature.CHUNK, Feature.BACKWARD))
    q, *rest = inputs()
    q = q.clone().requires_grad_()
    with installed(toy):
        with kda_core.use_backend("toy"):
            o, _ = kda_core.chunk_kda(q, *rest)
        o.sum().backward()
    assert q.grad.unique().tolist() == [1.0]


def test_wrappers_see_every_call_and_may_be_taken_out():
    with installed(Toy("toy", 9000)):
        kda_core.chunk_kda(*inputs())
        with Watcher() as seen:
            kda_core.chunk_kda(*inputs())
            kda_core.chunk_kda(*inputs(), backend="reference")
        kda_core.chunk_kda(*inputs())
    assert [request.op for request in seen] == ["chunk_kda", "chunk_kda"]


def test_slack_needs_a_reason_and_a_factor_above_one():
    with pytest.raises(ValueError, match="reason"):
        Slack("o", None, 2.0, " ")
    with pytest.raises(ValueError, match="factor"):
        Slack("o", None, 1.0, "none needed")


def test_explain_knows_wheels_that_are_not_installed():
    fresh = Registry(entry_points=())
    from kda_core.request import Request

    q, k, v, g, beta = inputs()
    explanation = fresh.explain(Request(op="chunk_kda", q=q, k=k, v=v, g=g, beta=beta, scale=1.0), None)
    assert explanation.chosen is None
    assert {v.backend: v.reason for v in explanation.verdicts}[
        "cpu"
    ] == "pip install ./backends/cpu in a checkout of kda-core"
    assert str(explanation).startswith("chunk_kda: no backend can serve this call")


def test_explain_takes_the_calls_arguments_and_names_the_op():
    assert kda_core.explain(*inputs(), op="fused_recurrent_kda").op == "fused_recurrent_kda"
    assert kda_core.explain(torch.zeros(3, 2, 4), lower_bound=-1.0, op="kda_gate").op == "kda_gate"
    assert kda_core.explain(torch.zeros(3, 2, 4), None, None, -1.0, "reference", op="kda_gate").chosen == "reference"
    with pytest.raises(ValueError, match="op: expected"):
        kda_core.explain(*inputs(), op="attention")
    with pytest.raises(TypeError, match="nonsense"):
        kda_core.explain(*inputs(), nonsense=1)


def test_supports_gives_the_verdict_of_the_call_and_its_reason():
    with installed(Toy("fussy", 3000, reject="not today")):
        assert kda_core.supports("chunk_kda", *inputs(), backend="reference") == (True, "")
        answer = kda_core.supports("chunk_kda", *inputs(), backend="fussy")
        with pytest.raises(kda_core.UnsupportedCall) as refused:
            kda_core.chunk_kda(*inputs(), backend="fussy")
        assert answer == (False, str(refused.value))
        wrong = kda_core.supports("chunk_kda", *inputs(), chunk_size=16, backend="reference")
        assert wrong == (False, "chunk_size: expected one of (32, 64), got 16")
        unknown = kda_core.supports("fused_recurrent_kda", *inputs(), slots=None)
        assert not unknown[0]
        assert "unexpected keyword argument 'slots'" in unknown[1]
        for op in ("kda", None):
            with pytest.raises(ValueError, match="op: expected one of chunk_kda"):
                kda_core.supports(op, *inputs())
        with pytest.raises(kda_core.BackendNotFound):
            kda_core.supports("chunk_kda", *inputs(), backend="nope")


def test_a_verdict_is_asked_for_once_and_forgotten_when_backends_change():
    asked = []

    class Asked(Toy):
        @hookimpl
        def kda_core_reject(self, request):
            asked.append(request)
            return "not today"

    with installed(Asked("asked")):
        for _ in range(3):
            assert not kda_core.supports("chunk_kda", *inputs(), backend="asked")[0]
            assert kda_core.supports("chunk_kda", *inputs(), backend="reference")[0]
            with pytest.raises(kda_core.UnsupportedCall, match="not today"):
                kda_core.chunk_kda(*inputs(), backend="asked")
        assert len(asked) == 1
        with installed(Toy("other")):
            assert not kda_core.supports("chunk_kda", *inputs(), backend="asked")[0]
        assert len(asked) == 2


def test_a_backend_that_breaks_the_contract_is_no_verdict():
    class Raising(Toy):
        @hookimpl
        def kda_core_reject(self, request):
            raise ValueError("boom")

    with installed(Raising("raising")), pytest.raises(kda_core.ContractViolation, match="kda_core_reject failed"):
        kda_core.supports("chunk_kda", *inputs(), backend="raising")


def test_every_hook_is_documented_and_implemented_by_the_oracle():
    from kda_core import hookspecs
    from kda_core.reference import ReferenceBackend

    hooks = [n for n in vars(hookspecs) if n.startswith("kda_core_")]
    assert len(hooks) == 21
    assert ENTRY_POINT_GROUP == "kda_core.backends.v1"
    assert hookspec is not None
    for name in hooks:
        text = getattr(hookspecs, name).__doc__
        assert "Fires" in text, name
        assert name in hookspecs.OPTIONAL_HOOKS or callable(getattr(ReferenceBackend, name)), name


@pytest.mark.parametrize(
    ("name", "right", "wrong"), [("output_final_state", True, 1), ("chunk_size", 64, 64.0), ("scale", 1.0, True)]
)
def test_a_wrong_type_is_refused_after_an_equal_value_was_served(name, right, wrong):
    """True == 1 == 1.0, and the choice is cached by the options' values."""
    for _ in range(3):
        kda_core.chunk_kda(*inputs(), **{name: right}, backend="reference")
    with pytest.raises(TypeError, match=f"^{name}: expected"):
        kda_core.chunk_kda(*inputs(), **{name: wrong}, backend="reference")


def request_with_everything():
    """A decoding step over a pool, every tensor its own; accepted counts and bounds are not given."""
    q, k, v, g, out = torch.randn(5, 4, 1, 2, 8).unbind(0)
    return Request(
        op="fused_recurrent_kda", q=q.clone(), k=k.clone(), v=v.clone(), g=g.clone(), beta=torch.rand(4, 1, 2),
        scale=0.5, A_log=torch.zeros(2), dt_bias=torch.zeros(2, 8), initial_state=torch.zeros(9, 2, 8, 8),
        ssm_state_indices=torch.arange(4), out=out.clone(), use_gate_in_kernel=True, inplace_final_state=True,
        chunk_size=64,
    )  # fmt: skip


class Wrapped(torch.Tensor):
    """A subclass, of which nobody knows what it is."""


OTHERS = {
    "dtype": lambda t: t.to(torch.int16), "shape": lambda t: torch.cat([t, t]), "rank": lambda t: t[None],
    "strides": lambda t: torch.stack([t, t], -1).select(-1, 0), "device": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(Wrapped), "absent": lambda t: None, "no tensor": lambda t: t.tolist(),
}  # fmt: skip


@pytest.mark.parametrize("name", _TENSORS[Request])
def test_a_call_with_another_tensor_has_another_key(name):
    r = request_with_everything()
    key = signature(r, None)
    fresh = {n: t.clone() for n, t in vars(r).items() if isinstance(t, torch.Tensor)}
    assert signature(replace(r, **fresh), None) == key, "as it is"
    assert signature(r, "toy") != key
    given = getattr(r, name)
    others = {"present": torch.zeros(3)} if given is None else {what: make(given) for what, make in OTHERS.items()}
    for what, other in others.items():
        assert signature(replace(r, **fresh | {name: other}), None) != key, what


@pytest.mark.parametrize("name", _OPTIONS[Request])
def test_a_call_with_another_option_has_another_key(name):
    r = request_with_everything()
    key, value = signature(r, None), getattr(r, name)
    others: list = ["another", torch.ones(2), 0.25]
    if isinstance(value, (bool, int, float)):
        # Equal values of other types, too.
        others += [None, not value, *(kind(value) for kind in (bool, int, float) if kind is not type(value))]
    for other in others:
        assert signature(replace(r, **{name: other}), None) != key, other


def test_no_call_is_like_another_where_torch_has_no_guards():
    """Calls are told apart by their keys then, as calls of two kinds in turn are."""
    values = (torch.zeros(2), 0.5)
    assert Same(values, range(2))(values)
    same = Same(values, range(2), guards=lambda: None)
    assert not same.can_match
    assert same(values) is None


@pytest.mark.parametrize("kind", [Request, GateRequest])
def test_every_field_that_a_choice_may_depend_on_is_compared(kind):
    compared = {*_TENSORS[kind], *_OPTIONS[kind]}
    assert compared == {f.name for f in fields(kind)} - _signature.BACKWARD_ONLY - {"memo"}
