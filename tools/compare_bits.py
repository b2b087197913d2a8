"""Whether results and gradients have the bits that they had at another commit.

    python tools/compare_bits.py --backend cpu --out before.json       # at the commit before
    python tools/compare_bits.py --backend cpu --against before.json   # after a change: status 1 when bits differ

Draws calls from a fixed seed over every function, option, dtype, layout and family of shapes, and hashes what each
returns and writes: outputs, states, pools and gradients. A refused call counts as a result. The draw depends on this
file and on torch's CPU generator alone, so that a change of the library or of its kit leaves it as it is. Calls are
drawn one by one: those of a smaller ``--calls`` are the first ones of a larger.

Every call is made twice, because backends and the router remember calls; both must have the same bits.

Triton's backends run on the GPU when there is one, with larger shapes; without one, or with ``--interpret``, they run
small shapes in Triton's interpreter. Bits hold on one machine and with one version of torch and triton, which the file
records.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SCHEMA = 1
SEED = 20260
CALLS = 300
INTERPRETED_CALLS = {"nvidia": 120, "amd": 120}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "chunk_kda", "fused_recurrent_kda", "chunk_kda", "kda_gate")
GATES = ("given", "softplus", "lower bound")
DECAYS = ("mild", "slow", "none", "isolated")
LOWER_BOUND = -5.0


@dataclass
class Drawn:
    """One call.

    Attributes:
        function: name of a public function.
        tensors, options: its arguments by name; tensors are on the CPU and contiguous.
        strided: names of the tensors that are passed as slices of wider ones, or with their axes exchanged.
        grads: names of the inputs whose gradient is asked for; empty: forward only.
        by_function: take the gradients with ``torch.func.vjp`` instead of autograd.
        out: pass a buffer as ``out``.
        seed: of the gradients of the outputs.
    """

    function: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    strided: dict[str, str] = field(default_factory=dict)
    grads: tuple[str, ...] = ()
    by_function: bool = False
    out: bool = False
    seed: int = 0

    def __str__(self) -> str:
        shapes = [f"{n} {_short(t.dtype)}{list(t.shape)}" for n, t in self.tensors.items()]
        layouts = [f"{n} {how}" for n, how in sorted(self.strided.items())]
        options = [f"{n}={value}" for n, value in sorted(self.options.items())]
        grads = [f"gradients of {', '.join(self.grads)}" + " by torch.func" * self.by_function] if self.grads else []
        return f"{self.function}: " + "; ".join([*shapes, *layouts, *options, *["out"] * self.out, *grads])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Sizes:
    """A family of shapes: values to choose from.

    Attributes:
        tokens, steps: of a sequence for ``chunk_kda`` and for ``fused_recurrent_kda``.
        heads: H. keys: K. values: V, None for K. sequences: of a packed batch.
    """

    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    heads: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int | None, ...]
    sequences: tuple[int, ...]


SIZES = {
    "interpreter": Sizes(
        (1, 2, 5, 16, 31, 33, 40, 64, 66),
        (1, 1, 2, 3, 4, 7),
        (1, 2),
        (8, 16, 16, 32, 20),
        (None, None, 16, 24),
        (1, 2, 3),
    ),
    "cpu": Sizes(
        (1, 2, 15, 31, 33, 63, 64, 65, 100, 129, 200),
        (1, 1, 2, 3, 4, 7, 20, 65),
        (1, 2, 3),
        (8, 16, 32, 64, 64, 128, 100, 36, 1),
        (None, None, None, 32, 64, 24),
        (1, 2, 3, 5),
    ),
    "gpu": Sizes(
        (1, 15, 63, 64, 65, 200, 1000, 1024, 2048, 4096),
        (1, 1, 2, 3, 4, 65, 300),
        (1, 2, 4, 16, 32),
        (128, 128, 128, 64, 64, 32, 100, 256, 1),
        (None, None, None, 64, 128, 24),
        (1, 2, 5, 30),
    ),
}


def draw(number: int, family: str) -> Drawn:
    """Call ``number`` of the draw, with shapes of a family of ``SIZES``."""
    choice = random.Random(f"{SEED} {number}")
    generator = torch.Generator().manual_seed(SEED * 1000 + number)
    function = FUNCTIONS[number % len(FUNCTIONS)]
    if function == "kda_gate":
        return _draw_gate(choice, generator)
    return _draw_call(function, choice, generator, SIZES[family])


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _draw_gate(choice: random.Random, generator: torch.Generator) -> Drawn:
    HV, K = choice.choice((1, 2, 5)), choice.choice((1, 8, 20, 64))
    lead = choice.choice(((3,), (2, 7), (), (3, 40, 2), (0,)))
    gate_dtype = DTYPES[choice.choice(tuple(DTYPES))]
    bounded, with_rate = choice.random() < 0.5, choice.random() < 0.8
    tensors = {"g": _normal(generator, *lead, HV, K).to(gate_dtype)}
    if with_rate or not bounded:
        tensors["A_log"] = _normal(generator, HV)
    if choice.random() < 0.7:
        tensors["dt_bias"] = _normal(generator, *((HV * K,) if choice.random() < 0.5 else (HV, K)))
    options: dict[str, Any] = {"lower_bound": choice.choice((-5.0, -0.5))} if bounded else {}
    grads = _some(choice, tuple(tensors)) if choice.random() < 0.5 else ()
    strided = {"g": choice.choice(("sliced", "exchanged"))} if choice.random() < 0.4 else {}
    return Drawn("kda_gate", tensors, options, strided, grads, choice.random() < 0.3, seed=choice.randrange(2**31))


def _some(choice: random.Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """All of the names, or now and then only a few."""
    if choice.random() < 0.7:
        return names
    return tuple(n for n in names if choice.random() < 0.4) or names[:1]


def _draw_call(function: str, choice: random.Random, generator: torch.Generator, sizes: Sizes) -> Drawn:
    chunked = function == "chunk_kda"
    dtype = DTYPES[choice.choice(("bf16", "bf16", "fp32", "fp32", "fp16", "fp64"))]
    gate_dtype = dtype if choice.random() < 0.5 else choice.choice((torch.float32, torch.bfloat16))
    lengths, B, T = _draw_lengths(choice, sizes.tokens if chunked else sizes.steps, sizes.sequences)
    H, group = choice.choice(sizes.heads), choice.choice((1, 1, 2, 3))
    HV = H * group
    K = choice.choice(sizes.keys)
    V = choice.choice(sizes.values) or K
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {"output_final_state": choice.random() < 0.7}

    q, k, v = (_normal(generator, B, T, heads, size) for heads, size in ((H, K), (H, K), (HV, V)))
    if choice.random() < 0.15:
        k = k[:, :1].expand_as(k) if T else k
    if choice.random() < 0.5:
        options["use_qk_l2norm_in_kernel"] = True
    else:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    for name, t in (("q", q), ("k", k), ("v", v)):
        tensors[name] = t.contiguous().to(dtype)
    if choice.random() < 0.3:
        options["scale"] = choice.choice((0.3, 1.0, -2.0, 0.0))

    tensors["g"] = _draw_decay(choice, generator, (B, T, HV, K), tensors, options, chunked).to(gate_dtype)
    logits = _normal(generator, B, T, HV)
    if choice.random() < 0.5:
        options["use_beta_sigmoid_in_kernel"] = True
        options["allow_neg_eigval"] = choice.random() < 0.5
    else:
        logits = torch.sigmoid(logits)
    tensors["beta"] = logits.to(gate_dtype)

    if lengths is not None:
        index_dtype = choice.choice((torch.int32, torch.int64))
        tensors["cu_seqlens"] = torch.tensor([0, *lengths], dtype=index_dtype).cumsum(0).to(index_dtype)
    if chunked:
        options["chunk_size"] = choice.choice((64, 64, 32))
        options["disable_recompute"] = choice.random() < 0.3
        options["return_intermediate_states"] = choice.random() < 0.15
        if lengths is not None and (options["return_intermediate_states"] or choice.random() < 0.3):
            tensors["cu_seqlens_cpu"] = tensors["cu_seqlens"].clone()
    options["state_v_first"] = choice.random() < 0.3
    N = B if lengths is None else len(lengths)
    longest = T if lengths is None else max(lengths, default=0)
    _draw_state(choice, generator, (N, HV, K, V), longest, dtype, tensors, options, chunked)

    out = choice.random() < 0.15
    written = out or options.get("inplace_final_state", False) or "ssm_state_indices" in tensors
    differentiable = not written and not options.get("return_intermediate_states", False)
    inputs = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    grads = _some(choice, tuple(n for n in inputs if n in tensors)) if choice.random() < 0.6 else ()
    layouts = {n: choice.choice(("sliced", "exchanged")) for n in inputs[:5] if choice.random() < 0.5}
    strided = layouts if choice.random() < 0.35 else {}
    by_function = choice.random() < 0.25
    seed = choice.randrange(2**31)
    return Drawn(function, tensors, options, strided, grads if differentiable else (), by_function, out, seed)


def _draw_lengths(
    choice: random.Random, tokens: tuple[int, ...], sequences: tuple[int, ...]
) -> tuple[list[int] | None, int, int]:
    """Lengths of packed sequences or None, B and T."""
    if choice.random() < 0.55:
        return None, choice.choice((1, 1, 2, 3)), 0 if choice.random() < 0.03 else choice.choice(tokens)
    lengths = [choice.choice((0, *tokens)) for _ in range(choice.choice(sequences))]
    behind = choice.choice((0, 0, 0, 3, 70))
    return lengths, 1, sum(lengths) + behind


def _draw_decay(
    choice: random.Random,
    generator: torch.Generator,
    shape: tuple[int, ...],
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    chunked: bool,
) -> Tensor:
    """g; adds the gate's other arguments."""
    x, (HV, K) = _normal(generator, *shape), shape[-2:]
    gate, hint = choice.choice(GATES), chunked and choice.random() < 0.3
    if gate == "given":
        decay = "bounded" if hint else choice.choice(DECAYS)
        if hint:
            options |= {"safe_gate": True, "lower_bound": LOWER_BOUND} if choice.random() < 0.5 else {"safe_gate": True}
            return LOWER_BOUND * torch.sigmoid(x)
        g = F.logsigmoid(x)
        if decay == "isolated":
            g[:, 7::29], g[:, 3::11, :, 0] = -1e30, -1e4
        return g if decay in ("mild", "isolated") else -1e-3 * torch.sigmoid(x) if decay == "slow" else 0 * g
    options["use_gate_in_kernel"] = True
    with_rate, with_bias, flat = choice.random() < 0.7, choice.random() < 0.7, choice.random() < 0.5
    if gate == "lower bound":
        options |= {"lower_bound": LOWER_BOUND} | ({"safe_gate": True} if hint else {})
    if with_rate or gate == "softplus":
        tensors["A_log"] = torch.linspace(0, 2.5, HV)
    if with_bias:
        tensors["dt_bias"] = _normal(generator, *((HV * K,) if flat else (HV, K)))
    return x


