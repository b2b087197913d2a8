"""Time the halves of a call (``Feature.CONTEXT_PARALLEL``) beside the plain call of the same rows, on one GPU.

    python benchmarks/halves.py --shapes 1,65536,32,128 1,131072,8,128

A row names what is timed, with the host (eager) and without (a CUDA graph), in milliseconds. "share" is the plain
call's time over that of both halves: the efficiency that several devices have before they exchange anything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import inputs
import torch
from measuring import capture
from peers import kernels
from torch import Tensor

from kda_core._bench import take_turns
from kda_core._plugins import registry
from kda_core.reference import DIFFERENTIABLE
from kda_core.request import Request
from kda_core.testing.inputs import Call

SHAPES = ("1,65536,32,128", "1,131072,8,128")


class Halves:
    """The halves of a call on a backend, with states drawn at the fragments' starts and ends.

    Args:
        call: a training call on the device; each of its sequences is a fragment.
    """

    def __init__(self, backend: str, call: Call) -> None:
        self.backend = registry.named(backend)
        r = replace(call.request(), initial_state=None, output_final_state=True, save_for_backward=True)
        self.plain, self.grad_o = r, call.grads["o"]
        needs = [n for n in DIFFERENTIABLE if getattr(r, n) is not None]
        self.needs = frozenset(needs)
        registry.choose(self.plain, backend)
        self.halved = self._with_memo(replace(r, cp_context=True))
        self.states = 0.1 * torch.randn(r.N, r.HV, r.K, r.V, device=r.device)

    @staticmethod
    def _with_memo(r: Request) -> Request:
        r.__dict__["memo"] = {}
        return r

    def _backward(self, r: Request, saved: tuple[Tensor, ...]) -> Request:
        found = replace(r, saved=saved, grad_o=self.grad_o, needs_grad=self.needs)
        found.__dict__["memo"] = r.memo
        return found

    def runs(self, training: bool) -> dict[str, Callable[[], Any]]:
        """The calls that are timed, by name."""
        plain, halved, states, call = self.plain, self.halved, self.states, self.backend.call
        if not training:
            plain, halved = replace(plain, save_for_backward=False), replace(halved, save_for_backward=False)
            plain, halved = self._with_memo(plain), self._with_memo(halved)

        def begin() -> Any:
            return call("kda_core_chunk_begin", request=halved)

        def finish(kept: tuple[Tensor, ...]) -> Any:
            return call("kda_core_chunk_finish", request=halved, kept=kept, starts=states)

        begun = begin()
        done = finish(begun.kept)
        found = {
            "plain forward": lambda: self.backend.forward(plain),
            "begin": begin,
            "finish": lambda: finish(begun.kept),
            "both": lambda: finish(begin().kept),
        }
        if not training:
            return {f"inference, {n}": run for n, run in found.items()}
        saved = self.backend.forward(plain).saved
        whole, part = self._backward(plain, saved), self._backward(halved, done.saved)

        def begin_backward(r: Request = part) -> Any:
            return call("kda_core_chunk_begin_backward", request=r)

        def finish_backward(kept: tuple[Tensor, ...], r: Request = part) -> Any:
            return call("kda_core_chunk_finish_backward", request=r, kept=kept, ends=states)

        def step() -> Any:
            r = self._backward(plain, self.backend.forward(plain).saved)
            return self.backend.backward(r)

        def both() -> Any:
            r = self._backward(halved, finish(begin().kept).saved)
            return finish_backward(begin_backward(r).kept, r)

        begun_backward = begin_backward()
        return found | {
            "plain backward": lambda: self.backend.backward(whole),
            "begin backward": begin_backward,
            "finish backward": lambda: finish_backward(begun_backward.kept),
            "plain step": step,
            "step in halves": both,
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=inputs.parse_shape, default=[*map(inputs.parse_shape, SHAPES)])
    parser.add_argument("--decay", choices=inputs.DECAYS, default="slow")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each row")
    parser.add_argument("--backend", default="nvidia")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for case in options.shapes:
        call, _ = inputs.draw(case, "training", "bounded", options.decay, torch.bfloat16, device)
        with torch.no_grad():
            for training in (False, True):
                times = {}
                for name, run in Halves(options.backend, call).runs(training).items():
                    both = {"eager": run, "graph": capture(run, device)}
                    medians = map(statistics.median, take_turns(both, device, options.seconds).values())
                    eager, graph = times[name.removeprefix("inference, ")] = tuple(medians)
                    print(f"{case.name:24} {name:28} eager {eager:7.3f}  graph {graph:7.3f}", flush=True)
                    parts = [*kernels(run, device).items()][:9]
                    print(*(f"    {1e3 * ms:9.1f} us {kernel[:90]}" for kernel, ms in parts), sep="\n", flush=True)
                whole, halved = ("plain step", "step in halves") if training else ("plain forward", "both")
                shares = [f"{100 * a / b:.1f}%" for a, b in zip(times[whole], times[halved], strict=True)]
                print(f"{case.name:24} share {'training' if training else 'inference'} {shares}", flush=True)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
