"""Which code runs the functions of a layer: a backend's hooks, or the core's torch code.

The torch code is the implementation for every device and dtype. A backend's hooks run instead in eager calls on plain
tensors of a device that it serves, in a dtype that it declares. Compilers, ``torch.func`` and fake tensors meet the
torch code, which they differentiate and fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_core._loaded import Backend
from kda_core._plugins import registry, requested_name
from kda_core._signature import Same, is_plain
from kda_core._torch_private import needs_operator
from kda_core.capabilities import Feature, Unavailable
from kda_core.errors import UnsupportedCall

HOOKS = {
    "short_convolution": "kda_core_short_convolution_forward",
    "gated_rms_norm": "kda_core_gated_rms_norm_forward",
    "decode_step": "kda_core_decode_step",
}
"""The hook that a backend serves a function with, by the function."""


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether a call is eager, and all tensors are plain ones that lie in memory with their own signs."""
    if torch.compiler.is_compiling():
        return False
    plain = all(t is None or (is_plain(t) and not t.is_neg()) for t in tensors)
    return plain and not needs_operator()


def backend_for(
    function: str,
    x: Tensor,
    others: tuple[Tensor | None, ...],
    options: tuple,
    name: str | None,
    features: frozenset[Feature] = frozenset(),
) -> tuple[Backend | None, Any]:
    """The backend whose hooks serve a call, with the memo of its kind of calls; (None, None): the torch code.

    Args:
        function: a key of ``HOOKS``.
        x: the tensor that decides on device and dtype.
        others: the other tensors.
        options: the rest of the arguments.
        name: the backend that the caller asked for.
        features: that follow from the tensors, and that a backend must declare for its hook to be used.

    Raises:
        UnsupportedCall: the backend that was asked for cannot serve the device.
        BackendNotFound, BrokenBackend: it is not installed, or could not be loaded.
    """
    if not is_eager():
        return None, None
    name, values = requested_name(name), (x, *others, *options)
    # With the router's choices: they are dropped together when a backend comes or goes.
    choices: dict[Any, Any] = registry._choices
    recent = function, name, x.shape, len(values)
    same, found = choices.get(recent, (None, None))
    if same is not None and same(values) is not None:
        return found
    if not is_eager(x, *others):
        return None, None
    layouts = [t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (x, *others)]
    # Types of options too: True == 1, and checks accept only one of the two.
    key = (function, name, *layouts, *options, *map(type, options))
    found = choices.get(key)
    if found is None:
        found = _choose(function, x, name, features), {}
        registry._keep(key, *found)
        return found
    same = found[1].get(Same)
    if same is None:
        same = found[1][Same] = Same(values, range(len(values)))
    if same.can_match:
        registry._keep(recent, same, found)
    return found


def _choose(function: str, x: Tensor, name: str | None, features: frozenset[Feature]) -> Backend | None:
    if x.device.type == "meta":
        return None
    hook = HOOKS[function]
    if name is None:
        asked = [b for b in registry.backends if b.info.priority is not None]
    else:
        asked = [registry.named(name)]
    for backend in asked:
        available = backend.availability(x.device)
        if isinstance(available, Unavailable):
            if name is not None:
                raise UnsupportedCall(f"{function}: backend {name!r} cannot serve this call: {available.reason}")
            continue
        card = backend.info.capabilities
        if hasattr(backend.plugin, hook) and x.dtype in card.dtypes and features <= card.features:
            return backend
    return None
