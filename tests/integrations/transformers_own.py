"""transformers' own tests of all models (ModelTesterMixin), on its models with Kimi Delta Attention.

Not collected by its name: test_transformers.py runs it in processes of its own, without and with kda_core (KDA_OWN=1).
TRANSFORMERS_TESTS is the folder of transformers' source distribution, which has the mixin. The tests of text and of
exports are in the repository alone: they run where the variable names a checkout.
"""

from __future__ import annotations

import os
import sys
import types
import unittest
from pathlib import Path

import torch
from hf_models import MODELS, classes_of, config_of

SOURCE = os.environ["TRANSFORMERS_TESTS"]
sys.path.insert(0, SOURCE)
for name, mixin in {
    "exporters/test_export": "ExportTesterMixin",
    "generation/test_utils": "GenerationTesterMixin",
}.items():
    if not Path(SOURCE, "tests", f"{name}.py").exists():
        stub = types.SimpleNamespace(**{mixin: type(mixin, (), {})})
        sys.modules[f"tests.{name}".replace("/", ".")] = stub

from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin

if os.environ.get("KDA_OWN"):
    import kda_core_transformers

    assert kda_core_transformers.install()


class ModelTester:
    """The mixin asks it for configurations, inputs and sizes."""

    is_training, batch_size, seq_length = True, 3, 70
    num_hidden_layers, hidden_size, num_attention_heads = 2, 64, 2

    def __init__(self, name: str):
        self.name = name

    def get_config(self):
        return config_of(self.name, linear=1)

    def prepare_config_and_inputs_for_common(self):
        text = torch.randint(3, 256, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": text, "attention_mask": torch.ones_like(text)}


class OwnTests(ModelTesterMixin):
    name: str

    def setUp(self):
        torch.manual_seed(0)
        self.model_tester = ModelTester(self.name)

    def test_attention_outputs(self):
        """Overridden, as in transformers' repository: linear layers have no weights of attention to show."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        rows, tokens = inputs["input_ids"].shape
        for kind in self.all_model_classes:
            (weights,) = kind(config).eval()(**inputs, output_attentions=True).attentions
            assert weights.shape == (rows, config.num_attention_heads, tokens, tokens)


class TestKimiLinear(OwnTests, GenerationTesterMixin, unittest.TestCase):
    name, all_model_classes = "kimi_linear", classes_of("kimi_linear")


class TestGlm5Next(OwnTests, unittest.TestCase):
    name, all_model_classes = "glm5_next", classes_of("glm5_next")
    # Between its layers there are four streams of hidden states, which the mixin does not know.
    test_hidden_states_output = None


if "bailing_hybrid" in MODELS:

    class TestBailingHybrid(OwnTests, GenerationTesterMixin, unittest.TestCase):
        name, all_model_classes = "bailing_hybrid", classes_of("bailing_hybrid")
        # It wants every pattern of renamed weights to match; this configuration has one of the variants.
        test_reverse_loading_mapping = None
