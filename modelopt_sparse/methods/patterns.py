"""Sparsity patterns: which entries of a score matrix are kept.

Shape letters: R rows (out features), C columns (in features), G groups of M consecutive columns.
Leading dimensions (``...``) are independent matrices: convolution groups, or q, k and v of a fused projection.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor

SCOPES = ("row", "matrix")


def count_zeros(sparsity: float, size: int) -> int:
    """How many of ``size`` entries to prune: round-half-even(sparsity * size), in exact decimal arithmetic."""
    return round(Fraction(str(sparsity)) * size)


def keep_largest(score: Tensor, count: int) -> Tensor:
    """Bool mask of the ``count`` largest entries along the last dimension; of equal scores the lower index is kept."""
    size = score.shape[-1]
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


@dataclass(frozen=True)
class NM:
    """N:M sparsity: n kept of every m consecutive weights along the input dimension.

    Raises ValueError unless 0 < n <= m.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(
                f"pattern '{self.n}:{self.m}': N (kept) must be from 1 to M; write for example '2:4', two kept of four"
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def with_scope(self, scope: str) -> "NM":
        """The pattern itself: N:M has no scope to fill in, as it counts in groups."""
        del scope
        return self

    def misfit(self, columns: int) -> str | None:
        """Why rows of ``columns`` consecutive weights cannot take the pattern, or None if they can."""
        if columns % self.m == 0:
            return None
        return f"{columns} input channels are not a multiple of {self.m}, so {self} does not fit"

    def mask(self, score: Tensor) -> Tensor:
        """Score ``[..., R, C]`` (larger = keep) -> bool mask (True = kept), exactly n of every m columns.

        Every two entries of a group are compared; of equal scores the first wins. An entry is kept if fewer than n
        others win against it. This takes a sixth of the time that sorting many small groups does. Scores must not be
        NaN. Raises ValueError if the pattern does not fit the columns.
        """
        *_, columns = score.shape
        if reason := self.misfit(columns):
            raise ValueError(f"a score of shape {list(score.shape)}: {reason}")
        score_MG = score.unflatten(-1, (columns // self.m, self.m)).movedim(-1, 0).contiguous()
        # the number of earlier entries that win against this one, minus the number of later ones that lose against it
        balance_MG = torch.zeros_like(score_MG, dtype=torch.int8 if self.m < 128 else torch.int16)
        for apart in range(1, self.m):
            first_wins = (score_MG[:-apart] >= score_MG[apart:]).view(torch.int8)
            balance_MG[apart:].add_(first_wins)
            balance_MG[:-apart].sub_(first_wins)
        later_M = torch.arange(self.m - 1, -1, -1, device=score.device)
        mask_MG = balance_MG < (self.n - later_M).view(-1, *[1] * (score_MG.dim() - 1))
        return mask_MG.movedim(0, -1).flatten(-2)

    def count_kept_wrong(self, mask: Tensor) -> int:
        """Groups of a mask ``[..., R, C]`` that do not keep exactly n."""
        return int((mask.unflatten(-1, (-1, self.m)).sum(-1) != self.n).sum())

    def count_nonzero_wrong(self, weight: Tensor) -> int:
        """Groups of a weight ``[..., R, C]`` with more than n nonzeros."""
        return int(((weight != 0).unflatten(-1, (-1, self.m)).sum(-1) > self.n).sum())


@dataclass(frozen=True)
class Unstructured:
    """Unstructured sparsity: zeros at any positions.

    sparsity: the pruned fraction, in [0, 1).
    scope: "row" prunes the same number of weights in every output row, "matrix" counts over the whole matrix. None
      takes the default of the method, which the report names.

    Raises ValueError for other values.
    """

    sparsity: float
    scope: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(
                f"sparsity {self.sparsity}: the pruned fraction must be in [0, 1), for example 0.5 or '50%'"
            )
        if self.scope is not None and self.scope not in SCOPES:
            raise ValueError(f"scope {self.scope!r} of an unstructured pattern: allowed are {', '.join(SCOPES)}")

    def __str__(self) -> str:
        percent = Decimal(str(self.sparsity)) * 100  # in decimal, so that it parses back to the same number
        text = f"{percent.normalize():f}%"
        return text if self.scope is None else f"{text} per {self.scope}"

    def with_scope(self, scope: str) -> "Unstructured":
        """The pattern with ``scope`` filled in where the user left it open."""
        return self if self.scope else Unstructured(self.sparsity, scope)

    def misfit(self, columns: int) -> str | None:
        """None: any number of columns can take the pattern."""
        del columns
        return None

    def mask(self, score: Tensor) -> Tensor:
        """Score ``[..., R, C]`` (larger = keep) -> bool mask (True = kept) with the exact count per scope."""
        flat = score if self._scope() == "row" else score.flatten(-2)
        count = flat.shape[-1] - count_zeros(self.sparsity, flat.shape[-1])
        return keep_largest(flat, count).view(score.shape)

    def count_kept_wrong(self, mask: Tensor) -> int:
        """Scopes (rows or matrices) of a mask whose number of zeros is not the exact one."""
        flat = mask if self._scope() == "row" else mask.flatten(-2)
        return int(((~flat).sum(-1) != count_zeros(self.sparsity, flat.shape[-1])).sum())

    def count_nonzero_wrong(self, weight: Tensor) -> int:
        """Scopes of a weight with fewer zeros than the pattern asks for."""
        flat = weight if self._scope() == "row" else weight.flatten(-2)
        return int(((flat == 0).sum(-1) < count_zeros(self.sparsity, flat.shape[-1])).sum())

    def _scope(self) -> str:
        return self.scope or "matrix"


Pattern = NM | Unstructured


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
    raise ValueError(
        f"pattern {value!r} is not known: write '2:4' (or any N:M, N kept of M), a pruned fraction such as 0.5 or "
        "'50%', or Unstructured(0.5, scope='row')"
    )
