"""fused_recurrent_kda against the oracle: decoding and short sequences."""

from __future__ import annotations

import pytest
import torch

from kda_core.capabilities import Feature
from kda_core.testing.cases import BF16, BFLOAT16, BOUNDED, DECAYS, FP16, FP32, FP64, PLAIN, SOFTPLUS, Case
from kda_core.testing.inputs import same_bits
from kda_core.testing.marks import each, requires, slow
from kda_core.testing.suite.test_packing import check_company

R = "fused_recurrent_kda"

FORWARD = [
    Case(name="step", op=R, B=8, T=1, state=FP32),
    Case(name="step bfloat16", op=R, B=8, T=1, HV=4, K=64, V=128, dtype=BF16, gate_dtype=BF16, state=FP32),
    Case(name="step float16", op=R, B=3, T=1, K=64, dtype=FP16, state=FP32),
    Case(name="step float64", op=R, B=3, T=1, dtype=FP64, gate_dtype=FP64, state=FP64),
    Case(name="step bfloat16 state", op=R, B=3, T=1, K=64, dtype=BF16, state=BF16),
    Case(name="step V first", op=R, B=3, T=1, V=64, state=FP32, options={"state_v_first": True}),
    Case(name="step K 60 V 36", op=R, B=3, T=1, K=60, V=36, state=FP32),
    Case(name="step of a model", op=R, B=2, T=1, H=32, K=128, state=FP32, **SOFTPLUS, **BFLOAT16),
    Case(name="step negative eigenvalues", op=R, B=3, T=1, HV=6, beta="negative eigenvalues", state=FP32),
    Case(name="several tokens", op=R, B=2, T=7, HV=6, state=FP32),
    Case(name="several tokens without states", op=R, B=2, T=7, final_state=False),
    Case(name="many tokens", op=R, T=100, state=FP32),
    Case(name="many tokens bfloat16", op=R, T=100, K=64, dtype=BF16, state=FP32),
    Case(name="scaled", op=R, T=5, state=FP32, options={"scale": 0.3}),
    Case(name="lower bound", op=R, T=5, HV=4, A_log=False, state=FP32, **BOUNDED),
    Case(name="packed steps", op=R, T=8, lengths=(1, 0, 3, 1, 2), state=FP32),
    Case(name="out of a step", op=R, B=3, T=1, state=FP32, given_out=True),
    *(
        Case(name=f"strided step {names}", op=R, B=3, T=2, state=FP32, strided=frozenset(names.split()))
        for names in ("q beta", "k v", "g initial_state")
    ),
    # Nothing is written and little of the state is left: S + (d − 1) S would have no digits.
    *(
        Case(name=f"forgets {T} {decay}", op=R, T=T, decay=decay, beta=0.0, state=FP32)
        for T, decay in ((1, -8.0), (1, -30.0), (5, -12.0), (12, -2.0), (40, -0.5))
    ),
    Case(name="packed steps int64", op=R, T=4, lengths=(1, 1, 1, 1), index_dtype=torch.int64, state=FP32),
]

# More than a few tokens, which may have a kernel of their own, must also be accurate to float32.
PROMPTS = [
    Case(name="prompt", op=R, B=2, T=40, state=FP32),
    Case(name="prompt bfloat16", op=R, B=2, T=64, HV=4, K=128, dtype=BF16, gate_dtype=BF16, state=FP32),
    Case(name="prompt float16", op=R, T=33, K=64, dtype=FP16, state=FP32),
    Case(name="prompt bfloat16 state V first", op=R, T=24, K=64, V=128, state=BF16, options={"state_v_first": True}),
    Case(name="prompt without states", op=R, B=2, T=17, final_state=False),
    Case(name="prompt K 60 V 36", op=R, T=50, K=60, V=36, state=FP32),
    Case(name="prompt K 256", op=R, T=20, H=1, K=256, V=64, dtype=BF16, state=FP32),
    Case(name="prompt of a model", op=R, B=2, T=64, H=8, K=128, state=FP32, **SOFTPLUS, **BFLOAT16)
    .having(options={"state_v_first": True}),
    Case(name="prompt lower bound", op=R, T=40, HV=6, state=FP32, **SOFTPLUS | {"gate": "lower bound"}),
    Case(name="prompt slow decay", op=R, T=1100, decay="slow", state=FP32),
    *(Case(name=f"decay steps {decay}", op=R, T=40, decay=decay, state=FP32) for decay in DECAYS),
    # Nothing is written: a constant decay has the same rounding error at every token.
    *(
        Case(name=f"decay of steps {T} {decay} {beta}", op=R, T=T, decay=decay, beta=beta, state=FP32)
        for T, decay in ((64, "mild"), (150, -0.05), (300, -0.003))
        for beta in (0.0, 0.5)
    ),
    Case(name="prompt equal keys", op=R, T=64, decay="none", keys="equal", beta=1.0, state=FP32),
    Case(name="prompt equal keys bfloat16", op=R, T=64, decay="none", keys="equal", beta=1.0, **PLAIN[BF16]),
    Case(name="prompt parallel keys", op=R, T=64, decay="none", keys="nearly parallel", beta=1.0, state=FP32),
    Case(name="prompt reflections", op=R, T=40, decay="none", keys="equal", beta="negative eigenvalues"),
    Case(name="prompts packed", op=R, T=120, lengths=(1, 0, 17, 8, 9, 40, 16, 25), state=FP32),
    Case(name="prompts packed all in kernel", op=R, T=80, HV=4, K=64, lengths=(30, 1, 49), state=FP32)
    .having(options={"state_v_first": True}, **SOFTPLUS, **BFLOAT16),
]  # fmt: skip

