"""Decoders of torchtitan with Kimi Delta Attention in the place of attention; a debug model for a few steps on gloo."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import installed
import pages
import pytest
import torch
import torch.distributed as dist

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


def test_another_version_is_refused_where_names_are_missing(tmp_path):
    """Its modules need not have what the adapter imports."""
    found = tmp_path / "torchtitan-0.2.2.dist-info" / "METADATA"
    found.parent.mkdir()
    found.write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    call = [sys.executable, "-c", "import kda_core_torchtitan"]
    found = subprocess.run(call, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    expected = "UnsupportedStack: torchtitan: torchtitan 0.2.2 is installed; pip install 'torchtitan==0.3.0'"
    assert expected in found.stderr


@pytest.mark.parametrize("override", ["kimi_linear", "kimi_delta_attention"])
@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss", "muse_glimmer"])
def test_other_kinds_of_attention_are_refused(model, override):
    """torchtitan alone would leave the first two as they are, and the third could not be run."""
    names = vars(importlib.import_module(f"torchtitan.models.{model}"))
    (of_model,) = (c for name, c in names.items() if name.endswith("_configs") and isinstance(c, dict))
    others = {"moe_comm_backend": "standard"} if model != "muse_glimmer" else {}
    config = of_model["debugmodel"](attn_backend="flex", **others)
    before = [layer.attention for layer in config.layers]
    with pytest.raises(
        UnsupportedStack, match=rf"{model}\.model is not served; take a model with GQAttention \(llama3"
    ):
        apply_overrides(OverrideConfig(imports=[f"kda_core_torchtitan.{override}"]), config)
    assert all(layer.attention is own for layer, own in zip(config.layers, before, strict=True))


def test_the_oldest_backend_shares_no_rows():
    """torchtitan's own words would be of missing attributes."""
    model = titan_steps.build("kimi_delta_attention", layers=1)
    dims = SimpleNamespace(tp_enabled=False, cp_enabled=True, get_mesh=lambda name: None)
    named = {"training": None, "compile_config": None, "ac_config": None, "dump_folder": ""}
    with pytest.raises(
        UnsupportedStack, match=r"context parallelism with parallelism\.spmd_backend spmd_types or full"
    ):
        parallelize_llama(
            model, parallel_dims=dims, parallelism=SimpleNamespace(spmd_backend="partial_dtensor"), **named
        )


def test_products_in_kernels_of_collectives_are_refused():
    config = llama3_configs["debugmodel"]("flex", tp_gemm_backend="dist_gemm")
    apply_overrides(OverrideConfig(imports=["kda_core_torchtitan.kimi_delta_attention"]), config)
    with pytest.raises(UnsupportedStack, match="no dist_gemm"):
        config.layers[0].attention.build().parallelize(SimpleNamespace(spmd_backend="spmd_types"))


def test_options_are_the_layers_own():
    model = titan_steps.build("kimi_delta_attention", safe_gate=True, lower_bound=-5.0, head_dim=32)
    layer = model.layers["0"].attention
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


@pytest.fixture(scope="module")
def ranks():
    found = Ranks("titan_steps", size=4, patience=300)
    yield found
    found.close()


@pytest.fixture(scope="module")
def tokens():
    torch.manual_seed(1)
    return torch.randint(0, 2048, (2, 513))


@pytest.mark.parametrize(
    ("backend", "dp", "cp", "tp", "balancer", "sp", "first"),
    [
        # DTensors of three axes take minutes to find their way.
        ("full_dtensor", 1, 4, 1, "headtail", True, 40),
        ("full_dtensor", 2, 2, 1, None, True, 0),
        ("full_dtensor", 2, 1, 2, None, False, 40),
        ("partial_dtensor", 2, 1, 2, None, True, 40),
        ("partial_dtensor", 4, 1, 1, None, True, 40),
    ],
)
def test_a_debug_model_trains_on_gloo(ranks, tokens, backend, dp, cp, tp, balancer, sp, first):
    """Four ranks that share rows, documents, heads and parameters have the losses of one process."""
    tokens = tokens.repeat(max(1, dp // 2), 1)
    whole = titan_steps.losses(titan_steps.build("kimi_delta_attention", layers=titan_steps.LAYERS), tokens, 3, first)
    parts = ranks.run(4, "titan_steps:trained", tokens, first, backend, (dp, cp, tp), balancer, sp)
    assert whole[0] > whole[1] > whole[2]
    # Ranks that share heads have the same loss.
    assert (torch.tensor(parts).sum(0) / tp).tolist() == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("sp", [True, False])
def test_gradients_of_torchtitans_default_backend(ranks, tokens, sp):
    model = titan_steps.build("kimi_delta_attention", layers=titan_steps.LAYERS)
    cp, tp = 2, 2
    positions = titan_steps.documents(tokens[:, :-1], 40)
    logits = model(tokens[:, :-1], positions, model.get_attention_masks(positions))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    parts = ranks.run(4, "titan_steps:gradients", tokens, (1, cp, tp), sp)
    assert sum(part for part, _ in parts) / tp == pytest.approx(loss.item(), rel=1e-5)
    for name, t in model.layers["0"].attention.named_parameters():
        of_rank = [grads[name] for _, grads in parts]
        rows = [sum(of_rank[heads::tp]) for heads in range(tp)]
        along = 1 if name == "o_proj.weight" else 0
        shared = any(name.startswith(part) for part in kda_core_torchtitan.SHARED)
        found = sum(rows) if shared else torch.cat(rows, along)
        torch.testing.assert_close(found, t.grad, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_in_an_order_that_nobody_knows_are_refused():
    """kda_core's own tests have the orders that it knows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedStack, match=r"parallelism\.context_parallel_load_balancer headtail"):
            kda_core_torchtitan._context(dist.group.WORLD, 4, torch.tensor([[0, 2, 1, 3]]), False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/torchtitan.md"])
def test_the_line_of_the_page(page):
    (target,) = set(re.findall(r"`--override\.imports kda_core_torchtitan\.(\w+)`", pages.read(page)))
    assert KDA.Config in attention_after(target)
