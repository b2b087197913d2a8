"""The layers of the repository for transformers' KDA models, by the names that it asks for. Stateless."""

from typing import Any

import torch
from torch import Tensor

from . import BACKEND
from .kda_core import chunk_kda, fused_recurrent_kda

# The signatures are those of the functions that the layers replace: the kernels library compares them. Layers of models
# pass on every argument of the model's call; transformers renamed the boundaries of packed documents in 5.23. Calls
# name the backend: KDA_BACKEND is for an installed kda_core, and amd serves only calls that name it.


def bounds(given: dict[str, Any]) -> Tensor | None:
    found = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
    if found is None and given.get("seq_idx") is not None:
        raise ValueError("seq_idx: packed documents need their boundaries, too: expected cu_seq_lens_q")
    return found


class chunk_kimi_delta_attention(torch.nn.Module):
    """For prompts and training."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return chunk_kda(
            query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, chunk_size=chunk_size, backend=BACKEND,
            cu_seqlens=bounds(kwargs),
        )  # fmt: skip


class recurrent_kimi_delta_attention(torch.nn.Module):
    """For one token."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        output_final_state: bool, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return fused_recurrent_kda(
            query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, backend=BACKEND,
            cu_seqlens=bounds(kwargs),
        )  # fmt: skip
