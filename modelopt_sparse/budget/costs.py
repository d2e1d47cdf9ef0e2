"""What the layers of a plan may become, what that loses, and what it costs.

Shape letters: N groups of layers that choose together (the experts of a mixture), K choices.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from modelopt_sparse.budget.knapsack import choose
from modelopt_sparse.checks import grouped
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured
from modelopt_sparse.plan.budget import Budget
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan, Plan, takes_shape

GRID = 10_000  # levels have four decimals
BYTES = 2  # of a weight: runtimes pack those in 16 bits, to which others are converted before
Chosen = Mapping[str, Pattern | None]  # layer -> its pattern; None: dense
Losses = dict[str, dict[Pattern | None, float]]  # layer -> choice -> divergence, such as nats per token


def loss_at(losses: Mapping[Pattern | None, float], choice: Pattern | None) -> float:
    """The loss of a choice. Between the sparsities that were solved, and above them, it is a power of the sparsity
    through the two nearest; below the lowest, its third power."""
    if choice in losses or not isinstance(choice, Unstructured):
        return losses[choice]
    points = sorted((p.sparsity, loss) for p, loss in losses.items() if isinstance(p, Unstructured) and loss > 0)
    if not points or not choice.sparsity:
        return 0.0
    pairs = [*pairwise([(points[0][0] / 2, points[0][1] / 8), *points])]
    (s0, loss0), (s1, loss1) = next((pair for pair in pairs if choice.sparsity <= pair[1][0]), pairs[-1])
    return loss0 * (choice.sparsity / s0) ** (math.log(loss1 / loss0) / math.log(s1 / s0))


@dataclass(frozen=True)
class ChoiceCosts:
    """Losses and costs of what the layers of a plan may become.

    config: says what bytes are counted by, and which sparsities are open.
    rows: layer -> how many rows each of its matrices is multiplied with in the dense model for a token, or for a sample
      of a net without tokens.
    """

    plan: Plan
    losses: Losses
    config: SparsifyConfig
    rows: Mapping[str, Fraction]

    @cached_property
    def groups(self) -> list[list[LayerPlan]]:
        """Layers that choose together: the experts of a mixture that are modules in a list; else each by itself."""
        return list(grouped(self.plan.layers, lambda layer_plan: layer_plan.layer.mixture or layer_plan.name).values())

    @cached_property
    def choices(self) -> list[tuple[Pattern | None, ...]]:
        """The choices of each group, equally many: a group that has fewer has its first one several times."""
        by_group = [group[0].choices for group in self.groups]
        most = max(map(len, by_group))
        return [choices + choices[:1] * (most - len(choices)) for choices in by_group]

    def dense(self, unit: str) -> int:
        """The cost of all layers as they are."""
        return self.cost(unit, dict.fromkeys(self.losses))

    def cost(self, unit: str, chosen: Chosen) -> int:
        """The cost of all layers, in whole numbers: weights that stay, bytes, or FLOPs of a token or sample."""
        return sum(self._cost_of(unit, group, chosen) for group in self.groups)

    def _cost_of(self, unit: str, group: Sequence[LayerPlan], chosen: Chosen) -> int:
        total = Fraction()
        for layer in group:
            choice = chosen[layer.name]
            stay = layer.size - zeros_in(layer, choice)
            if unit == "bytes":
                packed = isinstance(choice, NM) and (choice.n, choice.m) == (2, 4)
                packed = packed and layer.type == "Linear" and not layer.layer.tied_modules  # as the runtime asks
                packed = packed and takes_shape(layer.shape)[str(self.config.runtime)]
                total += stay * BYTES + stay // 4 if packed else layer.size * BYTES  # two bits for each that stays
            else:
                total += stay * (2 * self.rows.get(layer.name, 0) if unit == "flops" else 1)
        return math.ceil(total)

    def loss(self, chosen: Chosen, layers: Sequence[LayerPlan] | None = None) -> float:
        """The sum of the losses of all layers, or of these; a sparsity that is no choice is interpolated."""
        return sum(loss_at(self.losses[layer.name], chosen[layer.name]) for layer in layers or self.plan.layers)

    def ceiling(self, budget: Budget) -> int:
        """The most that all layers may cost."""
        return budget.ceiling(self.dense(budget.unit))

    def _of_choices(self, measure: Callable[[Sequence[LayerPlan], Chosen], float]) -> np.ndarray:
        """Measure each group with each of its choices -> [N, K]."""
        return np.array(
            [
                [measure(group, dict.fromkeys((layer.name for layer in group), choice)) for choice in choices]
                for group, choices in zip(self.groups, self.choices)
            ]
        )

    @cached_property
    def losses_NK(self) -> np.ndarray:
        return self._of_choices(lambda group, chosen: self.loss(chosen, group))

    def costs_NK(self, unit: str) -> np.ndarray:
        return self._of_choices(partial(self._cost_of, unit))

    def named(self, choice_N: np.ndarray) -> Chosen:
        chosen = zip(self.groups, self.choices, choice_N)
        return {layer.name: choices[k] for group, choices, k in chosen for layer in group}

    def best(self, budget: Budget) -> Chosen | None:
        """The choice within the budget whose losses have the smallest sum; None if there is none."""
        choice_N = choose(self.losses_NK, self.costs_NK(budget.unit), self.ceiling(budget))
        return None if choice_N is None else self.named(choice_N)

    @cached_property
    def open(self) -> dict[str, Unstructured]:
        """Layer -> a pattern, if it may have any sparsity: no rule gives it choices of its own, or fixes one."""
        patterns: dict[str, Unstructured] = {}
        for layer_plan in self.plan.layers:
            columns = layer_plan.layer.columns(layer_plan.layer.parameter)
            fitting = [c for c in self.config.choices or () if c is None or not c.misfit(columns)]
            pattern = next((x for x in layer_plan.choices if isinstance(x, Unstructured)), None)
            scope = layer_plan.method.scope
            if pattern and layer_plan.choices == tuple(choice and choice.with_scope(scope) for choice in fitting):
                patterns[layer_plan.name] = pattern
        return patterns

    def plain(self, budget: Budget) -> dict[str, Chosen]:
        """Title -> the plan that needs no losses: one sparsity in all layers that may have any, and in others the
        sparsest of their choices up to it; or, where none may, the cheapest choice from the first layer on, so that
        the last ones stay dense. Empty if that is not enough."""
        cheapest = self.named(self.costs_NK(budget.unit).argmin(1))
        by_level, ceiling = bool(self.open), self.ceiling(budget)

        def up_to(choices: Sequence[Pattern | None], sparsity: float) -> Pattern | None:
            ascending = sorted(choices, key=lambda choice: choice.sparsity if choice else 0.0)
            return next((x for x in reversed(ascending) if not x or x.sparsity <= sparsity), ascending[0])

        def at(step: int) -> Chosen:
            if by_level:
                chosen = {layer.name: up_to(layer.choices, step / GRID) for layer in self.plan.layers}
                return chosen | {name: replace(pattern, sparsity=step / GRID) for name, pattern in self.open.items()}
            last = {layer.name for group in self.groups[step:] for layer in group if None in layer.choices}
            return {**cheapest, **dict.fromkeys(last)}

        def fits(step: int) -> bool:
            return self.cost(budget.unit, at(step)) <= ceiling

        steps = range(1, GRID) if by_level else range(len(self.groups) + 1)
        if (index := bisect_left(steps, True, key=fits)) == len(steps):
            return {}
        where = "every layer" if len(self.open) == len(self.plan.layers) else "every layer that rules leave open"
        title = f"{100 * steps[index] / GRID:.3g}% in {where}" if by_level else "the last layers dense"
        return {title: at(steps[index])}

    def filled(self, chosen: Chosen, budget: Budget) -> Chosen:
        """Give back the zeros that a choice has beyond the budget, from all layers alike whose sparsity is open."""
        if budget.unit != "zeros":
            return chosen
        free = [layer for layer in self.plan.layers if layer.name in self.open]
        patterns = [(layer, pattern) for layer in free if isinstance(pattern := chosen[layer.name], Unstructured)]
        return {**chosen, **lowered(patterns, self.ceiling(budget) - self.cost("zeros", chosen))}


def zeros_in(layer_plan: LayerPlan, choice: Pattern | None) -> int:
    return 0 if choice is None else choice.zeros_in(layer_plan.shape)


def lowered(patterns: Sequence[tuple[LayerPlan, Unstructured]], surplus: int) -> dict[str, Unstructured]:
    """Lower all patterns alike until ``surplus`` zeros are gone, but for less than the finest step of a layer: one
    weight of each row or matrix, or 0.0001 of it. Returns layer -> pattern."""
    sizes = [min(math.prod(layer.shape[-1 if pattern.scope == "row" else -2 :]), GRID) for layer, pattern in patterns]

    def at(i: int, step: int) -> Unstructured:
        pattern = patterns[i][1]
        return pattern if step == sizes[i] else replace(pattern, sparsity=round(step / sizes[i], 4))

    def zeros_in(i: int, step: int) -> int:
        return at(i, step).zeros_in(patterns[i][0].shape)

    def shifted(shift: int) -> list[int]:
        exact = [(pattern.sparsity * size, (shift / 2**52 - 1) * size) for (_, pattern), size in zip(patterns, sizes)]
        return [min(max(round(before + change), 0), math.ceil(before)) for before, change in exact]

    def zeros_of(steps: Sequence[int]) -> int:
        return sum(map(zeros_in, range(len(patterns)), steps))

    zeros = sum(pattern.zeros_in(layer.shape) for layer, pattern in patterns) - surplus
    steps = shifted(bisect_left(range(2**53), True, key=lambda shift: zeros_of(shifted(shift)) >= zeros))
    surplus, again = zeros_of(steps) - zeros, True
    while again:
        again = False
        excess = [step / size - pattern.sparsity for (_, pattern), step, size in zip(patterns, steps, sizes)]
        for i in sorted(range(len(patterns)), key=lambda i: -excess[i]):
            less = zeros_in(i, steps[i]) - zeros_in(i, steps[i] - 1) if steps[i] else surplus + 1
            if less <= surplus:
                steps[i], surplus, again = steps[i] - 1, surplus - less, True
    return {layer.name: at(i, steps[i]) for i, (layer, _) in enumerate(patterns)}
