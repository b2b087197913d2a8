"""Operations that torch's FLOP counter counts: three products of a vector with the state a token and head."""

from __future__ import annotations

import pytest
import torch
from example_arguments import drawn
from torch.utils.flop_counter import FlopCounterMode

import kda_core
from kda_core import flops

OPS = ("chunk_kda", "fused_recurrent_kda")
SHAPES = [(1, 5, 1, 1, 8, 8), (2, 70, 2, 4, 16, 8), (1, 130, 3, 3, 12, 20)]


@pytest.fixture(autouse=True)
def registered():
    """Twice is once."""
    flops.register()
    flops.register()


def inputs(B, T, H, HV, K, V, grad=False):
    return drawn(grad, B=B, T=T, H=H, HV=HV, K=K, V=V)


def by_hand(tokens, HV, K, V):
    """k^T S, k r^T and S^T q of every token and value head, an addition for every multiplication."""
    return tokens * HV * (2 * K * V + 2 * K * V + 2 * K * V)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_the_forward_counts_three_products(op, shape):
    B, T, _, HV, K, V = shape
    found = counted(lambda: getattr(kda_core, op)(**inputs(*shape)))
    assert found == by_hand(B * T, HV, K, V)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_the_backward_counts_twice_the_forward(op, shape):
    B, T, _, HV, K, V = shape
    x = inputs(*shape, grad=True)
    # The forward ran outside the counter: its autograd function meets the counter in the backward alone.
    o, _ = getattr(kda_core, op)(**x)
    assert counted(lambda: o.sum().backward()) == 2 * by_hand(B * T, HV, K, V)
    both = counted(lambda: getattr(kda_core, op)(**x)[0].sum().backward())
    assert both == 3 * by_hand(B * T, HV, K, V)


@pytest.mark.parametrize(
    "options", [{"chunk_size": 32}, {"disable_recompute": True}, {"use_qk_l2norm_in_kernel": True}]
)
def test_options_that_change_no_product_count_nothing(options):
    x = inputs(*SHAPES[1], grad=True)
    found = counted(lambda: kda_core.chunk_kda(**x, **options)[0].sum().backward())
    assert found == 3 * by_hand(140, 4, 16, 8)


@pytest.mark.parametrize("op", OPS)
def test_packed_calls_count_the_tokens_of_their_sequences(op):
    x = inputs(1, 100, 2, 4, 8, 16)
    cu_seqlens = torch.tensor([0, 30, 30, 77])
    found = counted(lambda: getattr(kda_core, op)(**x, cu_seqlens=cu_seqlens))
    assert found == by_hand(77, 4, 8, 16)


def test_decoding_over_a_pool_counts_its_tokens():
    x, pool = inputs(3, 2, 1, 2, 8, 8), torch.zeros(5, 2, 8, 8)
    slots = torch.tensor([4, 0, 2])
    found = counted(lambda: kda_core.fused_recurrent_kda(**x, initial_state=pool, ssm_state_indices=slots))
    assert found == by_hand(6, 2, 8, 8)


def test_fake_boundaries_count_as_though_they_end_at_T():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = inputs(1, 100, 2, 4, 8, 16)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in x.items()}
        found = counted(lambda: kda_core.chunk_kda(**fakes, cu_seqlens=mode.from_tensor(torch.tensor([0, 30, 77]))))
    assert found == by_hand(100, 4, 8, 16)


def test_the_gate_has_no_products():
    g, A_log = torch.randn(2, 3, 4, 8, requires_grad=True), torch.zeros(4)
    assert counted(lambda: kda_core.kda_gate(g, A_log).sum().backward()) == 0


class Mixer(torch.nn.Module):
    """One projection to everything that the operator takes, and one back."""

    def __init__(self, dim: int = 24, H: int = 2, K: int = 8) -> None:
        super().__init__()
        self.H, self.K = H, K
        self.into = torch.nn.Linear(dim, H * (4 * K + 1), bias=False)
        self.back = torch.nn.Linear(H * K, dim, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v, g, beta = self.into(x).view(B, T, self.H, -1).split([self.K] * 4 + [1], dim=-1)
        g = kda_core.kda_gate(g, torch.zeros(self.H))
        o, _ = kda_core.chunk_kda(q, k, v, g, beta.squeeze(-1).sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.back(o.flatten(2))


def test_a_model_counts_its_layers_and_the_operator():
    model, x = Mixer(), torch.randn(3, 50, 24)
    linear = 2 * 150 * 24 * (2 * 33) + 2 * 150 * 16 * 24
    assert counted(lambda: model(x)) == linear + by_hand(150, 2, 8, 8)
    # The input needs no gradient, so that the first layer's backward has one product of its two.
    backward = 2 * linear - 2 * 150 * 24 * (2 * 33)
    assert counted(lambda: model(x).sum().backward()) == linear + backward + 3 * by_hand(150, 2, 8, 8)


def test_the_table_names_the_operators():
    x = inputs(*SHAPES[0], grad=True)
    with FlopCounterMode(display=False) as counter:
        kda_core.chunk_kda(**x)[0].sum().backward()
    names = {str(packet) for packet in counter.get_flop_counts()["Global"]}
    assert {"kda_core.chunk_kda", "kda_core.chunk_kda_backward"} <= names
