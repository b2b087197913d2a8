"""Layout of the intermediates that ``prepare`` writes and that the recurrences (forward and reverse) read.

The chunk form used here is the transpose of the usual WY form: the inverse is applied to the keys that write the
state rather than to the values, so that a value enters the recurrence as the caller wrote it. With chunks of C = 32
rows (``CHUNK``, whatever ``chunk_size`` the caller asked for), G the inclusive cumulative log decay inside the chunk,
X = (I + L)⁻¹ and A = diag(β) X  (L_rs = β_s Σ_c k_rc k_sc exp(G_rc − G_sc), s < r):

    ke = k ⊙ exp G            qg = s · q ⊙ exp G             kg = k ⊙ exp(G_C − G)
    P  = M A                  kA = Aᵀ kg                      D  = exp G_C
    M_rs = s · Σ_c q_rc k_sc exp(G_rc − G_sc), s ≤ r

    r   = v − ke S            (what the keys of the chunk do not yet predict; v_new of the WY form is A r = β ⊙ X r)
    o   = m (qg S + P r)      (s · m the output's scale, s a power of two: ``launch.split_scale``)
    S' = D ⊙ S + kAᵀ r

so that the reverse recurrence is, with dS' the gradient of the state after the chunk (and do times m):

    dv = Pᵀ do + kA dS'       dS = D ⊙ dS' + qgᵀ do − keᵀ dv

β stands on the side of the columns, so that z = X r is what β multiplies: dβ needs no division, and β = 0 is no
special case. The gradients of the rest are in ``backward_gradients``.

q and k above are normalised when the call asks for it, and decays are formed after the gate.

Slots. A chunk's results live in a *slot*; slots are numbered so that no program needs a sum over earlier sequences:

    dense:   slot(n, i) = n · ceil(T / C) + i                    slots = B · ceil(T / C)
    packed:  slot(n, i) = cu_seqlens[n] // C + n + i              slots = T // C + N + 1   (a bound known to the host)

Packed slots leave gaps (never read); "sequence" N is the rows behind cu_seqlens[N], whose output is zero.
HV is the value-head count and KP = ``padded(K)``; every tensor is contiguous, and index arithmetic is int64.

    keys   [slots, HV, 3, C, KP]   dtype of q     ke and qg times ``lift.lift``, and kA; rows past the sequence's end
                                                  and columns past K are zero
    P      [slots, HV, C, C]       dtype of q     [row r, column s]; zero for s > r and past the end
    D      [slots, HV, KP]         float32        exp G_C; anything finite past K
    X      [slots, HV, C, C]       dtype of q     only for the backward; identity rows past the end; float32 where a
                                                  forward keeps it
    norms  [slots, HV, 2, C]       float32        only for the backward of normalised rows: 1 / |q|, 1 / |k|
"""

from __future__ import annotations

from kda_core.request import Request

CHUNK = 32
"""Rows of the internal chunk, C."""

KE, QG, KA = 0, 1, 2
"""Positions in ``keys``."""


def padded(size: int) -> int:
    """The power of two, at least 16 (the least that matrix units take), that holds ``size`` channels."""
    return max(16, 1 << (size - 1).bit_length())


def slots(request: Request) -> int:
    """Number of chunk slots of a call: exact when dense, a bound when packed."""
    B, T = request.q.shape[:2]
    return B * -(-T // CHUNK) if request.cu_seqlens is None else T // CHUNK + request.cu_seqlens.shape[0]
