"""Mask refinement by swaps, for weights that stay at their dense values (SparseSwaps, Zimmer et al. 2025, arXiv
2512.10922; the code is our own).

A row w whose pruned set is P leaves the output error z H z^T, with H = X^T X, z = w on P and 0 elsewhere. Pruning a
kept u and restoring a pruned p changes it by

    (2 w_u c_u + w_u^2 H_uu) + (-2 w_p c_p + w_p^2 H_pp) - 2 w_u w_p H_up,    c = z H

With the ``coupling`` A_ij = 2 w_i w_j H_ij and the ``pull`` v_j = 2 w_j c_j, the sum of A_ij over i in P, that is

    (v_u + A_uu / 2) + (-v_p + A_pp / 2) - A_up

Shape letters: R rows (out features), C columns (in features), S columns among which is swapped: an N:M group, or the
shortlist of a row.
"""

import math

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import NM, Pattern, keep_largest

DAMPING = 0.3  # what `sparsify` adds to the Gram matrix's diagonal, relative to it: swaps overfit without
BLOCK = 128  # columns of groups that one product with the Gram matrix brings up to date
SHORTLIST = 16  # columns to prune, and as many to restore, that a row chooses from; also its most swaps in a round


def refine(weight: Tensor, mask: Tensor, stats: Stats, pattern: Pattern, sweeps: int, damping: float = 0.0) -> Tensor:
    """A mask ``[..., R, C]`` that holds the same pattern and leaves each row at most the error of the given one.

    ``weight`` is dense; the values of kept weights do not change. Needs ``stats.gram``, which may lack leading
    dimensions of the weight (shared by its matrices). Swaps stay in a row, and of N:M in a group, so that all counts
    stay. Ends after ``sweeps`` or when none improves a row; ties go to the lower index.
    """
    assert stats.gram is not None
    work = torch.promote_types(weight.dtype, torch.float32)
    dense, gram = weight.to(work), stats.gram.to(work)
    if damping:
        gram = gram + damping * gram.diagonal(dim1=-2, dim2=-1).diag_embed()
    error = _objective(dense, mask, gram)
    for _ in range(sweeps):
        if isinstance(pattern, NM):
            swapped = _sweep_groups(dense, mask, gram, pattern.m)
        else:
            swapped = _sweep_rows(dense, mask, gram)
        found = _objective(dense, swapped, gram)
        # rounding can make a swap look like a gain: a row whose error did not fall goes back
        better = found < error
        mask, error = torch.where(better, swapped, mask), torch.where(better, found, error)
        if not better.any():
            break
    return mask


def _sweep_groups(dense: Tensor, mask: Tensor, gram: Tensor, m: int) -> Tensor:
    """From left to right, the best swap of every group of every row."""
    mask = mask.clone()
    columns = dense.shape[-1]
    block = -(-BLOCK // m) * m
    for start in range(0, columns, block):
        end = min(start + block, columns)
        correlation = dense.masked_fill(mask, 0) @ gram[..., start:end]
        for first in range(start, end, m):
            group = slice(first, first + m)
            values, before = dense[..., group], mask[..., group]
            coupling = _coupling(values, gram[..., None, group, group])
            after = _swap(coupling, 2 * values * correlation[..., first - start : first - start + m], before)
            correlation += (values * _flips(before, after, values.dtype)) @ gram[..., group, start:end]
            mask[..., group] = after
    return mask


def _sweep_rows(dense: Tensor, mask: Tensor, gram: Tensor) -> Tensor:
    """About C / 8 swaps of every row at most, in rounds. A round looks at the SHORTLIST kept columns that alone cost
    least and the SHORTLIST pruned ones that alone gain most, and swaps the best pair of them until none improves."""
    columns = dense.shape[-1]
    alone = dense.square() * gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    grams = gram.expand(*dense.shape[:-2], columns, columns).flatten(-2)
    for _ in range(math.ceil(columns / (8 * SHORTLIST))):
        pull = 2 * dense * (dense.masked_fill(mask, 0) @ gram)
        index = _shortlist(torch.where(mask, pull, -pull) + alone, mask)
        pairs = (index.unsqueeze(-1) * columns + index.unsqueeze(-2)).flatten(-3)
        gram_RSS = torch.take_along_dim(grams, pairs, -1).view(*index.shape, -1)
        coupling, pull = _coupling(dense.gather(-1, index), gram_RSS), pull.gather(-1, index)
        kept = mask.gather(-1, index)
        for _ in range(SHORTLIST):
            after = _swap(coupling, pull, kept)
            if torch.equal(after, kept):
                break
            pull += (_flips(kept, after, pull.dtype).unsqueeze(-2) @ coupling).squeeze(-2)
            kept = after
        swapped = mask.scatter(-1, index, kept)
        if torch.equal(swapped, mask):
            break
        mask = swapped
    return mask


def _shortlist(change: Tensor, mask: Tensor) -> Tensor:
    """Indices ``[..., R, S]``, ascending, of the SHORTLIST smallest changes of kept and of pruned columns each.

    A row that has fewer of one kind, and equal changes, fill up with the lowest indices.
    """
    best = torch.zeros_like(mask)
    for kind in (mask, ~mask):
        best |= keep_largest((-change).masked_fill(~kind, -torch.inf), SHORTLIST)
    chosen = keep_largest(best.to(change.dtype), 2 * SHORTLIST)
    return chosen.nonzero()[:, -1].view(*mask.shape[:-1], -1)


def _swap(coupling: Tensor, pull: Tensor, mask: Tensor) -> Tensor:
    """The mask ``[..., R, S]`` after the best swap of each row, or as it was where no swap lowers the error."""
    change = torch.where(mask, pull, -pull) + coupling.diagonal(dim1=-2, dim2=-1) / 2
    prune = change.masked_fill(~mask, torch.inf).unsqueeze(-1)
    restore = change.masked_fill(mask, torch.inf).unsqueeze(-2)
    best, pair = (prune + restore - coupling).flatten(-2).min(-1, keepdim=True)
    size = mask.shape[-1]
    swapped = mask.scatter(-1, pair // size, False).scatter(-1, pair % size, True)
    return torch.where(best < 0, swapped, mask)


def _coupling(values: Tensor, gram: Tensor) -> Tensor:
    """A_ij = 2 w_i w_j H_ij, ``[..., R, S, S]``."""
    return 2 * values.unsqueeze(-1) * values.unsqueeze(-2) * gram


def _flips(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where a column was pruned, -1 where one was restored, else 0."""
    return before.to(dtype) - after.to(dtype)


def _objective(dense: Tensor, mask: Tensor, gram: Tensor) -> Tensor:
    """z H z^T of every row, ``[..., R, 1]``, summed in float64."""
    pruned = dense.masked_fill(mask, 0)
    return ((pruned @ gram) * pruned).sum(-1, keepdim=True, dtype=torch.float64)
