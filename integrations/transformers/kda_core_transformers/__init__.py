"""transformers' KDA models on kda_core: ``kda_core_transformers.install()``; ``uninstall()`` takes it back.

A model's module chooses its KDA functions once, when it is imported: a kernel of the Hub, fla's or its own torch code.
No registry can be entered before that, so that ``install`` binds the module's names anew, for models that are built
already, too: two operators, for one token on a CPU the short convolution before them, and the gate's decay.
``KDA_TRANSFORMERS=0`` switches it off.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kda_core
from kda_core.integrations import admit, advance_convolution, expect_models

__version__ = "0.1.0"

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
"""Modules of ``transformers.models``; bailing_hybrid came with transformers 5.20."""

OPERATORS: dict[str, Callable] = {
    "chunk_kimi_delta_attention": kda_core.chunk_kda,
    "recurrent_kimi_delta_attention": kda_core.fused_recurrent_kda,
}
"""Their functions for prompts and training, and for one token."""

UPDATE = "causal_conv1d_update"
"""Their short convolution of one token."""

GATES = ("KimiLinearForgetGate", "Glm5NextTextForgetGate")
"""Their modules of the decay that compute softplus as log(1 + exp(x))."""

_bound: dict[tuple[Any, str], tuple[Callable, Callable]] = {}
"""Their functions and ours, by module or class, and name."""


def install(*models: str) -> bool:
    """Let every model of this process with one of these architectures compute its linear attention with kda_core.

    Args:
        *models: names in ``MODELS``; all that this transformers has when left out.

    Returns:
        Whether they do: False where ``KDA_TRANSFORMERS=0`` switches it off.

    Raises:
        UnsupportedStack: transformers is missing or another version, or has no such model; nothing has changed.
    """
    if not admit("transformers"):
        return False
    there = [name for name in MODELS if find_spec(f"transformers.models.{name}")]
    expect_models("transformers", models, there)
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in models or there]
    places = [(module, name) for module in modules for name in (*OPERATORS, UPDATE)]
    places += [(vars(module)[name], "forward") for module in modules for name in GATES if name in vars(module)]
    found = {(owner, name): getattr(owner, name) for owner, name in places}
    for (owner, name), stock in found.items():
        if stock is not _bound.get((owner, name), (None, None))[1]:  # a reloaded module has transformers' again
            make = {UPDATE: _update, "forward": _decay}.get(name) or functools.partial(_as_layers_call, OPERATORS[name])
            function = make(stock)
            _bound[owner, name] = stock, function
            setattr(owner, name, function)
    return True


def uninstall() -> None:
    """Give the models back the functions that they had."""
    while _bound:
        (owner, name), (stock, _) = _bound.popitem()
        setattr(owner, name, stock)


def _as_layers_call(operator: Callable, stock: Callable) -> Callable:
    in_place = operator is kda_core.fused_recurrent_kda

    @functools.wraps(inspect.unwrap(stock))
    def call(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **given: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        # The layers copy the new state over the cache's, which is the initial one: written there, nothing is left.
        more = {"inplace_final_state": initial_state is not None and not torch.is_grad_enabled()} if in_place else {}
        # The layers pass on every argument of the model's call besides these. transformers renamed the boundaries of
        # packed documents in 5.23. Only prompts and training have any.
        bounds = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
        if bounds is None and given.get("seq_idx") is not None:
            raise ValueError("seq_idx: packed documents need their boundaries, too: expected cu_seq_lens_q")
        return operator(
            query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=bounds, **more,
        )  # fmt: skip

    return call


def _update(stock: Callable) -> Callable:
    """``advance_convolution`` for one token on a CPU without gradients. All other calls go on to ``stock``."""

    @functools.wraps(inspect.unwrap(stock))
    def update(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        x, state = hidden_states, conv_state
        traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        plain = x.is_cpu and weight.dtype != torch.float64 and activation in ("silu", None)
        if traced or not plain or x.shape[-1] != 1 or state.shape[-1] != weight.shape[-1]:
            return stock(x, state, weight, bias, activation)
        return advance_convolution(x, state, weight, bias, activation is not None)

    return update


def _decay(stock: Callable) -> Callable:
    """The gate's log decays in half of their operations. Above 88 the gradients of log(1 + exp(x)) are NaN."""

    @functools.wraps(stock)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        x = x.unflatten(-1, (-1, self.head_dim))
        rate, bound = self.A_log.float().exp().view(-1, 1), getattr(self, "safe_gate_lower_bound", None)
        return -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)

    return forward
