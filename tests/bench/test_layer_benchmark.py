"""``benchmarks/layer.py``: the layers of others, and its steps on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("kda_core_cpu")

import layer


def test_layer_on_a_gpu(gpu, monkeypatch):
    """The steps of a row; a capture that fails leaves the rest."""
    captures = []

    def graph(graph, stream):
        captures.append(0)
        if len(captures) > 1:
            raise RuntimeError("not permitted")
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    runs = {"kda_core": lambda: None, "fla": lambda: None}
    kernels = {"norm_forward_kernel": 3.0, "recurrence_kernel": 1.0}
    found = layer.measured(runs, gpu, 0.01, lambda run, device: kernels)
    assert found["fla"]["not_captured"] == "RuntimeError: not permitted"
    assert "device_ms" not in found["fla"]
    first, second = layer.lines_of({"shape": "1,2", "case": "forward", "implementations": found})[1:]
    assert first.startswith("  kda_core     2.500 ms, 2.500 ms replayed, 0.0")
    assert first.endswith(" ms of host, 0.00 GiB; norms 75%, the operator 25%")
    assert second.startswith("  fla          2.500 ms, 0.0")


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("convolution_backward_kernel", "convolutions"),
        ("causal_conv1d_fwd_kernel", "convolutions"),
        ("norm_backward_kernel", "norms"),
        ("layer_norm_gated_bwd_kernel_row", "norms"),
        ("l2norm_fwd_kernel", "the operator"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("void at::native::CatArrayBatchedCopy_vectorized<at::conv>", "torch's elementwise kernels"),
        ("Memset (Device)", "torch's elementwise kernels"),
        ("transitions_kernel", "the operator"),
    ],
)  # fmt: skip
def test_kernels_belong_to_parts_of_a_layer(kernel, part):
    assert layer.shares({kernel: 2.0})[part] == 1.0


@pytest.mark.end_to_end
@pytest.mark.filterwarnings("ignore")
def test_the_layer_of_transformers_has_the_same_results():
    """That of fla is in the tests of its adapter, because its kernels need a GPU."""
    pytest.importorskip("transformers")
    ours = layer.KimiDeltaAttention(24, head_dim=8, num_heads=3)
    torch.nn.init.zeros_(ours.g_proj[1].bias)
    x = torch.randn(2, 70, 24)
    first, second = (layer.runs_of(m, x) for m in (ours, layer.transformers_layer(ours)))
    torch.testing.assert_close(first["forward"](), second["forward"]())
    torch.testing.assert_close(first["training step"]()[0], second["training step"]()[0])


@pytest.mark.end_to_end  # fla's models import for seconds
def test_the_decays_parameters_of_the_other_layer_stay_float32():
    pytest.importorskip("fla")
    theirs = layer.fla_layer(layer.KimiDeltaAttention(24, head_dim=8, num_heads=3, dtype=torch.bfloat16))
    wide = {name for name, parameter in theirs.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
