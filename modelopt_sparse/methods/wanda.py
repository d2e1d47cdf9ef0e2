"""Wanda: keep the largest |w| * ||x||, compared within a row (Sun et al. 2024, arXiv 2306.11695, equation 1)."""

from torch import Tensor

from modelopt_sparse.methods.base import Method, Solution, masked_solution


class Wanda(Method):
    name = "wanda"
    needs = "square_sums"
    scope = "row"
    rows_independent = True

    def solve(self, weight, state, pattern, options) -> Solution:
        del options
        return masked_solution(weight, pattern.mask(score(weight, state.square_sums)), state)


def score(weight: Tensor, square_sums: Tensor) -> Tensor:
    """|w_ij| * ||x_j||, ``[..., R, C]``, in the dtype and on the device of the sums (larger = keep)."""
    norm_C = square_sums.sqrt().unsqueeze(-2)
    return weight.to(norm_C).abs() * norm_C
