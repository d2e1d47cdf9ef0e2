"""Polish: the best values for the weights that a mask keeps, one layer at a time, by masked conjugate gradients.

With H = X^T X + damping it minimizes tr((W - Q) H (W - Q)^T) over all Q supported on the mask, which is what ALPS ends
with (Meng et al. 2024, arXiv 2406.07831, algorithm 2), for a mask and start from anywhere. The damping pulls towards
the dense weights. Everything happens in a scaling that gives H a unit diagonal, which is Jacobi's preconditioner.
"""

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Solution, relative_error, written
from modelopt_sparse.methods.conjugate_gradients import Scaled, refit, squared_error

DAMPING = 0.01  # relative to the mean of the Gram matrix's diagonal


def polish(weight: Tensor, solution: Solution, state: Scaled, iterations: int) -> Solution:
    """A solution of the dense weight ``[..., R, C]`` -> one with the same mask and better values.

    At most ``iterations`` of conjugate gradients; a row whose damped error is not lower afterwards, as written in the
    weight's dtype, keeps the values that it came with. Inputs are left untouched.
    """
    root = state.root_C.unsqueeze(-2)
    target, start = (x.to(root.dtype) * root for x in (weight, solution.weight))
    pull = (target - start) @ state.gram  # a large product, which the refit and the guard share
    found = refit(target, start, solution.mask, state.gram, iterations, pull)
    values = written(found / root, solution.mask, weight.dtype)
    before = (pull * (target - start)).sum(-1, keepdim=True, dtype=torch.float64)
    better = squared_error(target, values.to(root.dtype) * root, state.gram) < before
    values = torch.where(better, values, solution.weight)
    return Solution(values, solution.mask, relative_error(weight, values, state.stats), solution.notes)
