"""Functions that the ranks of ``tests/support/ranks.py`` run."""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from toys import HalvesWatcher

import kda_core
from kda_core.distributed import build_cp_context
from kda_core.request import DATA as ROWS


def training_step(group: Any, rank: int, inputs: dict, grads: dict, context: dict, options: dict) -> dict[str, Any]:
    """A forward and, with ``grads``, a backward of this rank's rows; all tensors come whole."""
    c = build_cp_context(group=group, **context)
    leaves = _local(c, inputs, bool(grads))
    o, state, *h = kda_core.chunk_kda(**leaves, **options, cp_context=c)
    found = {"o": o.detach(), "final_state": None if state is None else state.detach(), "ranges": c.ranges}
    if h:
        found["h"] = h[0]
    if grads:
        outputs, given = [o], [c.local(grads["o"])]
        if "final_state" in grads:
            outputs, given = [*outputs, state], [*given, grads["final_state"]]
        if "without o" in grads:
            outputs, given = outputs[1:], given[1:]
        torch.autograd.backward(outputs, given)
        found |= {f"d{n}": t.grad for n, t in leaves.items()}
    return found


def continued(group: Any, rank: int, inputs: dict, grads: dict, options: dict) -> dict[str, torch.Tensor]:
    """A training step of a sequence in two calls, the second from the state that all ranks have of the first.

    Returns:
        this rank's part of each tensor, zeros elsewhere.
    """
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    found = {"o": torch.zeros_like(inputs["v"])}
    loss, state, T = 0.0, leaves["initial_state"], inputs["v"].shape[1]
    for start, end in ((0, T // 2), (T // 2, T)):
        c = build_cp_context(tokens=end - start, group=group, gather=True)
        tensors = {n: c.local(t[:, start:end]) if n in ROWS else t for n, t in leaves.items()}
        o, state = kda_core.chunk_kda(**{**tensors, "initial_state": state}, **options, cp_context=c)
        ((low, high),) = c.ranges
        found["o"][:, start + low : start + high] = o.detach()
        loss = loss + (o * c.local(grads["o"][:, start:end])).sum()
    (loss + (state * grads["final_state"]).sum() / c.size).backward()
    return found | {"final_state": state.detach() / c.size} | {f"d{n}": t.grad for n, t in leaves.items()}


def _local(c: Any, inputs: dict, gradients: bool = True) -> dict[str, torch.Tensor]:
    tensors = {n: c.local(t) if n in ROWS else t for n, t in inputs.items()}
    return {n: t.detach().clone().requires_grad_(gradients) for n, t in tensors.items()}


def compiled_step(group: Any, rank: int, inputs: dict, grad: Any, context: dict, options: dict, loss: str) -> bool:
    """Whether a compiled training step has the bits of the eager one; ``loss``: what it depends on."""
    torch._dynamo.reset()
    c = build_cp_context(group=group, **context)

    def call(x: dict, c: Any) -> tuple:
        # With work before and behind, so that a compiler has something to move.
        x = {**x, "v": x["v"] * 2}
        o, state = kda_core.chunk_kda(**x, **options, cp_context=c)
        return o.sin(), state if state is None else state + 1

    found = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        leaves = _local(c, inputs)
        o, state = function(leaves, c)
        outputs = {"o": [o], "state": [state], "both": [o, state]}[loss]
        given = [c.local(grad) if t is o else torch.ones_like(t) for t in outputs]
        torch.autograd.backward(outputs, given)
        found.append([o.detach(), *(t.grad for t in leaves.values())])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def packings(group: Any, rank: int, inputs: dict, contexts: list[dict], options: dict) -> tuple[int, bool]:
    """Graphs that one compiled function has after calls with all contexts, and whether results are the eager ones."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        lambda x, c: kda_core.chunk_kda(**x, **options, cp_context=c)[0] * 2, fullgraph=True, backend="aot_eager"
    )
    same = True
    for context in contexts:
        c = build_cp_context(group=group, **context)
        x = _local(c, inputs, False)
        with torch.no_grad():
            same = same and torch.equal(compiled(x, c), kda_core.chunk_kda(**x, **options, cp_context=c)[0] * 2)
    return counters["stats"]["unique_graphs"], same


def saved_bytes(group: Any, rank: int, inputs: dict, context: dict, options: dict) -> tuple[int, int]:
    """Bytes that the graph of a call keeps: with a context, and of a plain call of the same rows."""
    c = build_cp_context(group=group, **context)
    found = []
    for more in ({"cp_context": c}, {}):
        seen: dict[int, int] = {}

        def keep(t: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        leaves = _local(c, inputs)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            kept = kda_core.chunk_kda(**leaves, **options, **more)
        found.append(sum(seen.values()))
        del kept
    return found[0], found[1]


def bad_call(group: Any, rank: int, inputs: dict, context: dict, changes: dict) -> tuple[str, float]:
    """The error of a call with ``changes``, and after how many seconds."""
    began = time.perf_counter()
    try:
        c = build_cp_context(group=group, **context)
        x = _local(c, inputs, False)
        x |= {n: x[n][:, 1:] if change == "short" else change for n, change in changes.items()}
        kda_core.chunk_kda(**x, cp_context=c)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - began
    return "", time.perf_counter() - began


def negative_views(group: Any, rank: int, inputs: dict, grad: Any, context: dict) -> list[str]:
    """Names of tensors that hooks saw as negative views, of a call whose every row and gradient is one."""
    c = build_cp_context(group=group, **context)

    def negative(t: torch.Tensor) -> torch.Tensor:
        return torch.complex(t, -t).conj().imag

    with HalvesWatcher() as requests:
        leaves = _local(c, inputs)
        o, _ = kda_core.chunk_kda(**{n: negative(t) if n in ROWS else t for n, t in leaves.items()}, cp_context=c)
        torch.autograd.backward(o, negative(c.local(grad)))
    assert len(requests) >= 4
    named = [(n, t) for r in requests for n, t in vars(r).items() if isinstance(t, torch.Tensor)]
    return sorted({n for n, t in named if t.is_neg()})


def verified(group: Any, rank: int, contexts: list[dict]) -> str:
    """What ``verify`` says of contexts that differ by rank."""
    try:
        build_cp_context(group=group, **contexts[rank % len(contexts)]).verify()
    except ValueError as error:
        return str(error)
    return ""


def refreshed(
    group: Any, rank: int, inputs: dict, before: list[int], after: list[int], options: dict, more: dict | None = None
) -> bool:
    """Whether a context (made with ``more``) that takes other boundaries is as good as a new one, in its memory."""
    T = inputs["q"].shape[1]
    c = build_cp_context(before, group, tokens=T, fragments=4, **(more or {}))
    memory = c.fragments.data_ptr(), c.slots.data_ptr()
    c.refresh(after)
    new = build_cp_context(after, group, tokens=T, fragments=4, **(more or {}))
    x = _local(c, inputs, False)
    both = [kda_core.chunk_kda(**x, **options, cp_context=made)[0] for made in (c, new)]
    return torch.equal(*both) and memory == (c.fragments.data_ptr(), c.slots.data_ptr())


def refreshed_behind_copies(
    group: Any, rank: int, inputs: dict, grad: Any, before: list[int], after: list[int], options: dict
) -> bool:
    """Whether a backward of copies, as hooks of saved tensors make them, is that of its own forward's lengths."""
    register_halves()
    c = build_cp_context(before, group, tokens=inputs["q"].shape[1], fragments=4)
    found = []
    for bounds in (before, after):
        leaves = _local(c, inputs)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            o, _ = kda_core.chunk_kda(**leaves, **options, cp_context=c)
        c.refresh(bounds)
        o.backward(c.local(grad))
        found.append([t.grad for t in leaves.values()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def checkpointed(group: Any, rank: int, inputs: dict, grad: Any, context: dict, options: dict) -> bool:
    """Whether activation checkpointing has the gradients of a plain step."""
    from torch.utils.checkpoint import checkpoint

    c = build_cp_context(group=group, **context)

    def call(**x: torch.Tensor) -> torch.Tensor:
        return kda_core.chunk_kda(**x, **options, cp_context=c)[0]

    found = []
    for function in (call, lambda **x: checkpoint(call, use_reentrant=False, **x)):
        leaves = _local(c, inputs)
        function(**leaves).backward(c.local(grad))
        found.append([t.grad for t in leaves.values()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def explained(group: Any, rank: int, inputs: dict, context: dict, options: dict) -> tuple[list, list]:
    """The collectives and bytes of a training step: what an explanation says, and what torch.distributed was asked."""
    from kda_core.distributed import _exchange

    c = build_cp_context(group=group, **context)
    leaves = _local(c, inputs)
    options = {**options, "output_final_state": True}
    said = kda_core.explain(**leaves, **options, cp_context=c).transfers
    seen: list[tuple] = []
    # By the collective's code: its name, and the place of the tensor among its arguments.
    collectives = {_exchange.all_gather: ("all_gather", 1), dist.all_reduce: ("all_reduce", 0)}
    watched = {inspect.unwrap(function).__code__: found for function, found in collectives.items()}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in watched:
            name, place = watched[frame.f_code]
            seen.append((name, frame.f_locals[frame.f_code.co_varnames[place]].nbytes))

    sys.setprofile(note)
    try:
        o, state = kda_core.chunk_kda(**leaves, **options, cp_context=c)
        torch.autograd.backward([o, state], [torch.ones_like(o), torch.ones_like(state)])
    finally:
        sys.setprofile(None)
    return [(t.collective, t.nbytes) for t in said], seen


def made_alone(group: Any, rank: int, size: int) -> bool:
    """Make a context of a larger group, none of whose other ranks takes part."""
    others = dist.group.WORLD
    c = build_cp_context([0, 3, 7], others, tokens=2 * size * 8)
    return c.size > 1


def register_halves() -> None:
    """Let this process have the backends of ``halves_backend``."""
    import halves_backend

    from kda_core._plugins import registry

    for backend in (halves_backend.HalvesBackend(), halves_backend.EdgesBackend()):
        if all(b.info.name != backend.name for b in registry.backends):
            entry = registry.register(backend)
            assert entry.state == "loaded", entry


def step_by_hooks(group: Any, rank: int, *arguments: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """``training_step`` on a backend with hooks in halves, and how often each was called."""
    import halves_backend

    register_halves()
    halves_backend.COUNT.update(dict.fromkeys(halves_backend.COUNT, 0))
    *others, options = arguments
    found = training_step(group, rank, *others, {"backend": "halves", **options})
    return found, dict(halves_backend.COUNT)


def step_with_flas_context(group: Any, rank: int, inputs: dict, grads: dict, bounds: list[int], layout: str) -> dict:
    """``training_step`` with a context that fla has made."""
    from fla.ops.cp import build_cp_context as fla_context

    cu = torch.tensor(bounds, dtype=torch.int32)
    theirs = fla_context(cu, group, cu_seqlens_cpu=cu, layout=layout)
    ours = build_cp_context(bounds, group, layout=layout)
    leaves = _local(ours, inputs)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    o, _ = kda_core.chunk_kda(**leaves, **options, cu_seqlens=theirs.cu_seqlens, cp_context=theirs)
    o.backward(ours.local(grads["o"]))
    return {"o": o.detach(), "ranges": ours.ranges, **{f"d{n}": t.grad for n, t in leaves.items()}}


def convolution_step(group: Any, rank: int, x: Any, weight: Any, grad: Any, context: dict, compiled: bool) -> dict:
    """A short convolution of this rank's rows, with the rows ahead from other ranks."""
    from kda_core.distributed import conv_halo
    from kda_core.nn import short_convolution

    c = build_cp_context(group=group, conv1d_kernel_size=weight.shape[1], **context)
    leaf, taps = c.local(x).requires_grad_(), weight.clone().requires_grad_()

    def call(leaf: torch.Tensor, c: Any) -> torch.Tensor:
        rows = leaf.reshape(1, -1, leaf.shape[2])
        return short_convolution(rows, taps, None, conv_halo(leaf, c), cu_seqlens=c.cu_seqlens)[0].view_as(leaf)

    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(leaf, c)
    y.backward(c.local(grad))
    return {"o": y.detach(), "dq": leaf.grad, "dA_log": taps.grad, "ranges": c.ranges}


def fsdp_step(
    group: Any, rank: int, x: Any, grad: Any, context: dict, options: dict, recomputed: bool
) -> dict[str, Any]:
    """A training step of two layers under FSDP2 in bfloat16 over this rank's tokens; whole gradients on rank 0.

    Args:
        recomputed: whether layers recompute their activations in the backward.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from kda_core.nn import KimiDeltaAttention

    torch.manual_seed(0)
    layers = [KimiDeltaAttention(**options) for _ in range(2)]
    taps = layers[0].conv_size
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if recomputed:
        layers = [checkpoint_wrapper(layer) for layer in layers]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    c = build_cp_context(group=group, conv1d_kernel_size=taps, **context)
    leaf = c.local(x).requires_grad_()
    y = leaf
    for layer in layers:
        y = y + layer(y, cp_context=c)
    y.backward(c.local(grad).to(y.dtype))
    # FSDP takes the mean of ranks; torch 2.7's takes the sum on gloo.
    probe = fully_shard(torch.nn.Linear(1, 1, bias=False), mesh=mesh)
    probe(torch.ones(1, 1)).backward()
    ranks = group.size() / float(probe.weight.grad.full_tensor())
    found = {"o": y.detach(), "dq": leaf.grad, "ranges": c.ranges}
    for i, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            # Every rank has the whole, of which the first one's counts.
            whole = p.grad.full_tensor() * ranks
            found[f"d {i} {name.replace('_checkpoint_wrapped_module.', '')}"] = (
                whole if rank == 0 else torch.zeros_like(whole)
            )
    return found


def layer_step(group: Any, rank: int, x: Any, grad: Any, context: dict, options: dict) -> dict[str, Any]:
    """A training step of a layer on this rank's tokens."""
    from kda_core.nn import KimiDeltaAttention

    torch.manual_seed(0)
    layer = KimiDeltaAttention(**options).double()
    c = build_cp_context(group=group, conv1d_kernel_size=layer.conv_size, **context)
    leaf = c.local(x).requires_grad_()
    y = layer(leaf, cp_context=c)
    y.backward(c.local(grad))
    found = {"o": y.detach(), "dq": leaf.grad, "ranges": c.ranges}
    return found | {f"d {n}": p.grad for n, p in layer.named_parameters()}


def sharded_step(group: Any, rank: int, inputs: dict, grads: dict, kinds: list[str], options: dict, how: str) -> dict:
    """A training step of DTensors over a mesh of as many dimensions as ``kinds``; whole results.

    Args:
        kinds: what each dimension of the mesh, of two ranks, shards: "batch", "heads" or "nothing".
        how: "eager" or "compiled".
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch._dynamo.reset()
    mesh = _mesh(group, rank, len(kinds))
    heads = {**dict.fromkeys(ROWS, 2), "A_log": 0, "dt_bias": 0, "initial_state": 1, "o": 2, "final_state": 1}
    batch = {**dict.fromkeys(ROWS, 0), "initial_state": 0, "o": 0, "final_state": 0}

    def placements(name: str) -> list:
        dims = [{"batch": batch, "heads": heads, "nothing": {}}[kind].get(name) for kind in kinds]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def spread(name: str, t: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(t.clone(), mesh, placements(name))

    leaves = {n: spread(n, t).requires_grad_() for n, t in inputs.items()}

    def call(**x: torch.Tensor) -> tuple:
        return kda_core.chunk_kda(**x, **options, output_final_state=True)

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if how == "compiled" else call
    o, state = function(**leaves)
    assert list(o.placements) == placements("o")
    torch.autograd.backward([o, state], [spread("o", grads["o"]), spread("final_state", grads["final_state"])])
    found = {"o": o.detach(), "final_state": state.detach(), **{f"d{n}": t.grad for n, t in leaves.items()}}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def _mesh(group: Any, rank: int, dims: int) -> Any:
    """A mesh of all ranks of a group of two, or of one of four as two times two."""
    import ranks
    from torch.distributed.device_mesh import DeviceMesh

    if dims == 1:
        return DeviceMesh.from_group(group, "cpu")
    rows, columns = (next(p for p in part if rank in p) for part in (ranks.MESH[:2], ranks.MESH[2:]))
    groups = [ranks.PAIRS[columns], ranks.PAIRS[rows]]
    return DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("first", "second"))


def local_rows(group: Any, rank: int, inputs: dict, options: dict) -> torch.Tensor:
    """A call of this rank's heads as plain tensors, beside parameters that are DTensors."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh(group, rank, 1)
    rows = {n: t.chunk(2, 2)[rank] for n, t in inputs.items() if n in ROWS}
    parameters = {n: distribute_tensor(inputs[n], mesh, [Shard(0)]) for n in ("A_log", "dt_bias")}
    return kda_core.chunk_kda(**rows, **parameters, **options)[0]


def sharded_one_after_another(group: Any, rank: int, calls: list[tuple[dict, int]], options: dict) -> list[Any]:
    """Whole outputs of one compiled function for DTensors that are sharded along other dimensions each time."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch._dynamo.reset()
    mesh = _mesh(group, rank, 1)
    # torch 2.13 cannot partition graphs of DTensors whose sizes are symbols (docs/several_devices.md).
    function = torch.compile(
        lambda **x: kda_core.chunk_kda(**x, **options)[0], fullgraph=True, backend="aot_eager", dynamic=False
    )
    found = []
    for inputs, dim in calls:
        leaves = {n: distribute_tensor(t.clone(), mesh, [Shard(dim)]).requires_grad_() for n, t in inputs.items()}
        o = function(**leaves)
        o.sum().backward()
        found.append((tuple(o.shape), o.full_tensor().detach(), leaves["q"].grad.full_tensor()))
    return found
