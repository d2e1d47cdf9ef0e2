"""Which process solves what, where several make one model sparse: layers, or some of the experts of one, are dealt out
by what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelopt_sparse.calibration.run import Run
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.solving.pieces import ALL_ROWS, WHOLE, Piece, SolvedPiece

PieceKey = tuple[str, int]  # a layer's name, and the first of its matrices that one process solves


@dataclass(frozen=True)
class WorkShares:
    """Who solves each piece of the layers that are solved now. One process by itself solves all.

    whole_layers: experts are not dealt out by themselves. Those that are solved so many at a time for want of memory
      are, in turns, because their statistics are formed by all processes together.
    """

    processes: Processes
    whole_layers: bool
    owners: Mapping[PieceKey, int]

    @classmethod
    def of(cls, groups: Sequence[Sequence[LayerPlan]], run: Run) -> "WorkShares":
        """Deal out the layers of some groups, which share an input and what is prepared from it: the costliest first,
        each to the process that would be done with it first."""
        owners: dict[PieceKey, int] = {}
        size = run.processes.size
        shares = cls(run.processes, run.config.deterministic, owners)
        load = [0.0] * size
        has: list[set[int]] = [set() for _ in load]  # the groups whose preparation a process has paid for
        waiting: list[tuple[float, float, int, PieceKey]] = []
        for number, group in enumerate(groups):
            for layer_plan in group:
                *_, rows, columns = layer_plan.shape
                for turn, experts in enumerate(shares.pieces(layer_plan)):
                    prepared, solved = len(experts) * columns**3 / 3, len(experts) * rows * columns**2
                    key = (layer_plan.name, experts.start)
                    if layer_plan.at_once is not None:
                        owners[key] = turn % size
                        load[turn % size] += prepared + solved
                    else:
                        alone = len(experts) < layer_plan.matrices  # experts share no preparation
                        waiting.append((solved, prepared, -1 - len(waiting) if alone else number, key))
        for solved, prepared, group, key in sorted(waiting, key=lambda work: -work[0]):
            ends = [now + solved + (0 if group in known else prepared) for now, known in zip(load, has)]
            owner = ends.index(min(ends))
            load[owner], owners[key] = ends[owner], owner
            has[owner].add(group)
        return shares

    def pieces(self, layer_plan: LayerPlan) -> list[range]:
        """The matrices of a layer that one process solves, for all processes."""
        step, size = layer_plan.at_once or layer_plan.matrices, self.processes.size
        if size == 1:
            step = layer_plan.matrices
        elif (
            layer_plan.at_once is None and not self.whole_layers and isinstance(layer_plan.layer.adapter, RoutedAdapter)
        ):
            step = -(-layer_plan.matrices // size)
        return [range(start, min(start + step, layer_plan.matrices)) for start in range(0, layer_plan.matrices, step)]

    def turns(self, layer_plan: LayerPlan) -> list[list[range]]:
        """The pieces by turns, in which every process has at most one of those that were dealt out in turns."""
        pieces, size = self.pieces(layer_plan), self.processes.size
        return [pieces[first : first + size] for first in range(0, len(pieces), size)]

    def is_mine(self, layer_plan: LayerPlan, experts: range) -> bool:
        """Whether this process solves these."""
        return self.owners[layer_plan.name, experts.start] == self.processes.rank

    def exchange(
        self, layer_plan: LayerPlan, own: dict[PieceKey, SolvedPiece], device: torch.device
    ) -> list[SolvedPiece]:
        """What the processes have solved of a layer, in all of them. What this one has solved is taken out of ``own``;
        the rest comes to ``device``."""
        pieces = []
        for experts in self.pieces(layer_plan):
            key = (layer_plan.name, experts.start)
            owner, part = self.owners[key], own.pop(key, None)
            whole = len(experts) == layer_plan.matrices
            piece = WHOLE if whole else Piece(slice(experts.start, experts.stop), ALL_ROWS)
            facts = None
            if part is None:
                shape = layer_plan.shape if whole else (len(experts), *layer_plan.shape[-2:])
                values = torch.empty(shape, dtype=layer_plan.layer.parameter.dtype, device=device)
                mask = torch.empty(shape, dtype=torch.bool, device=device)
            else:
                values, mask = part.solution.weight, part.solution.mask
                facts = (part.solution.error, part.solution.notes, part.steps, part.energy)
            facts = self.processes.broadcast(f"layer {layer_plan.name!r}", [values, mask], owner, facts)
            error, notes, steps, energy = facts
            pieces.append(part or SolvedPiece(piece, Solution(values, mask, error, notes), steps, energy))
        return pieces
