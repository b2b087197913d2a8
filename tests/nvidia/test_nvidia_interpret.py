"""The NVIDIA backend's kernels in Triton's interpreter, small and hard cases against the oracle.

The interpreter must be chosen before triton is imported, so that a child process (this file, run as a script) does the
work and prints what it found; the tests look at that.

The kit's own suites run in the interpreter too (decays, keys, gates, beta, layouts, kda_gate); here is what they leave
out there or hold to less: a way that is bfloat16's, states in bfloat16, wide heads, a strided ``out``, the same bits
whatever a call is packed with.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import installed
import interpreted
import pytest
import torch

pytestmark = pytest.mark.end_to_end

installed.need_backend("nvidia")
installed.need_package("triton")

FP32 = 3e-6


def normalised(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def relative(actual, expected):
    """‖actual − expected‖ / ‖expected‖; NaN never passes a comparison."""
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def operands(T=40, B=1, HV=1, K=16, V=16, decay=1.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "q": normalised(normal(B, T, 1, K)), "k": normalised(normal(B, T, 1, K)),
        "v": normal(B, T, HV, V), "g": -decay * torch.rand((B, T, HV, K), generator=generator),
        "beta": torch.rand((B, T, HV), generator=generator), "initial_state": normal(B, HV, K, V),
    }  # fmt: skip


class Found(dict):
    """The child's findings: name -> [error, limit]; an error at or under the limit is right."""

    def close(self, name, actual, expected, limit=FP32):
        self[name] = [relative(actual, expected), limit]

    def true(self, name, value):
        self[name] = [0.0 if bool(value) else 1.0, 0.0]

    def against_oracle(self, name, call, limit=FP32, run=None, **options):
        """Compare a dense call with the oracle."""
        import kda_core

        run = run or partial(kda_core.chunk_kda, backend="nvidia")
        o, final = run(**call, output_final_state=True, **options)
        expected, state = kda_core.chunk_kda(**call, output_final_state=True, backend="reference")
        self.close(f"{name}: o", o, expected.double(), limit)
        rounding = 4e-3 if final.dtype == torch.bfloat16 else 0.0
        self.close(f"{name}: state", final, state.double(), limit + rounding)


def run_bounded(**call):
    """The call by the short way for bounded decays."""
    from kda_core_nvidia.choose import INTERPRETED, choose_forward
    from kda_core_nvidia.plans.forward import plan_forward
    from plan_runs import run_on_nvidia as run_plan

    from kda_core.request import Request
    from kda_core.triton_lib.plan import metadata

    request = Request(op="chunk_kda", scale=call["q"].shape[-1] ** -0.5, **call)
    r = metadata(request)
    plan = plan_forward(r, choose_forward(r, INTERPRETED))
    first, *others = plan.launches
    first = replace(first, constants={**first.constants, "BOUNDED": True})
    made = run_plan(replace(plan, epochs=((first, *others),)), request)
    return made["o"], made["final_state"]


def bounded_decays(found):
    """The short way for bounded decays, which real calls take in bfloat16 only."""
    for decay in (1e-4, 1.0, 5.0):
        call = operands(T=70, decay=decay, K=32)
        found.against_oracle(f"bounded, decay to -{decay:g}", call, limit=1e-5, run=run_bounded, safe_gate=True)
    call = operands(T=64)
    call["g"] = torch.full_like(call["g"], -5.0)
    found.against_oracle("bounded, all at the bound", call, limit=1e-5, run=run_bounded)
    call["q"], call["k"] = call["q"] * 1e-6, call["k"] * 1e-6
    found.against_oracle("bounded, tiny rows", call, limit=1e-5, run=run_bounded)
    call = operands(T=64, decay=0.0)
    call["k"] = call["k"][:, :1].expand_as(call["k"]).contiguous()
    call["beta"] = torch.ones_like(call["beta"])
    found.against_oracle("bounded, equal keys", call, limit=1e-5, run=run_bounded)
    call = operands(T=70)
    call["g"][:, ::7, :, ::3] = -math.inf
    call["g"][:, 3] = -1e30
    o, _ = run_bounded(**call)
    found.true("a broken promise is finite", torch.isfinite(o).all())


