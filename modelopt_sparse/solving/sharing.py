"""Which process solves what, where several make one model sparse: layers, or some of the experts of one, are dealt out
by what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from modelopt_sparse.distributed import Team
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.solving.pieces import WHOLE, Part, Piece

Share = tuple[str, int]  # a layer's name, and the first of its matrices that one process solves


@dataclass(frozen=True)
class Shares:
    """Who solves each piece of the layers that are solved now. Empty where one process solves all of them."""

    rank: int = 0
    owners: Mapping[Share, int] = field(default_factory=dict)
    whole_layers: bool = True
    size: int = 1

    @classmethod
    def of(cls, groups: Sequence[Sequence[LayerPlan]], team: Team, *, whole_layers: bool) -> "Shares":
        """Deal out the layers of some groups, which share an input and what is prepared from it: the costliest first,
        each to the process that would be done with it first.

        ``whole_layers``: experts are not dealt out by themselves. Those that are solved so many at a time for want of
        memory are, in turns, because their statistics are formed by all processes together.
        """
        if team.size == 1:
            return cls()
        shares = cls(team.rank, {}, whole_layers, team.size)
        owners: dict[Share, int] = {}
        load = [0.0] * team.size
        has: list[set[int]] = [set() for _ in load]  # the groups whose preparation a process has paid for
        waiting: list[tuple[float, float, int, Share]] = []
        for number, group in enumerate(groups):
            for layer in group:
                *_, rows, columns = layer.shape
                for turn, experts in enumerate(shares.pieces(layer)):
                    prepared, solved = len(experts) * columns**3 / 3, len(experts) * rows * columns**2
                    piece = (layer.name, experts.start)
                    if layer.at_once is not None:
                        owners[piece] = turn % team.size
                        load[turn % team.size] += prepared + solved
                    else:
                        alone = len(experts) < layer.matrices  # experts share no preparation
                        waiting.append((solved, prepared, -1 - len(waiting) if alone else number, piece))
        for solved, prepared, group, piece in sorted(waiting, key=lambda item: -item[0]):
            ends = [now + solved + (0 if group in known else prepared) for now, known in zip(load, has)]
            owner = ends.index(min(ends))
            load[owner], owners[piece] = ends[owner], owner
            has[owner].add(group)
        return cls(team.rank, owners, whole_layers, team.size)

    def pieces(self, layer: LayerPlan) -> list[range]:
        """The matrices of a layer that are solved together."""
        step = layer.at_once or layer.matrices
        if layer.at_once is None and not self.whole_layers and isinstance(layer.layer.adapter, RoutedAdapter):
            step = -(-layer.matrices // self.size)
        return [range(start, min(start + step, layer.matrices)) for start in range(0, layer.matrices, step)]

    def mine(self, layer: LayerPlan, experts: range) -> bool:
        """Whether this process solves these."""
        return self.owners.get((layer.name, experts.start), self.rank) == self.rank

    def exchanged(self, layer: LayerPlan, own: Mapping[Share, Part], team: Team, device: torch.device) -> list[Part]:
        """What the processes have solved of a layer, in all of them. ``own``: what this one has solved; the rest comes
        to ``device``."""
        found = []
        for experts in self.pieces(layer):
            share = (layer.name, experts.start)
            owner, part = self.owners[share], own.get(share)
            whole = len(experts) == layer.matrices
            piece = WHOLE if whole else Piece(slice(experts.start, experts.stop), slice(None))
            told = None
            if part is None:
                shape = layer.shape if whole else (len(experts), *layer.shape[-2:])
                values = torch.empty(shape, dtype=layer.layer.parameter.dtype, device=device)
                mask = torch.empty(shape, dtype=torch.bool, device=device)
            else:
                values, mask = part.solution.weight, part.solution.mask
                told = (part.solution.error, part.solution.notes, part.steps, part.energy)
            error, notes, steps, energy = team.give(f"layer {layer.name!r}", [values, mask], owner, told)
            found.append(part or Part(piece, Solution(values, mask, error, notes), steps, energy))
        return found
