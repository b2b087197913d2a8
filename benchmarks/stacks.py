"""Time the adapters of vLLM and SGLang beside the Triton kernels that they replace, on a GPU.

    python benchmarks/stacks.py --json stacks.json

The stacks need not be installed: a wheel unzipped on the path is enough. Only the modules of the kernels are imported;
stand-ins answer what these ask about the device. Both sides get the same call, over a pool of float32 states, V first:
one token for each of N sequences, a token with three drafts, or packed prompts. Inputs are bfloat16 and raw, so norms,
gate and sigmoid are part of the call, and so are vLLM's copies of the states of prompts.

"graph" is a call's time in a CUDA graph of several, each on other slots, so that no state is in the cache; "eager" its
time in a row of ten calls, with the host. Errors are |x - r| / |r| of o and of the states behind the last token, on two
heads, beside the token recurrence in float64.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from inputs import draw_gate, errors, oracle
from measuring import OURS, Parser, Row, Rows, by_turns, capture, count, elapsed, median, number, summary
from torch import Tensor

from kda_core._bench import Run, reason
from kda_core._cli import version_of
from kda_core.testing.inputs import Call

COLD, COMPARED_HEADS, STRETCH = 256 * 2**20, 2, 10
CASES = ("1x1", "8x1", "64x1", "64x4", "1x8192", "8x1024")
"""Sequences and tokens of each: decoding, a token with three drafts, prompts."""
FLAGS = "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "state_v_first"
RAW = dict.fromkeys((*FLAGS, "output_final_state"), True)


def main(arguments: list[str] | None = None, stacks: Mapping[str, Stack] | None = None) -> int:
    """Measure every row; ``stacks``: by name, by default ``STACKS``."""
    stacks = STACKS if stacks is None else stacks
    parser = Parser(__file__, __doc__)
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=list(stacks), help="default: both")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NxT", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--gates", nargs="+", choices=("softplus", "bounded"), default=["softplus"])
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--channels", type=count, default=128, help="K = V")
    parser.add_argument("--turns", type=count, default=15, help="of each side, in a row; the median counts")
    options = parser.parse(arguments)
    if options.backend:  # the adapters name none
        os.environ["KDA_BACKEND"] = options.backend
    rows = Rows(options, {name: version_of(name) for name in options.stacks})
    for stack in options.stacks:
        sides = dict(zip((OURS, stack), stacks[stack](options.device), strict=True))
        for case, gate in itertools.product(options.cases, options.gates):
            row: Row = {"suite": "stacks", "shape": f"{stack} {case}", "gate": gate}
            try:
                with torch.inference_mode():
                    work = Work(*map(int, case.split("x")), gate, options)
                    row["implementations"] = measure(work, sides, options.turns)
            # Go on with the next row.
            except Exception as error:
                row["failed"] = reason(error)
            rows.add(row, *lines(row))
    return rows.status


class Work:
    """The inputs of a row.

    Attributes:
        mixed: bfloat16 [N * T, 3 * H * K], rows of q, k and v as a convolution leaves them. prompt: whether T > 4.
        q, k, v, g: bfloat16 [1, N * T, H, K]. beta: [1, N * T, H]. A_log: float32 [H]. dt_bias: [H * K].
        bounds: int32 [N + 1]. accepted: int32 [N]. started: bool [N].
        pool: float32 [slots, H, V, K]. slots: int32 [calls, N, T], or [calls, N, 1] for prompts. first: [calls, N].
        drafts: float32 [N, T, H, V, K] and its rows, int32 [N]: the states that SGLang keeps of drafts.
    """

    def __init__(self, N: int, T: int, gate: str, options: Namespace) -> None:
        torch.manual_seed(0)
        self.T, self.prompt, H, K = T, T > 4, options.heads, options.channels
        on = {"device": options.device}
        self.mixed = torch.randn(N * T, 3 * H * K, dtype=torch.bfloat16, **on)
        self.q, self.k, self.v = (x.unflatten(-1, (H, K)) for x in self.mixed[None].split(H * K, -1))
        if self.prompt:
            self.q, self.k, self.v = (x.contiguous() for x in (self.q, self.k, self.v))
        self.values = self.v.clone()
        self.beta = torch.randn(1, N * T, H, dtype=torch.bfloat16, **on)
        for name, x in draw_gate(gate, "random", (1, N * T, H, K), torch.bfloat16, options.device).items():
            setattr(self, name, x)
        self.bounds = torch.arange(0, (N + 1) * T, T, dtype=torch.int32, **on)
        self.accepted, self.started = torch.ones_like(self.bounds[1:]), torch.ones(N, dtype=torch.bool, **on)
        calls = 2 if self.prompt or options.device.type == "cpu" else max(4, COLD // (4 * N * H * K**2))
        shape = calls, N, 1 if self.prompt else T
        # Slot 0 is vLLM's null slot.
        self.slots = (1 + torch.randperm(calls * N * shape[2], **on)).to(torch.int32).view(shape)
        self.first = self.slots[:, :, 0].contiguous()
        self.pool = torch.randn(1 + self.slots.numel(), H, K, K, **on)
        self.drafts = torch.empty(N, T, H, K, K, **on) if 1 < T <= 4 else None
        self.rows = torch.arange(N, dtype=torch.int32, **on)

    def refresh(self) -> None:
        """SGLang's kernels for prompts write o over v."""
        self.v.copy_(self.values)

    def expected(self) -> dict[str, Tensor]:
        """o and the last states of the call on the first slots, on some heads, in float64."""
        H, K, n = *self.q.shape[2:], COMPARED_HEADS
        tensors = {name: getattr(self, name)[:, :, :n] for name in ("q", "k", "v", "g", "beta")}
        tensors |= {"A_log": self.A_log[:n], "dt_bias": self.dt_bias.view(H, K)[:n].flatten()}
        tensors |= {"initial_state": self.pool[self.first[0].long(), :n], "cu_seqlens": self.bounds.long()}
        gate = {"lower_bound": self.lower_bound, "safe_gate": self.lower_bound is not None}
        return oracle(Call("chunk_kda", tensors, RAW | gate))


