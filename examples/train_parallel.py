"""Train a small language model over several processes: tokens, heads and parameters shared in any combination.

    python examples/train_parallel.py --json one.json                          # one process
    torchrun --nproc-per-node 4 examples/train_parallel.py --cp 2 --tp 2 --fsdp --expect one.json

--cp C shares the tokens of every sequence among C processes, --tp T the heads of every layer among T. The other
processes share the batch. --fsdp shards the parameters over all that do not share heads. The losses are those of one
process. On GPUs the processes talk by NCCL, on CPUs by gloo.

At a real size, on GPUs, the time of a step is printed too:

    torchrun --nproc-per-node 4 examples/train_parallel.py --cp 2 --tp 2 --fsdp --width 2048 --heads 16 --head-dim 128 \
        --layers 4 --tokens 65536 --dtype bfloat16

--save FOLDER writes a checkpoint (torch.distributed.checkpoint); --load FOLDER goes on from it, with any number of
processes and any way of sharing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from kda_core.distributed import build_cp_context
from kda_core.nn import KimiDeltaAttention

VOCABULARY, RATE = 64, 3e-3
SIZES = {"width": 48, "heads": 4, "head_dim": 16, "layers": 2, "batch": 4, "tokens": 96}
ALONG_FIRST = ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj.1", "g_proj.1", "conv1d", "A_log", "dt_bias")
"""Parameters whose first dimension are a layer's heads; that of o_proj is its second."""
SHARED = ("f_proj.0", "g_proj.0", "o_norm")
"""Parameters of a layer that all heads use: processes that share heads have parts of their gradients."""


class _Shared(torch.autograd.Function):
    """Where processes begin to share heads gradients are summed, where they end what comes out is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begins: Any, ends: Any) -> Tensor:
        ctx.group = begins
        return x.view_as(x) if ends is None else summed(x, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad if ctx.group is None else summed(grad, ctx.group), None, None


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Block(nn.Module):
    """x + mixer(norm(x)), x + MLP(norm(x)); the mixer with some of the heads where ``group`` shares them."""

    def __init__(self, width: int, head_dim: int, heads: int, group: Any) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(width), KimiDeltaAttention(width, head_dim=head_dim, num_heads=heads)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.group = group

    def forward(self, x: Tensor, context: Any) -> Tensor:
        y = self.norm(x)
        if self.group is None:
            x = x + self.mixer(y, cp_context=context)
        else:
            y = self.mixer(_Shared.apply(y, self.group, None), cp_context=context)
            x = x + _Shared.apply(y, None, self.group)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace, heads: int, group: Any = None) -> None:
        super().__init__()
        width = options.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, options.head_dim, heads, group) for _ in range(options.layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, context: Any = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


def heads_dim(name: str) -> int | None:
    """The dimension of a parameter that has a layer's heads."""
    if "mixer" not in name:
        return None
    return 1 if "o_proj" in name else 0 if any(part in name for part in ALONG_FIRST) else None


