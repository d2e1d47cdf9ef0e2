"""Masked conjugate gradients: the best values for the weights that a mask keeps, for a quadratic objective."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Stats

SETTLED = 1e-7  # a row is done when the norm of its gradient has fallen to this share of the first one


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
        """Scaled weights ``[..., R, C]`` -> weights of the layer, whose ``dense`` ones those of dead channels keep: no
        data says what would be better."""
        weight = scaled / self.root_C.unsqueeze(-2)
        return weight if self.dead_C is None else torch.where(self.dead_C.unsqueeze(-2), dense.to(weight), weight)


def refit(
    dense: Tensor, start: Tensor, mask: Tensor, gram: Tensor, iterations: int, pull: Tensor | None = None
) -> Tensor:
    """Minimize tr((W - Q) H (W - Q)^T) over Q supported on ``mask`` -> Q, all ``[..., R, C]``.

    W is ``dense``, H is ``gram``, and Q begins as ``start``. Every row is a linear system of its own: conjugate
    gradients run for all rows at once, with one matrix product per iteration and a step length for each row. ``pull``
    is (W - start) H, if the caller has it already.
    """
    solution = start.clone()
    residual = ((dense - start) @ gram if pull is None else pull).masked_fill(~mask, 0)
    direction = residual.clone()
    energy = residual.square().sum(-1, keepdim=True)
    enough = SETTLED**2 * energy
    for _ in range(iterations):
        if (energy <= enough).all():
            break
        curved = direction @ gram
        curvature = (direction * curved).sum(-1, keepdim=True)
        step = torch.where(curvature > 0, energy / curvature, 0)
        solution += step * direction
        residual = (residual - step * curved).masked_fill(~mask, 0)
        previous, energy = energy, residual.square().sum(-1, keepdim=True)
        direction = residual + torch.where(previous > 0, energy / previous, 0) * direction
    return solution


def squared_error(dense: Tensor, solution: Tensor, gram: Tensor) -> Tensor:
    """The error of each row, ``[..., R, 1]``: the diagonal of E H E^T with E = W - Q, summed in float64."""
    delta = dense - solution
    return ((delta @ gram) * delta).sum(-1, keepdim=True, dtype=torch.float64)
