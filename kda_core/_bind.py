"""Arguments become a request: the one way from a call of a public function, or a question about one, to the hooks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kda_core import _expect
from kda_core._checks import python_value
from kda_core.request import DIFFERENTIABLE, GATE_DIFFERENTIABLE, CommitRequest, GateRequest, Request


def build_request(values: dict[str, Any], kind: Any = Request) -> Any:
    """``kind(**values)`` in a fifth of the time, for callers that name every field without a default; keeps ``values``.

    The initialiser of a frozen dataclass sets its fields one by one, which costs a call more than the rest
    of the routing. Fields that are not named are found on the class, as the dataclass left their defaults
    there. A compiler that traces the call knows the initialiser and not this shortcut.
    """
    if torch.compiler.is_compiling():
        return kind(**values)
    request = object.__new__(kind)
    object.__setattr__(request, "__dict__", values)
    return request


def bind(op: str, values: dict[str, Any]) -> Any:
    """The request of a call of ``op``, by the function's arguments without ``backend``; keeps ``values``.

    The one place where arguments become a request. An argument that is not there has its default. Nothing is checked
    but flags that decide here.

    Raises:
        ValueError: a gradient is needed through what is not differentiable.
        TypeError: a value that must be a flag is something else.
    """
    values["op"] = op
    if op == "commit_kda":
        for name in ("pool", "records"):
            if _needs_gradient(values, (name,)):
                raise ValueError(f"{name}: commit_kda is not differentiable; use torch.no_grad(), or detach it")
        return build_request(values, CommitRequest)
    values["A_log"] = by_head(values.get("A_log"), values["g"], 1)
    values["dt_bias"] = by_head(values.get("dt_bias"), values["g"], 2)
    if op == "kda_gate":
        values["save_for_backward"] = _needs_gradient(values, GATE_DIFFERENTIABLE)
        return build_request(values, GateRequest)
    if values.get("scale") is None:
        values["scale"] = default_scale(values["q"])
    in_pool = values.get("ssm_state_indices") is not None
    values["inplace_final_state"] = _is_set(values, "inplace_final_state") or in_pool
    if values.get("records") is not None:
        values["update_state"] = _is_set(values, "update_state") and False
    values["save_for_backward"] = _needs_gradient(values, _FOLLOWED)
    if values["save_for_backward"]:
        _check_differentiable(values)
    return build_request(values)


_FOLLOWED = (*DIFFERENTIABLE, "out")


def _needs_gradient(values: dict[str, Any], names: tuple[str, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    for name in names:  # any() with a generator costs half a microsecond more
        t = values.get(name)
        if t is not None and getattr(t, "requires_grad", False):
            return True
    return False


def _check_differentiable(values: dict[str, Any]) -> None:
    """Raise if a call that needs gradients has an option that is not differentiable."""
    for name in ("ssm_state_indices", "inplace_final_state", "out", "return_intermediate_states"):
        used = values.get(name)
        if used is None or used is False:
            continue
        # The checks refuse what is no flag.
        if name in ("ssm_state_indices", "out") or python_value(used) is True:
            raise ValueError(
                f"{name}: expected no gradient to be needed (it is not differentiable; call it under torch.no_grad() "
                "or torch.inference_mode()), got an input that requires a gradient"
            )


def _is_set(values: dict[str, Any], name: str) -> bool:
    """A flag that decides before the checks of the request: True, False or NumPy's."""
    value = python_value(values.get(name, False))
    _expect.flag(name, value)
    return value


def default_scale(q: Tensor) -> float:
    """K ** -0.5; 1 for a q that is no tensor of rank 4, which the checks refuse by name."""
    try:
        shape: tuple[int, ...] = getattr(q, "shape", ())
    except RuntimeError:  # nested tensors of the strided layout have none
        shape = ()
    if len(shape) != 4 or not shape[3]:
        return 1.0
    # Under torch.jit.trace a size is a tensor.
    return (int(shape[3]) if isinstance(shape[3], Tensor) else shape[3]) ** -0.5


def is_sharded(t: Any) -> bool:
    """Whether ``t`` is a DTensor; found without an import of torch.distributed, which few programs need."""
    return type(t) is not Tensor and hasattr(t, "device_mesh")


def by_head(t: Tensor | None, g: Tensor, dims: int) -> Tensor | None:
    """A_log as [HV] (dims = 1) or dt_bias as [HV, K] (2), from a flat one or one with dimensions of size 1."""
    if t is None:
        return None
    try:
        shape, expected = t.shape, g.shape[-2 : dims - 2 or None]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return t  # no tensor, or a nested one
    if shape == expected or len(expected) < dims or not isinstance(t, Tensor) or t.layout is not torch.strided:
        return t
    if is_sharded(t) and not is_sharded(g):  # of tensor parallelism, beside local rows
        return by_head(t.to_local(), g, dims)  # type: ignore[attr-defined]
    count = math.prod(expected)
    # Most layers keep it flat. The checks refuse other shapes: as many elements in another order would be taken for
    # right.
    if shape[0] != count if len(shape) == 1 else _long(shape) not in (_long(expected), _long((count,))):
        return t
    if not is_sharded(t):
        return t.reshape(expected)
    try:
        return t.reshape(expected)
    except RuntimeError:  # cut within a head, which the checks refuse by name
        return t


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes other than 1."""
    return tuple(n for n in shape if n != 1)
