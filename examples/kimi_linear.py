"""transformers' Kimi Linear with kda_core as its operator, beside transformers' own torch code for it.

    pip install transformers typer rich                   # transformers 5.18
    python examples/kimi_linear.py                        # a small model with random weights, on the best device
    python examples/kimi_linear.py --tokens 2000 --device cpu

Another program needs only ``on_kda_core()``: the linear-attention layers then train and generate on the backend that
serves their tensors. Attention, short convolutions and experts stay transformers' own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

import kda_core

CHUNK, STEP = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
"""The functions of that module that its layers call: for prompts and training, and for one token."""


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, *, cu_seq_lens_q: Tensor | None = None, **given: Any):
    """``kda_core.chunk_kda`` as a layer calls it; packed documents (``cu_seq_lens_q``) share no state.

    Without the package causal_conv1d the layer's short convolution still mixes tokens across their borders.
    """
    return kda_core.chunk_kda(q, k, v, cu_seqlens=cu_seq_lens_q, **_of_the_operator(given))


def fused_recurrent_kda(q: Tensor, k: Tensor, v: Tensor, **given: Any):
    """``kda_core.fused_recurrent_kda`` as a layer calls it."""
    return kda_core.fused_recurrent_kda(q, k, v, **_of_the_operator(given))


def _of_the_operator(given: dict[str, Any]) -> dict[str, Any]:
    # Layers pass on every argument of the model's call.
    names = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    return {name: given[name] for name in names}


@contextmanager
def operators(chunk: Callable, step: Callable) -> Iterator[None]:
    """Let every Kimi Linear model of this process call these."""
    before = {name: getattr(modeling_kimi_linear, name) for name in (CHUNK, STEP)}
    setattr(modeling_kimi_linear, CHUNK, chunk)
    setattr(modeling_kimi_linear, STEP, step)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(modeling_kimi_linear, name, function)


def on_kda_core():
    """Let every Kimi Linear model of this process compute its linear attention with kda_core; a context manager."""
    return operators(chunk_kda, fused_recurrent_kda)


def on_torch():
    """Let them compute it with transformers' torch code, also where fla is installed; a context manager."""
    return operators(*(inspect.unwrap(getattr(modeling_kimi_linear, name)) for name in (CHUNK, STEP)))


def small_model(**changes: Any) -> KimiLinearForCausalLM:
    """A model of four layers, three of them linear, with random weights."""
    torch.manual_seed(0)
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 512}
    config = {
        **attention,
        **experts,
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "v_head_dim": 64,
        "qk_nope_head_dim": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return KimiLinearForCausalLM(KimiLinearConfig(**(config | changes))).eval()


def step(model: KimiLinearForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and, in one row, the gradients of a training step."""
    model.zero_grad()
    result = model(tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    return result.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def write(model: KimiLinearForCausalLM, prompt: Tensor, length: int) -> Tensor:
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


def apart(a: Tensor, b: Tensor) -> str:
    """The relative difference of two tensors, in norm."""
    return f"{float((a - b).norm() / b.norm()):.1e}"


def main(
    tokens: Annotated[int, typer.Option(help="of each of two sequences", min=2)] = 512,
    device: Annotated[str | None, typer.Option(help="default: the best one that an installed backend serves")] = None,
) -> None:
    """Train one step and continue a prompt, on transformers' torch code and on kda_core; print times, differences."""
    chosen = torch.device(device) if device else kda_core.default_device()
    model = small_model().to(chosen)
    text = torch.randint(3, 256, (2, tokens), device=chosen)
    table = Table("operator", "training step", "32 tokens", "logits apart", "gradients apart", "text")
    expected: tuple[Tensor, ...] = ()
    for name, using in (("torch code", on_torch), ("kda_core", on_kda_core)):
        with using():
            step(model, text)  # compile and allocate before the timing
            (logits, gradients), training = timed(lambda: step(model, text))
            written, writing = timed(lambda: write(model, text[:, : tokens // 2], 32))
        expected = expected or (logits, gradients, written)
        differences = apart(logits, expected[0]), apart(gradients, expected[1])
        same = "the same" if torch.equal(written, expected[2]) else "another"
        table.add_row(name, f"{training:.2f} s", f"{writing:.2f} s", *differences, same)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