def shapes(found):
    found.against_oracle("more channels than a block", operands(T=33, K=72, V=130))
    call = operands(B=2, HV=2, K=16, V=24)
    found.against_oracle("bfloat16 state", call | {"initial_state": call["initial_state"].bfloat16()})
    call["k"] = call["k"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    call["v"] = torch.cat([call["v"], call["v"]], -1)[..., 24:]
    call["beta"] = call["beta"].repeat_interleave(3, -1)[..., ::3]
    out = torch.empty(2, 40, 24, 2).transpose(2, 3)
    found.against_oracle("strided", call, out=out)


def packing(found):
    import kda_core

    cu = [0, 0, 1, 34, 66, 67, 90]
    call = operands(T=100, HV=2, V=24)
    call["initial_state"] = torch.randn(6, 2, 16, 24, generator=torch.Generator().manual_seed(4))
    run = {"output_final_state": True, "backend": "nvidia"}
    bounds = torch.tensor(cu, dtype=torch.int32)
    o, final, h = kda_core.chunk_kda(**call, cu_seqlens=bounds, return_intermediate_states=True, chunk_size=32, **run)
    found.true("rows behind the last sequence", (o[:, 90:] == 0).all())
    starts = []
    for n in range(6):
        rows = slice(cu[n], cu[n + 1])
        one = {name: call[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        one["initial_state"] = call["initial_state"][n : n + 1]
        starts += [n] * -(-(cu[n + 1] - cu[n]) // 32)
        if cu[n] == cu[n + 1]:
            found.true("empty sequence", torch.equal(final[n], call["initial_state"][n]))
            continue
        alone, last = kda_core.chunk_kda(**one, **run)
        found.true(f"sequence {n} alone", torch.equal(o[:, rows], alone) and torch.equal(final[n], last[0]))
    found.true("h", h.shape[1] == len(starts) and torch.equal(h[0, 0], call["initial_state"][1]))
    found.true("h of a later sequence", torch.equal(h[0, starts.index(3)], call["initial_state"][3]))
    spoiled = {name: call[name].clone() for name in ("q", "k", "v", "g", "beta")}
    for x in spoiled.values():
        x[:, 34:66] = math.nan
    other, _ = kda_core.chunk_kda(**(call | spoiled), cu_seqlens=bounds, **run)
    found.true("NaN in a neighbour", torch.equal(other[:, :34], o[:, :34]) and torch.equal(other[:, 66:], o[:, 66:]))


def intermediate_states(found):
    import kda_core

    call = operands(T=65)
    run = {"output_final_state": True, "backend": "nvidia"}
    for size in (32, 64):
        h = kda_core.chunk_kda(**call, return_intermediate_states=True, chunk_size=size, **run)[2]
        cut = call | {name: call[name][:, :64] for name in ("q", "k", "v", "g", "beta")}
        found.true(f"h every {size}", torch.equal(h[:, 64 // size], kda_core.chunk_kda(**cut, **run)[1]))


def launch_chain(matrices, parts, additions, bounds, rows, reverse, block, **tensors):
    """``chain_kernel`` on matrices [S, HV, K, K], as float32 or as two parts, and additions [S, HV, K, V]."""
    from kda_core.triton_lib.chain_kernels import chain_kernel

    HV, K, V = additions.shape[1:]
    strides = {"S_M": K * K, "M_IN": 1, "M_OUT": K, "PART": 0, "S_A": K * V, "A_K": V, "A_V": 1}
    if parts:
        first = matrices.bfloat16()
        matrices = torch.stack([first, (matrices - first.float()).bfloat16()], 2)
        strides |= {"S_M": 2 * K * K, "PART": K * K}
    edges = ("given", "places", "starts", "sources", "results", "sends", "whole", "states", "ends", "summary", "sums")
    numbers = dict.fromkeys(("sequences", "count_starts", "s_gn", "s_gh", "s_gk", "s_gv", "s_wk"), 0)
    ends = dict(zip(("s_en", "s_eh", "s_ek", "s_ev"), (HV * K * V, K * V, V, 1), strict=True))
    named = dict.fromkeys(edges) | numbers | {"s_sk": V} | ends | tensors | strides
    F, columns = len(bounds) - 1, V if named["summary"] is None else K + V
    chain_kernel[(columns // 16 * F * HV,)](
        matrices, additions, cu_seqlens=bounds, rows=rows, per=1, HV=HV, programs=F * HV, K=K, V=V, KP=K, BV=16,
        BK=block, REVERSE=reverse, IN_TURN=block < K, DOT="ieee", STAGES=1, **named,
    )  # fmt: skip


def chains(found):
    """Fragments of several segments, of one and of none: products of matrices, and states from one to the next."""
    HV, K, V, rows = 2, 32, 32, 10
    bounds = torch.tensor([0, 25, 25, 30, 70])
    first = [int(b) // rows + n for n, b in enumerate(bounds[:-1])]
    count = [-(-int(length) // rows) for length in bounds.diff()]
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(11, HV, K, K, generator=generator) / 4
    additions = torch.randn(11, HV, K, V, generator=generator)
    given = torch.randn(4, HV, K, V, generator=generator)
    for parts, reverse in ((False, False), (False, True), (True, False), (True, True)):
        summary, sums = torch.empty(4, HV, K, K + V), torch.empty(4, HV, K, V)
        states, ends = torch.empty(11, HV, V, K), torch.empty(4, HV, K, V)
        # Also with a state in blocks of key channels.
        run = partial(launch_chain, matrices, parts, additions, bounds, rows, reverse, 16 if reverse else K)
        run(summary=summary)
        run(sums=sums)
        run(starts=given, states=states, ends=ends)
        for f in range(4):
            order = [first[f] + i for i in range(count[f])]
            product, x = torch.eye(K, dtype=torch.float64).expand(HV, K, K), given[f].double()
            for s in reversed(order) if reverse else order:
                name = f"chain, parts {parts}, reverse {reverse}, fragment {f}, segment {s}"
                found.close(f"{name}: state", states[s].mT, x, 1e-5)
                product, x = matrices[s].double() @ product, matrices[s].double() @ x + additions[s].double()
            name = f"chain, parts {parts}, reverse {reverse}, fragment {f}"
            found.close(f"{name}: matrix", summary[f, ..., :K], product, 1e-5)
            found.true(f"{name}: beside it", torch.equal(summary[f, ..., K:], sums[f]))
            found.close(f"{name}: end", ends[f], x, 1e-5)
            found.close(f"{name}: sum", sums[f], x - product @ given[f].double(), 1e-5)


PARTS = {f.__name__: f for f in (bounded_decays, shapes, packing, intermediate_states, chains)}


@pytest.fixture(scope="module")
def found():
    """The child's findings, by part: one for all, for importing torch takes it longer than a part."""
    return interpreted.printed(__file__)


@pytest.mark.parametrize("part", PARTS)
def test_interpreted(found, part):
    assert found[part]
    wrong = {name: pair for name, pair in found[part].items() if not pair[0] <= pair[1]}
    assert not wrong


def test_loading_the_plugin_imports_no_triton():
    code = """
import sys
from kda_core._plugins import Registry
from kda_core_nvidia.plugin import BACKEND
assert Registry(entry_points=()).register(BACKEND).state == "loaded"
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {name: Found() for name in PARTS}
    for name, part in PARTS.items():
        part(results[name])
    print(json.dumps(results))
