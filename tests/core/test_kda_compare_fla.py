"""Compatibility with fla 0.6: the same call with the same arguments gives the same results and gradients.

On the CPU the other side is fla's naive references, on a GPU its Triton kernels. The kit, not this file,
says how accurate a backend is; here two results are compared that may each be off by their own budget,
so that they may lie two budgets apart.
"""

from __future__ import annotations

import inspect
import warnings
from importlib import metadata
from types import SimpleNamespace

import fla_sweep
import installed
import pytest
import torch
from packaging.version import Version
from torch.nn import functional as F

import kda_core
from kda_core.reference import DIFFERENTIABLE, L2NORM_EPS
from kda_core.testing import budgets
from kda_core.testing.cases import BF16, FP32, Case

# Importing fla takes longer than the comparisons of the fast tier.
pytestmark = pytest.mark.end_to_end

DISTRIBUTION = "flash-linear-attention"
COMPARED_WITH = "0.6"
APART = 2
"""Two results within a budget of the truth each lie at most so many budgets apart."""

MILD = frozenset({"mild"})
"""Tag of the cases that fla's chunk reference can take."""

CASES = [
    Case(name="fla dense", tags=MILD, B=2, T=64, K=32, state=FP32),
    Case(name="fla ragged length, scale", T=70, K=16, options={"scale": 0.3}),
    Case(name="fla bfloat16", tags=MILD, T=64, K=16, dtype=BF16, gate_dtype=BF16, state=FP32),
    Case(name="fla grouped values, K above V", tags=MILD, T=64, HV=4, K=32, V=16, state=FP32),
    Case(name="fla chunk 32", T=40, K=16, state=FP32, options={"chunk_size": 32}),
    Case(name="fla V first", T=40, K=16, V=32, state=FP32, options={"state_v_first": True}),
    Case(name="fla packed", T=45, K=16, lengths=(5, 34, 0, 6), index_dtype=torch.int64, state=FP32),
    Case(name="fla softplus gate, l2norm", T=40, K=16, gate="softplus", l2norm=True, state=FP32),
    Case(name="fla lower-bound gate", T=40, K=16, gate="lower bound", beta="sigmoid", options={"safe_gate": True}),
    Case(name="fla lower-bound gate without A_log", T=40, K=16, gate="lower bound", A_log=False),
    Case(name="fla negative eigenvalues", T=40, K=16, beta="negative eigenvalues", l2norm=True, state=FP32),
]
DIFFERENTIATED = [
    Case(name="fla gradients", T=40, K=16, V=32, state=FP32, backward=True),
    Case(
        name="fla gradients, packed, all in the kernel", T=40, HV=4, K=16, lengths=(6, 34), index_dtype=torch.int64,
        gate="softplus", l2norm=True, beta="negative eigenvalues", state=FP32, backward=True,
    ),
    Case(name="fla gradients, lower-bound gate", T=20, K=16, gate="lower bound", state=FP32, backward=True),
]  # fmt: skip

# name -> why it differs
ADDED = {
    "A_log": "fla takes it through **kwargs",
    "dt_bias": "fla takes it through **kwargs",
    "chunk_size": "fla takes it through **kwargs",
    "ssm_state_indices": "a pool of states, which fla has not in its public call",
    "num_accepted_tokens": "a pool of states, which fla has not in its public call",
    "pad_slot_id": "a pool of states, which fla has not in its public call",
    "inplace_final_state": "fla has it in its kernel and not in its public call",
    "out": "a caller's buffer, which fla has not",
    "backend": "fla chooses by environment variables",
    "safe_gate": "fla takes it in chunk_kda only",
    "has_initial_state": "a pool of states, which fla has not in its public call",
    "update_state": "a pool of states, which fla has not in its public call",
    "final_state_indices": "a pool of states, which fla has not in its public call",
    "checkpoint_indices": "a pool of states, which fla has not in its public call",
    "checkpoint_every": "a pool of states, which fla has not in its public call",
    "checkpoint_pool": "a pool of states, which fla has not in its public call",
    "intermediate_states_dtype": "fla stores them in the dtype of k",
    "final_state_pool": "a pool of states, which fla has not in its public call",
    "records": "drafts over a pool of states, which fla has not in its public call",
    "commit": "drafts over a pool of states, which fla has not in its public call",
    "num_committed": "drafts over a pool of states, which fla has not in its public call",
    "parents": "drafts over a pool of states, which fla has not in its public call",
    "batch_invariant": "fla has no such promise",
    "commit_path": "drafts over a pool of states, which fla has not in its public call",
}
LEFT_OUT = {
    "kwargs": "every parameter is named; an unknown one raises TypeError where fla would swallow it",
    "use_graph": "every call can be captured in a graph",
    "max_num_seqs": "only use_graph takes it",
    "output_dtype": "the log decay is float32 (float64 for float64 input), as fla's default",
}


