"""ALPS (Meng et al. 2024, NeurIPS, arXiv 2406.07831): ADMM finds the mask, conjugate gradients the values on it.

The layer is scaled first, so that H = X^T X + damping has a unit diagonal. ADMM (algorithm 1) alternates between a
ridge solution W = (H + rho I)^-1 (H What + rho (D - U)), the projection D of W + U onto the pattern, and what that
leaves out, U += W - D. rho grows while the support of D changes; the dual, rho U, stays what it is. Then the weights on
the support are refitted by conjugate gradients (algorithm 2). `polish` does the same for the mask of any method.

The released code diagonalizes H once, in float64. Here H + rho I is factorized anew whenever rho has grown, about a
dozen times.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.checks import check_number, check_whole
from modelopt_sparse.methods.base import Method, Solution, Stats, relative_error, written
from modelopt_sparse.methods.patterns import Pattern

# masked conjugate gradients -------------------------------------------------------------------------------------------


CG_SETTLED = 1e-7  # a row is done when the norm of its gradient has fallen to this share of the first one


@dataclass(frozen=True)
class Scaled:
    """The damped Gram matrix H of an input, scaled to a unit diagonal. All layers with this input share it.

    gram: ``[..., C, C]``, the scaled H: H_ij / (root_i root_j).
    root_C: ``[..., C]``, the root of the diagonal of H. Weights times it are the scaled weights.
    dead_C: ``[..., C]``, bool: channels of the input that were zero in all of the data; None if there are none.
    stats: what H was made from.
    """

    gram: Tensor
    root_C: Tensor
    dead_C: Tensor | None
    stats: Stats

    @classmethod
    def of(cls, stats: Stats | None, damping: float) -> "Scaled":
        assert stats is not None
        assert stats.gram is not None
        mean_diagonal = stats.gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        filled = stats.with_dead_channels()
        gram = stats.gram.clone() if filled is stats else filled.gram
        assert gram is not None
        root_C = gram.diagonal(dim1=-2, dim2=-1).add_(damping * mean_diagonal).sqrt()
        return cls(gram / root_C.unsqueeze(-1) / root_C.unsqueeze(-2), root_C, filled.dead, stats)

    def unscaled(self, scaled: Tensor, dense: Tensor) -> Tensor:
        """Scaled weights ``[..., R, C]`` -> weights of the layer. Dead channels keep their ``dense`` ones."""
        weight = scaled / self.root_C.unsqueeze(-2)
        return weight if self.dead_C is None else torch.where(self.dead_C.unsqueeze(-2), dense.to(weight), weight)


def refit(dense: Tensor, start: Tensor, mask: Tensor, gram: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Minimize tr((W - Q) H (W - Q)^T) over Q supported on ``mask`` -> (Q ``[..., R, C]``, the `squared_error` of
    ``start``).

    W is ``dense``, H is ``gram``, and Q begins as ``start``. Every row is a linear system of its own: conjugate
    gradients run for all rows at once, with one matrix product per iteration and a step length for each row.
    """
    solution, lacking = start.clone(), dense - start
    factors = mask.to(start.dtype)  # on a CPU a product takes a tenth of what `masked_fill` does
    pull = lacking @ gram
    before = lacking.mul_(pull).sum(-1, keepdim=True, dtype=torch.float64)
    residual = pull.mul_(factors)
    direction = residual.clone()
    energy = residual.square().sum(-1, keepdim=True)
    enough = CG_SETTLED**2 * energy
    for _ in range(iterations):
        if (energy <= enough).all():
            break
        curved = direction @ gram
        curvature = (direction * curved).sum(-1, keepdim=True)
        step = torch.where(curvature > 0, energy / curvature, 0)
        solution += step * direction
        residual -= curved.mul_(step).mul_(factors)
        previous, energy = energy, residual.square().sum(-1, keepdim=True)
        direction.mul_(torch.where(previous > 0, energy / previous, 0)).add_(residual)
    return solution, before


def squared_error(dense: Tensor, solution: Tensor, gram: Tensor) -> Tensor:
    """The error of each row, ``[..., R, 1]``: the diagonal of E H E^T with E = W - Q, summed in float64."""
    delta = dense - solution
    return ((delta @ gram) * delta).sum(-1, keepdim=True, dtype=torch.float64)


# alps -----------------------------------------------------------------------------------------------------------------


FIRST_RHO, MAX_RHO = 0.1, 1e6
CHECK_EVERY = 3  # iterations between two looks at the support
# once EARLIEST iterations are over, the support has settled if less than this share of it has changed since the last
# look
SETTLED = 3e-4
EARLIEST = 18


