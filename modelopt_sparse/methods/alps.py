"""ALPS (Meng et al. 2024, NeurIPS, arXiv 2406.07831): ADMM on the layer's own objective over all sparse weights.

The layer is scaled first, so that H = X^T X + damping has a unit diagonal. ADMM (algorithm 1) alternates between a
ridge solution W = (H + rho I)^-1 (H What - V + rho D), the projection D of W + V / rho onto the pattern, and the dual
V += rho (W - D). rho grows while the support of D still changes; once it has settled, the weights on it are refitted
by conjugate gradients (algorithm 2).

The released code diagonalizes H once, in float64. Here H + rho I is factorized anew whenever rho has grown, about a
dozen times.
"""

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Method, Solution, Stats, is_number, relative_error, written
from modelopt_sparse.methods.conjugate_gradients import Scaled, refit, squared_error
from modelopt_sparse.methods.patterns import Pattern

FIRST_RHO, MAX_RHO = 0.1, 1e6
CHECK_EVERY = 3  # iterations between two looks at the support
# once EARLIEST iterations are over, the support has settled if less than this share of it has changed since the last
# look
SETTLED = 3e-4
EARLIEST = 30


class ALPS(Method):
    """``damping`` is relative to the mean of the Gram matrix's diagonal; ``iterations`` bounds ADMM, which usually
    settles after 30 to 40; ``refit_iterations`` are those of the conjugate gradients."""

    name = "alps"
    needs = "gram"
    updates = True
    options = {"damping": 0.01, "iterations": 300, "refit_iterations": 10}

    def check(self, options) -> None:
        if not is_number(options["damping"]) or not 0 < options["damping"] <= 1:
            raise ValueError(f"option damping={options['damping']!r} of alps: must be a number in (0, 1]")
        for key in ("iterations", "refit_iterations"):
            if not isinstance(options[key], int) or isinstance(options[key], bool) or options[key] < 1:
                raise ValueError(f"option {key}={options[key]!r} of alps: a positive whole number")

    def prepare(self, stats: Stats | None, options) -> Scaled:
        return Scaled.of(stats, options["damping"])

    def solve(self, weight, state: Scaled, pattern: Pattern, options) -> Solution:
        root = state.root_C.unsqueeze(-2)
        scaled = weight.to(root.dtype) * root
        settled, mask = _settle(scaled, state, pattern, options["iterations"])
        sparse = refit(scaled, settled, mask, state.gram, options["refit_iterations"])
        worse = squared_error(scaled, sparse, state.gram) >= squared_error(scaled, settled, state.gram)
        sparse = torch.where(worse, settled, sparse)
        pruned = written(state.unscaled(sparse, weight), mask, weight.dtype)
        return Solution(pruned, mask, relative_error(weight, pruned, state.stats))


def _settle(scaled: Tensor, state: Scaled, pattern: Pattern, iterations: int) -> tuple[Tensor, Tensor]:
    """ADMM on the scaled dense weights -> the projected weights D and their support, a mask.

    Each of several matrices has its own rho and stops by itself. Weights of dead channels are projected as they are.
    """
    *lead, _, _ = scaled.shape
    gram, dead_C = state.gram, state.dead_C
    rho = scaled.new_full((*lead, 1, 1), FIRST_RHO)
    settled = torch.zeros_like(rho, dtype=torch.bool)
    inverse: Tensor | None = None
    correlation = scaled @ gram
    dual = torch.zeros_like(scaled)
    mask = checked = pattern.mask(scaled.abs())
    sparse = scaled.masked_fill(~mask, 0)
    for iteration in range(1, iterations + 1):
        if inverse is None:
            inverse = _inverse(gram, rho)
        ridge = (correlation - dual + rho * sparse) @ inverse
        lifted = ridge + dual / rho
        if dead_C is not None:  # nothing pulls at them
            lifted = torch.where(dead_C.unsqueeze(-2), scaled, lifted)
        mask = torch.where(settled, mask, pattern.mask(lifted.abs()))
        sparse = torch.where(settled, sparse, lifted.masked_fill(~mask, 0))
        dual += rho * (ridge - sparse)
        if iteration % CHECK_EVERY:
            continue
        changed = (mask & ~checked).sum((-2, -1), keepdim=True) / mask.sum((-2, -1), keepdim=True).clamp_min(1)
        checked = mask
        settled = settled | (changed == 0) | ((iteration > EARLIEST) & (changed < SETTLED))
        if settled.all():
            break
        growth = torch.where(changed >= 0.1, 1.3, torch.where(changed >= 0.005, 1.2, 1.1))
        rho = torch.where(settled, rho, (rho * growth).clamp_max(MAX_RHO))
        inverse = None  # freed before the next one is made, as it is as large as the Gram matrix
    return sparse, mask


def _inverse(gram: Tensor, rho: Tensor) -> Tensor:
    """(H + rho I)^-1. It is well conditioned, as H has a unit diagonal and rho is at least FIRST_RHO."""
    damped = gram.expand(*rho.shape[:-2], *gram.shape[-2:]).clone()  # matrices that share H have a rho each
    damped.diagonal(dim1=-2, dim2=-1).add_(rho.squeeze(-1))
    factor = torch.linalg.cholesky(damped)
    del damped
    return torch.cholesky_inverse(factor)
