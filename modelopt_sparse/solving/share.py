"""Layers of a block that several processes solve: which process solves what, and how it gets to all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from modelopt_sparse.calibration.stats import DeferredStats
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.values import StepReport
from modelopt_sparse.run import Run

InputStats = Stats | DeferredStats | None  # None where a method needs none


@dataclass(frozen=True)
class SolvedPiece:
    """A piece, or all of a layer, solved; ``energy`` is what its errors are relative to, the squared norm of its dense
    output (1 if it is all)."""

    solution: Solution
    steps: list[StepReport]
    energy: float


def assign_owners(groups: Sequence[Sequence[LayerPlan]], run: Run) -> dict[str, dict[range, int]]:
    """Layer name -> experts (all of anything else) -> the rank that solves them. Layers of a group share an input and
    what is prepared from it. The costliest are dealt out first, each to the process that would be done with it
    first.

    A layer costs the seconds that one of its kind took before, if they are known of all layers, else a count of
    operations. Experts are dealt out in ranges; those that are solved so many at a time for want of memory in turns, so
    that no process holds the rows of more than those at a time.
    """
    size = run.processes.size
    owners: dict[str, dict[range, int]] = {}
    load = [0.0] * size
    has: list[set[int]] = [set() for _ in load]  # the groups whose preparation a process has paid for
    waiting: list[tuple[float, float, int, str, range]] = []
    kinds = {layer_plan.name: kind_of_layer(layer_plan) for group in groups for layer_plan in group}
    measured = run.solve_seconds.keys() >= {*kinds.values()}
    for number, group in enumerate(groups):
        for layer_plan in group:
            *_, rows, columns = layer_plan.shape
            matrices = step = layer_plan.matrices
            if layer_plan.at_once is not None:
                step = layer_plan.at_once
            elif layer_plan.routed:
                step = -(-matrices // size)
            pieces = [range(start, min(start + step, matrices)) for start in range(0, matrices, step)]
            owners[layer_plan.name] = {experts: turn % size for turn, experts in enumerate(pieces)}
            for experts, owner in owners[layer_plan.name].items():
                prepared, solved = len(experts) * columns**3 / 3, len(experts) * rows * columns**2
                if measured:  # with what was prepared for it
                    prepared, solved = 0, len(experts) / matrices * run.solve_seconds[kinds[layer_plan.name]]
                if layer_plan.at_once is not None:
                    load[owner] += prepared + solved
                else:
                    alone = len(experts) < matrices  # experts share no preparation
                    group_number = -1 - len(waiting) if alone else number
                    waiting.append((solved, prepared, group_number, layer_plan.name, experts))
    for solved, prepared, number, name, experts in sorted(waiting, key=lambda work: -work[0]):
        ends = [busy + solved + (0 if number in known else prepared) for busy, known in zip(load, has)]
        owner = ends.index(min(ends))
        load[owner], owners[name][experts] = ends[owner], owner
        has[owner].add(number)
    return owners


def kind_of_layer(layer_plan: LayerPlan) -> tuple:
    """The key of layers that take about the same time."""
    return layer_plan.recipe, layer_plan.shape, str(layer_plan.pattern)


def own_work(owners: Mapping[range, int], stats: InputStats, run: Run) -> Iterator[tuple[range, InputStats]]:
    """The experts of a layer (or all of one that has none) that this process solves, with what forms their sums. They
    come in turns, so that each process holds the rows of at most one of those that are dealt out so. Collective."""
    parts, size = [*owners.items()], run.processes.size
    for first in range(0, len(parts), size):
        work: list[tuple[range, InputStats]] = []
        for experts, owner in parts[first : first + size]:
            sent = stats.sent_to(owner, experts, run.processes) if isinstance(stats, DeferredStats) else stats
            if owner == run.processes.rank:
                work.append((experts, sent))
        yield from work


def exchanged(
    layer_plan: LayerPlan, owners: Mapping[range, int], local: dict[tuple[str, range], SolvedPiece], run: Run
) -> list[SolvedPiece]:
    """Send the solved pieces of a layer to all processes. Those of this process are taken out of ``local``."""
    device = run.config.device or layer_plan.layer.values.device
    pieces = []
    for experts, owner in owners.items():
        shape = (len(experts), *layer_plan.shape[-2:]) if layer_plan.routed else layer_plan.shape
        part, facts = local.pop((layer_plan.name, experts), None), None
        if part is None:
            weight = torch.empty(shape, dtype=layer_plan.layer.parameter.dtype, device=device)
            mask = torch.empty(shape, dtype=torch.bool, device=device)
        else:
            weight, mask = part.solution.weight, part.solution.mask.contiguous()
            facts = (part.solution.error, part.solution.notes, part.steps, part.energy)
        by_rank = run.processes.broadcast(f"layer {layer_plan.name!r}", [weight, mask], [owner] * 2, facts)
        error, notes, steps, energy = by_rank[owner]
        pieces.append(part or SolvedPiece(Solution(weight, mask, error, notes), steps, energy))
    return pieces
