"""The arguments: signatures, requests and operators' schemas have the fields of ``Request``; what a field needs."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from toys import Watcher

import kda_core
from kda_core import _explain, _schemas, api
from kda_core._bind import bind
from kda_core.capabilities import Feature
from kda_core.request import Request

NAMES = [f.name for f in fields(Request)]
FIELDS = {f.name: f for f in fields(Request)[NAMES.index("q") : NAMES.index("save_for_backward")]}
"""The fields that are arguments."""
LATER = NAMES[NAMES.index("out") + 1 : NAMES.index("save_for_backward")]
"""Those that came after the functions were published: they stand at the end."""
NOT_TAKEN = {
    "chunk_kda": {
        *("num_accepted_tokens", "inplace_final_state", "records", "commit", "num_committed"),
        *("parents", "commit_path"),
    },
    "fused_recurrent_kda": {
        *("disable_recompute", "return_intermediate_states", "cu_seqlens_cpu", "cp_context", "chunk_size"),
        *("intermediate_states_dtype", "checkpoint_indices", "checkpoint_every", "checkpoint_pool"),
        "batch_invariant",
    },
}


def order(op: str) -> list[str]:
    """That of the fields, with what fla's function does not have, or takes by name only, behind what it has."""
    taken, moved = [name for name in FIELDS if name not in NOT_TAKEN[op]], {"A_log", "dt_bias"}
    names, later = [n for n in taken if n not in LATER], [n for n in taken if n in LATER]
    if op == "fused_recurrent_kda":
        return [*(name for name in names if name != "safe_gate"), "backend", "safe_gate", *later]
    names = [name for name in names if name not in moved]
    place = names.index("chunk_size")
    return [*names[:place], "A_log", "dt_bias", *names[place:], "backend", *later]


def parameters(function: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(kda_core, function)).parameters)


@pytest.mark.parametrize("op", NOT_TAKEN)
def test_the_functions_take_the_fields_of_a_request(op: str):
    found = parameters(op)
    assert list(found) == order(op)
    for name in found.keys() & FIELDS:
        default = inspect.Parameter.empty if FIELDS[name].default is MISSING else FIELDS[name].default
        # The scale of a request is filled in.
        expected = ("float | None", None) if name == "scale" else (FIELDS[name].type, default)
        assert (found[name].annotation, found[name].default) == expected, name


def test_the_gate_takes_its_arguments_as_the_other_functions_do():
    found, other = parameters("kda_gate"), parameters("fused_recurrent_kda")
    assert list(found) == ["g", "A_log", "dt_bias", "lower_bound", "backend"]
    for name, parameter in found.items():
        assert (parameter.annotation, parameter.default) == (other[name].annotation, other[name].default), name


@pytest.mark.parametrize("op", [*NOT_TAKEN, "kda_gate", "commit_kda"])
def test_the_functions_pass_every_argument_on_under_its_name(op: str):
    (function,) = ast.parse(inspect.getsource(getattr(kda_core, op))).body
    (passed,) = [node for line in function.body for node in ast.walk(line) if isinstance(node, ast.Tuple)]
    names = [name for name in parameters(op) if name != "backend"]
    assert [value.id for value in passed.elts] == names
    assert api._NAMES[op] == tuple(names)


@pytest.mark.parametrize("op", NOT_TAKEN)
def test_every_argument_is_in_the_request_under_its_name(op: str):
    """Values that no check has seen, each of its own; but two flags are looked at before there is a request."""
    looked_at = ("inplace_final_state", *(["update_state"] if op == "fused_recurrent_kda" else []))
    given = {name: name in looked_at or object() for name in parameters(op) if name != "backend"}
    request = bind(op, dict(given))
    found = {name: getattr(request, name) for name in FIELDS}
    # Records leave the pool as it was.
    own = {"chunk_kda": {"inplace_final_state": True}, "fused_recurrent_kda": {"update_state": False}}[op]
    assert found == {n: FIELDS[n].default for n in NOT_TAKEN[op]} | given | own
    assert vars(request).keys() <= FIELDS.keys() | {"op", "save_for_backward"}
    assert (request.op, request.save_for_backward) == (op, False)


