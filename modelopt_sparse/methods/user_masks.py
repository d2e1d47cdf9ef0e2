"""Masks of the user's own, in place of a method's."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelopt_sparse.methods.base import Method, Solution, Stats, masked_solution
from modelopt_sparse.methods.patterns import Pattern


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