Side = Callable[[Work, int], tuple[Tensor, Tensor | None]]
"""A call, on its slots: o [1, N * T, H, V], and the states after each token if they are not in the pool."""
Stack = Callable[[torch.device], tuple[Side, Side]]  # Makes our side and a stack's own


def bare(home: str) -> None:
    """Put a package and those around it in place without their ``__init__``, which would import a server."""
    for name in itertools.accumulate(home.split("."), "{}.{}".format):
        if name not in sys.modules:
            parent, _, last = name.rpartition(".")
            found = [f"{folder}/{last}" for folder in sys.modules[parent].__path__] if parent else None
            path = found or importlib.util.find_spec(name).submodule_search_locations
            sys.modules[name] = module = ModuleType(name)
            module.__path__ = list(path)


def stand_in(name: str, **content: object) -> None:
    sys.modules[name] = SimpleNamespace(**content)


def vllm(device: torch.device) -> tuple[Side, Side]:
    """The functions that the adapter puts into vLLM's layer of Kimi Linear, and those that are there."""
    import kda_core_vllm
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    major, minor = capability(device)
    yes, no = lambda: major > 0, lambda: False
    platform = {"is_cuda": yes, "is_cuda_alike": yes, "is_rocm": no, "is_arch_support_pdl": lambda: major >= 9}
    platform["has_device_capability"] = lambda least: 10 * major + minor >= least
    bare("vllm.models.kimi_k3.nvidia.ops.third_party")
    bare("vllm.third_party.flash_linear_attention.ops")
    bare("vllm.model_executor.layers.mamba.ops")
    bare("vllm.utils")
    stand_in("vllm.platforms", current_platform=SimpleNamespace(**platform))
    stand_in("vllm.triton_utils", triton=triton, tl=tl, tldevice=libdevice)
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    stand_in("vllm.utils.torch_utils", async_tensor_h2d=lambda x, device, dtype: x.to(device, dtype))
    places = kda_core_vllm.MODELS["kimi_k3"], kda_core_vllm.COPIES[0]
    makers = {name: maker for _, part in places for name, maker in part.items()}
    stock = {}
    for home, part in places:
        module = importlib.import_module("vllm." + home.format("nvidia"))
        stock |= {name: getattr(module, name) for name in part}

    def run(functions: dict[str, Callable[..., Any]], x: Work, i: int) -> tuple[Tensor, None]:
        gate = {"raw_g": x.g, "raw_beta": x.beta, "A_log": x.A_log, "lower_bound": x.lower_bound}
        rows = gate | {"q": x.q, "k": x.k, "v": x.v, "cu_seqlens": x.bounds}
        states = {"dt_bias": x.dt_bias, "initial_state": x.pool}
        if x.prompt:
            states = {"initial_state": functions["gather_initial_states"](x.pool, x.first[i], x.started)}
            states |= {"g_bias": x.dt_bias, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            o, x.pool[x.first[i]] = functions["chunk_kda_with_fused_gate"](**rows, **states)
        elif x.T == 1:
            o, _ = functions["fused_recurrent_kda_packed_decode"](x.mixed, **gate, **states, state_indices=x.first[i])
        else:
            drafts = {"ssm_state_indices": x.slots[i], "num_accepted_tokens": x.accepted}
            o, _ = functions["fused_recurrent_kda"](**rows, **states, **drafts)
        return o, None

    return partial(run, {name: makers[name](function) for name, function in stock.items()}), partial(run, stock)


def sglang(device: torch.device) -> tuple[Side, Side]:
    """Methods of the adapter's subclass, and those of SGLang's class."""
    import triton

    major, minor = capability(device)
    no = lambda: False  # noqa: E731
    asked = dict.fromkeys(("is_cpu", "is_hip", "is_npu", "is_xpu", "cpu_has_amx_support", "is_gfx95_supported"), no)
    asked |= {"is_cuda": lambda: major > 0, "is_sm90_supported": lambda: major == 9}
    asked |= {"get_device_sm": lambda: 10 * major + minor, "cdiv": triton.cdiv}
    asked["next_power_of_2"] = triton.next_power_of_2
    bare("sglang.srt.layers.attention.linear.kernels")
    bare("sglang.kernels.ops.attention.linear")
    bare("sglang.kernels.ops.attention.fla")
    stand_in("sglang.srt.utils", **asked)
    stand_in("sglang.srt.utils.common", torch_release=(9, 0))
    stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: major >= 9, get_jit_cuda_arch=None)
    # Its kernel in CUDA C++ for eight and more rows would be compiled with nvcc.
    stand_in("sglang.kernels.ops.attention.kda_packed_decode", covered=lambda *given, **named: False)
    from kda_core_sglang.kernel import KdaCoreKernel

    def run(kernel: Any, x: Work, i: int) -> tuple[Tensor, Tensor | None]:
        gate = {"A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": x.lower_bound}
        pool = {"ssm_states": x.pool, "cache_indices": x.first[i], "query_start_loc": x.bounds}
        if x.prompt:
            return kernel.extend(x.q, x.k, x.v, x.g, x.beta, **gate, **pool, beta_is_raw=True), None
        a, b = x.g.flatten(2), x.beta
        if x.T == 1:
            H, K = x.q.shape[2:]
            sizes = {"scale": K**-0.5, "num_v_heads": H, "head_v_dim": K}
            return kernel.packed_decode(x.mixed, a[0], b[0], **gate, **pool, **sizes), None
        given = {"intermediate_states_buffer": x.drafts, "cache_steps": x.T, "retrieve_parent_token": None}
        given["intermediate_state_indices"] = x.rows
        return kernel.target_verify(q=x.q, k=x.k, v=x.v, a=a, b=b, **gate, **pool, **given), x.drafts

    return partial(run, KdaCoreKernel()), partial(run, KdaCoreKernel.__base__())


