"""Sparsity patterns: which entries of a score matrix are kept.

Shape letters: R rows (out features), C columns (in features), G groups of M consecutive columns.
Leading dimensions (``...``) are independent matrices: convolution groups, or q, k and v of a fused projection.
"""

import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

SCOPES = ("row", "matrix")


def count_zeros(sparsity: float, size: int) -> int:
    """How many of ``size`` entries to prune: round-half-even(sparsity * size), in exact decimal arithmetic."""
    return round(Fraction(str(sparsity)) * size)


def keep_largest(score: Tensor, count: int | Tensor) -> Tensor:
    """Bool mask of the ``count`` largest entries along the last dimension; of equal scores the lower index is kept.

    ``count`` may be a tensor ``[..., 1]`` that has a number for each slice.
    """
    size = score.shape[-1]
    if isinstance(count, Tensor):
        return score.argsort(dim=-1, descending=True, stable=True).argsort(-1) < count
    if count <= 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if count >= size:
        return torch.ones_like(score, dtype=torch.bool)
    if score.dtype in (torch.float16, torch.bfloat16):
        score = score.float()  # kthvalue has no half kernels; the order is unchanged
    threshold = score.kthvalue(size - count + 1, dim=-1, keepdim=True).values
    above = score > threshold
    tied = score == threshold
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


@dataclass(frozen=True, kw_only=True)
class _Pattern(ABC):
    """What all patterns have: they count zeros in scopes, which are groups of m weights, rows or matrices.

    within: the mask ``[..., R, C]`` that the weight carries already (bool, True = kept). A mask of the pattern never
      keeps what it prunes, and counts its zeros. None: the weight carries no mask.
    """

    within: Tensor | None = field(default=None, compare=False, repr=False)

    @abstractmethod
    def by_scope(self, matrix: Tensor) -> Tensor:
        """Reshape ``[..., R, C]`` so that the last dimension holds one scope."""

    @abstractmethod
    def zeros_in_scope(self, size: int) -> int:
        """How many zeros the pattern asks of a scope of so many weights."""

    def zeros_in(self, shape: Sequence[int]) -> int:
        """How many zeros the pattern asks of a weight of this shape, ``[..., R, C]``."""
        *scopes, size = self.by_scope(torch.empty(shape, device="meta")).shape
        return math.prod(scopes) * self.zeros_in_scope(size)

    def count_kept_wrong(self, mask: Tensor) -> int:
        """Scopes of a mask ``[..., R, C]`` whose number of zeros is neither the exact one nor, if that is more, the one
        that they have ``within`` their mask."""
        zeros, wanted = self._zeros(mask)
        if self.within is not None:
            wanted = self._zeros(self.within)[0].clamp_min(wanted)
        return int((zeros != wanted).sum())

    def count_nonzero_wrong(self, weight: Tensor) -> int:
        """Scopes of a weight ``[..., R, C]`` with fewer zeros than the pattern asks for."""
        zeros, wanted = self._zeros(weight)
        return int((zeros < wanted).sum())

    def _zeros(self, matrix: Tensor) -> tuple[Tensor, int]:
        """(the zeros of each scope, how many the pattern asks for)."""
        scopes = self.by_scope(matrix)
        return (scopes == 0).sum(-1, dtype=torch.int32), self.zeros_in_scope(scopes.shape[-1])

    def allowed(self, score: Tensor) -> Tensor:
        """The score with -inf at the places that have to stay pruned."""
        if self.within is None:
            return score
        if self.within.shape != score.shape:
            raise ValueError(f"{list(score.shape)} scores for a mask {list(self.within.shape)}: score the whole weight")
        return torch.where(self.within.to(score.device), score, -torch.inf)

    def _and_within(self, mask: Tensor) -> Tensor:
        return mask if self.within is None else mask & self.within.to(mask.device)

    def count_regrown(self, mask: Tensor) -> int:
        """How many weights a mask ``[..., R, C]`` keeps that ``within`` prunes."""
        return 0 if self.within is None else int((mask & ~self.within.to(mask.device)).sum())


