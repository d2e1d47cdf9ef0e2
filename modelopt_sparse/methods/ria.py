"""RIA, relative importance and activations (Zhang et al. 2024, "Plug-and-Play", ICLR, equation 4)."""

import torch

from modelopt_sparse.methods.base import Method, Solution, is_number, masked_solution


class RIA(Method):
    """score_ij = (|w_ij| / sum_i |w_ij| + |w_ij| / sum_j |w_ij|) * ||x_j|| ** alpha"""

    name = "ria"
    needs = "square_sums"
    options = {"alpha": 0.5}

    def check(self, options) -> None:
        alpha = options["alpha"]
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise ValueError(f"option alpha={alpha!r} of ria: the power of the activation norm is a number in [0, 1]")

    def solve(self, weight, state, pattern, options) -> Solution:
        norm_C = state.square_sums.sqrt().unsqueeze(-2)
        size_RC = weight.to(norm_C.dtype).abs()
        tiny = torch.finfo(size_RC.dtype).tiny  # an all-zero row or column scores 0, not NaN
        relative_RC = size_RC / size_RC.sum(-2, keepdim=True).clamp_min(tiny)
        relative_RC = relative_RC + size_RC / size_RC.sum(-1, keepdim=True).clamp_min(tiny)
        score_RC = relative_RC * norm_C ** options["alpha"]
        return masked_solution(weight, pattern.mask(score_RC), state)
