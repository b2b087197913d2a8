"""The inputs of triton's compiler for a launch that never runs, by triton's own rules of specialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

DIVISIBLE = ["tt.divisibility", 16]
"""Attribute of an integer or an address that 16 divides."""

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of dtypes."""

Specialised = tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]


def specialised(
    kernel: Any, arguments: Mapping[str, Any], of_tensor: Callable[[Any], tuple[str, list[list[Any]]]]
) -> Specialised:
    """(signature, constants, attributes) of a launch, as ``triton.compiler.ASTSource`` takes them.

    Args:
        kernel: the jit function.
        arguments: value of every parameter by name.
        of_tensor: (type, attributes) of an argument that is neither a number nor None.
    """
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, known = "constexpr", []
        if parameter.is_constexpr or value is None:
            pass
        elif isinstance(value, float):
            kind = "fp32"
        elif not isinstance(value, int):
            kind, known = of_tensor(value)
        elif parameter.do_not_specialize or value != 1:
            kind = parameter.annotation_type or "i32"
            known = [DIVISIBLE] if value % 16 == 0 and not parameter.do_not_specialize else []
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
        if known:
            attributes[(i,)] = known
    return signature, constants, attributes
