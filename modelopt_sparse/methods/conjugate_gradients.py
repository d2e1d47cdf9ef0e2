"""Masked conjugate gradients: the best values for the weights that a mask keeps, for a quadratic objective."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Stats

SETTLED = 1e-7  # a row whose gradient has shrunk to this share of its first one, in norm, is at its optimum


@dataclass(frozen=True)
class Scaled:
    """What layers with one input share: H with unit diagonal ``[..., C, C]``, and the root of its old one."""

    gram: Tensor
    root_C: Tensor
    dead_C: Tensor  # input channels that were zero in all of the calibration data
    stats: Stats

    @classmethod
    def of(cls, stats: Stats | None, damping: float) -> "Scaled":
        assert stats is not None
        assert stats.gram is not None
        gram = stats.gram.clone()
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        dead_C = diagonal == 0
        # a dead channel never reaches the output: a unit pivot decouples it from all others
        diagonal.add_(damping * diagonal.mean(-1, keepdim=True) + dead_C.to(gram.dtype))
        root_C = diagonal.sqrt()
        return cls(gram / root_C.unsqueeze(-1) / root_C.unsqueeze(-2), root_C, dead_C, stats)


def refit(
    target: Tensor, start: Tensor, mask: Tensor, gram: Tensor, iterations: int, pull: Tensor | None = None
) -> Tensor:
    """Minimize tr((T - Q) H (T - Q)^T) over Q supported on ``mask``, from ``start``, all ``[..., R, C]``.

    Conjugate gradients for all rows at once, with one product per iteration and step lengths per row, as every row is
    a system of its own. ``pull`` is (T - start) H, if it is known.
    """
    solution = start.clone()
    residual = ((target - start) @ gram if pull is None else pull).masked_fill(~mask, 0)
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


def squared_error(target: Tensor, solution: Tensor, gram: Tensor) -> Tensor:
    """The diagonal of E H E^T with E = T - Q, ``[..., R, 1]``, summed in float64."""
    delta = target - solution
    return ((delta @ gram) * delta).sum(-1, keepdim=True, dtype=torch.float64)
