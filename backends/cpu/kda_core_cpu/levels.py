"""Pairwise decays of a chunk and its triangular inverse, by blocks that double: b = 1, 2, 4, …, C/2.

Every pair (r, s), s < r, straddles the middle of exactly one 2b-block, with r in its second half and s in its
first. With d_t = exp(γ_t), let inside each b-block

    E_r = Π d_t over its rows up to and including r          F_s = Π d_t over its rows after s        D = Π d_t

so that exp(G_r − G_s) = E_r·F_s for a pair that straddles: no exponent is ever formed that could be positive,
no difference of two large sums is taken, and γ = −∞ is an ordinary zero. Going from b to 2b, rows of the second
half gain the first half's total decay D in E and rows of the first half the second half's in F. After the last level
E and F are exp(G) and exp(G_C − G).

Totals of 8 rows and more are exponentials of sums, and not products of their halves' totals: constant decays have the
same rounding error in every row, and a product of 64 has 64 of it. E and F are products of one factor a level.

    M_rs = q'_r·(k'_s ⊙ exp(G_r − G_s))  (s ≤ r)      L_rs = β_r k'_r·(k'_s ⊙ exp(G_r − G_s))  (s < r)
    A = (I + L)⁻¹ by block doubling:  A₂₁ = −A₂₂ L₂₁ A₁₁

Query and key rows are interleaved, X [Z, C, 2, K] = (q', β k') ⊙ E, so that the second half of a 2b-block is one
matrix of 2b rows, and one product serves M and L.

The backward walks the levels down. It never divides by a decay, and each γ_t sums only pairs that its decay separates
(a tree, not a reverse sum over the chunk with cancelling terms). So its error is relative to the pairs that cross t,
for any γ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kda_core_cpu.workspace import Workspace, product, with_slack

LOG2_E = math.log2(math.e)
"""Log decays are loaded times this: torch computes exp2 in a third of the time of exp, and in a tenth below 2⁻¹²⁶."""

_SUMMED = 8
"""Least rows of a total decay that is the exponential of a sum; smaller totals are products, which are cheaper."""


def block_sizes(C: int) -> list[int]:
    """Half block sizes of the levels of a chunk of ``C`` rows, smallest first."""
    return [1 << i for i in range(C.bit_length() - 1)]


def _halves(X: Tensor, F: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """X of the second halves [n, 2b, K] and F of the first halves [n, b, K] of the 2b-blocks, as views."""
    K = F.shape[-1]
    return X.view(-1, 2, 2 * b, K)[:, 1], F.view(-1, 2, b, K)[:, 0]


def _corners(square: Tensor, b: int) -> Tensor:
    """View the lower left b×b corners of the diagonal 2b-blocks of ``square`` [Z, C, ..., C] as [Z, n, b, ..., b]."""
    C = square.shape[-1]
    blocks = square.unflatten(-1, (C // (2 * b), 2 * b)).unflatten(1, (C // (2 * b), 2 * b))
    return blocks.diagonal(dim1=1, dim2=-2).movedim(-1, 1)[:, :, b:, ..., :b]


def _products(workspace: Workspace, second: Tensor, first: Tensor, b: int) -> Tensor:
    """second·firstᵀ, [n, 2b, b]."""
    if b == 1:
        # Batched products of vectors are slow: no library has a kernel for them.
        n, _, K = first.shape
        return torch.mul(second, first, out=workspace("products", n, 2, K)).sum(-1, keepdim=True)
    return product(second, first.transpose(1, 2), out=workspace("block", *second.shape[:2], b))


def _products_backward(workspace: Workspace, block: Tensor, second: Tensor, first: Tensor, b: int) -> Iterator[Tensor]:
    """block·first [n, 2b, K], then blockᵀ·second [n, b, K]; use each before the next, which may overwrite it."""
    n, _, K = first.shape
    if b == 1:
        yield torch.mul(block, first, out=workspace("products", n, 2, K))
        one = torch.mul(block[:, :1], second[:, :1], out=workspace("products", n, 1, K))
        yield one.addcmul_(block[:, 1:], second[:, 1:])
    else:
        yield product(block, first, out=workspace("products", n, 2 * b, K))
        yield product(block.transpose(1, 2), second, out=workspace("products", n, b, K))


def _next_inverse(workspace: Workspace, inverse: Tensor, lower: Tensor, b: int) -> Tensor:
    """Inverses of the diagonal 2b-blocks [n, 2b, 2b] from those of the b-blocks and the corners of L [n, b, b]."""
    n = lower.shape[0]
    # The part above the diagonal stays zero.
    result = workspace(f"inverse{b}", n, 2 * b, 2 * b, zero=True)
    if b == 1:
        result.diagonal(dim1=1, dim2=2).fill_(1)
        torch.neg(lower[:, 0], out=result[:, 1, :1])
        return result
    first, second = inverse.view(n, 2, b, b).unbind(1)
    half = product(lower, first, out=workspace("inverse half", n, b, b))
    corner = product(second, half, out=workspace("inverse corner", n, b, b))
    result[:, :b, :b] = first
    result[:, b:, b:] = second
    torch.neg(corner, out=result[:, b:, :b])
    return result


def pairwise(
    workspace: Workspace, X: Tensor, F: Tensor, decay: Tensor, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Decay all pairs of rows of every chunk.

    Args:
        X: [Z, C, 2, K], rows (q', β k'); overwritten with (q', β k') ⊙ exp(G).
        F: [Z, C, K], rows k'; overwritten with k' ⊙ exp(G_C − G).
        decay: [Z, C, K], γ·LOG2_E; overwritten with d.
        keep: leave every level's operands in the workspace for ``pairwise_backward``.

    Returns:
        M [Z, C, C], A [Z, C, C] and the chunks' total decay exp(G_C) [Z, K].
    """
    Z, C, K = F.shape
    M = workspace("M", Z, C, C, zero=True)
    diagonal = torch.mul(X[:, :, 0], F, out=workspace("products", Z, C, K)).sum(-1)
    M.diagonal(dim1=1, dim2=2).copy_(diagonal)
    inverse = M  # A 1-block's inverse is 1: the first level reads none.
    for b, second, first in _levels_up(workspace, X, F, decay, keep):
        block = _products(workspace, second, first, b).view(-1, b, 2, b)
        _corners(M, b).copy_(block[:, :, 0].view(Z, -1, b, b))
        inverse = _next_inverse(workspace, inverse, block[:, :, 1], b)
    return M, inverse, _totals(workspace, decay, C)


