"""A small Kimi Linear of transformers on its own code and on kda_core, alternately: differences, and times.

    pip install . ./backends/cpu ./integrations/transformers typer rich     # in a checkout; without fla
    OMP_NUM_THREADS=1 python examples/kimi_linear.py --device cpu

Another program needs one line: ``import kda_core_transformers; kda_core_transformers.install()``. Attention, short
convolutions and experts stay transformers' own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import kda_core_transformers
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import kda_core


def small_model() -> KimiLinearForCausalLM:
    """A model of four layers, three of them linear, with random weights."""
    torch.manual_seed(0)
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 512}
    sizes = {"vocab_size": 256, "hidden_size": 256, "v_head_dim": 64, "qk_nope_head_dim": 64, "num_hidden_layers": 4}
    layers = {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}
    linear = {"linear_num_heads": 4, "linear_head_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = KimiLinearConfig(**attention, **experts, **sizes, **layers, **linear, **tokens)
    return KimiLinearForCausalLM(config).eval()


def step(model: KimiLinearForCausalLM, tokens: Tensor) -> Tensor:
    """The gradients of a training step, in one row."""
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def prefill(model: KimiLinearForCausalLM, tokens: Tensor) -> Tensor:
    """The logits of a prompt."""
    return model(tokens, use_cache=True).logits


def write(model: KimiLinearForCausalLM, prompt: Tensor, length: int = 32) -> Tensor:
    """The prompt and its likeliest continuation."""
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of an action, and the seconds that it takes."""
    start = time.perf_counter()
    result = action()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return result, time.perf_counter() - start


def main(
    tokens: Annotated[int, typer.Option(help="of each of two sequences", min=2)] = 512,
    repeats: Annotated[int, typer.Option(help="times of each action; their median counts", min=1)] = 5,
    device: Annotated[str | None, typer.Option(help="default: the best one that an installed backend serves")] = None,
) -> None:
    """Train, read a prompt and continue it, on transformers' code and on kda_core; print times and differences."""
    chosen = torch.device(device) if device else kda_core.default_device()
    model = small_model().to(chosen)
    text = torch.randint(3, 256, (2, tokens), device=chosen)
    table = Table("", "transformers, ms", "kda_core, ms", "times as fast", "difference")
    actions = {"training step": step, "prefill": prefill, "32 tokens": lambda model, text: write(model, text[:1, :64])}
    for name, action in actions.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        results = {}
        for repeat in range(repeats + 1):
            for ours in seconds:
                if ours:
                    kda_core_transformers.install("kimi_linear")
                results[ours], elapsed = timed(lambda action=action: action(model, text))
                kda_core_transformers.uninstall()
                if repeat:  # the first compiles and allocates
                    seconds[ours].append(elapsed)
        stock, own = (1000 * statistics.median(s) for s in seconds.values())
        apart = float((results[True] - results[False]).float().norm() / results[False].float().norm())
        table.add_row(name, f"{stock:.1f}", f"{own:.1f}", f"{stock / own:.2f}", f"{apart:.1e}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
