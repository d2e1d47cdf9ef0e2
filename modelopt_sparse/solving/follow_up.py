"""What follows a method's solution of one layer: the dense values back, a refined mask, polished values.

Each step is pure. Refinement and polish leave no row worse by their own objectives; dense values may.
"""

import time
from collections.abc import Callable

from torch import Tensor

from modelopt_sparse.methods.base import Solution, Stats, masked_solution
from modelopt_sparse.methods.conjugate_gradients import Scaled
from modelopt_sparse.methods.polish import polish
from modelopt_sparse.methods.refine import DAMPING, refine
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import StepReport


def improved(
    target: LayerPlan,
    weight: Tensor,
    solution: Solution,
    stats: Stats | None,
    scaled: Callable[[], Scaled],
    config: SparsifyConfig,
) -> tuple[Solution, list[StepReport]]:
    """The solution of ``target`` after its steps, and what each of them left. ``scaled`` gives the state that polish
    shares with other layers of the same input."""
    known: dict[str, Callable[[Solution], Solution]] = {
        "dense-values": lambda found: masked_solution(weight, found.mask, stats),
        "refine": lambda found: _refined(weight, found, stats, target, config.refine),
        "polish": lambda found: polish(weight, found, scaled(), config.polish),
    }
    reports = []
    for step in target.steps:
        if step in known:
            began = time.perf_counter()
            solution = known[step](solution)
            reports.append(StepReport.of(step, solution, time.perf_counter() - began))
    return solution, reports


def _refined(weight: Tensor, solution: Solution, stats: Stats | None, target: LayerPlan, sweeps: int) -> Solution:
    assert stats is not None
    return masked_solution(weight, refine(weight, solution.mask, stats, target.pattern, sweeps, DAMPING), stats)