def _draw_state(
    choice: random.Random,
    generator: torch.Generator,
    sizes: tuple[int, int, int, int],
    longest: int,
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    chunked: bool,
) -> None:
    """Add an initial state, or a pool with the slots of its sequences, or neither."""
    N, HV, K, V = sizes
    last = (V, K) if options["state_v_first"] else (K, V)
    state_dtype = torch.float64 if dtype == torch.float64 else choice.choice((torch.float32, torch.bfloat16))
    kind = choice.choice(("none", "dense", "dense", "dense", "pool", "pool", "inplace"))
    if kind == "none":
        return
    if kind != "pool" or not N:
        tensors["initial_state"] = 0.5 * _normal(generator, N, HV, *last).to(state_dtype)
        if kind == "inplace" and not chunked:
            options["inplace_final_state"] = True
        return
    width = max(longest, 1) if not chunked and longest <= 4 and choice.random() < 0.5 else 1
    slots = N * width + 2
    tensors["initial_state"] = 0.5 * _normal(generator, slots, HV, *last).to(state_dtype)
    rows = torch.tensor(choice.sample(range(slots), N * width)).view(N, width)
    if choice.random() < 0.4:
        rows[choice.randrange(N)] = options.setdefault("pad_slot_id", choice.choice((-1, -7)))
    index_dtype = choice.choice((torch.int32, torch.int64))
    tensors["ssm_state_indices"] = (rows[:, 0] if width == 1 else rows).to(index_dtype).contiguous()
    if width > 1 and choice.random() < 0.7:
        accepted = [choice.randint(1, width) for _ in range(N)]
        tensors["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)


def _laid_out(t: Tensor, how: str | None) -> Tensor:
    """A copy of ``t`` in another layout."""
    if how == "sliced":
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
        return wide[..., : t.shape[-1]].copy_(t)
    if how == "exchanged" and t.dim() > 2:
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    return t.clone()


def run(call: Drawn, backend: str, device: torch.device) -> dict[str, str]:
    """Hashes of everything that the call returns and writes, by name; or the refusal."""
    import kda_core

    function = getattr(kda_core, call.function)
    tensors = {n: _laid_out(t, call.strided.get(n)) for n, t in call.tensors.items()}
    tensors = {n: t if n == "cu_seqlens_cpu" else _moved(t, device) for n, t in tensors.items()}
    if call.out:
        v = tensors["v"]
        B, T, HV, V = v.shape
        tensors["out"] = torch.full((B, T, HV, V), float("nan"), dtype=tensors["q"].dtype, device=device)
    arguments = {**tensors, **call.options, "backend": backend}
    names = ("decay",) if call.function == "kda_gate" else ("o", "final_state", "h")
    try:
        if not call.grads:
            with torch.no_grad():
                results = function(**arguments)
            found = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=False))
        elif call.by_function:
            found = _by_function(call, function, arguments, names)
        else:
            found = _by_autograd(call, function, arguments, names)
    except kda_core.UnsupportedCall as error:
        return {"refused": type(error).__name__}
    if "ssm_state_indices" in tensors or call.options.get("inplace_final_state"):
        found["pool"] = tensors["initial_state"]
    return {n: digest(t) for n, t in found.items() if t is not None}


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """``t`` on a device, with its strides."""
    if device.type == "cpu":
        return t
    moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return moved.copy_(t)