class ALPS(Method):
    """``damping`` is relative to the mean of the Gram matrix's diagonal; ``iterations`` bounds ADMM, which usually
    settles after about 20; ``refit_iterations`` are those of the conjugate gradients."""

    name = "alps"
    needs = "gram"
    updates = True
    options = {"damping": 0.01, "iterations": 300, "refit_iterations": 10}

    def check(self, options) -> None:
        check_number("alps: damping", options["damping"], "(0, 1]")
        check_whole("alps: iterations", options["iterations"])
        check_whole("alps: refit_iterations", options["refit_iterations"])

    def prepare(self, stats: Stats | None, options) -> Scaled:
        return Scaled.of(stats, options["damping"])

    def solve(self, weight, state: Scaled, pattern: Pattern, options) -> Solution:
        root = state.root_C.unsqueeze(-2)
        scaled = weight.to(root.dtype) * root
        settled, mask = _settle(scaled, state, pattern, options["iterations"])
        sparse, before = refit(scaled, settled, mask, state.gram, options["refit_iterations"])
        sparse = torch.where(squared_error(scaled, sparse, state.gram) >= before, settled, sparse)
        pruned = written(state.unscaled(sparse, weight), mask, weight.dtype)
        return Solution(pruned, mask, relative_error(weight, pruned, state.stats))


def _settle(scaled: Tensor, state: Scaled, pattern: Pattern, iterations: int) -> tuple[Tensor, Tensor]:
    """ADMM on the scaled dense weights -> the projected weights D and their support, a mask.

    Each of several matrices has its own rho and stops by itself. Weights of dead channels are projected as they are.
    """
    *lead, _, _ = scaled.shape
    gram, dead_C = state.gram, state.dead_C
    rho = scaled.new_full((*lead, 1, 1), FIRST_RHO)
    settled, some_settled = torch.zeros_like(rho, dtype=torch.bool), False
    inverse: Tensor | None = None
    correlation = scaled @ gram
    left_out = torch.zeros_like(scaled)
    mask = checked = pattern.mask(scaled.abs())
    sparse = scaled * mask
    for iteration in range(1, iterations + 1):
        if inverse is None:
            inverse = _inverse(gram, rho)
        lifted = (sparse - left_out).mul_(rho).add_(correlation) @ inverse
        lifted += left_out
        if dead_C is not None:  # nothing pulls at them
            lifted = torch.where(dead_C.unsqueeze(-2), scaled, lifted)
        mask = torch.where(settled, mask, pattern.mask(lifted.abs())) if some_settled else pattern.mask(lifted.abs())
        kept_now = mask.to(lifted.dtype).mul_(lifted)  # on a CPU `where` takes several times as long
        sparse = torch.where(settled, sparse, kept_now) if some_settled else kept_now
        left_out = lifted.sub_(sparse)
        if iteration % CHECK_EVERY:
            continue
        changed = (mask & ~checked).sum((-2, -1), keepdim=True).float() / mask.sum((-2, -1), keepdim=True).clamp_min(1)
        checked = mask
        settled = settled | (changed == 0) | ((iteration > EARLIEST) & (changed < SETTLED))
        if settled.all():
            break
        some_settled = bool(settled.any())
        growth = torch.where(changed >= 0.1, 1.3, torch.where(changed >= 0.005, 1.2, torch.full_like(changed, 1.1)))
        smaller, rho = rho, torch.where(settled, rho, (rho * growth).clamp_max(MAX_RHO))
        left_out *= smaller / rho
        inverse = None  # freed before the next one is made, as it is as large as the Gram matrix
    return sparse, mask


def _inverse(gram: Tensor, rho: Tensor) -> Tensor:
    """(H + rho I)^-1. It is well conditioned, as H has a unit diagonal and rho is at least FIRST_RHO."""
    damped = gram.expand(*rho.shape[:-2], *gram.shape[-2:]).clone()  # matrices that share H have a rho each
    damped.diagonal(dim1=-2, dim2=-1).add_(rho.squeeze(-1))
    factor = torch.linalg.cholesky(damped)
    del damped
    return torch.cholesky_inverse(factor)


# polish ---------------------------------------------------------------------------------------------------------------


DAMPING = 0.01  # relative to the mean of the Gram matrix's diagonal


def polish(weight: Tensor, solution: Solution, state: Scaled, iterations: int) -> Solution:
    """A solution of the dense weight ``[..., R, C]`` -> one with the same mask and better values.

    Minimizes tr((W - Q) H (W - Q)^T) over Q on the mask; the damping in H pulls Q towards the dense W. ``iterations``
    bounds conjugate gradients. The error of a row is compared before and after, with the values rounded to the weight's
    dtype and with damping; a row whose error is not lower keeps its old values. Inputs are left untouched.
    """
    root = state.root_C.unsqueeze(-2)
    scaled, start = (x.to(root.dtype) * root for x in (weight, solution.weight))
    refitted, before = refit(scaled, start, solution.mask, state.gram, iterations)
    values = written(state.unscaled(refitted, weight), solution.mask, weight.dtype)
    better = squared_error(scaled, values.to(root.dtype) * root, state.gram) < before
    values = torch.where(better, values, solution.weight)
    return Solution(values, solution.mask, relative_error(weight, values, state.stats), solution.notes)
