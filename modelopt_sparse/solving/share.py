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


def assign_owners(layer_plans: Sequence[LayerPlan], run: Run) -> dict[str, dict[range, int]]:
    """Layer name -> experts (all of anything else) -> the rank that solves them. The costliest layers are dealt out
    first, each to the process with the least to do.

    Experts are dealt out in ranges; those that are solved so many at a time for want of memory in turns, so that no
    process holds the rows of more than those at a time.
    """
    size = run.processes.size
    load, owners = [0.0] * size, dict[str, dict[range, int]]()
    for layer_plan in sorted(layer_plans, key=_operations, reverse=True):
        matrices = layer_plan.matrices
        step = layer_plan.at_once or (-(-matrices // size) if layer_plan.routed else matrices)
        owners[layer_plan.name] = {}
        for turn, start in enumerate(range(0, matrices, step)):
            experts = range(start, min(start + step, matrices))
            owner = load.index(min(load)) if layer_plan.at_once is None else turn % size
            load[owner] += _operations(layer_plan) * len(experts) / matrices
            owners[layer_plan.name][experts] = owner
    return owners


def _operations(layer_plan: LayerPlan) -> float:
    """About what it takes to factor a layer's Gram matrices, and to solve it by them."""
    *_, rows, columns = layer_plan.shape
    return layer_plan.matrices * (columns**3 / 3 + rows * columns**2)


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
