"""SGLang's kernels for KDA with kda_core's operators inside.

States are stored V first, in a pool that calls read and advance in place. Slots below 0 are padding. So is slot 0: no
request has it, and all rows that pad an eager batch share it. SGLang's own kernels keep trees of drafts, rings of their
records, and states at all chunks of prompts whose lengths are not on the host.
"""

import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

import kda_core

RAW = dict.fromkeys(
    ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "state_v_first"), True
)
CHUNK = 64
"""Tokens between the states that SGLang takes snapshots of."""


class KdaCoreKernel(TritonKDAKernel):
    """A subclass, because SGLang asks isinstance."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_fused_chain_verify = False  # the convolution and the recurrence in one call
    supports_track_state_snapshot = True

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **call):
        """Prompts."""
        wanted, track, lengths = map(call.get, ("return_intermediate_states", "track_state", "extend_seq_lens_cpu"))
        # SGLang asks for the states at all chunks, but reads none beside snapshots, nor where final states are enough.
        sources = call.get("track_ssm_h_src")
        read = wanted and track is None and (sources is None or len(sources) > 0)
        if read and lengths is None:
            pool = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
            return super().extend(q, k, v, g, beta, **pool, **call)
        options = RAW | {"use_beta_sigmoid_in_kernel": bool(call.get("beta_is_raw")), "use_gate_in_kernel": False}
        if call.get("A_log") is not None:
            options |= {name: call.get(name) for name in ("A_log", "dt_bias", "lower_bound")}
            options |= {"use_gate_in_kernel": True, "safe_gate": options["lower_bound"] is not None}
        options |= {"ssm_state_indices": cache_indices, "pad_slot_id": 0, "chunk_size": CHUNK}
        if read:
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            options |= {"cu_seqlens_cpu": bounds, "return_intermediate_states": True}
        elif track is not None and q.shape[1] >= CHUNK:
            # Sequence n's snapshot is row n, 0 as well. It is wanted behind a chunk or more: shorter prompts have none.
            ends = torch.arange(1, q.shape[1] // CHUNK + 1, device=q.device)
            rows = torch.arange(len(track), device=q.device)[:, None]
            table = torch.where(call["track_chunk_idx"][:, None] == ends, rows, -1)
            options |= {"checkpoint_indices": table, "checkpoint_every": CHUNK, "checkpoint_pool": track}
            options |= {"ssm_state_indices": cache_indices.where(cache_indices > 0, -1), "pad_slot_id": -1}
        options |= {"initial_state": ssm_states, "cu_seqlens": query_start_loc}
        o, _, *h = kda_core.chunk_kda(q, k, v, g, beta, **options)
        return (o, h[0].to(ssm_states.dtype) if read else None) if wanted else o

    def packed_decode(self, mixed_qkv, a, b, *, num_v_heads, head_v_dim, **call):
        """One token of each request, from the rows of the convolution's result: views, no copies."""
        if call.get("replayssm_d") is not None:
            return super().packed_decode(mixed_qkv, a, b, num_v_heads=num_v_heads, head_v_dim=head_v_dim, **call)
        K, value_dim, N = call["ssm_states"].shape[-1], num_v_heads * head_v_dim, len(mixed_qkv)
        key_dim = (mixed_qkv.shape[1] - value_dim) // 2
        q, k, v = mixed_qkv.split_with_sizes([key_dim, key_dim, value_dim], -1)
        return self.decode(q.view(1, N, -1, K), k.view(1, N, -1, K), v.view(1, N, -1, head_v_dim), a, b, **call)

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, lower_bound=None, scale=None, **_):
        """One token of each request: [1, N, heads, channels]."""
        N, HV, K = q.shape[1], ssm_states.shape[1], ssm_states.shape[-1]
        o, _ = kda_core.fused_recurrent_kda(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), a.reshape(N, 1, HV, K), b.reshape(N, 1, HV),
            scale=scale, initial_state=ssm_states, ssm_state_indices=cache_indices, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, pad_slot_id=0, **RAW,
        )  # fmt: skip
        return o.transpose(0, 1)

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, **call):
        """Draft tokens: the pool stays, the state after each token goes to the buffer [slots, steps, HV, V, K]."""
        if call["retrieve_parent_token"] is not None or call.get("cache_ring"):
            pool = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
            return super().target_verify(A_log, dt_bias, q, k, v, a, b, **pool, **call)
        buffer, T, HV, K = call["intermediate_states_buffer"], q.shape[1], ssm_states.shape[1], ssm_states.shape[-1]
        first = call["intermediate_state_indices"][: len(cache_indices), None].long() * buffer.shape[1]
        o, _ = kda_core.fused_recurrent_kda(
            q, k, v, a.reshape(1, T, HV, K), b.reshape(1, T, HV), initial_state=ssm_states, cu_seqlens=query_start_loc,
            ssm_state_indices=cache_indices, final_state_pool=buffer.view(-1, *buffer.shape[2:]),
            final_state_indices=first + torch.arange(buffer.shape[1], device=q.device), A_log=A_log, dt_bias=dt_bias,
            lower_bound=call.get("lower_bound"), **RAW,
        )  # fmt: skip
        return o