def importable_fla() -> SimpleNamespace:
    """The functions of fla that are compared; skips where it is not installed."""
    try:
        version = Version(metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed: pip install {DISTRIBUTION}=={COMPARED_WITH}.0")
    if f"{version.major}.{version.minor}" != COMPARED_WITH:
        pytest.skip(f"{DISTRIBUTION} {version} is installed; compared with {COMPARED_WITH}")
    with warnings.catch_warnings():
        # Without a GPU it warns that its kernels cannot run; its naive references do.
        warnings.simplefilter("ignore")
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate
        from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
    return SimpleNamespace(
        chunk_kda=chunk_kda, fused_recurrent_kda=fused_recurrent_kda, fused_kda_gate=fused_kda_gate,
        naive_kda_gate=naive_kda_gate, naive_kda_lowerbound_gate=naive_kda_lowerbound_gate,
        naive_chunk_kda=naive_chunk_kda, naive_recurrent_kda=naive_recurrent_kda,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fla():
    return importable_fla()


def call_of(case, device):
    """The case's inputs; in bfloat16 for fla's kernels, which multiply float32 in fewer digits."""
    return (case if device.type == "cpu" else case.having(dtype=BF16)).call()


def l2norm(x):
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


def naive(fla, function, tensors, options):
    """A call of the public function, out of fla's naive parts, which know one sequence and no options."""
    q, k, v, g, beta = (tensors[n] for n in ("q", "k", "v", "g", "beta"))
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = l2norm(q.float()), l2norm(k.float())
    if options.get("use_gate_in_kernel"):
        A_log, dt_bias, bound = tensors.get("A_log"), tensors.get("dt_bias"), options.get("lower_bound")
        g = (
            fla.naive_kda_gate(g, A_log, dt_bias)
            if bound is None
            else fla.naive_kda_lowerbound_gate(g, A_log, dt_bias, bound)
        )
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta.float()) * (2 if options.get("allow_neg_eigval") else 1)
    state = tensors.get("initial_state")
    if state is not None and options.get("state_v_first"):
        state = state.mT
    cu = tensors.get("cu_seqlens")
    bounds = None if cu is None else list(zip(cu.tolist(), cu.tolist()[1:], strict=False))
    pieces = []
    for n, (start, end) in enumerate(bounds or [(0, q.shape[1])]):
        own = state if bounds is None or state is None else state[n : n + 1]
        part = (t[:, start:end] for t in (q, k, v, g, beta))
        pieces.append(function(*part, scale=options.get("scale"), initial_state=own, output_final_state=True))
    o, final_state = torch.cat([o for o, _ in pieces], 1), torch.cat([s for _, s in pieces])
    return F.pad(o, (0, 0, 0, 0, 0, v.shape[1] - o.shape[1])), final_state.mT if options.get(
        "state_v_first"
    ) else final_state


def run_fla(fla, call, device, function=None):
    """Results and gradients of fla by name, on the CPU."""
    tensors = {n: t.detach().clone().to(device) for n, t in call.tensors.items()}
    names = [n for n in DIFFERENTIABLE if n in tensors and call.grads]
    for n in names:
        tensors[n].requires_grad_()
    if device.type == "cpu":
        o, final_state = naive(fla, function or fla.naive_recurrent_kda, tensors, call.options)
    else:
        o, final_state = getattr(fla, call.op)(**tensors, **call.options)
    results = {"o": o, "final_state": final_state}
    if names:
        given = {n: t.to(device) for n, t in call.grads.items()}
        found = torch.autograd.grad(
            [results[n] for n in given], [tensors[n] for n in names], list(given.values()), allow_unused=True
        )
        results |= {f"d{n}": d for n, d in zip(names, found, strict=True)}
    return {n: t.detach().cpu().reshape(shape_of(call, n, t)) for n, t in results.items() if t is not None}


def shape_of(call, name, t):
    return call.request().dt_bias.shape if name == "ddt_bias" else t.shape


def assert_agree(call, ours, theirs):
    allowed, dtypes = budgets.budgets(call), budgets.result_dtypes(call.request())
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = budgets.measure(name, ours[name], expected.double(), dtypes[name])
        share = error.share(allowed[name])
        assert share <= APART, f"{name}: {share:.2f} budgets apart ({error}, budget {allowed[name]})"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_forward_and_states(kda, fla, case, op):
    call = call_of(case, kda.device)
    if op == "fused_recurrent_kda":
        call = call.decoding()
    assert_agree(call, kda.run(call), run_fla(fla, call, kda.device))


@pytest.mark.parametrize("case", [c for c in CASES if "mild" in c.tags], ids=lambda c: c.name)
def test_flas_chunk_reference(kda, fla, case):
    """It takes whole chunks; it cumulates the decay over them in float32, which costs digits unless decays are mild."""
    if kda.device.type != "cpu":
        pytest.skip("fla's naive references are compared on the CPU")
    call = case.call()
    assert_agree(call, kda.run(call), run_fla(fla, call, kda.device, fla.naive_chunk_kda))


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=lambda c: c.name)
def test_gradients(kda, fla, case):
    call = call_of(case, kda.device)
    assert_agree(call, kda.run(call), run_fla(fla, call, kda.device))