@dataclass(frozen=True)
class NM(_Pattern):
    """N:M sparsity: n kept of every m consecutive weights along the input dimension.

    Raises TypeError unless they are whole numbers, and ValueError unless 0 < n <= m.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not all(isinstance(x, Integral) and not isinstance(x, bool) for x in (self.n, self.m)):
            raise TypeError(f"{self!r}: N (kept) and M must be whole numbers, as in NM(2, 4)")
        if not 0 < self.n <= self.m:
            raise ValueError(f"pattern '{self.n}:{self.m}': N (kept) must be from 1 to M; write for example '2:4'")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def with_scope(self, scope: str) -> "NM":
        """The pattern itself: N:M has no scope to fill in, as it counts in groups."""
        return self

    def misfit(self, columns: int) -> str | None:
        """Why rows of ``columns`` consecutive weights cannot take the pattern, or None if they can."""
        if columns % self.m == 0:
            return None
        return f"{columns} input channels are not a multiple of {self.m}, so {self} does not fit"

    def by_scope(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(-1, (-1, self.m))

    def zeros_in_scope(self, size: int) -> int:
        return size - self.n

    def mask(self, score: Tensor) -> Tensor:
        """Score ``[..., R, C]`` (larger = keep) -> bool mask (True = kept), exactly n of every m columns.

        Every two entries of a group are compared; of equal scores the first wins. An entry is kept if fewer than n
        others win against it. This takes a sixth of the time that sorting many small groups does. Scores must not be
        NaN. ``within`` a mask, groups that it leaves fewer than n of keep those. Raises ValueError if the pattern does
        not fit the columns.
        """
        score = self.allowed(score)
        *_, columns = score.shape
        if reason := self.misfit(columns):
            raise ValueError(f"a score of shape {list(score.shape)}: {reason}")
        score_MG = score.unflatten(-1, (columns // self.m, self.m)).movedim(-1, 0).contiguous()
        # how many others win against this entry: all later ones, plus the earlier ones that do, minus the later ones
        # that lose
        dtype = torch.int8 if self.m < 128 else torch.int16
        later_M = torch.arange(self.m - 1, -1, -1, dtype=dtype, device=score.device)
        winners_MG = later_M.view(-1, *[1] * (score_MG.dim() - 1)).expand_as(score_MG).contiguous()
        for apart in range(1, self.m):
            first_wins = (score_MG[:-apart] >= score_MG[apart:]).view(torch.int8)
            winners_MG[apart:].add_(first_wins)
            winners_MG[:-apart].sub_(first_wins)
        return self._and_within((winners_MG < self.n).movedim(0, -1).flatten(-2))


@dataclass(frozen=True)
class Unstructured(_Pattern):
    """Unstructured sparsity: zeros at any positions.

    sparsity: the pruned fraction, in [0, 1).
    scope: "row" prunes the same number of weights in every output row, "matrix" counts over the whole matrix. None
      takes the default of the method, which the report names.

    Raises ValueError for other values.
    """

    sparsity: float
    scope: str | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.sparsity, Real) and not isinstance(self.sparsity, bool | Fraction)
        if not (is_number and 0 <= self.sparsity < 1):
            raise ValueError(f"sparsity {self.sparsity!r}: the pruned fraction must be in [0, 1), such as 0.5 or '50%'")
        if self.scope is not None and self.scope not in SCOPES:
            raise ValueError(f"scope {self.scope!r} of an unstructured pattern: allowed are {', '.join(SCOPES)}")

    def __str__(self) -> str:
        percent = Decimal(str(self.sparsity)) * 100  # in decimal, so that it parses back to the same number
        text = f"{percent.normalize():f}%"
        return text if self.scope is None else f"{text} per {self.scope}"

    def with_scope(self, scope: str) -> "Unstructured":
        """The pattern with ``scope`` filled in where the user left it open."""
        return self if self.scope else replace(self, scope=scope)

    def by_scope(self, matrix: Tensor) -> Tensor:
        return matrix if self.scope == "row" else matrix.flatten(-2)

    def zeros_in_scope(self, size: int) -> int:
        return count_zeros(self.sparsity, size)

    def misfit(self, columns: int) -> str | None:
        """None: any number of columns can take the pattern."""
        return None

    def mask(self, score: Tensor) -> Tensor:
        """Score ``[..., R, C]`` (larger = keep) -> bool mask (True = kept) with the exact count per scope; a scope that
        has more zeros already, ``within`` its mask, keeps what it has."""
        flat = self.by_scope(self.allowed(score))
        count = flat.shape[-1] - self.zeros_in_scope(flat.shape[-1])
        return self._and_within(keep_largest(flat, count).view(score.shape))

    def even_zeros_before(self, column: int, rows: int) -> int | Tensor:
        """How many zeros each scope of a weight with so many rows has in the columns before this one, if zeros are
        spread evenly.

        ``within`` a mask these are the zeros that it has there, and an even part of the new ones: ``[..., 1]``, a
        number for each scope.
        """
        per_column = 1 if self.scope == "row" else rows
        if self.within is None:
            return count_zeros(self.sparsity, per_column * column)
        live = self.by_scope(self.within).sum(-1, keepdim=True)
        live_there = self.by_scope(self.within[..., :column]).sum(-1, keepdim=True)
        size = per_column * self.within.shape[-1]
        new = (count_zeros(self.sparsity, size) - (size - live)).clamp_min(0)
        return per_column * column - live_there + new * live_there // live.clamp_min(1)


Pattern = NM | Unstructured
AnyPattern = TypeVar("AnyPattern", bound=_Pattern)


def sub_pattern(pattern: AnyPattern, rows: slice, columns: slice = slice(None)) -> AnyPattern:
    """The pattern of some rows and columns of a weight ``[..., R, C]``: the mask that it lies within is cut."""
    return pattern if pattern.within is None else replace(pattern, within=pattern.within[..., rows, columns])


def parse_pattern(value: object) -> Pattern:
    """``"2:4"``, ``"2:4 sparsity"`` (ModelOpt), ``0.5``, ``"50%"``, ``"50% per row"`` or a pattern -> a pattern.

    Raises ValueError for anything else.
    """
    if isinstance(value, (NM, Unstructured)):
        return value
    if isinstance(value, str):
        if match := re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)(\s+sparsity)?\s*", value):
            return NM(int(match[1]), int(match[2]))
        if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%(?:\s+per\s+(\w+))?\s*", value):
            return Unstructured(float(Fraction(match[1]) / 100), match[2])
        if re.fullmatch(r"\s*0?\.\d+\s*", value):
            return Unstructured(float(value))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return Unstructured(float(value))
    allowed = "'2:4' (any N:M, N kept of M), a pruned fraction such as 0.5 or '50%', or Unstructured(0.5, scope='row')"
    raise ValueError(f"pattern {reprlib.repr(value)[:300]} is not known: write {allowed}")


def level_of(mask: Tensor, scope: str) -> Unstructured:
    """The unstructured pattern that a mask ``[..., R, C]`` keeps in every "row" or "matrix", its sparsity in as few
    digits as give its zeros."""
    scopes = Unstructured(0.0, scope).by_scope(mask)
    size, fewest = scopes.shape[-1], int((~scopes).sum(-1).min())
    exact = min(fewest / size, 1 - 2**-40)
    rounded = (round(exact, digits) for digits in range(2, 12))
    sparsity = next((s for s in rounded if s < 1 and count_zeros(s, size) == fewest), exact)
    return Unstructured(sparsity, scope)


def pattern_of(mask: Tensor, like: Pattern) -> Pattern:
    """The pattern that a mask ``[..., R, C]`` keeps: N:M with the M of ``like`` if it has one, or unstructured."""
    if isinstance(like, Unstructured):
        return level_of(mask, like.scope or "matrix")
    most = 0 if like.misfit(mask.shape[-1]) else int(mask.unflatten(-1, (-1, like.m)).sum(-1).max())
    return NM(most, like.m) if 0 < most < like.m else level_of(mask, "matrix")
