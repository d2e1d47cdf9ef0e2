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
from modelopt_sparse.reports.values import StepReport


def follow_up(
    layer_plan: LayerPlan,
    weight: Tensor,
    solution: Solution,
    stats: Stats | None,
    scaled: Callable[[], Scaled],
    config: SparsifyConfig,
) -> tuple[Solution, list[StepReport]]:
    """The solution after the steps of the plan, and what each of them left. ``weight`` is the dense one; ``scaled``
    gives the state that polish shares with other layers of the same input."""
    reports = []
    for step in layer_plan.steps:
        began = time.perf_counter()
        if step == "dense-values":
            solution = masked_solution(weight, solution.mask, stats)
        elif step == "refine":
            assert stats is not None
            mask = refine(weight, solution.mask, stats, layer_plan.pattern, config.refine, DAMPING)
            solution = masked_solution(weight, mask, stats)
        elif step == "polish":
            solution = polish(weight, solution, scaled(), config.polish)
        else:
            continue  # reconstruction follows when all layers of the block are solved
        reports.append(StepReport.of(step, solution.error, time.perf_counter() - began))
    return solution, reports
