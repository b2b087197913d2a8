"""SGLang's own ``KDAAttnBackend`` and ``KDAKernelDispatcher`` on a CPU, from rows of a layer to the kernels' class.

Their module imports what a GPU server needs. So its text runs without its imports, with these doubles in their place:
convolutions that return their input, no fused kernels, and a base class without methods. All that lies between, the
arguments of the kernels too, is SGLang's.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import sglang
import torch
from sglang.srt.layers.attention.linear import utils
from torch import Tensor

NAME = "sglang.srt.layers.attention.linear.kda_backend"


class Base:
    """In the place of ``MambaAttnBackendBase``; the snapshots of a batch are not under test."""

    accept_lens_pool = None

    def _track_mamba_state_decode(self, *_: object) -> None: ...


DOUBLES = {
    "MambaAttnBackendBase": Base,
    "causal_conv1d_fn": lambda x, *_, **__: x,
    "causal_conv1d_update": lambda x, *_, **__: x,
    "is_cpu": lambda: False,
    "is_cuda": lambda: False,
    "is_gfx95_supported": lambda: False,
    "is_npu": lambda: False,
    "kda_fused_decode": None,
    "rank0_log": print,
}


def module(kernels: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, before ``install``: with the class of the module ``kernels``."""
    path = Path(sglang.__file__).parents[1] / f"{NAME.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not isinstance(node, ast.ImportFrom) or node.module in ("typing", utils.__name__)
    ]
    own = ModuleType(NAME)
    vars(own).update(DOUBLES, TritonKDAKernel=importlib.import_module(kernels).TritonKDAKernel)
    exec(compile(tree, path, "exec", flags=__future__.annotations.compiler_flag), vars(own))
    monkeypatch.setitem(sys.modules, NAME, own)
    return own


class Backend:
    """A backend of the default kernels with one layer.

    Args:
        own: from ``module``. x: raw rows q, k [1, T, H, D], v, a [1, T, HV, D] and b [1, T, HV], A_log and dt_bias.
        pool: [slots, HV, D, D]. slots: of the requests. bounds: of their rows. lower_bound: of the gate.
        buffer: the states of drafts.
    """

    def __init__(
        self, own: ModuleType, x: dict[str, Tensor], pool: Tensor, slots: Tensor, bounds: Tensor,
        lower_bound: float | None, buffer: Tensor | None = None,
    ) -> None:  # fmt: skip
        T, H, D = x["q"].shape[1:]
        HV = x["v"].shape[2]
        sizes = {"q_dim": H * D, "k_dim": H * D, "v_dim": HV * D, "head_q_dim": D, "head_k_dim": D, "head_v_dim": D}
        gate = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": lower_bound}
        self.layer = SimpleNamespace(**sizes, **gate, num_v_heads=HV, conv_weights=None, bias=None, layer_id=0)
        window = torch.zeros(len(pool), 3, 2 * H * D + HV * D)
        rings = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_rawv"))
        cache = SimpleNamespace(
            conv=[window], temporal=pool, intermediate_ssm=buffer, intermediate_conv_window=[window], **rings
        )
        self.backend = own.KDAAttnBackend.__new__(own.KDAAttnBackend)
        triton = utils.LinearAttnKernelBackend.TRITON
        self.backend.kernel_dispatcher = own.KDAKernelDispatcher(triton, triton, triton)
        self.backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer: cache, size=len(pool))
        self.backend._fused_chain_verify_fn = None
        names = (
            "track_chunk_idx", "track_ssm_h_src", "track_ssm_h_batch_src", "state_checkpoint_cu_starts",
            "num_state_checkpoints", "state_checkpoint_every_n_tokens", "state_checkpoint_indices",
            "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token", "logical_num_tokens",
        )  # fmt: skip
        self.backend.forward_metadata = SimpleNamespace(
            **dict.fromkeys(names), query_start_loc=bounds, mamba_cache_indices=slots, has_mamba_track_mask=False
        )
        self.mixed = torch.cat([x[name].reshape(T, -1) for name in ("q", "k", "v")], 1)
        self.a, self.b, self.bounds = x["a"].reshape(1, T, -1), x["b"], bounds

    def _batch(self, drafts: int) -> SimpleNamespace:
        mode = SimpleNamespace(is_target_verify=lambda: drafts > 0, is_draft_extend_v2=lambda: False)
        spec = SimpleNamespace(draft_token_num=drafts, ragged_verify_layout=None)
        lengths = self.bounds.diff()
        return SimpleNamespace(
            forward_mode=mode, spec_info=spec, extend_prefix_lens=lengths * 0, extend_seq_lens_cpu=lengths.tolist(),
            req_pool_indices=None,
        )  # fmt: skip

    def extend(self) -> Tensor:
        return self.backend.forward_extend(self.layer, self._batch(0), self.mixed, self.a, self.b)

    def decode(self) -> Tensor:
        a, b = self.a[0], self.b.mT.mT
        return self.backend.forward_decode(self.layer, self._batch(0), self.mixed, a, b)

    def verify(self, drafts: int, places: Tensor) -> Tensor:
        self.backend.verify_intermediate_state_indices = places
        return self.backend.forward_extend(self.layer, self._batch(drafts), self.mixed, self.a, self.b)
