"""Wanda: keep the largest |w| * ||x||, compared within a row (Sun et al. 2024, arXiv 2306.11695, equation 1)."""

from modelopt_sparse.methods.base import Method, Solution, masked_solution


class Wanda(Method):
    name = "wanda"
    needs = "square_sums"
    scope = "row"

    def solve(self, weight, state, pattern, options) -> Solution:
        del options
        norm_C = state.square_sums.sqrt().unsqueeze(-2)
        score_RC = weight.to(norm_C.dtype).abs() * norm_C
        return masked_solution(weight, pattern.mask(score_RC), state)
