"""Named cases that tests, benchmarks and ``kda verify`` share, and their inputs.
A case is data: shape, layout, dtypes, distribution of the inputs, and options. Its inputs are the same on every
machine: random numbers come from the CPU generator, seeded by the case's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kda_core.testing.inputs import Call

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Gate = Literal["given", "softplus", "lower bound"]
Beta = Literal["given", "sigmoid", "negative eigenvalues"]
Keys = Literal["random", "equal", "nearly parallel", "collinear"]
Decay = Literal["mild", "slow", "none", "bounded", "isolated"]

LOWER_BOUND = -5.0

DECAYS: tuple[Decay | float, ...] = (-1.0, -5.0, -40.0, -1000.0, -1e30, "isolated")
"""From mild to those that forget everything at every token, or at a few."""

BFLOAT16: dict[str, Any] = {"dtype": BF16, "gate_dtype": BF16}  # Fields of a case whose inputs are all bfloat16

PLAIN: dict[torch.dtype, dict[str, Any]] = {
    FP32: {"dtype": FP32, "K": 32, "state": FP32},
    BF16: {"dtype": BF16, "K": 64, "state": FP32},
    FP16: {"dtype": FP16, "K": 64, "state": FP32},
}
"""Fields of a case of each dtype, for tests that are about values or lengths.

