"""A layer that is solved in parts: a few experts at a time, or some rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Solution, Stats, output_energy
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import StepReport


@dataclass(frozen=True)
class Piece:
    """Where a part of a layer lies: its experts (all of anything else), and its rows."""

    experts: slice
    rows: slice

    def of(self, matrix: Tensor) -> Tensor:
        """A view of this piece of ``[E, R, C]``, or of ``[..., R, C]`` for all experts."""
        return matrix[self.experts][..., self.rows, :]

    def within(self, other: "Piece") -> "Piece":
        """The same place counted from the first expert of a piece with all rows that it is part of."""
        first = other.experts.start or 0
        if not first:
            return self
        return Piece(slice(self.experts.start - first, self.experts.stop - first), self.rows)


WHOLE = Piece(slice(None), slice(None))


@dataclass(frozen=True)
class Part:
    """A piece, or all of a layer, solved; ``energy`` is what its errors are relative to, the squared norm of its dense
    output (1 if it is all)."""

    piece: Piece
    solution: Solution
    steps: list[StepReport]
    energy: float

    @classmethod
    def of(
        cls,
        layer: LayerPlan,
        piece: Piece,
        solution: Solution,
        steps: list[StepReport],
        weight: Tensor,
        stats: Stats | None,
    ) -> "Part":
        energy = 1.0 if weight.numel() == layer.size else output_energy(weight, stats)
        return cls(piece, solution, steps, energy)


def some_of(target: LayerPlan, piece: Piece) -> LayerPlan:
    """The plan of a layer as that of a piece of it."""
    shape = piece.of(torch.empty(target.shape, device="meta")).shape
    method = target.method
    if isinstance(method, GivenMask) and method.mask is not None:
        method = GivenMask(piece.of(method.mask))
    return replace(target, shape=tuple(shape), method=method)


def joined(piece: Piece, shape: Sequence[int], found: Sequence[Part], notes: Sequence[str] = ()) -> Part:
    """Parts that make up ``piece``, whose weights are of ``shape``, as one; errors are relative to the energy of all of
    them. ``notes`` are added to those of the parts."""
    if len(found) == 1 and not notes:
        return found[0]
    total = sum(part.energy for part in found)

    def error(errors: Iterable[float | None]) -> float | None:
        known = [(part.energy, value) for part, value in zip(found, errors)]
        if any(value is None for _, value in known):
            return None
        return sum(energy * (value or 0.0) for energy, value in known) / total if total > 0 else 0.0

    steps = [
        StepReport(same[0].step, error(step.error for step in same), round(sum(step.seconds for step in same), 4))
        for same in zip(*(part.steps for part in found))
    ]
    first = found[0].solution
    weight, mask = first.weight.new_empty(shape), first.mask.new_empty(shape)
    for part in found:
        place = part.piece.within(piece)
        place.of(weight).copy_(part.solution.weight)
        place.of(mask).copy_(part.solution.mask)
    error_of_all = sum(part.energy * part.solution.error for part in found) / total if total > 0 else 0.0
    said = dict.fromkeys(note for part in found for note in part.solution.notes)
    return Part(piece, Solution(weight, mask, error_of_all, (*said, *notes)), steps, total)