@pytest.mark.parametrize("op", NOT_TAKEN)
def test_the_operators_take_the_arguments(op: str):
    """A pool is an argument of its own; a context of several devices is in no program."""
    taken = FIELDS.keys() - {
        "cp_context",
        "inplace_final_state",
        *({"records", "commit", "num_committed", "parents", "commit_path", "batch_invariant"} & NOT_TAKEN[op]),
    }
    row = _schemas.OPERATORS[op]
    assert row.options == (*_schemas.OPTION_NAMES, *({"batch_invariant"} - NOT_TAKEN[op]))
    assert {*row.options} <= {*row.functional.names} & {*row.backward.names}
    assert {*row.writing.names} == taken | {"pool", "backend"}
    assert {*row.functional.names} - {"backend", "save_for_backward", "intermediate_states_dtype"} == {
        *_schemas.TENSOR_NAMES,
        *row.options,
    }
    bound = row.writing.bind((), {})
    for name in bound.keys() & FIELDS:
        default = None if FIELDS[name].default is MISSING else FIELDS[name].default
        assert bound[name] is default or bound[name] == default, name


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.type == "bool" and "needs" in f.metadata])
def test_a_flag_needs_its_feature(name: str):
    x = torch.zeros(1, 2, 1, 4)
    data = {"op": "chunk_kda", "scale": 1.0, "q": x, "k": x, "v": x, "g": x, "beta": x[..., 0].contiguous()}
    needed = FIELDS[name].metadata["needs"]
    default = FIELDS[name].default
    assert needed in Request(**data, **{name: not default}).features
    assert needed not in Request(**data, **{name: default}).features


def test_every_feature_that_an_argument_alone_needs_is_asked_for():
    found = {f.metadata["needs"] for f in FIELDS.values() if "needs" in f.metadata}
    assert found >= {Feature.NEG_EIGVAL, Feature.OUT, Feature.VARLEN, Feature.CONTEXT_PARALLEL}


def test_a_flag_without_the_one_that_it_needs_is_refused():
    x = -torch.rand(1, 2, 1, 4)
    data = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "allow_neg_eigval": True}
    with pytest.raises(ValueError, match="allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got F"):
        kda_core.chunk_kda(**data)
    kda_core.chunk_kda(**data, use_beta_sigmoid_in_kernel=True)


OTHER_VALUES = [0, 1, "", "1", b"", [], (), {}, None, 1j, np.zeros(()), np.zeros(2), torch.zeros(()), torch.zeros(2)]
OPTIONS = [
    (op, name, p.annotation)
    for op in ("chunk_kda", "fused_recurrent_kda", "kda_gate")
    for name, p in inspect.signature(getattr(kda_core, op)).parameters.items()
    if "Tensor" not in p.annotation
]


@pytest.mark.parametrize("kind", ["plain", "pool", "gradient"])
@pytest.mark.parametrize(("op", "name", "annotation"), OPTIONS)
def test_an_option_takes_only_values_of_its_kind(op, name, annotation, kind):
    """0, "", [] and None counted as False for inplace_final_state, and an array ended in an error of NumPy's."""
    kinds = {"bool": bool, "int": int, "float": (int, float), "str": str, "None": type(None), "Any": type(None)}
    kinds["torch.dtype"] = torch.dtype
    kinds = tuple(kinds[part] for part in annotation.split(" | "))
    arguments = right_call(op, pool=kind == "pool", gradient=kind == "gradient")
    for value in OTHER_VALUES:
        if type(value) is bool or isinstance(value, kinds):
            continue
        with pytest.raises(TypeError, match=f"^{name}: expected "):
            getattr(kda_core, op)(**{**arguments, name: value})


def right_call(op, pool=False, gradient=False):
    """Arguments of a call that is right but for what a test adds."""
    q, k, v = torch.randn(3, 1, 3, 2, 4)
    arguments = {"q": q, "k": k, "v": v, "g": -q.abs(), "beta": torch.rand(1, 3, 2)}
    if pool:
        arguments |= {"initial_state": torch.zeros(2, 2, 4, 4), "ssm_state_indices": torch.tensor([1])}
    if op == "kda_gate":
        arguments = {"g": arguments["g"], "A_log": torch.zeros(2)}
    arguments["g"].requires_grad_(gradient)
    return arguments