def model_of(options: argparse.Namespace, p: Processes) -> Model:
    """This process's heads of the model that one process would have."""
    torch.manual_seed(0)
    whole = Model(options, options.heads)
    if options.tp == 1:
        return whole
    if options.heads % options.tp:
        raise SystemExit(f"--tp: expected a number that divides {options.heads} heads, got {options.tp}")
    model, rank = Model(options, options.heads // options.tp, p.tp.get_group()), p.tp.get_local_rank()
    given = {name: (t, heads_dim(name)) for name, t in whole.state_dict().items()}
    model.load_state_dict({n: t if d is None else t.chunk(options.tp, d)[rank].clone() for n, (t, d) in given.items()})
    return model


def batches(steps: int, batch: int, tokens: int) -> list[Tensor]:
    """[batch, tokens + 1] tokens for each step: words of a small language, drawn on the CPU."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, VOCABULARY, (16, 6), generator=generator)
    count = math.ceil((tokens + 1) / words.shape[1])
    drawn = (torch.randint(0, len(words), (batch, count), generator=generator) for _ in range(steps))
    return [words[index].flatten(1)[:, : tokens + 1] for index in drawn]


class Processes:
    """This process's place among all: a mesh of (batch, tokens, heads)."""

    def __init__(self, cp: int, tp: int) -> None:
        alone = "RANK" not in os.environ
        size = 1 if alone else int(os.environ["WORLD_SIZE"])
        if size % (cp * tp):
            raise SystemExit(f"--cp {cp} --tp {tp}: expected {cp * tp} processes or a multiple, got {size}")
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        place = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", **place)
        self.mesh = init_device_mesh(kind, (size // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        self.dp, self.cp, self.tp = (self.mesh[name] for name in ("dp", "cp", "tp"))
        # Processes with the same heads: they hold the same parameters, and have parts of one gradient.
        self.same = self.mesh["dp", "cp"]._flatten("same")


class Checkpoint:
    """Parameters and the optimizer's moments as whole tensors, or as DTensors where processes share heads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, p: Processes, steps: int) -> None:
        self.steps, self.counts = torch.tensor(steps), []
        self.own: dict[str, Tensor] = {}
        for name, t in model.named_parameters():
            state = optimizer.state[t]
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)}
            self.counts.append(state["step"])
            self.own |= {f"{name}.exp_avg": state["exp_avg"], f"{name}.exp_avg_sq": state["exp_avg_sq"]}
            self.own[name] = t.detach()
        self.whole = {"steps": self.steps, **{n: self._whole(n, t, p) for n, t in self.own.items()}}

    @staticmethod
    def _whole(name: str, t: Tensor, p: Processes) -> Tensor:
        t = t.full_tensor() if isinstance(t, DTensor) else t
        dim = heads_dim(name)
        return t if dim is None or p.tp.size() == 1 else DTensor.from_local(t, p.tp, [Shard(dim)])

    def load(self, folder: Path) -> int:
        """Fill the parameters and moments; the number of steps that were done."""
        dcp.load(self.whole, checkpoint_id=folder)
        for name, t in self.own.items():
            if isinstance(t, DTensor):
                found = self.whole[name]
                found = found.to_local() if isinstance(found, DTensor) else found
                t.copy_(distribute_tensor(found, t.device_mesh, t.placements))
        for count in self.counts:
            count.fill_(int(self.steps))
        return int(self.steps)


def train(options: argparse.Namespace, p: Processes) -> tuple[int, list[float]]:
    """The steps of the checkpoint, and the loss of every step behind it, over all tokens of all processes."""
    model, context = model_of(options, p).to(p.device, getattr(torch, options.dtype)), None
    if options.cp > 1:
        context = build_cp_context(
            None, p.cp, model.blocks[0].mixer.conv_size, tokens=options.tokens, batch=options.batch // p.dp.size(),
            layout=options.layout, device=p.device,
        )  # fmt: skip
    if options.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=p.same)
        fully_shard(model, mesh=p.same)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    done = 0 if options.load is None else Checkpoint(model, optimizer, p, 0).load(options.load)
    losses: list[float] = []
    seconds: list[float] = []
    for tokens in batches(done + options.steps, options.batch, options.tokens)[done:]:
        began = time.perf_counter()
        own = tokens.chunk(p.dp.size())[p.dp.get_local_rank()].to(p.device)
        given, wanted = own[:, :-1], own[:, 1:]
        if context is not None:
            given, wanted = context.local(given), context.local(wanted)
        logits = model(given, context)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
        loss = loss / (options.batch * options.tokens)
        # The loss is the sum of all processes'; FSDP takes the mean of their gradients.
        (loss * (p.same.size() if options.fsdp else 1)).backward()
        sum_gradients(model, p, options)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=p.same.get_group())
        losses.append(float(total))
        seconds.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(f"step {done + len(losses)}: loss {losses[-1]:.5f}", flush=True)
    if dist.get_rank() == 0 and p.device.type == "cuda" and len(seconds) > 4:
        step, peak = statistics.median(seconds[4:]), torch.cuda.max_memory_allocated() / 2**30
        print(f"{1e3 * step:.1f} ms a step, {options.batch * options.tokens / step:,.0f} tokens/s, {peak:.2f} GiB")
    if options.save is not None:
        dcp.save(Checkpoint(model, optimizer, p, done + len(losses)).whole, checkpoint_id=options.save)
    return done, losses


def sum_gradients(model: nn.Module, p: Processes, options: argparse.Namespace) -> None:
    """Sum the parts of gradients that neither autograd nor FSDP has summed."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        if options.tp > 1 and "mixer" in name and any(part in name for part in SHARED):
            dist.all_reduce(local, group=p.tp.get_group())
        if not options.fsdp and p.same.size() > 1:
            dist.all_reduce(local, group=p.same.get_group())


def run(options: argparse.Namespace) -> tuple[int, list[float]]:
    """``train`` in a process group."""
    processes = Processes(options.cp, options.tp)
    try:
        if options.batch % processes.dp.size():
            raise SystemExit(f"expected a batch of {options.batch} that {processes.dp.size()} processes divide")
        done, losses = train(options, processes)
        if dist.get_rank() == 0 and options.json is not None:
            options.json.write_text(json.dumps({"losses": losses}) + "\n")
        return done, losses
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cp", type=int, default=1, help="processes that share the tokens of a sequence")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the heads of a layer")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous", help="of tokens, with --cp")
    parser.add_argument("--steps", type=int, default=20)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of parameters")
    parser.add_argument("--json", type=Path, metavar="FILE", help='write {"losses": [...]}')
    parser.add_argument("--expect", type=Path, metavar="FILE", help="fail unless losses are those of FILE within 1e-4")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="go on from a checkpoint")
    options = parser.parse_args(arguments)
    done, losses = run(options)
    # Threads of a group that a cycle still holds may abort the interpreter at its end.
    gc.collect()
    if options.expect is not None:
        expected = json.loads(options.expect.read_text())["losses"][done : done + len(losses)]
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"largest difference from {options.expect}: {worst:.1e}")
        return int(not worst < 1e-4)
    return 0


if __name__ == "__main__":
    sys.exit(main())
