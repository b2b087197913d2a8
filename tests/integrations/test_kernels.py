"""The repository for the kernels library: it stands alone, loads both ways and serves transformers' Kimi Linear."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path

import installed
import pages
import pytest
import torch
from environments import run
from toys import Watcher

installed.need_backend("cpu")
installed.need_package("kernels", at_least="0.17")
installed.need_package("transformers", at_least="5.18")

import kernels
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import kda_core

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    spec = importlib.util.spec_from_file_location("hub_build", pages.ROOT / "integrations/hub/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    out = tmp_path_factory.mktemp("hub")
    build.main(out)
    return out


def draw():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
    return q, k, v, -torch.rand(1, 70, 2, 16), torch.rand(1, 70, 2)


def test_variants_import_nothing_but_torch_and_triton(repository):
    variants = sorted((repository / "build").iterdir())
    assert [v.name for v in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    about = [json.loads((v / "metadata.json").read_text()) for v in variants]
    assert [a["backend"]["type"] for a in about] == ["cpu", "cuda", "rocm"]
    assert len({a["id"] for a in about}) == 3
    # torch needs typing_extensions itself.
    allowed = {*sys.stdlib_module_names, "torch", "triton", "typing_extensions"}
    for path in repository.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= allowed, path


def test_a_local_kernel_computes_what_kda_core_does(repository):
    found = kernels.get_local_kernel(repository)
    assert found.chunk_kda is not kda_core.chunk_kda
    inputs = draw()
    expected, own = (f(*inputs, use_qk_l2norm_in_kernel=True)[0] for f in (kda_core.chunk_kda, found.chunk_kda))
    assert torch.equal(own, expected)
    given = torch.randn_like(own)
    for a, b in zip(*(torch.autograd.grad(o, inputs[:3], given) for o in (own, expected)), strict=True):
        assert torch.equal(a, b)
    wrapped = torch.func.vmap(lambda q: found.chunk_kda(q, *inputs[1:])[0])(inputs[0][None])  # through its operator
    torch.testing.assert_close(wrapped[0], found.chunk_kda(*inputs)[0])


def test_packed_documents_without_boundaries_are_refused(repository):
    q, k, v, g, beta = draw()
    chunk = kernels.get_local_kernel(repository).layers.chunk_kimi_delta_attention()
    documents = {"seq_idx": torch.arange(70)[None] // 40}
    with pytest.raises(ValueError, match="seq_idx: packed documents need their boundaries, too"):
        chunk(q, k, v, g, beta, **documents)
    o, _ = chunk(q, k, v, g, beta, **documents, cu_seq_lens_q=torch.tensor([0, 40, 70]))
    torch.testing.assert_close(o[:, 40:], chunk(*(t[:, 40:] for t in (q, k, v, g, beta)))[0])


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_name_of_the_hub_loads_it_without_kda_core(repository, tmp_path, check):
    """Also where calls are compared with the float64 oracle."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, kernels, torch\n"
        "found = kernels.get_kernel('kernels-community/fla', version=2)\n"
        "q = torch.randn(1, 9, 2, 16)\n"
        "o, _ = found.fused_recurrent_kda(q, q, q, -torch.rand(1, 9, 2, 16), torch.rand(1, 9, 2), scale=0.1)\n"
        "assert o.isfinite().all()\n"
        "print([n for n in sys.modules if n.partition('.')[0] in ('kda_core', 'kda_core_cpu', 'pluggy')])\n"
    )
    environment = {**os.environ, "LOCAL_KERNELS": f"kernels-community/fla={repository}", "KDA_CHECK": check}
    assert run(sys.executable, script, env=environment, timeout=300) == "[]\n"


def test_kernelize_serves_a_model(repository):
    torch.manual_seed(0)
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "v_head_dim": 16, "qk_nope_head_dim": 16}
    linear = {"linear_num_heads": 2, "linear_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = KimiLinearForCausalLM(KimiLinearConfig(**attention, **experts, **sizes, **linear, **tokens)).eval()
    text = torch.randint(3, 256, (2, 90))
    with torch.no_grad():
        expected = model(text).logits
    core = kernels.get_local_kernel(repository).kda_core  # its own copy
    names = {"chunk_kda": "chunk_kimi_delta_attention", "fused_recurrent_kda": "recurrent_kimi_delta_attention"}
    mapping = {
        op: {"cpu": kernels.LocalLayerRepository(repo_path=repository, layer_name=layer)} for op, layer in names.items()
    }
    with kernels.use_kernel_mapping(mapping):
        model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    with Watcher(core._plugins.registry) as requests, torch.no_grad():
        result = model(text, use_cache=True)
        model(text[:, :1], past_key_values=result.past_key_values, use_cache=True)
    assert [r.op for r in requests] == ["chunk_kda", "fused_recurrent_kda"]
    assert float((result.logits - expected).norm() / expected.norm()) < 5e-6
