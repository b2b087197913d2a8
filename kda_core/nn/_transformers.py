"""Weights of Kimi Linear's layers, in transformers and in checkpoints of the Hub, as ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NAMES = {
    "f_proj.0.weight": "forget_gate.f_a_proj.weight",
    "f_proj.1.weight": "forget_gate.f_b_proj.weight",
    "A_log": "forget_gate.A_log",
    "dt_bias": "forget_gate.dt_bias",
    "g_proj.0.weight": "g_a_proj.weight",
    "g_proj.1.weight": "g_b_proj.weight",
}
"""Names that differ, ours first. Checkpoints of the Hub have no ``forget_gate.``, and three convolutions."""

_SAME = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "o_norm.weight", "o_proj.weight")
_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_BIAS = "g_proj.1.bias"


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict for ``KimiDeltaAttention`` from that of a ``KimiLinearDeltaAttention`` of transformers.

    Args:
        weights: by name within the layer; names of the Hub's checkpoints (``f_a_proj``, ``q_conv1d``) serve as well.

    Returns:
        Views where nothing changes. The bias of the output gate, which those layers do not have, is 0.

    Raises:
        ValueError: names that are missing, or that are unknown.
    """
    rest, found = dict(weights), {}
    if "conv1d.weight" in rest:
        stacked = rest.pop("conv1d.weight")
        rest |= dict(zip(_CONVOLUTIONS, stacked.chunk(3), strict=True))
    for ours in (*_SAME, *_CONVOLUTIONS, *_NAMES):
        theirs = _NAMES.get(ours, ours)
        name = theirs if theirs in rest else theirs.removeprefix("forget_gate.")
        if name not in rest:
            raise ValueError(f"weights: {theirs} is missing")
        found[ours] = rest.pop(name)
    if rest:
        raise ValueError(f"weights: unknown names {sorted(rest)}")
    found["A_log"] = found["A_log"].flatten()
    gate = found["g_proj.1.weight"]
    return found | {_BIAS: gate.new_zeros(gate.shape[0])}


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict for a ``KimiLinearDeltaAttention`` of transformers from that of ``KimiDeltaAttention``.

    Raises:
        ValueError: names that are missing or unknown, a bias of the output gate that is not 0 (freeze it while training
            if the weights are to go back), or head counts that differ.
    """
    known = {*_SAME, *_CONVOLUTIONS, *_NAMES, _BIAS}
    if weights.keys() != known:
        raise ValueError(f"weights: expected other names, different are {sorted(weights.keys() ^ known)}")
    if weights[_BIAS].any():
        raise ValueError(f"weights: {_BIAS} is not 0, and transformers' layer has no such bias")
    if weights["v_proj.weight"].shape != weights["q_proj.weight"].shape:
        raise ValueError("weights: expected v_proj to have the shape of q_proj, as transformers' layer does")
    found = {name: weights[name] for name in _SAME} | {theirs: weights[ours] for ours, theirs in _NAMES.items()}
    found["forget_gate.A_log"] = weights["A_log"].view(1, 1, -1, 1)
    return found | {"conv1d.weight": torch.cat([weights[name] for name in _CONVOLUTIONS])}
