"""Schemas of the torch operators: names, types and defaults of their arguments, and their results.

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

from typing import Any, get_args

from kda_core.hookspecs import MAX_SAVED_TENSORS
from kda_core.options import ARGUMENTS, REQUIRED, Argument, arguments_of
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import Op

NAMESPACE = "kda_core"

SCHEMA_VERSION = max(a.since for a in ARGUMENTS)
"""Rises whenever a schema grows; ``tests/core/data`` has programs that were exported with each version."""

TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "bool": "bool", "int": "int", "float | None": "float?"}
DEFAULTS = {"": '""', (): "[]"}
"""Defaults that a schema writes differently from Python."""

GATE_DIFFERENTIABLE = ("g", "A_log", "dt_bias")
"""Inputs of ``kda_gate`` that have a gradient."""

SAVED_NAMES = tuple(f"saved_{i}" for i in range(MAX_SAVED_TENSORS))
"""Arguments of a backward operator for what the forward saved, in the order of the forward's last results."""


def _text(a: Argument) -> str:
    """An argument as a schema has it."""
    kind = TYPES.get(a.type, a.type)
    if a.default is REQUIRED:
        return f"{kind} {a.name}"
    return f"{kind} {a.name}={DEFAULTS.get(a.default, a.default)}"


class Schema:
    """One operator's schema.

    Attributes:
        name: the operator's, without the namespace.
        names: of its arguments, in order.
        text: the schema as ``torch.library`` takes it.
    """

    def __init__(self, name: str, arguments: tuple[Argument, ...], results: int) -> None:
        self.name = name
        self.names = tuple(a.name for a in arguments)
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        self.text = f"{name}({', '.join(map(_text, arguments))}) -> {returned}"
        self._defaults = {a.name: None if a.default is REQUIRED else a.default for a in arguments}

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name, in the schema's order; torch leaves out trailing ones that have their defaults."""
        return {**self._defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


def _tensors(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name=name, type="Tensor | None", default=None) for name in names)


_BACKEND = Argument(name="backend", type="str", default="")
_SAVE = Argument(name="save_for_backward", type="bool", default=False)
# Empty: a gradient of every input that is given.
_NEEDS = Argument(name="needs", type="bool[]", default=())

_IN_SCHEMA = tuple(a for a in ARGUMENTS if a.in_schema)
_FIRST = tuple(a for a in _IN_SCHEMA if a.since == 1)
_SHARED = (*(a for a in _FIRST if a.is_tensor), *(a for a in _FIRST if a.is_plain), _BACKEND)
_LATER = tuple(a for a in _IN_SCHEMA if a.since > 1)
_WRITTEN = (
    # States that are only read are not declared as written: those that are have an argument of their own.
    Argument(name="pool", type="Tensor(a!)?", default=None),
    *_tensors("ssm_state_indices", "num_accepted_tokens"),
    Argument(name="out", type="Tensor(b!)?", default=None),
    Argument(name="pad_slot_id", type="int", default=-1),
)
_OF_BACKWARD = (*_tensors("grad_o", "grad_final_state", *SAVED_NAMES), _NEEDS)

TENSOR_NAMES = tuple(a.name for a in _IN_SCHEMA if a.is_tensor)
"""Tensor arguments that the functional operators and their backwards share."""

OPTION_NAMES = tuple(a.name for a in _IN_SCHEMA if a.is_plain)
"""Options that all operators of a public function share, the backend's name aside."""


FUNCTIONAL = {op: Schema(op, (*_SHARED, _SAVE, *_LATER), 3 + MAX_SAVED_TENSORS) for op in get_args(Op)}
"""(o, final_state, h, saved_0, ...) of a call that writes to nothing of the caller's; differentiable."""

INPLACE = {op: Schema(f"{op}_", (*_SHARED, *_WRITTEN, *_LATER), 3) for op in get_args(Op)}
"""(o, final_state, h) of a call that writes to the caller's ``pool`` or ``out``; no gradient."""

BACKWARD = {
    op: Schema(f"{op}_backward", (*_SHARED, *_OF_BACKWARD, *_LATER), len(DIFFERENTIABLE)) for op in get_args(Op)
}
"""A gradient for each of ``DIFFERENTIABLE``, absent where ``needs`` does not ask for it.

If the backend saves tensors and none are passed, the forward is run again.
"""

_GATE = tuple(_BACKEND if a.name == "backend" else a for a in arguments_of("kda_gate"))
GATE = Schema("kda_gate", (*_GATE, _SAVE), 1)
GATE_BACKWARD = Schema("kda_gate_backward", (*_GATE, *_tensors("grad_output"), _NEEDS), len(GATE_DIFFERENTIABLE))
