"""Random calls: shapes, packing, strides and options drawn together, against the oracle.

Every test comes in parts, each with draws of its own, so that the parts run side by side: on a backend that compiles,
new kinds of calls take most of the time. The first draw of every part is the simplest call there is.

A part's draws are the same for every backend and wherever the kit is started from: hypothesis seeds by a test's whole
identifier, in which both occur, if it is not told a seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call
from kda_core.testing.marks import requires, slow
from kda_core.testing.subject import Subject, refusal_of

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

FAST = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    # Without shrinking: draws are small calls that describe themselves, and every smaller one that is tried would be
    # compiled on a device, which takes minutes before the first word on what failed.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
BACKWARD = hypothesis.settings(FAST, max_examples=3)
THOROUGH = hypothesis.settings(FAST, max_examples=8)
THOROUGH_BACKWARD = hypothesis.settings(FAST, max_examples=4)

in_parts = pytest.mark.parametrize("part", range(5))
in_many_parts = pytest.mark.parametrize("part", range(30))

DIMENSIONS = st.sampled_from([1, 3, 8, 16, 20, 33, 64])
DTYPES = st.sampled_from([FP32, FP32, BF16, FP16])


@st.composite
def calls(draw, op: str, max_tokens: int, backward: bool) -> Call:
    """A call of ``op``: everything that may vary does."""
    lengths = draw(st.one_of(st.just(()), st.lists(st.integers(0, max_tokens // 2), min_size=1, max_size=5).map(tuple)))
    T = sum(lengths) + draw(st.integers(0, 3)) if lengths else draw(st.integers(1, max_tokens))
    H = draw(st.integers(1, 3))
    beta = draw(st.sampled_from(["given", "sigmoid", "negative eigenvalues", 1.0, 0.01]))
    dtype = draw(DTYPES)
    gate = draw(st.sampled_from(["given", "softplus", "lower bound"]))
    # Of e⁻³⁰ a token float16 holds nothing between a backward's kernels.
    strongest = -8.0 if dtype == FP16 else -30.0
    decay = draw(st.sampled_from(["mild", "slow", "none", "bounded", "isolated", -0.5, -8.0, strongest]))
    options = {"state_v_first": draw(st.booleans())}
    scale = draw(st.sampled_from([None, 1.0, 0.3]))
    if scale is not None:
        options["scale"] = scale
    if op == "chunk_kda":
        options |= {"chunk_size": draw(st.sampled_from([64, 32])), "disable_recompute": draw(st.booleans())}
        if gate == "lower bound" or (gate == "given" and decay in ("bounded", -0.5)):
            options["safe_gate"] = draw(st.booleans())
    case = Case(
        name=f"random {draw(st.integers(0, 99))}",
        op=op,
        B=1 if lengths else draw(st.integers(1, 3)),
        T=max(T, 1),
        H=H,
        HV=H * draw(st.integers(1, 3)),
        K=draw(DIMENSIONS),
        V=draw(DIMENSIONS),
        dtype=dtype,
        gate_dtype=draw(st.sampled_from([FP32, dtype])),
        lengths=lengths,
        gate=gate,
        decay=decay,
        dt_bias=draw(st.booleans()),
        beta=beta,
        keys=draw(st.sampled_from(["random", "random", "equal", "nearly parallel"])),
        l2norm=draw(st.booleans()),
        state=draw(st.sampled_from([None, FP32, BF16])),
        final_state=draw(st.booleans()),
        backward=backward,
        options=options,
    )
    call = case.call()
    if draw(st.integers(0, 5)) == 5:
        # Rows of zeros, of which a norm is none.
        for name in ("q", "k"):
            rows = call.tensors[name].clone()  # equal keys share memory
            rows[:, draw(st.integers(0, 2)) :: 3] = 0
            call.tensors[name] = rows
    if beta in ("sigmoid", "negative eigenvalues"):
        # Logits that are all large lose what 1 - sigmoid has lost.
        call = call.having(beta=call.tensors["beta"] + draw(st.sampled_from([0.0, 0.0, -4.0, 4.0, 8.0])))
    strided = draw(st.sets(st.sampled_from(["q", "k", "v", "g", "beta", "initial_state"])))
    return replace(call, strided=frozenset(strided))


@st.composite
def pooled_calls(draw, op: str, max_tokens: int) -> Call:
    """A forward of ``op`` on slots of a pool, some of its sequences skipped; drafts of several tokens among them."""
    with_states = calls(op, max_tokens, backward=False).filter(lambda call: "initial_state" in call.tensors)
    call = draw(with_states)
    lengths = call.lengths()
    # A slot for every token, where the sequences are equally long.
    drafts = op == "fused_recurrent_kda" and len(set(lengths)) == 1 and lengths[0] > 1 and draw(st.booleans())
    width = lengths[0] if drafts else 1
    pool = len(lengths) * width + 2
    slots = draw(st.permutations(range(pool)))[: len(lengths) * width]
    table = torch.tensor(slots, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(len(lengths), width)
    pad = draw(st.sampled_from([-1, pool + 3]))
    for n in range(len(lengths)):
        if draw(st.integers(0, 3)) == 3:
            table[n] = draw(st.sampled_from([-1, -7, pad]))
    accepted = torch.tensor([draw(st.integers(1, width)) for _ in lengths]) if drafts else None
    call = call.having(pad_slot_id=pad)
    if op == "chunk_kda" and draw(st.booleans()):
        call = call.having(return_intermediate_states=True)
        if "cu_seqlens" in call.tensors:
            call = call.having(cu_seqlens_cpu=call.tensors["cu_seqlens"].clone())
    call = call.in_pool(table if drafts or draw(st.booleans()) else table[:, 0], pool, accepted)
    return replace(call, given_out=draw(st.booleans()))


def _check(kda: Subject, call: Call, settings: hypothesis.settings) -> None:
    # The interpreter makes fewer calls than hypothesis draws, but makes a wrong one as often as it is asked to.
    if len(kda.records) >= kda.draws(settings.max_examples) and kda.target.interpreted and not kda.wrong:
        return
    try:
        refusal = refusal_of(lambda: kda.check(call))
        # What is not declared may be refused; run() has compared the reasons.
        assert refusal is None or refusal.status != "rejected", str(refusal)
    except Exception:  # any failure, a crash of the backend's too
        kda.wrong = True
        raise


def _check_part(kda: Subject, name: str, part: int, drawn: st.SearchStrategy, settings: hypothesis.settings) -> None:
    """Check the calls that part ``part`` of the test ``name`` draws."""

    @hypothesis.seed(f"{name} {part}")
    @settings
    @hypothesis.given(call=drawn)
    def check(call: Call) -> None:
        _check(kda, call, settings)

    check()


@in_parts
@requires(Feature.CHUNK)
def test_random_forward(kda, part: int):
    """Forward of chunk_kda."""
    _check_part(kda, "forward", part, calls("chunk_kda", 100, backward=False), FAST)


@in_parts
@requires(Feature.CHUNK, Feature.BACKWARD)
def test_random_backward(kda, part: int):
    """Gradients of chunk_kda."""
    _check_part(kda, "backward", part, calls("chunk_kda", 70, backward=True), BACKWARD)


@in_parts
@requires(Feature.RECURRENT)
def test_random_recurrent(kda, part: int):
    """Forward of fused_recurrent_kda."""
    _check_part(kda, "recurrent", part, calls("fused_recurrent_kda", 12, backward=False), FAST)


@in_parts
@requires(Feature.CHUNK, Feature.PAGED_STATE)
def test_random_pool(kda, part: int):
    """Forward of chunk_kda in place, with intermediate states or without."""
    _check_part(kda, "pool", part, pooled_calls("chunk_kda", 100), FAST)


@in_parts
@requires(Feature.RECURRENT, Feature.PAGED_STATE)
def test_random_pool_recurrent(kda, part: int):
    """Decoding in place, drafts among it."""
    _check_part(kda, "recurrent pool", part, pooled_calls("fused_recurrent_kda", 12), FAST)


@slow
@in_many_parts
@requires(Feature.CHUNK)
def test_random_forward_thorough(kda, part: int):
    """Forward of chunk_kda, many more."""
    _check_part(kda, "forward, thorough", part, calls("chunk_kda", 300, backward=False), THOROUGH)


@slow
@in_many_parts
@requires(Feature.CHUNK, Feature.BACKWARD)
def test_random_backward_thorough(kda, part: int):
    """Gradients of chunk_kda, many more."""
    _check_part(kda, "backward, thorough", part, calls("chunk_kda", 150, backward=True), THOROUGH_BACKWARD)