STACKS: dict[str, Stack] = {"vllm": vllm, "sglang": sglang}


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def measure(x: Work, sides: dict[str, Side], turns: int) -> dict[str, Any]:
    """Errors, and milliseconds of a call by turns, by side."""
    device, expected, found = x.q.device, x.expected(), {}
    first, before = x.slots[0].long(), x.pool[x.slots[0].long()]
    for name, side in sides.items():
        x.refresh()
        o, states = side(x, 0)
        last = x.pool[first[:, -1]] if states is None else states[:, -1]
        part = {"o": o[:, :, :COMPARED_HEADS], "final_state": last[:, :COMPARED_HEADS]}
        found[name] = {"errors": errors(part, expected)}
        x.pool[first] = before
    every = {name: partial(all_slots, x, side) for name, side in sides.items()}
    replays = {name: capture(run, device) for name, run in every.items()} if device.type == "cuda" else {}
    for name, ms in by_turns({name: partial(stretch, x, side) for name, side in sides.items()}, turns).items():
        found[name]["ms"] = summary(ms)
    for name, ms in by_turns({name: partial(replayed, x, run) for name, run in replays.items()}, turns).items():
        found[name]["device_ms"] = summary(ms)
    return found


def all_slots(x: Work, side: Side) -> list[object]:
    return [side(x, i) for i in range(len(x.slots))]


def replayed(x: Work, replay: Run) -> float:
    """Milliseconds of a call in a graph of one for each row of slots."""
    x.refresh()
    return elapsed(replay) / len(x.slots)


def stretch(x: Work, side: Side) -> float:
    """Milliseconds of a call in a row of calls, with the host."""
    synchronize = torch.cuda.synchronize if x.q.device.type == "cuda" else lambda: None
    x.refresh()
    synchronize()
    before = time.perf_counter()
    for i in range(STRETCH):
        side(x, i % len(x.slots))
    synchronize()
    return 1e3 * (time.perf_counter() - before) / STRETCH


def lines(row: Row) -> list[str]:
    """A row in words, one line a side."""
    found = [f"{row['shape']}, {row['gate']}"]
    for name, part in row.get("implementations", {}).items():
        text = f"  {name:9}"
        for key, word in (("device_ms", "graph"), ("ms", "eager")):
            ms, ours = median(row, name, key), median(row, OURS, key)
            text += f"  {word} {number(1e3 * ms):>7} µs {ms / ours:5.2f}×" if ms and ours else ""
        found.append(text + "".join(f"  {n} {float(x):.1e}" for n, x in part["errors"].items()))
    return found


if __name__ == "__main__":
    sys.exit(main())
