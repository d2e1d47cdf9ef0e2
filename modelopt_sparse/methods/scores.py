"""Masks for weights that keep their dense values: by a score of each weight (magnitude, Wanda, RIA), or of the user's
own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.checks import check_number
from modelopt_sparse.methods.base import Method, Solution, Stats, masked_solution
from modelopt_sparse.methods.patterns import Pattern


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

    def part(self, index: Any) -> "GivenMask":
        """The mask of a part of the layer, ``mask[index]``."""
        return GivenMask(None if self.mask is None else self.mask[index])
