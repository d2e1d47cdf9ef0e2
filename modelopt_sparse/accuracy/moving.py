"""Masks that move while a block is tuned: SR-STE (Zhou et al. 2021, arXiv 2102.04010), from a solution on.

Every weight, pruned or not, has a value that Adam tunes; the block runs with those that count most, by the pattern.
Gradients reach pruned values as if they were in place (straight through), and pruned values shrink a little with each
step. Some way before the end the masks stay, so that the values settle.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.methods.patterns import NM, Pattern
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import named_masks, update_mask

MOVING = 0.6  # of all steps; after them masks stay
DECAY = 0.02  # share that a pruned value loses in a step at the full learning rate
BELOW = 0.95  # pruned values begin with at most this share of the score of the least kept one in their group


@dataclass(frozen=True)
class Movable:
    """A weight whose mask moves.

    norms: ``[..., 1, C]``, the size of each input channel. dense: the values from before it was pruned,
    shaped like the parameter.
    """

    layer: Layer
    pattern: Pattern
    norms: Tensor
    dense: Tensor

    @classmethod
    def of(cls, layer: Layer, pattern: Pattern, square_sums: Tensor) -> "Movable":
        """Of a layer that is not yet solved; its values are copied, and the mask that the pattern is ``within``. A
        channel that was zero in all data counts as much as the least of the others."""
        norms = square_sums.float().sqrt()
        least = norms.masked_fill(norms == 0, torch.inf).amin(-1, keepdim=True)
        norms = torch.where(norms == 0, least.masked_fill(least.isinf(), 1.0), norms)
        if pattern.within is not None:  # the layer's own, which moves
            pattern = replace(pattern, within=pattern.within.clone())
        return cls(layer, pattern, norms.unsqueeze(-2), layer.values.clone())

    def start(self, values: Tensor, mask: Tensor) -> Tensor:
        """Solved ``values`` where the mask keeps them. Elsewhere the dense ones, made small enough for the mask to be
        what their scores lead to."""
        norms, pattern = self.norms.to(values.device), self.pattern
        scores = self.layer.matrix(values).abs() * norms
        scores = scores.masked_fill(~self.layer.matrix(mask), torch.inf)
        if isinstance(pattern, NM):
            least = scores.unflatten(-1, (-1, pattern.m)).amin(-1).repeat_interleave(pattern.m, dim=-1)
        else:
            least = scores.amin(-1 if pattern.scope == "row" else (-2, -1), keepdim=True).expand_as(scores)
        limit = self.layer.unmatrix(BELOW * least / norms)
        return torch.where(mask, values, self.dense.to(values).clamp(-limit, limit))

    def mask(self, values: Tensor) -> Tensor:
        """The mask of values, shaped like the parameter: by the pattern, with scores ``|w| * norm``."""
        scores = self.layer.matrix(values).abs() * self.norms.to(values.device)
        return self.layer.unmatrix(self.pattern.mask(scores))

    def set_mask(self, mask: Tensor) -> None:
        """On every module that holds the weight and carries a mask."""
        for module in (self.layer.owner, *self.layer.tied_modules):
            if self.layer.param in dict(named_masks(module)):
                update_mask(module, self.layer.param, mask)


def moves(step: int, steps: int) -> bool:
    """Whether masks move after this one of all steps (0, 1, ...)."""
    return step + 1 < MOVING * steps


def shrunk(values: Tensor, mask: Tensor, schedule: float) -> Tensor:
    """Values of which the pruned ones are a little smaller; ``schedule``: the learning rate's, from 1 to 0."""
    return torch.where(mask, values, values * (1 - DECAY * schedule))
