"""What the choice of a backend depends on, as a key of the router's cache.

Every call passes by here, so that the functions are written out field by field: a loop over the fields costs 2 µs more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from kda_core.request import AnyRequest, GateRequest

_PLAIN = frozenset({Tensor, Parameter})

BACKWARD_ONLY = frozenset({"saved", "grad_o", "grad_final_state", "grad_output", "needs_grad"})
"""Fields that the choice does not depend on: a backward runs where its forward ran."""


def signature(request: AnyRequest, name: str | None) -> tuple | None:
    """The key of a call that asks for backend ``name``; None when it has none (fake tensors, values of a wrong type).

    Options are there with their types: True == 1 and 64 == 64.0, but the checks refuse the one and take the other.
    Contiguous tensors are all one, whatever strides their dimensions of size 1 have.
    """
    try:
        return _of_gate(request, name) if type(request) is GateRequest else _of_call(request, name)
    except (AttributeError, RuntimeError):
        # What is no tensor, and sparse layouts, which have no strides: the checks refuse them by name.
        return None


def _of_call(r: Any, name: str | None) -> tuple | None:
    q, k, v, g, beta = r.q, r.k, r.v, r.g, r.beta
    if not _PLAIN.issuperset((type(q), type(k), type(v), type(g), type(beta))):
        return None
    options = (
        r.scale,
        r.output_final_state,
        r.use_qk_l2norm_in_kernel,
        r.use_gate_in_kernel,
        r.use_beta_sigmoid_in_kernel,
        r.allow_neg_eigval,
        r.safe_gate,
        r.lower_bound,
        r.disable_recompute,
        r.return_intermediate_states,
        r.state_v_first,
        r.inplace_final_state,
        r.pad_slot_id,
        r.chunk_size,
        r.save_for_backward,
        r.cp_context,
    )
    # Types first: two keys are compared up to the first difference, and values of other types may not compare.
    return (
        name,
        r.op,
        *map(type, options),
        options,
        (q.shape, q.is_contiguous() or q.stride(), q.dtype, q.device),
        (k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device),
        (v.shape, v.is_contiguous() or v.stride(), v.dtype, v.device),
        (g.shape, g.is_contiguous() or g.stride(), g.dtype, g.device),
        (beta.shape, beta.is_contiguous() or beta.stride(), beta.dtype, beta.device),
        None if r.A_log is None else _metadata(r.A_log),
        None if r.dt_bias is None else _metadata(r.dt_bias),
        None if r.initial_state is None else _metadata(r.initial_state),
        None if r.cu_seqlens is None else _metadata(r.cu_seqlens),
        None if r.cu_seqlens_cpu is None else _metadata(r.cu_seqlens_cpu),
        None if r.ssm_state_indices is None else _metadata(r.ssm_state_indices),
        None if r.num_accepted_tokens is None else _metadata(r.num_accepted_tokens),
        None if r.out is None else _metadata(r.out),
    )


def _of_gate(r: Any, name: str | None) -> tuple:
    options = (r.lower_bound, r.save_for_backward)
    return (
        name,
        *map(type, options),
        options,
        _metadata(r.g),
        None if r.A_log is None else _metadata(r.A_log),
        None if r.dt_bias is None else _metadata(r.dt_bias),
    )


def _metadata(t: Tensor) -> tuple:
    if type(t) not in _PLAIN:
        raise AttributeError(f"{type(t).__name__} has no metadata of its own")
    return (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device)


def is_plain(t: Any) -> bool:
    """Whether ``t`` is a tensor with values, rather than a fake or wrapped one."""
    return type(t) in _PLAIN
