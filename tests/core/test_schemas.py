"""The operators' schemas: pinned, and only ever grown; what their defaults mean; how much a forward may save."""

from __future__ import annotations

import re

import pytest
import torch
from example_arguments import drawn
from toys import Toy, installed

import kda_core
from kda_core import _schemas
from kda_core.capabilities import Feature
from kda_core.errors import ContractViolation
from kda_core.hookspecs import MAX_SAVED_TENSORS, hookimpl
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import BackwardResult, ForwardResult, TensorSpec

_DATA = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_SHARED = (
    f"{_DATA}, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
    "Tensor? cu_seqlens_cpu=None, float? scale=None, bool output_final_state=False, "
    "bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, bool safe_gate=False, float? lower_bound=None, bool disable_recompute=False, "
    'bool return_intermediate_states=False, bool state_v_first=False, int chunk_size=64, str backend=""'
)
_FUNCTIONAL = (
    f"({_SHARED}, bool save_for_backward=False) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_INPLACE = (
    f"({_SHARED}, Tensor(a!)? pool=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, "
    "Tensor(b!)? out=None, int pad_slot_id=-1) -> (Tensor, Tensor, Tensor)"
)
_FUNCTIONAL_2 = _FUNCTIONAL.replace(
    "save_for_backward=False", "save_for_backward=False, ScalarType? intermediate_states_dtype=None"
)
_INPLACE_2 = _INPLACE.replace(
    "int pad_slot_id=-1",
    "int pad_slot_id=-1, Tensor? has_initial_state=None, bool update_state=True, Tensor? final_state_indices=None, "
    "Tensor(c!)? final_state_pool=None, ScalarType? intermediate_states_dtype=None, "
    "Tensor? checkpoint_indices=None, int checkpoint_every=0, Tensor(d!)? checkpoint_pool=None",
)
_BACKWARD = (
    f"({_SHARED}, Tensor? grad_o=None, Tensor? grad_final_state=None, Tensor? saved_0=None, Tensor? saved_1=None, "
    "Tensor? saved_2=None, Tensor? saved_3=None, Tensor? saved_4=None, Tensor? saved_5=None, Tensor? saved_6=None, "
    "Tensor? saved_7=None, bool[] needs=[]) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_GATE = 'Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, str backend=""'

# Versions are added, never changed.
PINNED = {
    1: {
        "chunk_kda": _FUNCTIONAL,
        "chunk_kda_": _INPLACE,
        "chunk_kda_backward": _BACKWARD,
        "fused_recurrent_kda": _FUNCTIONAL,
        "fused_recurrent_kda_": _INPLACE,
        "fused_recurrent_kda_backward": _BACKWARD,
        "kda_gate": f"({_GATE}, bool save_for_backward=False) -> Tensor",
        "kda_gate_backward": f"({_GATE}, Tensor? grad_output=None, bool[] needs=[]) -> (Tensor, Tensor, Tensor)",
    }
}
_INPLACE_RECORDS = _INPLACE_2.replace(
    "checkpoint_pool=None",
    "checkpoint_pool=None, Tensor(e!)? records=None, Tensor? commit=None, Tensor? num_committed=None, "
    "Tensor? parents=None, Tensor? commit_path=None",
)
PINNED[2] = PINNED[1] | dict.fromkeys(("chunk_kda_", "fused_recurrent_kda_"), _INPLACE_2)
PINNED[2] |= dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), _FUNCTIONAL_2)
PINNED[2] |= {
    "fused_recurrent_kda_": _INPLACE_RECORDS,
    "commit_kda_": (
        "(Tensor(a!) pool, Tensor records, Tensor num_accepted, Tensor state_indices, Tensor? cu_seqlens=None, "
        'bool state_v_first=False, int pad_slot_id=-1, str backend="", Tensor? path=None) -> ()'
    ),
}
PINNED[3] = PINNED[2] | {
    name: PINNED[2][name].replace(") -> (Tensor", ", bool batch_invariant=False) -> (Tensor")
    for name in ("chunk_kda", "chunk_kda_", "chunk_kda_backward")
}