@pytest.mark.slow
@pytest.mark.parametrize("swept", [*fla_sweep.DENSE, *fla_sweep.PACKED], ids=lambda s: s.name)
def test_sweep(kda, fla, swept):
    """The forward alone, whose backend may take other kernels, then results and every gradient."""
    call = swept.call() if kda.device.type == "cpu" else call_of(swept.case, kda.device)
    theirs = run_fla(fla, call, kda.device)
    forward = kda.run(call.forward_only())
    assert_agree(call, forward, {name: theirs[name] for name in forward})
    assert_agree(call, kda.run(call), theirs)


def test_sweep_is_broad_and_of_its_own():
    """32 dense and 36 packed calls with every option at work, none of which the fast tests make."""
    swept = [*fla_sweep.DENSE, *fla_sweep.PACKED]
    assert (len(fla_sweep.DENSE), len(fla_sweep.PACKED)) == (32, 36)
    assert not any(s.case.lengths for s in fla_sweep.DENSE)
    assert all(s.case.lengths for s in fla_sweep.PACKED)
    for layout in (fla_sweep.DENSE, fla_sweep.PACKED):
        assert {s.case.gate for s in layout} == {"softplus", "lower bound"}
        assert {s.beta_dtype for s in layout} == {torch.float32, torch.bfloat16, torch.float16}
        assert {s.case.options.get("disable_recompute", False) for s in layout} == {True, False}

    def shape(case):
        return case.B, case.T, case.H, case.HV, case.K, case.V, case.lengths

    assert len({s.name for s in swept}) == len(swept)
    assert not {shape(s.case) for s in swept} & {shape(c) for c in (*CASES, *DIFFERENTIATED)}