def decay_rows(workspace: Workspace, X: Tensor, F: Tensor, decay: Tensor, keep: bool = False) -> Tensor:
    """``pairwise`` where M and A are known: decays X and F and returns the total decay."""
    for _ in _levels_up(workspace, X, F, decay, keep):
        pass
    return _totals(workspace, decay, decay.shape[1])


def _totals(workspace: Workspace, d: Tensor, b: int) -> Tensor:
    """Total decay D of every b-block [blocks, K], as ``_levels_up`` computes it."""
    Z, C, K = d.shape
    return d.view(-1, K) if b == 1 else workspace(f"total{b}", Z * C // b, K)


def _levels_up(
    workspace: Workspace, X: Tensor, F: Tensor, decay: Tensor, keep: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(b, second-half operands, first-half operands), smallest b first; the rows gain a level's decay after each."""
    Z, C, K = F.shape
    summed = min(_SUMMED, C)
    sums = workspace("log total", Z * C // summed, K)
    torch.sum(decay.view(-1, summed, K), 1, out=sums)
    with_slack(decay).exp2_()
    X.mul_(decay[:, :, None])
    for b in block_sizes(C):
        second, first = _halves(X, F, b)
        n = first.shape[0]
        if keep:
            workspace(f"second{b}", n, 2 * b, K).copy_(second)
            workspace(f"first{b}", n, b, K).copy_(first)
        yield b, second, first
        halves = _totals(workspace, decay, b).view(n, 2, 1, K)
        second.mul_(halves[:, 0])
        first.mul_(halves[:, 1])
        total = _totals(workspace, decay, 2 * b)
        if 2 * b < summed:
            torch.mul(halves[:, 0, 0], halves[:, 1, 0], out=total)
            continue
        if 2 * b > summed:
            of_halves = sums.view(n, 2, K)
            sums = torch.add(of_halves[:, 0], of_halves[:, 1], out=workspace(f"log total{2 * b}", n, K))
        torch.exp2(with_slack(sums), out=with_slack(total))


def pairwise_backward(
    workspace: Workspace, d: Tensor, dX: Tensor, dF: Tensor, dP: Tensor, dlog_total: Tensor
) -> Tensor:
    """Gradients through ``pairwise`` with ``keep``; the caller adds those of M's diagonal.

    Args:
        d: [Z, C, K], as ``pairwise`` left it.
        dX, dF: [Z, C, 2, K], [Z, C, K]: gradients of the decayed rows; overwritten with those of the rows
            (q', β k') and k'.
        dP: [Z, C, 2, C]: gradients of M and L, interleaved like X; only pairs s < r are read.
        dlog_total: [Z, K], gradient of log exp(G_C).

    Returns:
        dγ [Z, C, K] without the term of a row's own decay in X, which is (q', β k')⊙dX.
    """
    Z, C, K = d.shape
    dlog = dlog_total.view(Z, 1, 1, K)
    for b in reversed(block_sizes(C)):
        n = Z * C // (2 * b)
        second, first = workspace(f"second{b}", n, 2 * b, K), workspace(f"first{b}", n, b, K)
        total = _totals(workspace, d, b).view(n, 2, 1, K)
        dsecond, dfirst = _halves(dX, dF, b)
        products = workspace("products", n, 2 * b, K)
        dlog_halves = workspace(f"dlog{b}", n, 2, 1, K)
        torch.mul(second, dsecond, out=products)
        torch.sum(products, 1, keepdim=True, out=dlog_halves[:, 0])
        torch.mul(first, dfirst, out=products[:, :b])
        torch.sum(products[:, :b], 1, keepdim=True, out=dlog_halves[:, 1])
        dlog = dlog_halves.mul_(total).add_(dlog.view(n, 1, 1, K))
        block = workspace("block", n, 2 * b, b)
        block.view(Z, -1, b, 2, b).copy_(_corners(dP, b))
        gains = _products_backward(workspace, block, second, first, b)
        torch.addcmul(next(gains), dsecond, total[:, 0], out=dsecond)
        torch.addcmul(next(gains), dfirst, total[:, 1], out=dfirst)
    dX.mul_(d[:, :, None])
    return dlog.view(Z, C, K)
