"""DTensors that are sharded evenly by batch or by heads: a call of its own on every rank, where nothing travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from kda_core._expect import fail
from kda_core.request import DATA, GateRequest, Request

Kind = Literal["batch", "heads"] | None

# Tensors whose first dimension holds sequences, and the dimensions that hold heads.
BATCH = (*DATA, "initial_state", "o", "final_state", "h")
HEADS = {
    **dict.fromkeys(DATA, 2), "A_log": 0, "dt_bias": 0, "initial_state": 1, "o": 2, "final_state": 1, "h": 2,
}  # fmt: skip
PARAMETERS = ("A_log", "dt_bias")
_NAMES = [f.name for f in fields(Request)]
_ARGUMENTS = {
    Request: _NAMES[_NAMES.index("q") : _NAMES.index("save_for_backward")],
    GateRequest: ["g", "A_log", "dt_bias", "lower_bound"],
}
REFUSED = (
    *("cu_seqlens", "cu_seqlens_cpu", "cp_context", "ssm_state_indices", "num_accepted_tokens", "out"),
    *("has_initial_state", "final_state_indices", "final_state_pool", "records", "commit", "parents"),
)
"""Arguments that do not go with DTensors: their rows, slots or places are those of all sequences."""


def run(r: Request | GateRequest, function: Callable[[dict[str, Any]], Any]) -> Any:
    """``function`` of this rank's shards of a call's arguments; its results as DTensors. Raises what ``local`` does."""
    arguments, kinds, mesh = local(r)
    found = function(arguments)
    if isinstance(r, GateRequest):
        return _global("g", found, kinds, mesh, r)
    # Compilers of torch 2.7 take every zip for a strict one.
    results = zip(("o", "final_state", "h")[: len(found)], found, strict=True)
    return tuple(None if t is None else _global(n, t, kinds, mesh, r) for n, t in results)


def local(r: Request | GateRequest) -> tuple[dict[str, Any], list[Kind], Any]:
    """This rank's shards of a call's arguments, how the mesh's dimensions are used, and the mesh.

    Raises:
        TypeError: a plain tensor among q, k, v, g, beta or states.
        ValueError: other placements than those of q, another mesh, an uneven shard, or an argument of ``REFUSED``.
    """
    rows = ("g",) if isinstance(r, GateRequest) else DATA
    first: DTensor = getattr(r, rows[0])  # type: ignore[assignment]
    mesh = first.device_mesh
    kinds = [_kind(rows[0], p, r) for p in first.placements]
    found: dict[str, Any] = {n: getattr(r, n) for n in _ARGUMENTS[type(r)]}
    for name in REFUSED:
        if found.get(name) is not None:
            fail(name, "None beside DTensors", f"{type(found[name]).__name__}; use to_local()")
    if found.get("inplace_final_state"):
        raise ValueError("inplace_final_state: expected False beside DTensors; use to_local()")
    for name in (*rows, *PARAMETERS, "initial_state"):
        t = found.get(name)
        if t is None:
            continue
        if not isinstance(t, DTensor):
            if name not in PARAMETERS:
                raise TypeError(f"{name}: expected a DTensor, as {rows[0]} is, got {type(t).__name__}")
            for i, kind in enumerate(kinds):  # a parameter that all ranks have
                t = t.chunk(mesh.size(i))[mesh.get_local_rank(i)] if kind == "heads" else t
            found[name] = t
            continue
        placements = [_placement(name, kind, r) for kind in kinds]
        if t.device_mesh != mesh or list(t.placements) != placements:
            expected = f"a DTensor with placements {placements} on {mesh}, as those of {rows[0]} demand"
            fail(name, expected, f"{list(t.placements)} on {t.device_mesh}; redistribute it")
        for dim, size in enumerate(t.shape):
            ranks = 1
            for i, p in enumerate(placements):
                ranks *= mesh.size(i) if isinstance(p, Shard) and p.dim == dim else 1
            if size % ranks:
                fail(name, f"a size of dimension {dim} that {ranks} ranks divide", f"{list(t.shape)}")
        # Ranks with sequences of their own have each a part of a parameter's gradient.
        parts = [kind == "batch" and name in PARAMETERS for kind in kinds]
        grads = [Partial() if part else p for part, p in zip(parts, placements, strict=True)]
        found[name] = t.to_local(grad_placements=grads)
    return found, kinds, mesh


def _dims(name: str, r: Any) -> dict[Kind, int]:
    """The dimensions of sequences, where there is one, and of heads."""
    if isinstance(r, GateRequest) and name == "g":
        n = r.g.dim()
        return {"heads": n - 2, **({"batch": 0} if n > 2 else {})}
    return {"heads": HEADS[name], **({"batch": 0} if name in BATCH else {})}


def _kind(name: str, p: Placement, r: Any) -> Kind:
    dims = _dims(name, r)
    if isinstance(p, Replicate):
        return None
    for kind, dim in dims.items():
        if type(p) is Shard and p.dim == dim:
            return kind
    ways = f"by batch, Shard({dims.get('batch')}), or by heads, Shard({dims['heads']}), or replicated"
    fail(name, f"a DTensor sharded {ways}", f"{p}; several ranks share the tokens of a sequence by cp_context")


def _placement(name: str, kind: Kind, r: Any) -> Placement:
    dim = _dims(name, r).get(kind)
    return Replicate() if dim is None else Shard(dim)


def _global(name: str, t: Tensor, kinds: list[Kind], mesh: Any, r: Any) -> DTensor:
    return DTensor.from_local(t, mesh, [_placement(name, kind, r) for kind in kinds], run_check=False)
