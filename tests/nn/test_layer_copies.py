"""Copies of a layer, and exported programs of it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kda_core.nn import KimiDeltaAttention


def layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2, **options)


def test_new_parameters_ask_for_no_weight_decay():
    """torch makes parameters anew in these, without their attributes; some conversions do so on request."""
    assigned = layer()
    assigned.load_state_dict(layer().state_dict(), assign=True)
    empty = layer().to("meta").to_empty(device="cpu")
    empty.reset_parameters()
    converted = []
    for how in (
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ):
        how(True)
        try:
            converted.append(layer().double())
        finally:
            how(False)
    for m in (layer(), copy.deepcopy(layer()), pickle.loads(pickle.dumps(layer())), assigned, empty, *converted):
        assert [n for n, p in m.named_parameters() if hasattr(p, "_no_weight_decay")] == ["A_log", "dt_bias"]


@pytest.mark.parametrize("options", [{}, {"use_short_conv": False}], ids=["plain", "no convolution"])
def test_exported_for_any_number_of_packed_sequences(options: dict):
    m, x = layer(**options), torch.randn(1, 30, 24)
    # torch 2.7 takes no dimension without an end here.
    lengths = {"cu_seqlens": {0: torch.export.Dim("N")}, "hidden_states": {1: torch.export.Dim("T", max=2**20)}}
    program = torch.export.export(m, (x,), {"cu_seqlens": torch.tensor([0, 3, 30])}, dynamic_shapes=lengths).module()
    for ends in ([0, 30], [0, 1, 1, 30]):
        torch.testing.assert_close(program(x, cu_seqlens=torch.tensor(ends)), m(x, cu_seqlens=torch.tensor(ends)))
