"""Decoders of torchtitan with Kimi Delta Attention in the place of attention; a debug model for a few steps on gloo."""

from __future__ import annotations

import re
from types import SimpleNamespace

import installed
import pages
import pytest
import torch

installed.need_backend("cpu")
installed.need_package("torchtitan")
installed.need_package("kda_core_torchtitan", "./integrations/torchtitan")

import kda_core_torchtitan
import titan_steps
from ranks import Ranks
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import GQAttention, create_varlen_metadata_for_document
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.llama3.parallelize import parallelize_llama

from kda_core import nn
from kda_core.errors import UnsupportedStack

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]

KDA = kda_core_torchtitan.KimiDeltaAttention


def attention_after(override: str) -> list[type]:
    config = llama3_configs["debugmodel"]("flex")
    apply_overrides(OverrideConfig(imports=[f"kda_core_torchtitan.{override}"]), config)
    return [type(layer.attention) for layer in config.layers]


def test_layers_are_replaced():
    assert attention_after("kimi_delta_attention") == [KDA.Config] * 6
    three = [KDA.Config] * 3
    assert attention_after("kimi_linear") == [*three, GQAttention.Config, *three[:2]]


def test_the_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("KDA_TORCHTITAN", "0")
    assert attention_after("kimi_delta_attention") == [GQAttention.Config] * 6


def test_another_version_is_refused(tmp_path, monkeypatch):
    (tmp_path / "torchtitan-0.2.2.dist-info").mkdir()
    (tmp_path / "torchtitan-0.2.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedStack, match=r"torchtitan 0\.2\.2 is installed; pip install 'torchtitan==0\.3\.0'"):
        attention_after("kimi_delta_attention")


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_shards_of_heads_and_rows_are_refused(axis):
    """torchtitan's own words would be of missing attributes and mixed tensors."""
    model = titan_steps.build("kimi_delta_attention")
    dims = SimpleNamespace(tp_enabled=axis == "tp", cp_enabled=axis == "cp", get_mesh=lambda name: None)
    refused = pytest.raises(UnsupportedStack, match=r"set parallelism\.tensor_parallel_degree")
    with refused:
        model.layers["0"].attention.parallelize(dims)
    if axis == "cp":
        named = {"training": None, "compile_config": None, "ac_config": None, "dump_folder": ""}
        with refused:
            parallelize_llama(model, parallel_dims=dims, parallelism=SimpleNamespace(spmd_backend="default"), **named)


def test_options_are_the_layers_own():
    model = titan_steps.build("kimi_delta_attention", safe_gate=True, lower_bound=-5.0, head_dim=32)
    layer = model.layers["0"].attention.layer
    assert isinstance(layer, nn.KimiDeltaAttention)
    assert (layer.safe_gate, layer.lower_bound, layer.head_dim) == (True, -5.0, 32)
    with pytest.raises(ValueError, match="conv_sizes"):
        titan_steps.build("kimi_delta_attention", conv_sizes=3)


@pytest.mark.parametrize("masks", ["flex", "varlen"])
def test_documents_of_a_row_share_no_state(masks):
    model = titan_steps.build("kimi_delta_attention")
    tokens = torch.randint(0, 2048, (2, 64))
    positions = torch.cat([torch.arange(40), torch.arange(24)]).repeat(2, 1)
    flex = model.get_attention_masks(positions)
    given = flex if masks == "flex" else create_varlen_metadata_for_document(positions)
    with torch.no_grad():
        together = model(tokens, positions, given)
        apart = [model(part, None, None) for part in tokens.split([40, 24], 1)]
    torch.testing.assert_close(together, torch.cat(apart, 1), atol=1e-5, rtol=1e-5)


def test_a_debug_model_trains_for_a_few_steps_on_gloo():
    """Two ranks with half of the batch and of the parameters each have the losses of one process."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 2048, (2, 65))
    whole = titan_steps.losses(titan_steps.build("kimi_delta_attention"), tokens, 3)
    ranks = Ranks()
    try:
        ranks.run(2, "titan_steps:ready")
        parts = ranks.run(2, "titan_steps:sharded", tokens)
    finally:
        ranks.close()
    assert whole[0] > whole[1] > whole[2]
    assert torch.tensor(parts).mean(0).tolist() == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/torchtitan.md"])
def test_the_line_of_the_page(page):
    (target,) = set(re.findall(r"`--override\.imports kda_core_torchtitan\.(\w+)`", pages.read(page)))
    assert KDA.Config in attention_after(target)
