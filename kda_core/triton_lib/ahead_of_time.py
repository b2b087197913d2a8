"""The inputs of triton's compiler for a launch that never runs, by triton's own rules of specialisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kda_core.request import GatedNormRequest, LayerRequest, ShortConvolutionRequest

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


def layer_calls(device: str) -> Iterator[tuple[str, LayerRequest]]:
    """(name, call) of what launches every kernel around the operator: plain, and with everything there is."""
    empty = partial(torch.empty, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        x, D, W = empty(1, 128, 3 * 1024, dtype=dtype), 3 * 1024, 4
        plain = ShortConvolutionRequest(x=x, weight=empty(D, W))
        more = {"bias": empty(D), "initial_state": empty(2, W - 1, D, dtype=dtype), "output_final_state": True}
        packed = replace(plain, **more, cu_seqlens=torch.zeros(3, dtype=torch.int32, device=device))
        for name, call in (("", plain), (", packed", packed)):
            yield f"layer, {TYPES[dtype]}{name}", call
            thirds = dict.fromkeys(("grad_output", "grad_second", "grad_third"), empty(1, 128, 1024, dtype=dtype))
            gradients = {**thirds, "grad_final_state": call.initial_state, "needs_grad": frozenset({"x"})}
            yield f"layer, {TYPES[dtype]}{name}", replace(call, parts=(1024,) * 3, **gradients)
        for D in (64, 128, 256):
            x = empty(1, 128, 8, D, dtype=dtype)
            norm = GatedNormRequest(x=x, gate=x, weight=empty(D), eps=1e-5)
            yield f"layer, {TYPES[dtype]} V {D}", norm
            yield f"layer, {TYPES[dtype]} V {D}", replace(norm, grad_output=x, needs_grad=frozenset({"x"}))
