"""Masks for weights that keep their dense values: by a score of each weight (magnitude, Wanda, RIA), of the user's own,
and refined by swaps.

`refine` follows SparseSwaps (Zimmer et al. 2025, arXiv 2512.10922; the code is our own). A row w whose pruned set is P
leaves the output error z H z^T, with H = X^T X, z = w on P and 0 elsewhere. Pruning a kept u and restoring a pruned p
changes it by

    (2 w_u c_u + w_u^2 H_uu) + (-2 w_p c_p + w_p^2 H_pp) - 2 w_u w_p H_up,    c = z H

With the ``coupling`` A_ij = 2 w_i w_j H_ij and the ``pull`` v_j = 2 w_j c_j, the sum of A_ij over i in P, that is

    (v_u + A_uu / 2) + (-v_p + A_pp / 2) - A_up

Shape letters: R rows (out features), C columns (in features), S columns that a swap chooses from: an N:M group, or the
shortlist of a row.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.methods.alps import squared_error
from modelopt_sparse.methods.base import Method, Solution, Stats, masked_solution
from modelopt_sparse.methods.patterns import NM, Pattern, keep_largest
from modelopt_sparse.values import check_number

# scores ---------------------------------------------------------------------------------------------------------------


class Magnitude(Method):
    """Keep the largest |w|; N:M as in ASP (Mishra et al. 2021, arXiv 2104.08378)."""

    name = "magnitude"
    rows_independent = True

    def solve(self, weight, state, pattern, options) -> Solution:
        return masked_solution(weight, pattern.mask(weight.abs()), state)


class Wanda(Method):
    """Keep the largest |w| * ||x||, compared within a row (Sun et al. 2024, arXiv 2306.11695, equation 1)."""

    name = "wanda"
    needs = "square_sums"
    scope = "row"
    rows_independent = True

    def solve(self, weight, state, pattern, options) -> Solution:
        return masked_solution(weight, pattern.mask(score(weight, state.square_sums)), state)


def score(weight: Tensor, square_sums: Tensor) -> Tensor:
    """|w_ij| * ||x_j||, ``[..., R, C]``, in the dtype and on the device of the sums (larger = keep)."""
    norm_C = square_sums.sqrt().unsqueeze(-2)
    return weight.to(norm_C).abs() * norm_C


class RIA(Method):
    """Relative importance and activations (Zhang et al. 2024, "Plug-and-Play", ICLR, equation 4):

    score_ij = (|w_ij| / sum_i |w_ij| + |w_ij| / sum_j |w_ij|) * ||x_j|| ** alpha
    """

    name = "ria"
    needs = "square_sums"
    options = {"alpha": 0.5}

    def check(self, options) -> None:
        check_number("ria: alpha", options["alpha"], "[0, 1]")

    def solve(self, weight, state, pattern, options) -> Solution:
        norm_C = state.square_sums.sqrt().unsqueeze(-2)
        size_RC = weight.to(norm_C.dtype).abs()
        tiny = torch.finfo(size_RC.dtype).tiny  # an all-zero row or column scores 0, not NaN
        relative_RC = size_RC / size_RC.sum(-2, keepdim=True).clamp_min(tiny)
        relative_RC = relative_RC + size_RC / size_RC.sum(-1, keepdim=True).clamp_min(tiny)
        score_RC = relative_RC * norm_C ** options["alpha"]
        return masked_solution(weight, pattern.mask(score_RC), state)


class GivenMask(Method):
    """The mask of one layer, ``[..., R, C]`` (bool, True = kept), from the option ``masks`` of `sparsify`.

    Kept weights stay bit for bit what they were.
    """

    name = "masks"
    rows_independent = True

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask

    def solve(self, weight: Tensor, state: Stats | None, pattern: Pattern, options: Mapping[str, Any]) -> Solution:
        assert self.mask is not None
        return masked_solution(weight, self.mask.to(weight.device), state)

    def cut(self, place: Any) -> "GivenMask":
        """The same for a part of the layer."""
        return GivenMask(None if self.mask is None else self.mask[place])


# swaps ----------------------------------------------------------------------------------------------------------------

# the `damping` with which `sparsify` calls `refine`, relative to the diagonal of the Gram matrix: without it swaps
# overfit to the calibration data
REFINE_DAMPING = 0.3
BLOCK = 128  # columns whose correlations z H are computed in one product, for N:M patterns
# a row chooses among this many kept columns to prune, and as many pruned ones to restore; it makes at most this many
# swaps in a round
SHORTLIST = 16


def refine(weight: Tensor, mask: Tensor, stats: Stats, pattern: Pattern, sweeps: int, damping: float = 0.0) -> Tensor:
    """A mask ``[..., R, C]`` of the same pattern, under which no row has a larger error than under ``mask``.

    ``weight`` is dense, and the values of its weights do not change. ``stats.gram`` is needed; it lacks leading
    dimensions of the weight if its matrices share one input. A swap prunes and restores a weight of the same row, and
    with N:M of the same group, so that all counts stay. It ends after ``sweeps`` rounds, or when a round improves no
    row. Ties go to the lower index.
    """
    gram = stats.with_dead_channels().gram
    assert gram is not None
    work = torch.promote_types(weight.dtype, torch.float32)
    dense, gram = weight.to(work), gram.to(work)
    if damping:
        gram = gram + damping * gram.diagonal(dim1=-2, dim2=-1).diag_embed()
    # a weight that another mask prunes already is not restored
    may_stay = torch.ones_like(mask) if pattern.within is None else pattern.within
    error = squared_error(dense, dense.masked_fill(~mask, 0), gram)
    for _ in range(sweeps):
        if isinstance(pattern, NM):
            swapped = _sweep_groups(dense, mask, gram, pattern.m, may_stay)
        else:
            swapped = _sweep_rows(dense, mask, gram, may_stay)
        error_after = squared_error(dense, dense.masked_fill(~swapped, 0), gram)
        # because of rounding a swap can seem to lower the error: a row whose error did not fall keeps its old mask
        better = error_after < error
        mask, error = torch.where(better, swapped, mask), torch.where(better, error_after, error)
        if not better.any():
            break
    return mask


def _sweep_groups(dense: Tensor, mask: Tensor, gram: Tensor, m: int, may_stay: Tensor) -> Tensor:
    """From left to right, the best swap of every group of every row. Places where ``may_stay`` is False stay pruned."""
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
            pull = 2 * values * correlation[..., first - start : first - start + m]
            after = _swap(coupling, pull, before, may_stay[..., group])
            correlation += (values * _flips(before, after, values.dtype)) @ gram[..., group, start:end]
            mask[..., group] = after
    return mask


def _sweep_rows(dense: Tensor, mask: Tensor, gram: Tensor, may_stay: Tensor) -> Tensor:
    """At most about C / 8 swaps of every row, in rounds.

    The shortlist of a round holds the SHORTLIST kept columns that cost least if they alone are pruned, and the
    SHORTLIST pruned columns that gain most if they alone are restored. The best pair of these is swapped, again and
    again, until no swap lowers the error.
    """
    columns = dense.shape[-1]
    alone = dense.square() * gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    grams = gram.expand(*dense.shape[:-2], columns, columns).flatten(-2)
    for _ in range(math.ceil(columns / (8 * SHORTLIST))):
        pull = 2 * dense * (dense.masked_fill(mask, 0) @ gram)
        change = torch.where(mask, pull, -pull) + alone
        index = _shortlist(change.masked_fill(~may_stay, torch.inf), mask)
        pairs = (index.unsqueeze(-1) * columns + index.unsqueeze(-2)).flatten(-3)
        gram_RSS = torch.take_along_dim(grams, pairs, -1).view(*index.shape, -1)
        coupling, pull = _coupling(dense.gather(-1, index), gram_RSS), pull.gather(-1, index)
        shortlist_mask, listed_may_stay = mask.gather(-1, index), may_stay.gather(-1, index)
        for _ in range(SHORTLIST):
            after = _swap(coupling, pull, shortlist_mask, listed_may_stay)
            if torch.equal(after, shortlist_mask):
                break
            pull += (_flips(shortlist_mask, after, pull.dtype).unsqueeze(-2) @ coupling).squeeze(-2)
            shortlist_mask = after
        swapped = mask.scatter(-1, index, shortlist_mask)
        if torch.equal(swapped, mask):
            break
        mask = swapped
    return mask


def _shortlist(change: Tensor, mask: Tensor) -> Tensor:
    """Indices ``[..., R, S]``, ascending: the SHORTLIST kept and the SHORTLIST pruned columns of the smallest changes.

    Of equal changes the lowest indices come first. A row with fewer columns of one kind is filled up with the lowest
    indices.
    """
    best = torch.zeros_like(mask)
    for kind in (mask, ~mask):
        best |= keep_largest((-change).masked_fill(~kind, -torch.inf), SHORTLIST)
    chosen = keep_largest(best.to(change.dtype), 2 * SHORTLIST)
    return chosen.nonzero()[:, -1].view(*mask.shape[:-1], -1)


def _swap(coupling: Tensor, pull: Tensor, mask: Tensor, may_stay: Tensor) -> Tensor:
    """The mask ``[..., R, S]`` after the best swap of each row; a row in which no swap lowers the error stays. Only
    what ``may_stay`` is restored."""
    change = torch.where(mask, pull, -pull) + coupling.diagonal(dim1=-2, dim2=-1) / 2
    prune = change.masked_fill(~mask, torch.inf).unsqueeze(-1)
    restore = change.masked_fill(mask | ~may_stay, torch.inf).unsqueeze(-2)
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
