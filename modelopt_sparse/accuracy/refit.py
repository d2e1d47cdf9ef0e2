"""Refit: better values for what takes the channels that are kept, in closed form.

Shape letters: R rows, C columns (input channels), K those of them that are kept.
"""

import torch
from torch import Tensor

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # of the mean of the Gram matrix's diagonal


def refit(weight_RC: Tensor, kept_K: Tensor, gram_CC: Tensor, judge_CC: Tensor) -> tuple[Tensor, float, float]:
    """(the kept columns ``[R, K]`` with values that make up for the others, the error as is, the error of these).

    They are the least squares for the inputs of ``gram_CC``, pulled towards the old values: the solution V of
    V (G_KK + d I) = W (G_CK + d I_CK). The damping d is the one with the least error on the inputs of ``judge_CC``, and
    the old values stay where none of them lowers it. Errors are relative to ||W X||^2.
    """
    weight, gram, judge = weight_RC.double(), gram_CC.double(), judge_CC.double()
    energy = float(((weight @ judge) * weight).sum())

    def error(values: Tensor) -> float:
        rest = weight.index_copy(1, kept_K, weight[:, kept_K] - values)
        return max(float(((rest @ judge) * rest).sum()), 0.0) / energy if energy > 0 else 0.0

    best = weight[:, kept_K]
    as_is = least = error(best)
    mean = gram.diagonal().mean().clamp_min(1e-30)
    for damping in DAMPINGS:
        among = gram[kept_K][:, kept_K]
        damped = among + torch.eye(len(kept_K), dtype=gram.dtype, device=gram.device) * (damping * mean)
        goal = weight @ gram[:, kept_K] + weight[:, kept_K] * (damping * mean)
        values = torch.cholesky_solve(goal.mT, torch.linalg.cholesky(damped)).mT.to(weight_RC.dtype).double()
        if (now := error(values)) < least:
            best, least = values, now
    return best.to(weight_RC.dtype), as_is, least
