"""Magnitude pruning: keep the largest |w|.

N:M as in ASP (Mishra et al. 2021, arXiv 2104.08378): of every M consecutive input weights the N largest are kept.
Needs no data.
"""

from modelopt_sparse.methods.base import Method, Solution, masked_solution


class Magnitude(Method):
    name = "magnitude"
    rows_independent = True

    def solve(self, weight, state, pattern, options) -> Solution:
        del options
        return masked_solution(weight, pattern.mask(weight.abs()), state)
