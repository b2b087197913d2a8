"""Every size and threshold of the backend, chosen from a request's metadata.

Budgets count elements, and comments give bytes in fp32. They were measured at K = V = 128 on two cores.
"""

from __future__ import annotations

import torch

from kda_core.request import Request
from kda_core_cpu.sequences import token_counts

_LANE_BUDGET = 1 << 19
"""State elements (lanes·K·V) of one group: 2 MiB, the second-level caches of two cores."""

_STEP_BUDGET = 1 << 21
"""State elements of one group of a decoding step: 8 MiB, a third-level cache, because a step reads its states three
times and not again for later tokens. Half of it costs 10% at 256 lanes (more calls), twice costs 15% at 1,024."""

_WINDOW_BUDGET = 1 << 18
"""Elements of one [rows, K] operand of one window: 1 MiB; about twelve such operands are live at once. Half of it costs
10% (more calls), twice gains nothing."""

_ROW_BUDGET = 1 << 19
"""Elements of one [lanes, tokens, K] operand of the recurrent form when one run serves every token."""

_BACKWARD_SHARE = 2
"""A backward window has about twice as many operands as a forward one, so it has half the chunks."""

_MIN_CHUNK = 16

_INFERENCE_CHUNK = 32
"""Rows of a chunk when nothing is saved: 9% faster than 64 (fewer products between rows), as fast as 16."""

_PRODUCT_DIM = 8
"""Head dimensions of the chunk form's products are multiples of this."""

_RUN = 64
"""Tokens whose rows are prepared at once; a multiple of the rows that ``RowInputs.load_decays`` corrects together."""

_SLOT_IN_PLACE = 1 << 16
"""State elements of a sequence from which its slot is updated in place, rather than gathered with others."""

_SMALL_STEP = 1 << 18
"""State elements up to which a step's time is that of its torch calls."""

_BAG = 1 << 13
"""Elements of one state from which a weighted sum of its rows beats a matrix product of two rows."""


def is_small_step(r: Request) -> bool:
    """Whether a call may be one token for each of a few states, which are together or in slots of a pool."""
    states, slots = r.initial_state, r.ssm_state_indices
    if states is None or states.dtype != r.compute_dtype or r.H != r.HV or r.state_v_first != walks_v_first(r):
        return False
    if not 0 < r.B * r.T == r.N <= _SMALL_STEP // (r.HV * r.K * r.V):
        return False
    if r.has_initial_state is not None or r.final_state_indices is not None or not r.update_state:
        return False
    if slots is None:
        return states.is_contiguous()
    # To copy one state of as many elements takes longer than the calls that it saves.
    copied = r.HV * r.K * r.V < _SMALL_STEP
    return copied and slots.numel() == r.N and r.num_accepted_tokens is None


def rows_per_chunk(request: Request) -> int:
    """Rows of one chunk, C, a divisor of ``chunk_size``; a smaller power of two when every sequence fits one chunk.

    A training call saves one state every ``chunk_size`` rows, and its backward walks the same chunks. Tensors that
    ``disable_recompute`` saves have as many rows: their shape must follow from metadata alone.
    """
    training = request.save_for_backward or bool(request.saved)
    rows = request.chunk_size if training else min(request.chunk_size, _INFERENCE_CHUNK)
    if request.checkpoint_every:
        # Chunks end where a state is kept.
        rows = min(rows, request.checkpoint_every & -request.checkpoint_every)
    longest = request.T if request.cu_seqlens is None else int(token_counts(request).amax()) if request.N else 0
    # In float64 some of MKL's products of fewer rows have other bits, and a sequence's must not depend on its batch.
    if training and (request.disable_recompute or request.compute_dtype == torch.float64):
        return rows
    return min(rows, max(_MIN_CHUNK, 1 << max(0, longest - 1).bit_length()))


def product_dims(request: Request) -> tuple[int, int]:
    """K and V of the chunk form's products: those of ``request``, with channels of zeros up to a multiple of 8.

    MKL sums a member of a batched product in an order that depends on its place in the batch when rows have an odd
    length or very few elements. A sequence's bits would then depend on the sequences that it is packed with.
    """
    K, V = (-(-d // _PRODUCT_DIM) * _PRODUCT_DIM for d in (request.K, request.V))
    return K, V


def group_lanes(K: int, V: int, step: bool = False) -> int:
    """Lanes of one group, whose states [K, V] stay in cache for a run of tokens, or for one decoding ``step``."""
    return max(1, (_STEP_BUDGET if step else _LANE_BUDGET) // (K * V))


def window_chunks(K: int, V: int, chunk: int, backward: bool = False) -> int:
    """Chunks of ``chunk`` rows of one window."""
    chunks = max(1, _WINDOW_BUDGET // (chunk * max(K, V)))
    return max(1, chunks // _BACKWARD_SHARE) if backward else chunks


def run_tokens(request: Request) -> int:
    """Tokens of one run of the recurrent form."""
    return max(1, min(_RUN, request.T))


def run_lanes(request: Request, lanes: int) -> int:
    """Lanes whose rows one run prepares, when states are walked ``lanes`` at a time.

    If one run serves every token it prepares the rows of many blocks, because a block's time is mostly torch calls. A
    longer sequence keeps one block of states in cache from its first run to its last.
    """
    run = run_tokens(request)
    return max(lanes, _ROW_BUDGET // (run * max(request.K, request.V))) if request.T <= run else lanes


def updates_slot_in_place(n_heads: int, K: int, V: int) -> bool:
    """Whether one sequence's states are large enough for torch calls of their own."""
    return n_heads * K * V >= _SLOT_IN_PLACE


def walks_v_first(request: Request) -> bool:
    """Whether states that are stored V first are also walked V first.

    Rows of an odd length are walked K first: MKL's product would depend on the batch (``product_dims``), a sum of rows
    does not (``sums_rows``).
    """
    return request.state_v_first and request.K % 2 == 0


def sums_rows(dtype: torch.dtype, K: int, V: int, v_first: bool) -> bool:
    """Whether kq·S is a weighted sum of S's rows (an embedding bag), rather than a matrix product.

    The product first copies S into a packed layout, which doubles its time when S comes from memory. The choice
    depends on one state and never on the batch, so that a row's bits do not depend on the batch either.
    """
    return dtype == torch.float32 and not v_first and (K * V >= _BAG or V % 2 == 1)