BACKWARD = [
    Case(name="recurrent gradients", op=R, T=20, state=FP32, backward=True),
    Case(name="recurrent gradients of groups of three", op=R, B=2, T=6, HV=6, state=FP32, backward=True, **SOFTPLUS)
    .having(options={"scale": -0.3}),
    Case(name="recurrent gradients all in kernel", op=R, T=20, HV=6, lengths=(1, 12, 0, 7), state=FP32, **SOFTPLUS)
    .having(beta="negative eigenvalues", backward=True, options={"state_v_first": True}),
]  # fmt: skip


@each([*FORWARD, *PROMPTS, *BACKWARD])
def test_recurrent(kda, case: Case):
    """FAILURES 4, 5, 10, 26: results and gradients are within their budgets: float32 arithmetic whatever the inputs."""
    kda.check(case)


@requires(Feature.RECURRENT)
@pytest.mark.parametrize("T", [1, 8, 9, 40])
def test_recurrent_prompt_in_a_batch(kda, T: int):
    """FAILURES 28: a sequence's results do not depend on its batch, bit for bit."""
    call = Case(name=f"prompts in a batch {T}", op=R, B=3, T=T, state=FP32).call()
    check_company(kda, call, [1])


@slow
@requires(Feature.RECURRENT, Feature.PAGED_STATE)
@pytest.mark.parametrize("T", [1, 2, 8, 20])
@pytest.mark.parametrize("state", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_recurrent_in_a_batch_of_any_size(kda, T: int, state: torch.dtype, v_first: bool):
    """FAILURES 28: a sequence's results do not depend on the number of sequences, bit for bit."""
    options = {"state_v_first": v_first}
    case = Case(name=f"sizes {T}", op=R, B=130, T=T, H=32, K=128, dtype=BF16, state=state, options=options)
    call = case.having(gate_dtype=BF16, gate="lower bound", l2norm=True, beta="sigmoid").call()
    check_company(kda, call, *([*range(N)] for N in (1, 2, 4, 8, 16, 33, 65)))
    if T == 1:
        whole = kda.run(call)
        packed = {n: call.tensors[n].transpose(0, 1) for n in ("q", "k", "v", "g", "beta")}
        steps = kda.run(call.having(**packed, cu_seqlens=torch.arange(131, dtype=torch.int32)))
        assert same_bits(steps["o"].transpose(0, 1), whole["o"])
        assert same_bits(steps["final_state"], whole["final_state"])


@requires(Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
@pytest.mark.parametrize("steps", [200, pytest.param(100_000, marks=slow)])
@pytest.mark.parametrize("gate_dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_recurrent_drift(kda, steps: int, gate_dtype: torch.dtype):
    """FAILURES 23: an error in every step (beta rounded to bfloat16, say) adds up against the oracle."""
    case = Case(name=f"drift {steps}", op=R, T=steps, decay="slow", gate_dtype=gate_dtype, state=FP32)
    whole = case.call()
    kda.check(whole.slice_tokens(0, 1))
    tensors = kda.on_device(whole)
    state = tensors.pop("initial_state")
    tokens = {n: t.unbind(1) for n, t in tensors.items()}
    with torch.no_grad():
        for t in range(steps):
            inputs = {n: x[t][:, None] for n, x in tokens.items()}
            _, state = whole(inputs | {"initial_state": state}, kda.name)
    kda.compare(whole, {"final_state": state.cpu()})


@requires(Feature.RECURRENT, Feature.INITIAL_STATE)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [0.73, 0.9])
@pytest.mark.parametrize(("T", "decay"), [(8, -0.15), (16, -0.05), (32, -0.15)])
def test_recurrent_reads_what_it_wrote(kda, dtype: torch.dtype, beta: float, T: int, decay: float):
    """Queries equal keys: a token's write mostly cancels its read of the state."""
    name = f"reads what it wrote {T} {beta}"
    call = Case(name=name, op=R, T=T, decay=decay, beta=beta, keys="equal", **PLAIN[dtype]).call()
    state, v = 40 * call.tensors["initial_state"], call.tensors["v"] / 20
    kda.check(call.having(q=call.tensors["k"].clone(), initial_state=state, v=v))


@requires(Feature.RECURRENT, Feature.PAGED_STATE)
def test_recurrent_advances_the_initial_state_in_place(kda):
    """inplace_final_state without indices: row n is state n."""
    call = Case(name="in place", op=R, B=3, T=2, state=FP32).call()
    kda.check(call.having(inplace_final_state=True))
    kda.check(call.having(inplace_final_state=True, output_final_state=False))
