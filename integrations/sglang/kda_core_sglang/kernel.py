"""SGLang's kernels for KDA with kda_core's operators inside.

States are stored V first, in a pool that calls read and advance in place; slots below 0 are padding. SGLang's own
kernels keep what kda_core cannot say yet: trees of drafts, rings of their records, and states at chunks of prompts
whose lengths are not on the host.
"""

import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

import kda_core

RAW = {
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "state_v_first": True,
}
CHUNK = 64
"""Tokens between the states that SGLang takes snapshots of."""


class KdaCoreKernel(TritonKDAKernel):
    """A subclass, because SGLang asks isinstance."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_fused_chain_verify = False  # the convolution and the recurrence in one call
    supports_track_state_snapshot = True

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None,
        lower_bound=None, beta_is_raw=False, return_intermediate_states=False, track_state=None, track_chunk_idx=None,
        extend_seq_lens_cpu=None, **others,
    ):  # fmt: skip
        """Prompts."""
        h_wanted = return_intermediate_states or track_state is not None
        if h_wanted and extend_seq_lens_cpu is None:
            return super().extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
                A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_is_raw=beta_is_raw,
                return_intermediate_states=return_intermediate_states, track_state=track_state,
                track_chunk_idx=track_chunk_idx, extend_seq_lens_cpu=extend_seq_lens_cpu, **others,
            )  # fmt: skip
        options = RAW | {"use_gate_in_kernel": A_log is not None, "use_beta_sigmoid_in_kernel": beta_is_raw}
        if A_log is not None:
            options |= {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
            options["safe_gate"] = lower_bound is not None
        if track_state is not None:
            options["intermediate_states_dtype"] = track_state.dtype
        if h_wanted:
            options["cu_seqlens_cpu"] = torch.tensor([0, *extend_seq_lens_cpu]).cumsum(0)
        o, _, *h = kda_core.chunk_kda(
            q, k, v, g, beta, initial_state=ssm_states, ssm_state_indices=cache_indices, cu_seqlens=query_start_loc,
            return_intermediate_states=h_wanted, chunk_size=CHUNK, **options,
        )  # fmt: skip
        if track_state is not None:
            chunks = (query_start_loc.diff() + CHUNK - 1) // CHUNK
            # SGLang does not read the rows of sequences without a snapshot.
            rows = (chunks.cumsum(0) - chunks + track_chunk_idx).clamp(0, h[0].shape[1] - 1)
            track_state.copy_(h[0][0, rows.long()])
        return (o, h[0].to(ssm_states.dtype)) if return_intermediate_states else o

    def packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
        lower_bound=None, **others,
    ):  # fmt: skip
        """One token of each request, from the rows of the convolution's result: views, no copies."""
        if others.get("replayssm_d") is not None:
            return super().packed_decode(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim, lower_bound=lower_bound,
                **others,
            )  # fmt: skip
        K, value_dim = ssm_states.shape[-1], num_v_heads * head_v_dim
        key_dim = (mixed_qkv.shape[1] - value_dim) // 2
        q, k, v = (x.unflatten(-1, (-1, n)) for x, n in zip(
            mixed_qkv.split([key_dim, key_dim, value_dim], -1), (K, K, head_v_dim), strict=True
        ))  # fmt: skip
        return self.decode(
            q[None], k[None], v[None], a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
            cache_indices=cache_indices, query_start_loc=None, lower_bound=lower_bound, scale=scale,
        )  # fmt: skip

    def decode(
        self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None,
        scale=None, **others,
    ):  # fmt: skip
        """One token of each request: [1, N, heads, channels]."""
        N, HV, K = q.shape[1], ssm_states.shape[1], ssm_states.shape[-1]
        o, _ = kda_core.fused_recurrent_kda(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), a.reshape(N, 1, HV, K), b.reshape(N, 1, HV),
            scale=scale, initial_state=ssm_states, ssm_state_indices=cache_indices, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, **RAW,
        )  # fmt: skip
        return o.transpose(0, 1)

    def target_verify(
        self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
        intermediate_state_indices, cache_steps, retrieve_parent_token, lower_bound=None, cache_ring=False, **others,
    ):  # fmt: skip
        """Draft tokens: the pool stays, the state after each token goes to the buffer [slots, steps, HV, V, K]."""
        if retrieve_parent_token is not None or cache_ring:
            return super().target_verify(
                A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, intermediate_states_buffer=intermediate_states_buffer,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, cache_ring=cache_ring, **others,
            )  # fmt: skip
        N, T, steps = cache_indices.shape[0], q.shape[1], intermediate_states_buffer.shape[1]
        HV, K = ssm_states.shape[1], ssm_states.shape[-1]
        first = intermediate_state_indices[:N, None].long() * steps
        o, _ = kda_core.fused_recurrent_kda(
            q, k, v, a.reshape(1, T, HV, K), b.reshape(1, T, HV), initial_state=ssm_states, cu_seqlens=query_start_loc,
            ssm_state_indices=cache_indices, final_state_pool=intermediate_states_buffer.flatten(0, 1),
            final_state_indices=first + torch.arange(steps, device=q.device), A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, **RAW,
        )  # fmt: skip
        return o
