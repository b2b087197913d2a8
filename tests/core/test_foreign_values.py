"""Tensors that no operator takes are refused by name before anything runs; NumPy's scalars are taken for Python's."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from example_arguments import HV, SLOTS, B, K, T, V, call_arguments, gate, packed, paged, speculative
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Watcher

import kda_core
from kda_core._plugins import registry

# torch says of nested and quantized tensors that they may change.
pytestmark = pytest.mark.filterwarnings("ignore")


def nested(layout):
    return lambda t: torch.nested.nested_tensor(list(t.reshape(len(t), -1)), layout=layout)


# The value, how it is made of a plain tensor, and what the message calls it.
FOREIGN = {
    "jagged": (nested(torch.jagged), "a nested one with layout torch.jagged"),
    "nested": (nested(torch.strided), "a nested one with layout torch.strided"),
    "mkldnn": (lambda t: t.float().to_mkldnn(), "layout torch._mkldnn"),
    "coo": (lambda t: t.to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda t: t.reshape(len(t), -1).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), "a quantized one of qint8"),
    "masked": (lambda t: torch.masked.masked_tensor(t, t > 0), "a masked one"),
    "lazy": (lambda t: torch.nn.UninitializedParameter(requires_grad=False), "a parameter that has not been init"),
    "numpy": (lambda t: t.numpy(), "ndarray"),
}


def gated(**changes):
    return call_arguments(A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, K), **gate, **changes)


# A call for every tensor argument of every function.
CALLS = {
    "chunk_kda": [
        lambda: gated(initial_state=torch.zeros(B, HV, K, V), out=torch.zeros(B, T, HV, V)),
        lambda: packed(cu_seqlens_cpu=torch.tensor([0, 4, B * T])),
        paged,
    ],
    "fused_recurrent_kda": [
        lambda: gated(initial_state=torch.zeros(B, HV, K, V), out=torch.zeros(B, T, HV, V)),
        packed,
        lambda: speculative(num_accepted_tokens=torch.tensor([1, 2])),
    ],
    "kda_gate": [lambda: {"g": torch.zeros(B, T, HV, K), "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * K)}],
}
ARGUMENTS = [
    (op, name, make)
    for op, calls in CALLS.items()
    for first, make in enumerate(calls)
    for name, value in make().items()
    if isinstance(value, torch.Tensor) and not any(name in earlier() for earlier in calls[:first])
]


def test_every_tensor_argument_is_tried():
    names = {(op, name) for op, name, _ in ARGUMENTS}
    assert len(names) == len(ARGUMENTS) == 12 + 12 + 3


@pytest.mark.parametrize(("op", "name", "make"), ARGUMENTS, ids=[f"{op}-{name}" for op, name, _ in ARGUMENTS])
def test_a_tensor_that_no_operator_takes_is_refused_by_name(op, name, make):
    """After a call whose choice is cached; ``explain`` refuses the same."""
    arguments, function = make(), getattr(kda_core, op)
    before = {n: t.clone() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    with torch.no_grad():
        for _ in range(3):  # from the second call on the router knows calls like it
            function(**make())
    choices = dict(registry._choices)
    for kind, (convert, called) in FOREIGN.items():
        counts = name == "num_accepted_tokens" and kind in ("mkldnn", "quantized")
        foreign = convert(torch.ones(2) if counts else before[name].clone())
        for call in (function, lambda **given: kda_core.explain(**given, op=op)):
            with pytest.raises(TypeError, match=rf"^{name}: expected a .*tensor, got {re.escape(called)}") as caught:
                call(**{**arguments, name: foreign})
            assert type(caught.value) is TypeError
    assert registry._choices == choices
    for n, t in before.items():
        assert torch.equal(arguments[n], t), n


def test_a_nested_tensor_is_told_how_to_come_instead():
    q = torch.nested.nested_tensor([torch.zeros(3, 2, K), torch.zeros(5, 2, K)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^q: .* \(pack its sequences one behind the other, with cu_seqlens\)$"):
        kda_core.chunk_kda(**call_arguments(q=q))


def test_tensors_that_operators_take_are_not_refused():
    """Parameters, fake tensors and those of torch.func go on to the operators."""
    arguments = call_arguments()
    with torch.no_grad():
        expected, _ = kda_core.chunk_kda(**arguments)
        o, _ = kda_core.chunk_kda(**{**arguments, "q": torch.nn.Parameter(arguments["q"])})
        assert torch.equal(o, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        o, _ = kda_core.chunk_kda(**{name: mode.from_tensor(t) for name, t in arguments.items()})
        assert o.shape == expected.shape

    class Logged(torch.Tensor):
        """Goes on to the operators as a plain tensor, as those of many libraries do."""

    o, _ = kda_core.chunk_kda(**{**arguments, "k": arguments["k"].as_subclass(Logged)})
    assert torch.equal(o.as_subclass(torch.Tensor), expected)


def negative_view(t):
    """Equal to ``t``, but its memory holds the values with the other sign."""
    view = torch.complex(t, -t).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_backends_never_see_a_negative_view(op, name):
    """Kernels that read memory took its values with the wrong sign; the gradient goes through."""
    arguments = gated(initial_state=torch.ones(B, HV, K, V))
    arguments["A_log"], arguments["dt_bias"] = torch.linspace(-1, 0, HV), torch.linspace(-1, 1, HV * K)
    function = getattr(kda_core, op)
    with Watcher() as requests:
        with torch.no_grad():
            for _ in range(3):
                expected, _ = function(**arguments)
            found, _ = function(**{**arguments, name: negative_view(arguments[name])})
        torch.testing.assert_close(found, expected)
        given = arguments[name].clone().requires_grad_()
        found, _ = function(**{**arguments, name: negative_view(given)})
        (gradient,) = torch.autograd.grad(found.sum(), given)
        arguments[name] = arguments[name].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(function(**arguments)[0].sum(), arguments[name])
    torch.testing.assert_close(gradient, wanted)
    seen = [t for request in requests for t in vars(request).values() if isinstance(t, torch.Tensor)]
    assert len(seen) > 40
    assert not any(t.is_neg() for t in seen)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "kda_gate"])
def test_backends_never_see_a_negative_gradient(op):
    """Kernels that read memory took it with the wrong sign, in first and in repeated calls."""
    arguments = gated() if op != "kda_gate" else {"g": torch.randn(T, HV, K), "lower_bound": -4.0}
    arguments["g"].requires_grad_()
    with Watcher() as requests:
        for _ in range(4):
            results = getattr(kda_core, op)(**arguments)
            o = results if op == "kda_gate" else results[0]
            gradient = torch.randn_like(o)
            (wanted,) = torch.autograd.grad(o, arguments["g"], gradient, retain_graph=True)
            (found,) = torch.autograd.grad(o, arguments["g"], negative_view(gradient))
            assert torch.equal(found, wanted)
    seen = [t for request in requests for t in vars(request).values() if isinstance(t, torch.Tensor)]
    assert not any(t.is_neg() for t in seen)


def test_the_gate_of_a_negative_view():
    raw = torch.randn(T, HV, K)
    for _ in range(3):
        expected = kda_core.kda_gate(raw, lower_bound=-4.0)
    torch.testing.assert_close(kda_core.kda_gate(negative_view(raw), lower_bound=-4.0), expected)


@pytest.mark.parametrize("name", ["out", "initial_state"])
def test_a_negative_view_is_not_written_to(name):
    arguments = {**paged(), "out": torch.ones(B, T, HV, V)}
    given = negative_view(arguments[name])
    before = given.clone()
    with torch.no_grad(), pytest.raises(ValueError, match=rf"^{name}: expected .*, got a negative view"):
        kda_core.chunk_kda(**{**arguments, name: given})
    assert torch.equal(given, before)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("scale", [1e39, -1e39, 3.5e38, 10**40, 1e-39, -1e-45, 1e-300, float("inf"), float("nan")])
def test_a_scale_that_float32_cannot_hold_is_refused(op, scale):
    """It would be infinite, or lose its digits, where the output is scaled; float64 holds all but the last two."""
    function = getattr(kda_core, op)
    message = r"^scale: expected 0 or of a size from 1\.2e-38 to 3\.4e\+38, as float32 holds it, got "
    for dtype in (torch.float32, torch.bfloat16):
        data = {name: t.to(dtype) for name, t in call_arguments().items()}
        with pytest.raises(ValueError, match=message):
            function(**data, scale=scale)
        with pytest.raises(ValueError, match=message):
            kda_core.explain(**data, scale=scale, op=op)
    double = {name: t.double() for name, t in call_arguments().items()}
    if abs(scale) < 1e300:
        o, _ = function(**double, scale=scale)
        expected, _ = function(**double, scale=1.0)
        torch.testing.assert_close(o / float(scale), expected)
    else:
        with pytest.raises(
            ValueError, match=r"^scale: expected 0 or of a size from 2\.2e-308 to 1\.8e\+308, as float64"
        ):
            function(**double, scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.0, 0, 1.2e-36, -1e37, 10**20, 3])
def test_a_scale_that_float32_holds_is_taken(scale):
    """Zero, too: a zero output is what it says."""
    arguments = call_arguments()
    o, _ = kda_core.chunk_kda(**arguments, scale=scale)
    expected, _ = kda_core.chunk_kda(**arguments, scale=1.0)
    torch.testing.assert_close(o.double(), expected.double() * float(scale), atol=abs(scale) * 1e-7, rtol=1e-4)


@pytest.mark.parametrize("bound", [-1e39, -1e-39, -(10**40), -float("inf"), float("nan")])
def test_a_lower_bound_that_float32_cannot_hold_is_refused(bound):
    with pytest.raises(ValueError, match=r"^lower_bound: expected a number below 0 and of a size from 1\.2e-38"):
        kda_core.kda_gate(torch.zeros(T, HV, K), lower_bound=bound)
    with pytest.raises(ValueError, match=r"^lower_bound: expected"):
        kda_core.chunk_kda(**call_arguments(lower_bound=bound, **gate))


NUMPY_OPTIONS = [
    # (option as NumPy has it, what else the call has)
    *(("scale", kind(0.5), {}) for kind in (np.float16, np.float32, np.float64, np.longdouble)),
    ("scale", np.int64(2), {}),
    ("lower_bound", np.float32(-4.0), gate),
    ("lower_bound", np.int32(-4), gate),
    ("chunk_size", np.int64(32), {}),
    ("chunk_size", np.uint8(64), {}),
    ("output_final_state", np.True_, {}),
    ("output_final_state", np.False_, {}),
    ("use_qk_l2norm_in_kernel", np.True_, {}),
    ("use_beta_sigmoid_in_kernel", np.True_, {}),
    ("state_v_first", np.True_, {"output_final_state": True}),
    ("return_intermediate_states", np.True_, {}),
]


@pytest.mark.parametrize(
    ("name", "value", "others"), NUMPY_OPTIONS, ids=[f"{n}-{type(v).__name__}-{v}" for n, v, _ in NUMPY_OPTIONS]
)
def test_numpys_scalars_are_taken_for_pythons(name, value, others):
    """Backends, operators and the cache of choices see Python values."""
    arguments = call_arguments(**others)
    python = value.item() if not isinstance(value, np.longdouble) else float(value)
    with Watcher() as seen, torch.no_grad():
        expected = kda_core.chunk_kda(**arguments, **{name: python})
        choices = len(registry._choices)
        for _ in range(3):
            found = kda_core.chunk_kda(**arguments, **{name: value})
        assert len(registry._choices) == choices
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert len(seen) == 4
    for request in seen:
        assert not [n for n, x in vars(request).items() if isinstance(x, (np.generic, np.ndarray))]
    assert kda_core.explain(**arguments, **{name: value}).chosen == "cpu"


def test_numpys_scalars_are_taken_where_gradients_and_operators_see_them():
    arguments = call_arguments()
    arguments["q"].requires_grad_()
    kinds = {"scale": np.float32(0.5), "chunk_size": np.int64(32), "use_qk_l2norm_in_kernel": np.True_}
    o, _ = kda_core.chunk_kda(**arguments, **kinds)
    (gradient,) = torch.autograd.grad(o.sum(), arguments["q"])
    o, _ = kda_core.chunk_kda(**arguments, **{name: value.item() for name, value in kinds.items()})
    assert torch.equal(gradient, torch.autograd.grad(o.sum(), arguments["q"])[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        o, _ = kda_core.chunk_kda(**{name: mode.from_tensor(t.detach()) for name, t in arguments.items()}, **kinds)
        assert o.shape == (B, T, HV, V)
        raw = mode.from_tensor(torch.zeros(T, HV, K))
        assert kda_core.kda_gate(raw, lower_bound=np.float64(-4.0)).shape == (T, HV, K)
    raw = torch.randn(T, HV, K)
    assert torch.equal(kda_core.kda_gate(raw, lower_bound=np.float32(-4)), kda_core.kda_gate(raw, lower_bound=-4.0))


def test_numpys_integers_are_taken_for_slots():
    with torch.no_grad():
        arguments = {**paged(), "ssm_state_indices": torch.tensor([SLOTS + 5, 3])}
        o, _ = kda_core.chunk_kda(**arguments, pad_slot_id=np.int32(SLOTS + 5))
        assert not o[0].any()
        assert o[1].any()
        state = torch.zeros(B, HV, K, V)
        kda_core.fused_recurrent_kda(**call_arguments(), initial_state=state, inplace_final_state=np.True_)
        assert state.any()


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("scale", np.True_, "bool"), ("scale", np.array(0.5), "ndarray"), ("scale", np.complex64(1), "complex"),
        ("scale", np.str_("1"), "str"), ("scale", np.timedelta64(1, "s"), "timedelta"),
        ("scale", torch.tensor(0.5), "Tensor"), ("chunk_size", np.float32(64), "float"),
        ("chunk_size", np.array(64), "ndarray"), ("chunk_size", torch.tensor(64), "Tensor"),
        ("pad_slot_id", np.float64(-1), "float"), ("output_final_state", np.int64(1), "1"),
        ("output_final_state", np.array(True), "array"), ("output_final_state", torch.tensor(True), "tensor"),
        ("output_final_state", "yes", "'yes'"), ("output_final_state", 1, "1"), ("output_final_state", None, "None"),
    ],
)  # fmt: skip
def test_what_is_no_scalar_of_the_right_kind_is_refused(name, value, got):
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^{name}: expected .*, got {got}"):
            kda_core.chunk_kda(**call_arguments(**{name: value}))


@pytest.mark.end_to_end
def test_what_is_checked_before_the_request_can_be_compiled():
    """The default scale."""
    arguments = packed()
    compiled = torch.compile(lambda a: kda_core.chunk_kda(**a)[0], fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(arguments), kda_core.chunk_kda(**arguments)[0])


def test_scalars_of_a_process_without_numpy(monkeypatch):
    """NumPy is looked up, never imported."""
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(TypeError, match=r"^scale: expected a number, got str"):
        kda_core.chunk_kda(**call_arguments(scale="1"))
    assert "numpy" not in sys.modules