def test_prefill_then_decode(kda, fla):
    """A state that one function hands to the other, on both sides."""
    call = call_of(Case(name="fla prefill and decode", T=66, K=32, V=16, state=FP32, l2norm=True), kda.device)
    both = run_fla(fla, call, kda.device)
    prompt = kda.run(call.slice_tokens(0, 64))
    step = call.slice_tokens(64, 66).having(initial_state=prompt["final_state"]).decoding()
    decoded = kda.run(step)
    ours = {"o": torch.cat([prompt["o"], decoded["o"]], 1), "final_state": decoded["final_state"]}
    assert_agree(call, ours, both)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gate(kda, fla, lower_bound, with_bias):
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(2, 5, 3, 8, generator=generator)
    A_log, dt_bias = torch.randn(3, generator=generator), torch.randn(24, generator=generator) if with_bias else None
    weights = torch.randn(g.shape, generator=generator)

    def differentiated(function):
        leaves = [t.clone().to(kda.device).requires_grad_() for t in (g, A_log, dt_bias) if t is not None]
        y = function(leaves[0], leaves[1], leaves[2] if with_bias else None)
        return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, leaves, weights.to(kda.device)))]

    def theirs(g, A_log, dt_bias):
        if lower_bound is None:
            return fla.naive_kda_gate(g, A_log, dt_bias)
        return fla.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)

    ours = differentiated(lambda *x: kda_core.kda_gate(*x, lower_bound=lower_bound, backend=kda.name))
    for got, expected in zip(ours, differentiated(theirs), strict=True):
        # Sums over every token in float32, on both sides.
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("chunk_kda", "chunk_kda"), ("fused_recurrent_kda", "fused_recurrent_kda"), ("kda_gate", "fused_kda_gate")],
)
def test_parameters_have_flas_names_order_and_defaults(fla, ours, theirs):
    own = inspect.signature(getattr(kda_core, ours)).parameters
    other = inspect.signature(getattr(fla, theirs)).parameters
    assert set(own) - set(other) <= ADDED.keys()
    assert set(other) - set(own) <= LEFT_OUT.keys()
    positional = [n for n in other if n in own]
    assert list(own)[: len(positional)] == positional
    for n in own.keys() & other.keys():
        assert own[n].default == other[n].default, n


@pytest.mark.parametrize("case", [*CASES, *DIFFERENTIATED], ids=lambda c: c.name)
def test_fla_takes_the_same_arguments(fla, case):
    call = case.call()
    for op, one in (("chunk_kda", call), ("fused_recurrent_kda", call.decoding())):
        inspect.signature(getattr(fla, op)).bind(**one.tensors, **one.options)


class _TorchNorm(torch.nn.Module):
    """In place of fla's FusedRMSNormGated, which needs a GPU."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x, gate):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5) * torch.sigmoid(gate)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower bound"])
def test_layers_of_fla_take_our_functions(fla, monkeypatch, lower_bound: float | None):
    """Training, and a prompt in pieces over fla's cache; on the CPU, without the parts whose kernels need a GPU."""
    installed.need_backend("cpu")
    from fla.layers import kda as layers
    from fla.models.utils import Cache

    def naively(**given):
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        options = {name: x for name, x in given.items() if name not in tensors and x is not None}
        return naive(fla, fla.naive_recurrent_kda, tensors, options)

    def use(chunk, step):
        monkeypatch.setattr(layers, "chunk_kda", chunk)
        monkeypatch.setattr(layers, "fused_recurrent_kda", step)

    torch.manual_seed(0)
    bounded = lower_bound is not None
    options = {"allow_neg_eigval": bounded, "safe_gate": bounded, "lower_bound": lower_bound}
    layer = layers.KimiDeltaAttention(
        48, expand_v=1, head_dim=16, num_heads=3, use_short_conv=False, layer_idx=0, **options
    )
    layer.o_norm = _TorchNorm(layer.o_norm.weight)
    x = torch.randn(2, 90, 48)
    found = []
    for functions in ((naively, naively), (kda_core.chunk_kda, kda_core.fused_recurrent_kda)):
        use(*functions)
        layer.zero_grad()
        o = layer(x)[0]
        o.square().sum().backward()
        found.append((o.detach(), *(p.grad.clone() for p in layer.parameters())))
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() < 5e-6 * expected.norm()

    layer.eval()
    cache, pieces = Cache(), []
    with torch.no_grad():
        for piece in x.split([70, 18, 1, 1], dim=1):
            o, _, cache = layer(piece, past_key_values=cache, use_cache=True)
            pieces.append(o)
    assert (torch.cat(pieces, dim=1) - found[1][0]).norm() < 5e-6 * found[1][0].norm()
