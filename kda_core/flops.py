"""FLOPs of a call for ``torch.utils.flop_counter.FlopCounterMode``: the products of the recurrence.

For each token and value head the equation S_t = (I - beta k k^T) Diag(exp g) S + beta k v^T, o = scale S^T q needs
three products of a vector with the state, k^T S, k r^T and S^T q, of K * V multiplications and additions each:

    forward   6 * K * V         backward   12 * K * V

The backward has two products for each of the forward's. These are the model's FLOPs, which model FLOPs utilisation
(MFU) is computed from: ``chunk_kda`` and ``fused_recurrent_kda`` count the same, and neither the chunk size, nor the
backend, nor ``disable_recompute`` changes the count. The extra products of a chunk form and recomputation in the
backward do not count. Elementwise work (decay, gate, l2norm, sigmoid) does not count either, as elsewhere in torch's
counter. Packed calls count the tokens of their sequences, without the rows behind the last one.

``import kda_core`` does not register the formulas, because torch's counter imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kda_core import _schemas
from kda_core._signature import is_plain

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 3, 6
"""Products of a vector with the state, for each token and value head."""


@cache
def register() -> None:
    """Tell ``torch.utils.flop_counter`` what the calls count. Counters that exist already do not learn of it."""
    from torch.utils.flop_counter import register_flop_formula

    for row in _schemas.OPERATORS.values():
        products_of = {row.functional: FORWARD_PRODUCTS, row.writing: FORWARD_PRODUCTS, row.backward: BACKWARD_PRODUCTS}
        for schema, products in products_of.items() if row.op != "commit_kda" else ():
            if schema is not None:
                packet = getattr(torch.ops.kda_core, schema.name)
                register_flop_formula(packet, get_raw=True)(_formula(schema, products))


def _formula(schema: _schemas.Schema, products: int) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = schema.bind(args, kwargs)
        if "q" not in given:  # the gate has no products
            return 0
        K, (HV, V) = given["q"].shape[3], given["v"].shape[2:]
        return 2 * products * _tokens(given) * HV * K * V

    return flops


def _tokens(given: dict[str, Any]) -> int:
    """Tokens of all sequences; boundaries without values (fake tensors) are taken to end at T."""
    B, T = given["q"].shape[:2]
    boundaries = given.get("cu_seqlens_cpu")
    boundaries = given.get("cu_seqlens") if boundaries is None else boundaries
    if boundaries is None or not is_plain(boundaries) or boundaries.is_meta:
        return B * T
    return int(boundaries[-1])
