"""Layout of the intermediates that a chunk kernel writes ahead of the recurrences, and the equations behind them.

The chunk form is the transpose of the usual WY form: the inverse is applied to the keys that write the state rather
than to the values, so that a value enters the recurrence as the caller wrote it. With chunks of C = 32 rows
(``CHUNK``, whatever ``chunk_size`` the caller asked for) and G the inclusive cumulative log decay inside the chunk:

    ke = k ⊙ exp G            qg = scale · q ⊙ exp G         kg = k ⊙ exp(G_C − G)        D = exp G_C
    Lk_rs = Σ_c k_rc k_sc exp(G_rc − G_sc), s < r            M_rs = scale · Σ_c q_rc k_sc exp(G_rc − G_sc), s <= r
    X  = (I + Lk diag(β))⁻¹         A = diag(β) X = (I + diag(β) Lk)⁻¹ diag(β)
    P  = M A                        kA = Aᵀ kg

    r = v − ke S                    what the keys do not predict; z = X r, and the rows that are written are β ⊙ z = A r
    o = qg S + P r
    S' = D ⊙ S + kAᵀ r

A backend may split scale in two factors, of which the second multiplies o (and do) rather than qg and P.

The reverse recurrence, with dS' the gradient of the state after the chunk:

    dv = Pᵀ do + kA dS'             dS = D ⊙ dS' + qgᵀ do − keᵀ dv

β multiplies z, so that dβ needs no division and β = 0 is no special case. q and k are normalised when the call asks
for it, and decays are formed after the gate.

A chunk's results live in a *slot*. Slots are numbered so that no program needs a sum over earlier sequences:

    dense:   slot(n, i) = n · ceil(T / C) + i                    slots = B · ceil(T / C)
    packed:  slot(n, i) = cu_seqlens[n] // C + n + i              slots = T // C + N + 1   (a bound known to the host)

Packed slots leave gaps (never read). "Sequence" N is the rows behind cu_seqlens[N], whose output is zero.
HV is the number of value heads and KP = ``padded(K)``. Every tensor is contiguous.

    keys   [slots, HV, 3, C, KP]   dtype of q     ke and qg times ``lift``, and kA; rows past the sequence's end
                                                  and columns past K are zero
    P      [slots, HV, C, C]       dtype of q     [row r, column s]; zero for s > r and past the end
    D      [slots, HV, KP]         float32        exp G_C; anything finite past K
    X      [slots, HV, C, C]       dtype of q     only for the backward; identity rows past the end; float32 where
                                                  a forward saves it
    norms  [slots, HV, 2, C]       float32        only for a backward that wants them: 1 / |q| and 1 / |k| of each row
"""

from __future__ import annotations

from kda_core.request import Request

CHUNK = 32
"""Rows of the internal chunk, C."""


def power_of_two(size: int) -> int:
    """The least power of two that holds ``size``."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """The power of two, at least 16 (the least that matrix units take), that holds ``size`` channels."""
    return max(16, power_of_two(size))


def slots(request: Request, rows: int = CHUNK) -> int:
    """Number of slots of so many rows, those of chunks as a rule: exact when dense, a bound when packed."""
    if request.cu_seqlens is None:
        return request.B * -(-request.T // rows)
    return request.T // rows + request.N + 1


def piece_rows(request: Request) -> int:
    """Rows from checkpoint to checkpoint where some lie within a chunk: chunks begin anew behind each. 0 otherwise."""
    return request.checkpoint_every if request.checkpoint_every % CHUNK else 0
