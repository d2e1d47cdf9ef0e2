"""The method contract: two pure functions of tensors. No method ever sees a module.

Shape letters: R rows (out features), C columns (in features), T tokens. Leading dimensions (``...``) are independent
matrices that are solved together.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelopt_sparse.methods.patterns import Pattern

NEEDS = ("nothing", "square_sums", "gram")
STRIP = 256  # columns of a Gram matrix that one product of `output_energy` takes


@dataclass
class Stats:
    """What calibration sums up for one distinct layer input: sums, never averages, so that they merge by ``+``.

    ``tokens`` counts input rows; ``square_sums`` ``[..., C]`` is sum over tokens of x**2; ``gram`` ``[..., C, C]`` is
    X^T X, kept only where a method needs it. Both are float32 or float64. ``counts`` ``[E]`` says how many of the rows
    each expert of a mixture got; None for all other layers.
    """

    tokens: int
    square_sums: Tensor
    gram: Tensor | None = None
    counts: Tensor | None = None

    def __add__(self, other: "Stats") -> "Stats":
        gram = None if self.gram is None or other.gram is None else self.gram + other.gram
        counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        return Stats(self.tokens + other.tokens, self.square_sums + other.square_sums, gram, counts)


@dataclass(frozen=True)
class Solution:
    """A solved layer: ``weight`` in the dtype it came in, exactly +0.0 wherever ``mask`` (True = kept) is False.

    ``error`` is the relative squared error left in the layer's output (see `relative_error`); ``notes`` says whatever
    did not go the usual way, such as raised damping.
    """

    weight: Tensor
    mask: Tensor
    error: float
    notes: tuple[str, ...] = field(default=())


class Method(ABC):
    """A way to make one layer sparse. Subclass it, write ``solve``, and hand an instance to `sparsify`.

    ``name`` stands in plans and reports (default: the class's own); ``needs`` says what calibration has to collect;
    ``options`` are the accepted options with their defaults; ``scope`` is the default scope of unstructured patterns;
    ``updates`` says that kept weights do not stay what they were; ``rows_independent`` that with an N:M pattern, or one
    per row, ``solve`` gives some rows ``[..., r, C]`` of a weight what it gives them among all others, for the same
    state: then a layer that is too large for memory is solved some rows at a time.
    """

    name: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    options: ClassVar[Mapping[str, Any]] = {}
    scope: ClassVar[str] = "matrix"
    updates: ClassVar[bool] = False
    rows_independent: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def prepare(self, stats: Stats | None, options: Mapping[str, Any]) -> Any:
        """Work that layers with the same input share (a factorization), done once. Default: the stats themselves."""
        del options
        return stats

    @abstractmethod
    def solve(self, weight: Tensor, state: Any, pattern: Pattern, options: Mapping[str, Any]) -> Solution:
        """Dense weight ``[..., R, C]`` and what ``prepare`` returned -> Solution. Inputs are left untouched.

        An unstructured pattern comes with its scope filled in.
        """

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for option values that make no sense; called before any work."""
        del options


def relative_error(weight: Tensor, pruned: Tensor, stats: Stats | None) -> float:
    """Relative squared error of the layer's output, ||(W - Q) X||^2 / ||W X||^2, summed over all matrices.

    With a Gram matrix H it is exact: tr(E H E^T) / tr(W H W^T). With square sums alone H is taken as diagonal, with no
    stats as the identity. A layer whose output is zero everywhere has error 0.
    """
    work = _working(weight)
    total = output_energy(weight, stats)
    return max(output_energy(weight.to(work) - pruned.to(work), stats), 0.0) / total if total > 0 else 0.0


def output_energy(weight: Tensor, stats: Stats | None) -> float:
    """||W X||^2, summed over all matrices, with X as `relative_error` knows it."""
    work = _working(weight)
    matrix = weight.to(work)
    if stats is None:
        return float(matrix.square().sum(dtype=torch.float64))
    if stats.gram is None:
        return float((matrix.square() * stats.square_sums.to(work).unsqueeze(-2)).sum(dtype=torch.float64))
    energy = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for first in range(0, matrix.shape[-1], STRIP):
        last = first + STRIP
        # the matrix is symmetric: what is above its diagonal counts twice, and what is below is not multiplied
        strip = stats.gram[..., :last, first:last].to(work, copy=True)
        strip[..., :first, :] *= 2
        energy += ((matrix[..., :last] @ strip) * matrix[..., first:last]).sum(dtype=torch.float64)
    return float(energy)


def _working(weight: Tensor) -> torch.dtype:
    """float32 is the working precision of calibration; a float64 layer keeps its own."""
    return torch.promote_types(weight.dtype, torch.float32)


def written(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Solved values as they go into the model: in its dtype, +0.0 where pruned, and no kept weight is -0.0.

    A tiny kept weight rounds to -0.0 in half precision, which kernels that look at the bits take for a nonzero;
    adding +0.0 makes it +0.0 and changes nothing else.
    """
    return (values.to(dtype) + 0.0).masked_fill(~mask, 0)


def is_number(value: object) -> bool:
    """For options: YAML reads ``1e-2`` as text, and True is no number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def masked_solution(weight: Tensor, mask: Tensor, stats: Stats | None) -> Solution:
    """The solution of a mask-only method: kept weights stay bit for bit what they were."""
    pruned = weight.masked_fill(~mask, 0)
    return Solution(pruned, mask, relative_error(weight, pruned, stats))