def test_a_false_context_is_no_context():
    """It was dropped in silence."""
    with pytest.raises(TypeError, match="cp_context"):
        kda_core.chunk_kda(**right_call("chunk_kda"), cp_context=False)


@pytest.mark.parametrize("value", [0, "", [], None, np.zeros(2)])
def test_other_public_functions_take_only_values_of_their_kind(value):
    arguments = right_call("chunk_kda")
    with pytest.raises(ValueError, match=r"^op: expected "):
        kda_core.explain(**arguments, op=value)
    with pytest.raises(TypeError, match=r"^warn: expected "), kda_core.checked_calls(warn=value):
        pass
    if not isinstance(value, str):
        with pytest.raises(TypeError, match=r"^name: expected "), kda_core.use_backend(value):
            pass
    if value is not None and not isinstance(value, str):
        with pytest.raises(TypeError, match=r"^dump: expected "), kda_core.checked_calls(dump=value):
            pass
        with pytest.raises(TypeError, match=r"^chip: expected "):
            _explain.plan(**arguments, chip=value)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "kda_gate"])
@pytest.mark.parametrize("bias", [(6 * 8,), (1, 48), (1, 1, 6, 8), (6, 1, 8, 1)])
@pytest.mark.parametrize("rate", [(1, 1, 6, 1), (6, 1), (1, 6)])
def test_parameters_of_the_gate_may_have_dimensions_of_size_1(op: str, bias: tuple, rate: tuple):
    """As layers of other libraries hold them; gradients come in the same shape."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, g, beta = draw(2, 9, 3, 8), draw(2, 9, 3, 8), draw(2, 9, 6, 4), draw(2, 9, 6, 8), draw(2, 9, 6).sigmoid()
    given, parameters = {"q": q, "k": k, "v": v, "beta": beta, "use_gate_in_kernel": True}, (draw(6), draw(6, 8))
    if op == "kda_gate":
        given = {}
    results = []
    for shapes in ((6,), (6, 8)), (rate, bias):
        A_log, dt_bias = (x.reshape(s).requires_grad_() for x, s in zip(parameters, shapes, strict=True))
        o = getattr(kda_core, op)(g=g, A_log=A_log, dt_bias=dt_bias, backend="reference", **given)
        o = o[0] if isinstance(o, tuple) else o
        grads = torch.autograd.grad(o.square().sum(), (A_log, dt_bias))
        assert [grad.shape for grad in grads] == [A_log.shape, dt_bias.shape]
        results.append([o, *(grad.flatten() for grad in grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _compiled(step):
    torch._dynamo.reset()
    return torch.compile(step, backend="aot_eager", fullgraph=True)


WAYS = {
    "eager": lambda step: step,
    "compiled": _compiled,
    "grad": torch.func.grad,
    "vmap": lambda step: lambda *inputs: torch.func.vmap(torch.func.grad(step))(*(t[None] for t in inputs)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("invariant", [True, False])
def test_batch_invariant_reaches_both_directions(way: str, invariant: bool):
    """A forward that saves what its backward does not expect would be an error at best."""

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return kda_core.chunk_kda(*inputs, batch_invariant=invariant)[0].square().sum()

    inputs = [t.detach().requires_grad_(way in ("eager", "compiled")) for t in right_call("chunk_kda").values()]
    function = WAYS[way](step)
    with Watcher() as requests:
        for _ in range(2):  # the second repeats the first
            found = function(*inputs)
            if inputs[0].requires_grad:
                found.backward()
    seen = [(r.grad_o is not None, r.batch_invariant) for r in requests]
    assert set(seen) == {(False, invariant), (True, invariant)}
    assert seen.count((True, invariant)) == 2


def test_batch_invariant_reaches_a_call_over_a_pool():
    with Watcher() as requests, torch.no_grad():
        for call in (kda_core.chunk_kda, _compiled(kda_core.chunk_kda)):
            call(**right_call("chunk_kda", pool=True), batch_invariant=True)
    assert [r.batch_invariant for r in requests] == [True, True]
