"""The functions of vLLM's Triton kernels, by the module that holds them, with kda_core's operators inside.

Slot 0, and any below, is vLLM's null slot: its row is skipped. States are stored V first. Tables of slots and counts of
accepted tokens may be longer than the batch.
"""

import kda_core

RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def _prefill(q, k, v, g, beta, cu_seqlens, **options):
    """``chunk_kda`` of packed prompts. vLLM gathers the states before the call, and scatters them behind it."""
    if options.get("use_gate_in_kernel"):
        options["safe_gate"] = options["lower_bound"] is not None
    return kda_core.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, state_v_first=True, **options)


def _decode(q, k, v, g, beta, pool, cu_seqlens, slots, accepted=None, inplace_final_state=True, **options):
    """``fused_recurrent_kda`` of the tokens of N requests in a pool; returns the outputs and the pool, as vLLM does."""
    if not inplace_final_state:
        raise ValueError("inplace_final_state: expected True, kda_core advances a pool in place only")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, _ = kda_core.fused_recurrent_kda(
        q, k, v, g, beta, initial_state=pool, cu_seqlens=cu_seqlens, ssm_state_indices=slots[:N], pad_slot_id=0,
        num_accepted_tokens=None if accepted is None else accepted[:N], state_v_first=True, **options,
    )  # fmt: skip
    return o, pool


# Kimi-K3, and the layer of Kimi-Linear: raw gates and beta.


def k3_prefill(
    q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
    lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **ignored,
):  # fmt: skip
    return _prefill(
        q, k, v, raw_g, raw_beta, cu_seqlens, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, A_log=A_log,
        dt_bias=g_bias, lower_bound=lower_bound, out=out, **RAW,
    )  # fmt: skip


def k3_decode(
    q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices,
    num_accepted_tokens=None, out=None, fuse_gate=None,
):  # fmt: skip
    return _decode(
        q, k, v, raw_g, raw_beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, A_log=A_log,
        dt_bias=dt_bias, lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, out=out, **RAW,
    )  # fmt: skip


def k3_packed_decode(
    mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, out=None
):
    """One token of each request, from the rows of the convolution's result: views, no copies."""
    _, H, V, K = initial_state.shape
    q, k, v = mixed_qkv.split([H * K, H * K, H * V], -1)
    q, k, v = (x.unflatten(-1, (H, -1)).unsqueeze(1) for x in (q, k, v))  # [N, 1, H, ..]
    if out is None:
        out = mixed_qkv.new_empty(1, q.shape[0], H, V)
    _decode(
        q, k, v, raw_g.transpose(0, 1), raw_beta.transpose(0, 1), initial_state, None, state_indices, scale=scale,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, use_qk_l2norm_in_kernel=True,
        out=out.transpose(0, 1), **RAW,
    )  # fmt: skip
    return out, initial_state


# GLM-5: beta comes through its sigmoid to prompts, and raw to decoding.


def glm_prefill(
    q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **ignored,
):  # fmt: skip
    return _prefill(
        q, k, v, raw_g, beta, cu_seqlens, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, A_log=A_log,
        dt_bias=g_bias, lower_bound=lower_bound if safe_gate else None, use_gate_in_kernel=True,
    )  # fmt: skip


def glm_decode(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True,
    cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, out=None, sigmoid_beta=False, a_log=None,
    g_bias=None, compute_gate=False, lower_bound=-5.0, **ignored,
):  # fmt: skip
    gate = {"A_log": a_log, "dt_bias": g_bias, "lower_bound": lower_bound} if compute_gate else {}
    return _decode(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        inplace_final_state, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=sigmoid_beta,
        use_gate_in_kernel=compute_gate, out=out, **gate,
    )  # fmt: skip


# Bailing (Ling): the decays and beta are computed before.


def bailing_prefill(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, safe_gate=False, lower_bound=None, **ignored,
):  # fmt: skip
    return _prefill(
        q, k, v, g, beta, cu_seqlens, scale=scale, initial_state=initial_state, safe_gate=safe_gate,
        lower_bound=lower_bound, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def bailing_drafts(
    q, k, v, g, beta, scale, initial_state, inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None,
    num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    return _decode(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        inplace_final_state, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def bailing_decode(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True,
    cu_seqlens=None, ssm_state_indices=None, **ignored,
):  # fmt: skip
    return _decode(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices,
        inplace_final_state=inplace_final_state, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


FUNCTIONS = {
    "kimi_k3": (
        "vllm.models.kimi_k3.{vendor}.ops.third_party.kda",
        {
            "chunk_kda_with_fused_gate": k3_prefill,
            "fused_recurrent_kda": k3_decode,
            "fused_recurrent_kda_packed_decode": k3_packed_decode,
        },
    ),
    "glm5next": (
        "vllm.models.glm5next.{vendor}.ops.third_party.kda",
        {"chunk_kda_with_fused_gate": glm_prefill, "fused_recurrent_kda": glm_decode},
    ),
    "bailing_moe_v3": (
        "vllm.third_party.flash_linear_attention.ops.kda",
        {
            "chunk_kda": bailing_prefill,
            "fused_recurrent_kda": bailing_decode,
            "fused_recurrent_kda_fwd": bailing_drafts,
        },
    ),
}
"""Module and functions of each model; bailing_moe_v3 is not the only one that may use its module."""
