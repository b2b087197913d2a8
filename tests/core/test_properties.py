"""Random shapes, strides, packing and flags: forward and gradients against the oracle, in float64.

float64 leaves no room for a tolerance to hide in: what is not rounding is a bug.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kda_core
from kda_core.reference import DIFFERENTIABLE

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
RTOL = 1e-9


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    """The same values behind other strides."""
    if how == "sliced":
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan"), dtype=t.dtype)
        wide[..., 1 : 1 + t.shape[-1]] = t
        return wide[..., 1 : 1 + t.shape[-1]]
    if how == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every_second":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    return t


@st.composite
def calls(draw):
    """Arguments of a call: tensors by name, and options."""
    integer = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    flag = lambda: draw(st.booleans())  # noqa: E731
    group, H, K, V = integer(1, 3), integer(1, 3), integer(1, 9), integer(1, 9)
    HV = H * group
    op = draw(st.sampled_from(["chunk_kda", "fused_recurrent_kda"]))
    options: dict = {"output_final_state": flag(), "scale": draw(st.sampled_from([None, 0.3, -1.5]))}
    tensors: dict = {}
    if flag():
        lengths = draw(
            st.lists(st.one_of(st.integers(0, 3), st.integers(60, 70), st.integers(0, 140)), min_size=1, max_size=4)
        )
        cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        B, T, N = 1, cuts[-1] + integer(0, 2), len(lengths)
        options["cu_seqlens"] = torch.tensor(cuts, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    else:
        B, T = integer(1, 3), draw(st.one_of(st.integers(0, 5), st.integers(31, 34), st.integers(62, 140)))
        N = B
    generator = torch.Generator().manual_seed(integer(0, 2**31))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors["q"], tensors["k"], tensors["v"] = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    options["use_qk_l2norm_in_kernel"] = flag()
    if not options["use_qk_l2norm_in_kernel"]:
        tensors["k"] = torch.nn.functional.normalize(tensors["k"], dim=-1)
    decay = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    options["use_gate_in_kernel"] = flag()
    if options["use_gate_in_kernel"]:
        tensors["g"] = normal(B, T, HV, K)
        options["lower_bound"] = draw(st.sampled_from([None, -5.0, -0.1, -80.0]))
        if options["lower_bound"] is None or flag():
            tensors["A_log"] = normal(HV)
        if flag():
            tensors["dt_bias"] = normal(HV, K) if flag() else normal(HV * K)
    else:
        tensors["g"] = -decay * normal(B, T, HV, K).abs()
        if op == "chunk_kda" and flag():
            options |= {"safe_gate": True, "lower_bound": draw(st.sampled_from([None, -5.0, -1e6]))}
    tensors["beta"] = normal(B, T, HV)
    options["use_beta_sigmoid_in_kernel"] = flag()
    if options["use_beta_sigmoid_in_kernel"]:
        options["allow_neg_eigval"] = flag()
    else:
        tensors["beta"] = tensors["beta"].sigmoid()
    options["state_v_first"] = flag()
    if flag():
        tensors["initial_state"] = normal(N, HV, V, K) if options["state_v_first"] else normal(N, HV, K, V)
    if op == "chunk_kda":
        options["chunk_size"] = draw(st.sampled_from([32, 64]))
        options["disable_recompute"] = flag()
    how = draw(st.sampled_from(["contiguous", "sliced", "transposed", "every_second"]))
    return op, {n: strided(t, how) if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}, options


def close(found: torch.Tensor | None, expected: torch.Tensor | None, name: str) -> None:
    if expected is None:
        assert found is None, name
        return
    assert found is not None, name
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype, name
    if expected.numel():
        assert torch.isfinite(expected).all(), f"{name}: the oracle itself is not finite"
        error, size = (found - expected).norm().item(), expected.norm().item()
        assert error <= RTOL * size + 1e-12, f"{name}: relative error {error / max(size, 1e-300):.1e}"


@given(calls())
@SETTINGS
def test_forward_equals_the_oracle(call):
    op, tensors, options = call
    function = getattr(kda_core, op)
    before = {n: t.clone() for n, t in tensors.items()}
    with torch.no_grad():
        found = function(**tensors, **options)
        expected = function(**tensors, **options, backend="reference")
    for name, a, b in zip(("o", "final_state"), found, expected, strict=True):
        close(a, b, name)
    for n, t in tensors.items():
        assert torch.equal(t, before[n]), f"{n} was modified"


@given(calls())
@SETTINGS
def test_gradients_equal_the_oracles(call):
    op, tensors, options = call
    function = getattr(kda_core, op)
    names = [n for n in DIFFERENTIABLE if n in tensors]
    grads = []
    for backend in (None, "reference"):
        leaves = {n: tensors[n].detach().requires_grad_() for n in names}
        o, state = function(**leaves, **options, backend=backend)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(o.shape, generator=generator, dtype=o.dtype)
        loss = (o * weights).sum()
        if state is not None:
            loss = loss + (state * torch.randn(state.shape, generator=generator, dtype=state.dtype)).sum()
        grads.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for name, found, expected in zip(names, *grads, strict=True):
        close(found, expected, f"d{name}")


@given(st.sampled_from(["cpu", "reference"]), st.integers(-2, 3))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_a_dense_state_in_place_has_no_padding_index(backend, pad_slot_id):
    """pad_slot_id is about indices: without them every row is its own slot, whatever its number."""
    q, k, v = (torch.randn(3, 2, 1, 4) for _ in range(3))
    call = (q, k, v, -k.abs(), torch.rand(3, 2, 1))
    state = torch.randn(3, 1, 4, 4)
    with torch.no_grad():
        o, final = kda_core.fused_recurrent_kda(*call, initial_state=state, output_final_state=True, backend=backend)
        same, written = kda_core.fused_recurrent_kda(
            *call, initial_state=state, output_final_state=True, inplace_final_state=True, pad_slot_id=pad_slot_id,
            backend=backend,
        )  # fmt: skip
    assert written is state
    torch.testing.assert_close(same, o)
    torch.testing.assert_close(written, final)
