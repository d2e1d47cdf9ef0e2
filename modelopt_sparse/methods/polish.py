"""Polish: the best values for the weights that a mask keeps, one layer at a time, by masked conjugate gradients.

With H = X^T X + damping it minimizes tr((W - Q) H (W - Q)^T) over all Q supported on the mask. ALPS ends with the same
step (Meng et al. 2024, arXiv 2406.07831, algorithm 2); here the mask and the values to start from may come from any
method. The damping pulls the weights towards the dense ones. The layer is scaled first, so that H has a unit diagonal,
which is Jacobi's preconditioner.
"""

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Solution, relative_error, written
from modelopt_sparse.methods.conjugate_gradients import Scaled, refit, squared_error

DAMPING = 0.01  # relative to the mean of the Gram matrix's diagonal


def polish(weight: Tensor, solution: Solution, state: Scaled, iterations: int) -> Solution:
    """A solution of the dense weight ``[..., R, C]`` -> one with the same mask and better values.

    ``iterations`` is the most that conjugate gradients take. The error of a row is compared before and after, with the
    values rounded to the weight's dtype and with damping; a row whose error is not lower keeps its old values. Inputs
    are left untouched.
    """
    root = state.root_C.unsqueeze(-2)
    scaled, start = (x.to(root.dtype) * root for x in (weight, solution.weight))
    pull = (scaled - start) @ state.gram  # a large product, needed by `refit` and for the error before
    refitted = refit(scaled, start, solution.mask, state.gram, iterations, pull)
    values = written(state.unscaled(refitted, weight), solution.mask, weight.dtype)
    before = (pull * (scaled - start)).sum(-1, keepdim=True, dtype=torch.float64)
    better = squared_error(scaled, values.to(root.dtype) * root, state.gram) < before
    values = torch.where(better, values, solution.weight)
    return Solution(values, solution.mask, relative_error(weight, values, state.stats), solution.notes)
