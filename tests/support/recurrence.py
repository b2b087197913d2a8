"""KDA token by token in plain torch, as servers call it: raw gates, states stored V first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gate(raw: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Decays [..., HV, K] and beta [..., HV] of the raw ones."""
    HV, K = raw.shape[-2:]
    raw, rate = raw.float() + dt_bias.view(HV, K), A_log.view(HV, 1).exp()
    decays = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return decays, beta.float().sigmoid()


def recur(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs [T, HV, V] of one request's tokens [T, heads, channels], and the states before the first, after each."""
    group, scale = v.shape[1] // q.shape[1], q.shape[-1] ** -0.5
    q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(group, 1) for x in (q, k))
    S = state.float().mT
    outputs, states = [], [S.mT]
    for t, row in enumerate(v.float()):
        S = S * decays[t].exp().unsqueeze(-1)
        u = beta[t].unsqueeze(-1) * (row - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + torch.einsum("hk,hv->hkv", k[t], u)
        outputs.append(torch.einsum("hk,hkv->hv", q[t] * scale, S))
        states.append(S.mT)
    return torch.stack(outputs), states
