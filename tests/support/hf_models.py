"""Small models of transformers' architectures with Kimi Delta Attention: linear layers, then one of another kind."""

from __future__ import annotations

import importlib

import transformers
from packaging.version import Version

MODELS = ["kimi_linear", "glm5_next"]
if Version(transformers.__version__) >= Version("5.20"):
    MODELS.append("bailing_hybrid")

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "linear_num_heads": 2, "linear_head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "v_head_dim": 16},
    "max_position_embeddings": 512,
}


def module_of(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def classes_of(name: str) -> list[type]:
    """The architecture's model without a head, and with one where it can write text."""
    if name == "glm5_next":
        return [module_of(name).Glm5NextTextModel]
    stem = {"kimi_linear": "KimiLinear", "bailing_hybrid": "BailingHybrid"}[name]
    return [getattr(transformers, stem + end) for end in ("Model", "ForCausalLM")]


def config_of(name: str, linear: int = 2):
    """A configuration with ``linear`` linear layers and one other layer."""
    full = "indexed_attention" if name == "glm5_next" else "full_attention"
    sizes = {**SIZES, "num_hidden_layers": linear + 1, "layer_types": ["linear_attention"] * linear + [full]}
    if name == "kimi_linear":
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
        return transformers.KimiLinearConfig(**sizes, **more)
    sizes |= {"mlp_layer_types": ["dense", *["sparse"] * linear], "qk_nope_head_dim": 16}
    if name == "glm5_next":
        more = {"n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16}
        index = {"index_n_heads": 2, "index_head_dim": 16, "indexer_types": ["full"] * (linear + 1)}
        return transformers.Glm5NextTextConfig(**sizes, **more, **index)
    more = {"num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 2, "topk_group": 1, "head_dim": 16}
    return transformers.BailingHybridConfig(**sizes, **more, qk_rope_head_dim=16)
