"""Device functions that find the rows of a program, of dense and of packed sequences, without help from the host."""

import triton
import triton.language as tl


@triton.jit
def sequence_of_slot(cu_seqlens, N, i_slot, C):
    """Sequence that owns chunk slot ``i_slot`` when slot(n, i) = cu_seqlens[n] // C + n + i.

    First slots grow strictly with n, so that a binary search finds the last n in [0, N] whose first slot is not past
    ``i_slot``. N itself stands for the rows behind the last sequence. The answer has N's integer type.
    """
    low = N * 0
    high = N
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens + middle).to(tl.int64) // C + middle
        if first <= i_slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def chunks_before(cu_seqlens, i_n, length, ROWS: tl.constexpr, LEAST: tl.constexpr = 1):
    """Chunks of ROWS rows of the sequences before ``i_n``, but for those of fewer than LEAST rows.

    With all of them counted it is where the sequence's first intermediate state lies.
    """
    # One exit: Triton 3.6 compiles what follows a return in a branch that is known at compile time.
    if cu_seqlens is None:
        before = i_n * ((length + ROWS - LEAST) // ROWS)
    else:
        before = tl.zeros_like(i_n)
        for first in range(0, i_n, 64):
            o_n = first + tl.arange(0, 64)
            m_n = o_n < i_n
            begin = tl.load(cu_seqlens + o_n, mask=m_n, other=0).to(tl.int64)
            end = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0).to(tl.int64)
            before += tl.sum((end - begin + ROWS - LEAST) // ROWS)
    return before


@triton.jit
def rows_of_sequence(cu_seqlens, i_n, T, chunks, C: tl.constexpr):
    """Rows of sequence ``i_n``, an int64: (batch row, first row within it, number of rows, first slot).

    The number of rows has T's type, all others are int64. ``chunks``: of a dense sequence.
    """
    if cu_seqlens is None:
        i_b = i_n
        bos = tl.zeros_like(i_n)
        length = T
        first_slot = i_n * chunks
    else:
        i_b = tl.zeros_like(i_n)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(T.dtype)
        first_slot = bos // C + i_n
    return i_b, bos, length, first_slot


@triton.jit
def rows_of_slot(cu_seqlens, i_slot, T, N, chunks, C: tl.constexpr):
    """Rows of chunk slot ``i_slot``: (sequence, batch row, first row within it, end of the sequence), of its type.

    Packed: "sequence" N is the rows behind the last one. A slot that holds nothing starts at the end or behind it.
    """
    if cu_seqlens is None:
        i_n = i_slot // chunks
        i_b = i_n
        first_row = (i_slot % chunks) * C
        end = T.to(i_slot.dtype)
    else:
        i_n = sequence_of_slot(cu_seqlens, N.to(i_slot.dtype), i_slot, C)
        i_b = i_n * 0
        begin = tl.load(cu_seqlens + i_n).to(i_slot.dtype)
        first_row = begin + (i_slot - begin // C - i_n) * C
        end = tl.load(cu_seqlens + tl.minimum(i_n + 1, N)).to(i_slot.dtype)
        end = tl.where(i_n == N, T, end)
    return i_n, i_b, first_row, end


@triton.jit
def chunks_of_piece(rows, C: tl.constexpr):
    """Chunks of one piece. Rows may be as many as an integer holds: a sum with them exceeds it."""
    return (rows - 1) // C + 1


@triton.jit
def chunks_of_pieces(length, rows, C: tl.constexpr):
    """Chunks of a sequence of ``length`` rows that begin anew every ``rows`` rows."""
    return length // rows * chunks_of_piece(rows, C) + (length % rows + C - 1) // C


@triton.jit
def first_piece_of(cu_seqlens, i_n, bos, T, rows):
    """Where sequence ``i_n`` begins, with its pieces as packed sequences of one token axis: (row, piece), int64."""
    if cu_seqlens is None:
        begin = i_n * T
        first = i_n * ((T - 1) // rows + 1)  # of at least one row; a sum with ``rows`` may exceed an integer
    else:
        begin = bos
        first = bos // rows + i_n
    return begin, first


@triton.jit
def chunk_of_pieces(i, begin, first_piece, rows, C: tl.constexpr):
    """Chunk i of such a sequence: (its first row, rows from there to the end of its piece, its slot), int64.

    Pieces are packed sequences of one token axis. The sequence begins there at row ``begin`` of piece ``first_piece``.
    """
    each = chunks_of_piece(rows, C)
    piece = (i // each).to(tl.int64)
    within = (i % each).to(tl.int64)
    row = within * C
    slot = (begin + piece * rows) // C + first_piece + piece + within
    return piece * rows + row, rows - row, slot


@triton.jit
def is_padding(i_state, pad_slot_id, slots):
    """Whether an index of a pool of so many slots names none of them."""
    return (i_state < 0) | (i_state >= slots) | (i_state == pad_slot_id)


@triton.jit
def starts_from_state(has_state, i_n, s_has):
    """Whether sequence ``i_n`` starts from its state, rather than from zero."""
    # As bytes: the interpreter reads no booleans.
    return tl.load(has_state.to(tl.pointer_type(tl.int8)) + i_n * s_has) != 0


@triton.jit
def checkpoint_slot(checkpoints, i_n, chunks, every, columns, s_row, s_column, pad_slot_id, slots):
    """The slot that takes the state of sequence ``i_n`` after so many chunks; -1: none does."""
    chunks = tl.cast(chunks, tl.int64)  # a plain Python number in the interpreter
    column = chunks // every - 1
    wanted = (chunks > 0) & (chunks % every == 0) & (column < columns)
    slot = tl.load(checkpoints + i_n * s_row + column * s_column, mask=wanted, other=-1).to(tl.int64)
    return tl.where(is_padding(slot, pad_slot_id, slots), -1, slot)