def registered() -> dict[str, str]:
    """The schema of every operator of the namespace, without its name."""
    names = {str(s) for s in torch._C._dispatch_get_all_op_names() if str(s).startswith("kda_core::")}
    found = {}
    for name in names:
        own, _, overload = name.removeprefix("kda_core::").partition(".")
        schema = getattr(getattr(torch.ops.kda_core, own), overload or "default")._schema
        found[name.removeprefix("kda_core::")] = str(schema).removeprefix(name)
    return found


def grows(old: str, new: str) -> str | None:
    """Why programs that hold schema ``old`` may not run with ``new``; None if they do."""
    (before, results), (after, now) = (schema.split(" -> ") for schema in (old, new))
    if results != now:
        return f"results {results} became {now}"
    held, found = (arguments[1:-1].split(", ") for arguments in (before, after))
    if found[: len(held)] != held:
        return "an argument was removed, renamed, moved or retyped, or has another default"
    required = [a for a in found[len(held) :] if "=" not in a]
    return f"new arguments without a default: {required}" if required else None


def test_the_schemas_are_those_of_their_version():
    assert registered() == PINNED[_schemas.SCHEMA_VERSION]


@pytest.mark.parametrize("version", PINNED)
def test_schemas_only_grow_at_their_end_and_with_defaults(version: int):
    now = registered()
    broken = {name: grows(old, now.get(name, "() -> nothing")) for name, old in PINNED[version].items()}
    assert {name: why for name, why in broken.items() if why} == {}


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("(Tensor g, bool b=True, int n=1, str s='') -> Tensor", None),
        ("(Tensor g, bool b=True, int n=1) -> Tensor", None),
        ("(Tensor g, bool b=True, int n=1, str s) -> Tensor", "without a default"),
        ("(Tensor g, bool b=False, int n=1) -> Tensor", "another default"),
        ("(Tensor g, int n=1, bool b=True) -> Tensor", "moved"),
        ("(Tensor g, bool b=True) -> Tensor", "removed"),
        ("(Tensor g, bool b=True, int n=12) -> Tensor", "another default"),
        ("(Tensor g, bool b=True, int n=1) -> (Tensor, Tensor)", "results"),
    ],
)
def test_growth_is_told_from_other_changes(new: str, reason: str | None):
    found = grows("(Tensor g, bool b=True, int n=1) -> Tensor", new)
    assert found is None if reason is None else reason in found


def test_every_argument_behind_the_data_has_a_default():
    for name, schema in registered().items():
        arguments = schema[1 : schema.index(") ->")].split(", ")
        data = 1 if name.startswith("kda_gate") else 5
        assert [a for a in arguments[data:] if "=" not in a] == [], name
        assert "Tensor[]" not in schema


def data(T: int = 5, **more):
    return drawn(B=2, T=T, HV=4, K=8, V=6) | more


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_defaults_mean_what_those_of_the_public_function_mean(op: str):
    arguments = data()
    o, state, h, *saved = getattr(torch.ops.kda_core, op)(*arguments.values())
    expected, _ = getattr(kda_core, op)(**arguments)
    assert torch.equal(o, expected)
    assert [t.shape for t in (state, h, *saved)] == [(0,)] * (2 + MAX_SAVED_TENSORS)