A device compiles for dtypes, head dimensions, flags and which arguments are given, and takes most of its time for that:
tests share these wherever they are about something else.
"""

SOFTPLUS: dict[str, Any] = {"gate": "softplus", "l2norm": True, "beta": "sigmoid"}
BOUNDED: dict[str, Any] = {"gate": "lower bound", "l2norm": True, "beta": "negative eigenvalues"}
"""Fields of a case whose inputs are all raw: the operator computes the gate, the norms and beta."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of ``chunk_kda`` or ``fused_recurrent_kda``, as data."""

    name: str  # unique; also the seed
    tags: frozenset[str] = frozenset()  # what it is chosen by; "slow" keeps it out of the fast tier
    op: str = "chunk_kda"
    B: int = 1
    T: int = 130
    H: int = 2
    HV: int = 0  # 0: as many as H
    K: int = 32
    V: int = 0  # 0: as K
    dtype: torch.dtype = FP32  # of q, k, v
    gate_dtype: torch.dtype = FP32  # of g and beta
    lengths: tuple[int, ...] = ()  # of packed sequences, which may end before T; empty: dense
    index_dtype: torch.dtype = torch.int32
    gate: Gate = "given"  # source of the decay
    decay: Decay | float = "mild"  # its distribution when it is given; a number: constant
    A_log: bool = True  # whether the gate has it
    dt_bias: bool = True
    rate: float = 16.0  # largest exp(A_log); the smallest is 1
    raw_scale: float = 1.0  # standard deviation of the raw gate input
    beta: Beta | float = "given"
    keys: Keys = "random"  # their directions
    l2norm: bool = False  # q and k are normalised by the operator
    state: torch.dtype | None = None  # of the initial state
    final_state: bool = True  # ask for it
    backward: bool = False  # the case has gradients of every output
    strided: frozenset[str] = frozenset()  # this and given_out: as of a ``Call``
    given_out: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # further options of the call

    @property
    def N(self) -> int:
        """Number of sequences."""
        return len(self.lengths) if self.lengths else self.B

    def having(self, **changes: Any) -> Case:
        """The case with some fields changed; ``options`` are added to its own."""
        options = self.options | changes.pop("options", {})
        return replace(self, options=options, **changes)

    def call(self) -> Call:
        """The inputs of the case, on the CPU."""
        c = self
        generator = torch.Generator().manual_seed(zlib.crc32(c.name.encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        HV, V = c.HV or c.H, c.V or c.K
        q, k, v = normal(c.B, c.T, c.H, c.K), _keys(c, normal), normal(c.B, c.T, HV, V)
        if not c.l2norm:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        tensors = {"q": q.to(c.dtype), "k": k.to(c.dtype), "v": v.to(c.dtype)}
        options: dict[str, Any] = {"output_final_state": c.final_state} | c.options
        g = _decay(c, normal) if c.gate == "given" else _raw_gate(c, tensors, options, normal)
        tensors["g"] = g.to(c.gate_dtype)
        logits = normal(c.B, c.T, HV)
        if isinstance(c.beta, float):
            tensors["beta"] = torch.full_like(logits, c.beta).to(c.gate_dtype)
        elif c.beta == "given":
            tensors["beta"] = torch.sigmoid(logits).to(c.gate_dtype)
        else:
            tensors["beta"] = logits.to(c.gate_dtype)
            options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": c.beta == "negative eigenvalues"}
        if c.l2norm:
            options["use_qk_l2norm_in_kernel"] = True
        if c.lengths:
            tensors["cu_seqlens"] = torch.tensor([0, *c.lengths]).cumsum(0).to(c.index_dtype)
        shape = (c.N, HV, V, c.K) if options.get("state_v_first") else (c.N, HV, c.K, V)
        if c.state is not None:
            tensors["initial_state"] = normal(*shape).mul_(0.5).to(c.state)
        if c.op == "chunk_kda" and options.get("return_intermediate_states") and c.lengths:
            tensors["cu_seqlens_cpu"] = tensors["cu_seqlens"].clone()
        grads = {}
        if c.backward:
            grads["o"] = normal(c.B, c.T, HV, V).to(c.dtype)
            if c.final_state:
                grads["final_state"] = normal(*shape).to(c.state or (FP64 if c.dtype == FP64 else FP32))
        return Call(c.op, tensors, options, grads, c.strided, c.given_out, c.name)


def _keys(c: Case, normal: Any) -> Tensor:
    if c.keys == "random":
        return normal(c.B, c.T, c.H, c.K)
    common = normal(c.B, 1, c.H, c.K).expand(c.B, c.T, c.H, c.K)
    if c.keys == "collinear":
        # Numbers of either sign, less and less exact.
        noise = torch.linspace(0, 1e-3, c.T).view(1, -1, 1, 1) * normal(c.B, c.T, c.H, c.K)
        return common * normal(c.B, c.T, c.H, 1).sign() + noise
    return common if c.keys == "equal" else common + 0.1 * normal(c.B, c.T, c.H, c.K)


def _decay(c: Case, normal: Any) -> Tensor:
    x = normal(c.B, c.T, c.HV or c.H, c.K)
    if isinstance(c.decay, float):
        return torch.full_like(x, c.decay)
    if c.decay == "isolated":
        # A few tokens forget everything, in every channel or in one.
        g = F.logsigmoid(x)
        g[:, 7::29] = -1e30
        g[:, 3::11, :, 0] = -1e4
        return g
    return {
        "mild": F.logsigmoid,
        "slow": lambda x: -1e-3 * torch.sigmoid(x),
        "none": torch.zeros_like,
        "bounded": lambda x: LOWER_BOUND * torch.sigmoid(x),
    }[c.decay](x)


def _raw_gate(c: Case, tensors: dict[str, Tensor], options: dict[str, Any], normal: Any) -> Tensor:
    """The raw gate input; adds the gate's other arguments to ``tensors`` and ``options``."""
    HV = c.HV or c.H
    options["use_gate_in_kernel"] = True
    if c.gate == "lower bound":
        options.setdefault("lower_bound", LOWER_BOUND)
    if c.A_log:
        # exp(A_log) from 1 to the largest rate over the heads.
        tensors["A_log"] = torch.linspace(0, 1, HV).mul_(torch.tensor(c.rate).log())
    if c.dt_bias:
        tensors["dt_bias"] = normal(HV * c.K)
    return c.raw_scale * normal(c.B, c.T, HV, c.K)


def _case(name: str, tags: str = "", **fields: Any) -> Case:
    return Case(name=name, tags=frozenset(tags.split()), **fields)


# Kimi-Linear 48B-A3B: 32 heads of 128, no grouping; q, k and v in bfloat16, the gate's input too.
_MODEL = {"H": 32, "K": 128} | BFLOAT16 | SOFTPLUS
_GRADS: dict[str, Any] = {"state": FP32, "backward": True}
_V_FIRST_SAFE = {"state_v_first": True, "safe_gate": True}

CASES: tuple[Case, ...] = (
    # Forward: lengths below, at and past a chunk, shapes, dtypes.
    _case("one token", "forward verify", T=1, state=FP32),
    _case("below a chunk", "forward", T=63, B=2),
    _case("one chunk", "forward", T=64, HV=6),
    _case("past a chunk", "forward verify", T=65, state=FP32),
    _case("plain", "forward verify", B=2, H=3),
    _case("bfloat16", "forward verify", B=2, K=64, dtype=BF16, gate_dtype=BF16, state=FP32),
    _case("float16", "forward verify", B=2, K=64, dtype=FP16, gate_dtype=FP16, state=FP32),
    # A random draw (the name is its seed) that found operands truncated to tf32, in its smallest rows.
    _case("random 88", "forward", T=285, H=3, HV=6, K=64, lengths=(72, 61, 56, 95), gate="softplus", beta="sigmoid")
    .having(state=BF16, dtype=FP16, gate_dtype=FP16),
    # A random draw that found float32 products of only three tf32 parts.
    _case("random 8", "forward backward", T=2, H=2, HV=2, K=8, V=8, lengths=(2,), gate="lower bound", dt_bias=False)
    .having(backward=True),
    _case("bfloat16 with float32 gate", "forward", K=64, dtype=BF16, state=FP32),
    _case("float32 with bfloat16 gate", "forward", gate_dtype=BF16),
    _case("float64", "forward", T=70, dtype=FP64, gate_dtype=FP64, state=FP64),
    _case("no final state", "forward", T=70, final_state=False),
    _case("scale", "forward verify", T=70, options={"scale": 0.3}),
    _case("K below V", "forward", T=70, K=32, V=64, state=FP32),
    _case("K above V", "forward", T=70, K=64, V=32, state=FP32),
    _case("K 60 V 36", "forward verify", B=2, T=70, K=60, V=36, state=FP32),
    _case("K 100 V 100 bfloat16", "forward", T=70, K=100, dtype=BF16, state=FP32),
    _case("K 1 V 1", "forward", T=20, K=1, V=1, state=FP32),
    _case("K 256", "forward", T=70, H=1, K=256, V=128, dtype=BF16, state=FP32),
    _case("grouped values", "forward verify", B=2, HV=6, T=70, state=FP32),
    _case("chunk 32", "forward verify", T=100, state=FP32, options={"chunk_size": 32}),
    _case("slow decay", "forward", T=200, decay="slow", state=FP32),
    _case("bounded decay, safe_gate", "forward verify", T=100, decay="bounded", options={"safe_gate": True}),
    _case("bounded decay bfloat16, safe_gate", "forward", T=100, K=64, decay="bounded", state=FP32, **BFLOAT16)
    .having(options={"safe_gate": True}),
    _case("Kimi-Linear 48B-A3B", "forward model verify", T=96, state=FP32, **_MODEL),
    # Everything in the operator at once.
    _case("all in kernel", "forward verify", B=2, T=100, HV=4, K=64, V=32, state=FP32, **BOUNDED, **BFLOAT16)
    .having(options=_V_FIRST_SAFE),
    # Backward.
    _case("gradients", "backward verify", B=2, T=70, K=32, V=64, **_GRADS),
    _case("gradients bfloat16", "backward verify", T=130, K=64, dtype=BF16, **_GRADS),
    _case("gradients packed, grouped values, softplus gate", "backward verify", T=140, HV=6, lengths=(1, 64, 0, 70))
    .having(**_GRADS, **SOFTPLUS),
    _case("gradients all in kernel", "backward", T=70, HV=4, K=36, V=24, options=_V_FIRST_SAFE, **_GRADS, **BOUNDED),
    # Sums over the rows of a batch and over a group of three; a negative scale.
    _case("gradients of groups of three", "backward", B=2, T=20, HV=6, options={"scale": -0.3}, **_GRADS, **SOFTPLUS),
    _case("gradients one token", "backward", T=1, **_GRADS),
    _case("gradients without states", "backward", T=70, final_state=False, backward=True),
    _case("gradients chunk 32", "backward", T=70, options={"chunk_size": 32}, **_GRADS),
    # Heads as models have them: some backends have kernels for them alone.
    _case("gradients of heads of 128, packed, grouped values", "backward", T=120, H=2, HV=4, K=128)
    .having(lengths=(1, 33, 50, 32), **_GRADS, **BFLOAT16, **SOFTPLUS),
    _case("gradients float16", "backward slow", T=70, K=64, dtype=FP16, gate_dtype=FP16, **_GRADS),
    _case("gradients model", "backward model slow", T=256, lengths=(100, 156), **_GRADS, **_MODEL | {"H": 8}),
    # Packed sequences.
    _case("packed", "packed verify", T=140, lengths=(5, 64, 1, 70), state=FP32),
    _case("packed with empty sequences", "packed", T=71, lengths=(0, 1, 0, 64, 6, 0), state=FP32),
    _case("packed, ends before T", "packed", T=100, lengths=(30, 40), state=FP32),
    _case("packed int64, grouped values", "packed", T=100, HV=6, lengths=(33, 67), index_dtype=torch.int64),
    _case("packed chunk 32", "packed", T=100, lengths=(33, 67), state=FP32, options={"chunk_size": 32}),
    _case("packed bfloat16", "packed", T=200, K=64, dtype=BF16, lengths=(1, 129, 70), state=FP32),
    # The shapes of fla 0.6's own KDA tests.
    _case("fla 1x63", "forward backward slow", T=63, H=1, K=64, **_GRADS),
    _case("fla 2x500", "forward backward slow", B=2, T=500, H=3, K=60, **_GRADS),
    _case("fla 2x1000", "forward backward slow", B=2, T=1000, H=3, K=64, **_GRADS),
    _case("fla 3x1024", "forward backward slow", B=3, T=1024, H=4, K=100, l2norm=True, **_GRADS),
    _case("fla 4x1024 bfloat16", "forward backward slow", B=4, T=1024, H=4, K=128, dtype=BF16, **_GRADS),
    _case("fla 2x1500", "forward backward slow", B=2, T=1500, H=4, K=128, dtype=BF16, **_GRADS),
    _case("fla 4x2048", "forward backward slow", B=4, T=2048, H=8, K=64, dtype=BF16, **_GRADS),
    _case("fla packed 15", "packed backward slow", T=15, lengths=(15,), K=60, gate="softplus", l2norm=True, **_GRADS),
    _case("fla packed 1000", "packed backward slow", T=1000, H=3, K=60, lengths=(256, 244, 200, 300), **_GRADS),
    _case("fla packed 1000, uneven", "packed backward slow", T=1000, H=4, K=64, dtype=FP16, **_GRADS)
    .having(lengths=(15, 85, 200, 700)),
    _case("fla packed 3000", "packed backward slow", T=3000, H=4, K=100, dtype=BF16, **_GRADS)
    .having(lengths=(1, 99, 200, 700, 1000, 1000)),
    # Long and ragged traces; long sequences with few heads.
    _case("9k, two heads", "forward backward slow", T=9000, H=2, K=128, dtype=BF16, decay="slow", **_GRADS),
    _case("9k packed, one head", "packed backward slow", T=9300, H=1, K=128, dtype=BF16, decay="slow", **_GRADS)
    .having(lengths=(4130, 5100)),
    _case("Kimi-Linear 48B-A3B ragged", "packed model slow", T=300, lengths=(1, 130, 169), state=FP32, **_MODEL),
    _case("8k ragged", "packed slow", T=8192, H=2, K=64, dtype=BF16, lengths=(1300, 547, 2048, 963, 271, 3063)),
    _case("64k", "packed slow", T=65536, H=1, K=64, dtype=BF16, lengths=(1, 65535)),
    _case("64k ragged", "packed slow", T=65536, H=1, K=64, dtype=BF16, state=FP32)
    .having(lengths=tuple(1 + (i * 7919) % 1021 for i in range(128))),
)  # fmt: skip


def select(*tags: str, among: Iterable[Case] = CASES) -> list[Case]:
    """The cases that have every one of these tags; a tag with "-" before it must be absent."""
    wanted = {t for t in tags if not t.startswith("-")}
    unwanted = {t[1:] for t in tags if t.startswith("-")}
    return [c for c in among if wanted <= c.tags and not unwanted & c.tags]


def named(name: str) -> Case:
    """The case of that name."""
    return {case.name: case for case in CASES}[name]
