"""The two recurrences of the backward in one launch: ``backward_states`` runs from a sequence's start to its end,
``backward_reverse`` from its end to its start, and neither reads what the other writes.

With few sequences and heads each of them leaves multiprocessors idle, and both together take as long as one.

Grid: the programs of states, then those of reverse.
"""

import triton
import triton.language as tl

from kda_core_nvidia.backward_reverse import reverse_of_sequence
from kda_core_nvidia.backward_states import states_of_sequence


@triton.jit(do_not_specialize=["T", "T_row", "NT", "o_scale", "programs"])
def recurrences_kernel(
    v, do,  # [B, T, HV, V], rows as their strides say
    keys,  # [slots, HV, 3, C, KP]: ke, qg and kA
    X, P,  # [slots, HV, C, C]
    D,  # [slots, HV, KP]
    initial_state, grad_final_state,  # [N, HV, K, V] ([N, HV, V, K]), or None
    z,  # [slots, HV, C, VP], or by pairs
    states, state_grads,  # [slots, HV, VP, KP], or by pairs
    dv,  # [B, T, HV, V]
    grad_initial_state,  # as initial_state, or None
    cu_seqlens,  # [N + 1] or None
    s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T, T_row, NT,
    o_scale,
    programs,  # of states; as many of reverse follow
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    V_AS_OPERAND: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    EVERY_SECOND: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < programs:
        states_of_sequence(
            tl.program_id(0), v, keys, X, D, initial_state, z, states, cu_seqlens, s_vb, s_vt, s_vh, T, T_row, NT,
            HV, K, V, C, LIFT, KP, VP, BV, V_AS_OPERAND, V_FIRST, PRECISION, STAGES, EVERY_SECOND,
        )  # fmt: skip
    else:
        reverse_of_sequence(
            tl.program_id(0) - programs, keys, P, D, do, grad_final_state, dv, state_grads, grad_initial_state,
            cu_seqlens, s_ob, s_ot, s_oh, T, T_row, NT, o_scale,
            HV, K, V, C, LIFT, KP, VP, BV, V_FIRST, PRECISION, STAGES, EVERY_SECOND,
        )  # fmt: skip
