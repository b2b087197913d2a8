"""Layout of the intermediates that ``prepare`` writes and the recurrences read.

The chunk form is the transpose of the usual WY form: the inverse is applied to the keys that write the state rather
than to the values, so that a value enters the recurrence as the caller wrote it. With chunks of C = 32 rows
(whatever ``chunk_size`` the caller asked for), G the inclusive cumulative log decay inside the chunk,
X = (I + L)⁻¹ and A = X diag(β)  (L_rs = β_r Σ_c k_rc k_sc exp(G_rc − G_sc), s < r):

    ke = k ⊙ exp G            qg = scale · q ⊙ exp G         kg = k ⊙ exp(G_C − G)
    P  = M A                  kA = Aᵀ kg                      D  = exp G_C
    M_rs = scale · Σ_c q_rc k_sc exp(G_rc − G_sc), s ≤ r

    r = v − ke S            o = qg S + P r            S' = D ⊙ S + kAᵀ r

q and k are normalised when the call asks for it, and decays are formed after the gate.

A chunk's results live in a *slot*; slots are numbered so that no program needs a sum over earlier sequences:

    dense:   slot(n, i) = n · ceil(T / C) + i                    slots = B · ceil(T / C)
    packed:  slot(n, i) = cu_seqlens[n] // C + n + i              slots = T // C + N + 1   (a bound known to the host)

Packed slots leave gaps (never read); "sequence" N is the rows behind cu_seqlens[N], whose output is zero.
KP is K padded to a power of two; every tensor is contiguous.

    keys   [slots, HV, 3, C, KP]   dtype of q     ke and qg times ``lift.lift``, and kA; rows past the sequence's end
                                                  and columns past K are zero
    P      [slots, HV, C, C]       dtype of q     [row r, column s]; zero for s > r and past the end
    D      [slots, HV, KP]         float32        exp G_C; 1 past K
    Z      [slots, HV, C, C]       dtype of q     only for the backward: z = Z r, see chunk_backward
"""

from __future__ import annotations

from kda_core.request import Request

CHUNK = 32
"""Rows of the internal chunk, C."""


def padded(size: int) -> int:
    """The power of two, at least 16 (the least that matrix units take), that holds ``size`` channels."""
    return max(16, 1 << (size - 1).bit_length())


def slots(request: Request) -> int:
    """Number of chunk slots of a call: exact when dense, a bound when packed."""
    if request.cu_seqlens is None:
        return request.B * -(-request.T // CHUNK)
    return request.T // CHUNK + request.N + 1
