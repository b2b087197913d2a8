"""transformers' KDA models on kda_core: ``kda_core_transformers.install()``; ``uninstall()`` takes it back.

A model's module chooses its two KDA functions once, when it is imported: a kernel of the Hub, fla's or its own torch
code. No registry can be entered before that, so that ``install`` binds the module's two names anew, for models that are
built already, too. ``KDA_TRANSFORMERS=0`` switches it off.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

import kda_core
from kda_core.errors import UnsupportedStack
from kda_core.integrations import admit

__version__ = "0.1.0"

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
"""Modules of ``transformers.models``; bailing_hybrid came with transformers 5.20."""

OPERATORS = {
    "chunk_kimi_delta_attention": kda_core.chunk_kda,
    "recurrent_kimi_delta_attention": kda_core.fused_recurrent_kda,
}
"""Their functions for prompts and training, and for one token."""

TAKEN = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
"""The layers pass on every argument of the model's call besides these."""

_stock: dict[tuple[Any, str], Callable] = {}


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
    for name in models:
        if name not in there:
            raise UnsupportedStack(
                f"transformers: model {name!r} is not served; leave it out, or take {', '.join(there)}"
            )
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in models or there]
    found = {(module, name): getattr(module, name) for module in modules for name in OPERATORS}
    for (module, name), stock in found.items():
        if (module, name) not in _stock:
            _stock[module, name] = stock
            setattr(module, name, _as_layers_call(OPERATORS[name], stock))
    return True


def uninstall() -> None:
    """Give the models back the functions that they had."""
    while _stock:
        (module, name), stock = _stock.popitem()
        setattr(module, name, stock)


def _as_layers_call(operator: Callable, stock: Callable) -> Callable:
    @functools.wraps(inspect.unwrap(stock))
    def call(query: Tensor, key: Tensor, value: Tensor, **given: Any):
        # transformers renamed the boundaries of packed documents in 5.23. Only prompts and training have any.
        bounds = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
        return operator(query, key, value, cu_seqlens=bounds, **{name: given[name] for name in TAKEN if name in given})

    return call