@pytest.mark.parametrize(
    ("op", "options"),
    [("chunk_kda", {}), ("chunk_kda", {"disable_recompute": True}), ("fused_recurrent_kda", {})],
    ids=["chunk_kda", "chunk_kda without recomputing", "fused_recurrent_kda"],
)
def test_a_backward_without_what_was_saved_runs_the_forward_again(op: str, options: dict):
    arguments = {n: t.requires_grad_() for n, t in data(70).items()}
    o, _ = getattr(kda_core, op)(**arguments, **options)
    expected = torch.autograd.grad(o.sum(), list(arguments.values()))
    operator = getattr(torch.ops.kda_core, f"{op}_backward")
    with torch.no_grad():
        found = operator(*arguments.values(), **options, grad_o=torch.ones_like(o))
    assert len(found) == len(DIFFERENTIABLE)
    assert all(map(torch.equal, found[:5], expected))
    assert [t.shape for t in found[5:]] == [(0,)] * 3


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_only_the_output_and_the_final_state_have_a_gradient(op: str):
    arguments = {n: t.requires_grad_() for n, t in data().items()}
    options = {"output_final_state": True, "return_intermediate_states": op == "chunk_kda", "save_for_backward": True}
    results = getattr(torch.ops.kda_core, op)(**arguments, **options)
    assert [t.requires_grad for t in results] == [True, True] + [False] * (1 + MAX_SAVED_TENSORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_o": None}, "grad_o: expected a tensor, or one for grad_final_state, got None for both"),
        ({"needs": [True]}, "needs: expected True or False for each of q, k, v, g, beta, A_log"),
        ({"needs": [False] * 5 + [True, False, False]}, "True only for given ones"),
        ({"saved_0": torch.ones(3)}, "saved tensors of [3, 0, 0, 0, 0, 0, 0, 0] elements"),
        ({"saved_7": torch.ones(3)}, "saved tensors of [0, 0, 0, 0, 0, 0, 0, 3] elements"),
    ],
)
def test_wrong_arguments_of_a_backward_are_refused(changes: dict, message: str):
    arguments = data() | {"grad_o": torch.ones(2, 5, 4, 6)} | changes
    with pytest.raises((ValueError, ContractViolation), match=re.escape(message)):
        torch.ops.kda_core.chunk_kda_backward(**arguments)


def test_the_gates_backward_needs_a_gradient():
    with pytest.raises(ValueError, match="grad_output: expected a tensor, got None"):
        torch.ops.kda_core.kda_gate_backward(torch.zeros(3, 2, 4), lower_bound=-5.0)


def test_states_come_as_a_pool_or_as_an_initial_state():
    state = torch.zeros(2, 4, 8, 6)
    with pytest.raises(ValueError, match="initial_state: expected None beside pool"):
        torch.ops.kda_core.chunk_kda_(**data(), initial_state=state, pool=state.clone())


class Hoarder(Toy):
    """Saves ``count`` tensors, the i-th of i elements."""

    def __init__(self, count: int) -> None:
        needed = (Feature.CHUNK, Feature.BACKWARD, Feature.GVA, Feature.UNEQUAL_HEAD_DIMS, Feature.ODD_HEAD_DIMS)
        super().__init__("hoarder", None, needed)
        self.count, self.seen = count, None

    @hookimpl
    def kda_core_saved_spec(self, request):
        return tuple(TensorSpec((1, i), torch.float32) for i in range(self.count))

    @hookimpl
    def kda_core_chunk_forward(self, request):
        saved = [torch.full((1, i), float(i)) for i in range(self.count)] if request.save_for_backward else ()
        return ForwardResult(torch.zeros_like(request.v), saved=tuple(saved))

    @hookimpl
    def kda_core_chunk_backward(self, request):
        self.seen = request.saved
        return BackwardResult({n: torch.zeros_like(getattr(request, n)) for n in request.needs_grad})


@pytest.fixture
def hoarder(request):
    plugin = Hoarder(request.param)
    with installed(plugin):
        yield plugin


def forward(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    return kda_core.chunk_kda(**arguments, backend="hoarder")[0]


def step(function) -> None:
    function({n: t.requires_grad_() for n, t in data().items()}).sum().backward()


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("hoarder", [0, MAX_SAVED_TENSORS], indirect=True)
def test_as_many_tensors_are_saved_as_the_schemas_have_places_for(hoarder):
    """They come back in their order and shapes, an empty one among them, through autograd and through operators."""
    for function in (forward, compiled(forward)):
        step(function)
        assert [tuple(t.shape) for t in hoarder.seen] == [(1, i) for i in range(hoarder.count)]
        assert all((t == i).all() for i, t in enumerate(hoarder.seen))


@pytest.mark.parametrize("hoarder", [MAX_SAVED_TENSORS + 1], indirect=True)
def test_more_are_a_violation_of_the_contract(hoarder):
    expected = r"backend 'hoarder' saves 9 tensors for its backward, expected 8 at most"
    with pytest.raises(ContractViolation, match=expected):
        step(forward)
    with pytest.raises(Exception, match=expected):  # torch's own, which says where it met it
        step(compiled(forward))
    with pytest.raises(ContractViolation, match=expected), torch.no_grad():
        torch.ops.kda_core.chunk_kda(**data(), backend="hoarder", save_for_backward=True)
