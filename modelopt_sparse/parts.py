"""A layer of experts that is solved a few experts at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Solution, Stats, output_energy
from modelopt_sparse.methods.given import GivenMask
from modelopt_sparse.plan import LayerPlan
from modelopt_sparse.report import StepReport


@dataclass(frozen=True)
class Part:
    """Some experts, or all of a layer, solved; ``energy`` is what their errors are relative to, the squared norm of
    their dense output (1 if these are all)."""

    solution: Solution
    steps: list[StepReport]
    experts: int
    energy: float

    @classmethod
    def of(
        cls, layer: LayerPlan, solution: Solution, steps: list[StepReport], weight: Tensor, stats: Stats | None
    ) -> "Part":
        experts = torch.Size(weight.shape[:-2]).numel()
        energy = 1.0 if experts == layer.matrices else output_energy(weight, stats)
        return cls(solution, steps, experts, energy)


def some_experts(target: LayerPlan, experts: range) -> LayerPlan:
    """The plan of a layer as that of some of its experts."""
    method = target.method
    if isinstance(method, GivenMask) and method.mask is not None:
        method = GivenMask(method.mask[experts.start : experts.stop])
    return replace(target, shape=(len(experts), *target.shape[1:]), method=method)


def joined(found: Sequence[Part]) -> tuple[Solution, list[StepReport]]:
    """The solution of all experts of a layer, and its steps: errors are relative to the energy of all of them."""
    if len(found) == 1:
        return found[0].solution, found[0].steps
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
    solution = Solution(
        torch.cat([part.solution.weight for part in found]),
        torch.cat([part.solution.mask for part in found]),
        sum(part.energy * part.solution.error for part in found) / total if total > 0 else 0.0,
        tuple(dict.fromkeys(note for part in found for note in part.solution.notes)),
    )
    return solution, steps
