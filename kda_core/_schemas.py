"""The torch operators of every public function: schemas, and all that tells one function's from another's.

Exported programs (``torch.export``), compiled packages (AOTInductor) and sharding rules hold these schemas, so
that they only ever grow. A later version may

- add an argument at the end, with a default that means what its absence meant;
- add an operator, or an overload of one.

It may not rename, move, retype or remove an argument, change a default, or change the number, the order or the types
of the results: what needs that becomes a new operator beside the old one, which stays. Every argument behind ``beta``
(``g`` in ``kda_gate``) has a default, and results are a fixed number of tensors: a tensor that a call does not produce
is an empty one of shape [0], because schemas have no optional results and sharding rules take no lists.
``tests/core/test_schemas.py`` pins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.request import DIFFERENTIABLE, GATE_DIFFERENTIABLE, CommitRequest, GateRequest, Request

NAMESPACE = "kda_core"

SCHEMA_VERSION = 3
"""Rises whenever a schema grows; ``tests/core/data`` has programs that were exported with each version."""

DEFAULTS = {"None": None, "False": False, "True": True, '""': "", "[]": (), "64": 64, "-1": -1, "0": 0}
"""Python's values of the defaults."""

SAVED_NAMES = tuple(f"saved_{i}" for i in range(MAX_SAVED_TENSORS))
"""Arguments of a backward operator for what the forward saved, in the order of the forward's last results."""


def _names(arguments: str) -> tuple[str, ...]:
    return tuple(a.split(" ")[1].partition("=")[0] for a in arguments.split(", "))


class Schema:
    """One operator's schema: ``text`` as ``torch.library`` takes it, and the ``names`` of its arguments, in order."""

    def __init__(self, name: str, arguments: str, results: int) -> None:
        self.name = name
        self.names = _names(arguments)
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        self.text = f"{name}({arguments}) -> {returned}"
        defaults = [a.partition("=")[2] for a in arguments.split(", ")]
        self._defaults = {n: DEFAULTS[d] if d else None for n, d in zip(self.names, defaults, strict=True)}

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name, in the schema's order; torch leaves out trailing ones that have their defaults."""
        return {**self._defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log=None, Tensor? dt_bias=None, "
    "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? cu_seqlens_cpu=None"
)
_OPTIONS = (
    "float? scale=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
    "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "bool safe_gate=False, float? lower_bound=None, bool disable_recompute=False, "
    "bool return_intermediate_states=False, bool state_v_first=False, int chunk_size=64"
)
_SHARED = f'{_TENSORS}, {_OPTIONS}, str backend=""'
_SAVE = "bool save_for_backward=False"
# Empty: a gradient of every input that is given.
_NEEDS = "bool[] needs=[]"
# States that are only read are not declared as written: those that are have an argument of their own.
_WRITTEN = (
    "Tensor(a!)? pool=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, "
    "Tensor(b!)? out=None, int pad_slot_id=-1, Tensor? has_initial_state=None, bool update_state=True, "
    "Tensor? final_state_indices=None, Tensor(c!)? final_state_pool=None"
)
_LATER = "ScalarType? intermediate_states_dtype=None"
_CHECKPOINTS = "Tensor? checkpoint_indices=None, int checkpoint_every=0, Tensor(d!)? checkpoint_pool=None"
_RECORDS = (
    "Tensor(e!)? records=None, Tensor? commit=None, Tensor? num_committed=None, Tensor? parents=None, "
    "Tensor? commit_path=None"
)
_GRADIENTS = ", ".join(f"Tensor? {name}=None" for name in ("grad_o", "grad_final_state", *SAVED_NAMES))
_GATE = 'Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, str backend=""'
_COMMIT = (
    "Tensor(a!) pool, Tensor records, Tensor num_accepted, Tensor state_indices, Tensor? cu_seqlens=None, "
    'bool state_v_first=False, int pad_slot_id=-1, str backend="", Tensor? path=None'
)

TENSOR_NAMES = _names(_TENSORS)
"""Tensor arguments that the functional operators and their backwards share."""

OPTION_NAMES = _names(_OPTIONS)
"""Options that all operators of a public function share, the backend's name aside."""


@dataclass(frozen=True, eq=False)
class Operator:
    """The operators of one public function. Autograd, ``torch.func`` and fake kernels of all are made from such rows.

    Attributes:
        op: the function.
        request: the class of its requests.
        hooks: a backend's, of the forward and the backward.
        functional: writes to nothing of the caller's and is differentiable. Results: (o, final_state, h, *saved), or
            one tensor where nothing is saved.
        backward: a gradient for each of ``differentiable``, absent where ``needs`` does not ask for it. If the backend
            saves tensors and none are passed, the forward is run again.
        writing: (o, final_state, h) of a call that writes to the caller's ``pool`` or ``out``; no gradient.
        tensors, options: arguments of the functional operator that its backward takes again.
        differentiable: names of the inputs that have a gradient.
        grads: arguments of the backward: the gradients of the results.
        saved: arguments of the backward for what the forward saved, in the order of the forward's last results.
        namespace: of the operators.
    """

    op: str
    request: type
    hooks: tuple[str, ...]
    # None where a function has no such operator.
    functional: Schema = None  # type: ignore[assignment]
    backward: Schema = None  # type: ignore[assignment]
    writing: Schema = None  # type: ignore[assignment]
    tensors: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    namespace: str = NAMESPACE


def _of_recurrence(op: str, hooks: str, *, written: str = "", more: str = "") -> Operator:
    """The row of ``op``; ``written``, ``more``: arguments at the end of the writing operator, and of all three."""
    last, names = (f", {more}", _names(more)) if more else ("", ())
    return Operator(
        op, Request, (f"{hooks}_forward", f"{hooks}_backward"),
        Schema(op, f"{_SHARED}, {_SAVE}, {_LATER}{last}", 3 + MAX_SAVED_TENSORS),
        Schema(f"{op}_backward", f"{_SHARED}, {_GRADIENTS}, {_NEEDS}{last}", len(DIFFERENTIABLE)),
        Schema(f"{op}_", f"{_SHARED}, {_WRITTEN}, {_LATER}, {_CHECKPOINTS}{written}{last}", 3),
        TENSOR_NAMES, (*OPTION_NAMES, *names), DIFFERENTIABLE, ("grad_o", "grad_final_state"), SAVED_NAMES,
    )  # fmt: skip


OPERATORS = {
    row.op: row
    for row in (
        _of_recurrence("chunk_kda", "kda_core_chunk", more="bool batch_invariant=False"),
        _of_recurrence("fused_recurrent_kda", "kda_core_recurrent", written=f", {_RECORDS}"),
        Operator(
            "kda_gate", GateRequest, ("kda_core_gate_forward", "kda_core_gate_backward"),
            Schema("kda_gate", f"{_GATE}, {_SAVE}", 1),
            Schema("kda_gate_backward", f"{_GATE}, Tensor? grad_output=None, {_NEEDS}", len(GATE_DIFFERENTIABLE)),
            tensors=GATE_DIFFERENTIABLE, options=("lower_bound",), differentiable=GATE_DIFFERENTIABLE,
            grads=("grad_output",),
        ),
        Operator("commit_kda", CommitRequest, ("kda_core_commit",), writing=Schema("commit_kda_", _COMMIT, 0)),
    )
}  # fmt: skip