def _grads_of(call: Drawn, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(call.seed)
    return tuple(_normal(generator, *t.shape).to(t.dtype).to(t.device) for t in results)


def _by_autograd(call: Drawn, function: Any, arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    inputs = [arguments[n].requires_grad_() for n in call.grads]
    results = function(**arguments)
    found = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=False))
    outputs = tuple(t for t in found.values() if t is not None)
    grads = torch.autograd.grad(outputs, inputs, _grads_of(call, outputs), allow_unused=True)
    return found | {f"d{n}": grad for n, grad in zip(call.grads, grads, strict=True)}


def _by_function(call: Drawn, function: Any, arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    def of_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = function(**(arguments | dict(zip(call.grads, inputs, strict=True))))
        return tuple(t for t in (results if isinstance(results, tuple) else (results,)) if t is not None)

    results, backward = torch.func.vjp(of_inputs, *(arguments[n] for n in call.grads))
    grads = backward(_grads_of(call, results))
    # A final state that was not asked for is the last of the results.
    return dict(zip(names, results, strict=False)) | {f"d{n}": grad for n, grad in zip(call.grads, grads, strict=True)}


def digest(t: Tensor) -> str:
    """A hash of dtype, shape and bits."""
    t = t.detach().cpu().contiguous()
    h = hashlib.sha256(f"{t.dtype}{tuple(t.shape)}".encode())
    if t.numel():
        h.update(ctypes.string_at(t.data_ptr(), t.nbytes))
    return h.hexdigest()[:24]


def inputs_digest(call: Drawn) -> str:
    """A hash of the drawn tensors, which tells another draw from another result."""
    h = hashlib.sha256()
    for name in sorted(call.tensors):
        h.update(f"{name} {digest(call.tensors[name])}".encode())
    return h.hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(backend: str, count: int, interpret: bool, device: torch.device) -> dict[str, Any]:
    """The file's content: versions, and every call with its hashes."""
    calls = []
    started = time.perf_counter()
    family = "interpreter" if interpret else "gpu" if device.type == "cuda" else "cpu"
    for number in range(count):
        call = draw(number, family)
        entry = {"number": number, "call": str(call), "inputs": inputs_digest(call)}
        results = run(call, backend, device)
        again = run(call, backend, device)
        if again != results:
            results |= {f"{n} of the second call": again[n] for n in again if again[n] != results[n]}
        calls.append(entry | {"results": results})
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {count}", end="", file=sys.stderr)
    seconds = time.perf_counter() - started
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {name: _version(name) for name in ("torch", "triton", "numpy")} | {"python": platform.python_version()}
    refused = sum("refused" in entry["results"] for entry in calls)
    unlike = sum(any(" second " in name for name in entry["results"]) for entry in calls)
    print(
        f"{backend} on {device}: {count} calls twice, {refused} refused, {unlike} with other bits the second time, "
        f"in {seconds:.0f} s",
        file=sys.stderr,
    )
    head = {"schema": SCHEMA, "seed": SEED, "backend": backend, "shapes": family, "device": where}
    return head | {"commit": _commit(), "versions": versions, "calls": calls}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for every call whose bits, or whose inputs, differ.

    Raises:
        ValueError: the two cannot be compared.
    """
    for name in ("schema", "seed", "backend", "shapes"):
        if before.get(name) != after[name]:
            raise ValueError(f"{name}: expected {after[name]!r}, got {before.get(name)!r} in the other file")
    found = []
    known = {entry["number"]: entry for entry in before["calls"]}
    for entry in after["calls"]:
        old = known.get(entry["number"])
        if old is None:
            continue
        if (old["call"], old["inputs"]) != (entry["call"], entry["inputs"]):
            found.append(f"{entry['number']}: another draw, of {entry['call']}; before, of {old['call']}")
        elif old["results"] != entry["results"]:
            names = sorted(old["results"].keys() | entry["results"].keys())
            wrong = [n for n in names if old["results"].get(n) != entry["results"].get(n)]
            found.append(f"{entry['number']}: {', '.join(wrong)} differ in {entry['call']}")
    return found


def compared(before: dict[str, Any], after: dict[str, Any]) -> int:
    """How many calls are in both."""
    return len({e["number"] for e in before["calls"]} & {e["number"] for e in after["calls"]})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--against", type=Path, help="compare with this file; status 1 when bits differ")
    parser.add_argument("--calls", type=int, help="only the first so many calls")
    parser.add_argument("--interpret", action="store_true", help="run Triton kernels in Triton's interpreter")
    given = parser.parse_args(arguments)
    before = None if given.against is None else json.loads(given.against.read_text(encoding="utf-8"))
    on_gpu = torch.cuda.is_available() and given.backend not in ("reference", "cpu")
    interpret = given.interpret or (given.backend in INTERPRETED_CALLS and not on_gpu)
    if interpret:
        # Triton looks when it is imported, and backends look when they are loaded.
        os.environ["TRITON_INTERPRET"] = "1"
        from kda_core.testing import interpreter

        interpreter.improve()
    torch.set_num_threads(1)
    count = given.calls or (INTERPRETED_CALLS.get(given.backend, CALLS) if interpret else CALLS)
    if before is not None and given.calls is None:
        count = min(count, len(before["calls"]))
    after = measure(given.backend, count, interpret, torch.device("cuda" if on_gpu and not interpret else "cpu"))
    if given.out is not None:
        given.out.write_text(json.dumps(after, indent=1), encoding="utf-8")
    if before is None:
        return 0
    for name, version in after["versions"].items():
        if before["versions"].get(name) != version:
            print(f"{name}: {version} here, {before['versions'].get(name)} there")
    try:
        found = differences(before, after)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(*found, sep="\n", end="\n" if found else "")
    number = compared(before, after)
    print(f"{number} calls compared with commit {before['commit']}: {len(found)} differ")
    return 1 if found or not number else 0


if __name__ == "__main__":
    sys.exit(main())
