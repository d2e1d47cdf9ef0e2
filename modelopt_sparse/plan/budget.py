"""Budgets: how much a model may cost, and which choice for each layer loses least within that.

Shape letters: N layers, K choices of each, S partial plans.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from modelopt_sparse.methods.patterns import Pattern, Unstructured, parse_pattern
from modelopt_sparse.reports.text import nearest

# what the user asks for -----------------------------------------------------------------------------------------------


UNITS = ("zeros", "bytes", "flops")
NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%?)\s*(\w+)\s*")
DENSE, AUTO = "dense", "auto"
LEVELS, HIGHEST = (DENSE, *(f"{level}%" for level in range(20, 85, 5))), 0.8


@dataclass(frozen=True)
class Budget:
    """So much of a unit: ``amount``, or, if ``of_dense``, that share of what the dense layers have.

    optional: it came from "auto". Where losses cannot be measured, the layers get the pattern instead.
    """

    unit: str
    amount: Fraction
    of_dense: bool
    optional: bool = False

    def __str__(self) -> str:
        return f"{float(self.amount * 100):g}% {self.unit}" if self.of_dense else f"{float(self.amount):g} {self.unit}"

    def ceiling(self, dense: int) -> int:
        """The most that layers may cost, which cost ``dense`` now; of zeros, the weights that may stay."""
        amount = self.amount * (dense if self.of_dense else 1)
        return dense - math.ceil(amount) if self.unit == "zeros" else math.floor(amount)


def parse_budget(value: Any, units: Collection[str] = UNITS) -> Budget | None:
    """``"35% zeros"`` or ``"4.2e9 bytes"``, of ``units``. Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, Budget):
        return value
    if not isinstance(value, str):
        raise TypeError(f"budget={value!r}: give text, such as '35% {min(units)}'")
    match = NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"budget={value!r}: say how much, and of what ({', '.join(units)}): '35% {min(units)}' or so")
    amount, percent, unit = Fraction(match[1]), bool(match[2]), match[3]
    problem = ""
    if unit not in units:
        problem = f"unit {unit!r} is not known{nearest(unit, units)}; allowed are {', '.join(units)}"
    elif amount <= 0 or (percent and amount > 100):
        problem = "a budget is more than 0, and a share at most 100 %"
    elif not percent and amount < 1:
        problem = f"less than one of the {unit}: write a share with %, such as '35% {unit}'"
    if problem:
        raise ValueError(f"budget={value!r}: {problem}")
    return Budget(unit, amount / 100 if percent else amount, percent)


def zeros_of(pattern: Unstructured) -> tuple[Budget, tuple[Pattern | None, ...]]:
    """An optional budget of as many zeros as a pattern has, and LEVELS with its scope."""
    levels = (replace(pattern, sparsity=each.sparsity) for each in map(parse_pattern, LEVELS[1:]))
    return Budget("zeros", Fraction(str(pattern.sparsity)), of_dense=True, optional=True), (None, *levels)


def parse_choices(value: Any, where: str = "choices") -> tuple[Pattern | None, ...]:
    """Patterns, and "dense" (None), from a list, or text with commas, of what ``pattern=`` takes; at least one is a
    pattern."""
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",")]
    if not isinstance(value, Iterable):
        raise TypeError(f"{where}={value!r}: give a list, such as ['dense', '2:4']")
    parsed = [*map(parse_choice, value)]
    if not any(parsed):
        raise ValueError(f"{where}={value!r}: give at least one pattern beside 'dense'")
    return tuple(dict.fromkeys(parsed))


def parse_choice(value: Any) -> Pattern | None:
    return None if value in (DENSE, None) else parse_pattern(value)


# the choice -----------------------------------------------------------------------------------------------------------


STATES = 20_000  # partial plans that are held: far more than an exact choice takes but for adversarial losses
LEAST, DOUBLINGS = -140, 210  # the price of a cost is 2**LEAST, which is as good as none, doubled up to so many times
STEPS = 2**60  # between which prices are told apart


def choose(losses_NK: np.ndarray, costs_NK: np.ndarray, ceiling: int) -> np.ndarray | None:
    """The choice [N] of the smallest sum of losses with costs within a ceiling; None if there is none.

    Costs get the lowest price at which the cheapest choices meet the ceiling (Lagrange). What these lose more than the
    bound that the price gives is little, and all plans that lose no more are gone through, layer by layer. Those
    partial plans stay that no other one beats in both cost and loss (dynamic programming, Pisinger 1995).
    """
    least_N = costs_NK.min(1)
    if least_N.sum() > ceiling:
        return None

    def priced(step: int) -> tuple[float, np.ndarray, np.ndarray]:
        """(a price, losses and priced costs, the choice [N] of the least of them; of equal ones the cheapest)."""
        price = 2 ** (LEAST + DOUBLINGS * step / STEPS)
        priced_NK = losses_NK + price * costs_NK
        return price, priced_NK, np.lexsort((costs_NK, priced_NK))[:, 0]

    step = bisect_left(range(STEPS), True, key=lambda step: _sum(costs_NK, priced(step)[-1]) <= ceiling)
    price, priced_NK, start = priced(step)
    more_NK = priced_NK - priced_NK.min(1, keepdims=True)  # than the bound: what a choice adds to it
    loss, bound = _sum(losses_NK, start), priced_NK.min(1).sum() - price * ceiling
    gap = (loss - bound) * (1 + 1e-9)
    room_N = ceiling - least_N.sum() + least_N.cumsum()  # others cheapest
    plans, costs_S, sums = np.empty((1, 0), np.int16), np.zeros(1, np.int64), np.zeros((2, 1))
    for n in range(len(losses_NK)):
        costs_S = (costs_S[:, None] + costs_NK[n]).ravel()
        sums = (sums[..., None] + np.stack((losses_NK[n], more_NK[n]))[:, None]).reshape(2, -1)
        inside = np.flatnonzero((sums[1] <= gap) & (costs_S <= room_N[n]))
        inside = inside[np.lexsort((sums[0, inside], costs_S[inside]))]
        best = np.minimum.accumulate(np.append(np.inf, sums[0, inside]))[:-1]  # of the cheaper ones
        inside = inside[sums[0, inside] < best]
        inside = inside[np.argsort(sums[1, inside], kind="stable")[:STATES]]
        plans = np.column_stack((plans[inside // losses_NK.shape[1]], inside % losses_NK.shape[1]))
        costs_S, sums = costs_S[inside], sums[:, inside]
    return plans[sums[0].argmin()] if len(plans) and sums[0].min() < loss else start


def _sum(values_NK: np.ndarray, choice_N: np.ndarray) -> Any:
    return values_NK[np.arange(len(choice_N)), choice_N].sum()
