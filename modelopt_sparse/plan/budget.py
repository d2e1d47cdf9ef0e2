"""Budgets: how much a model may cost, and which choice for each layer loses least within that.

Shape letters: N layers, K choices of each, B budgets, one or two, S partial plans.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_sparse.methods.patterns import Pattern, Unstructured, parse_pattern
from modelopt_sparse.reports.text import nearest

# what the user asks for -----------------------------------------------------------------------------------------------


UNITS = {"zeros": 1, "bytes": 1, "flops": 1, "ms": 10**6, "kl": 1}  # unit -> how many one is, of those that are counted
NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%?)\s*(\w+)\s*")
DENSE, AUTO = "dense", "auto"
LEVELS, HIGHEST = (DENSE, *(f"{level}%" for level in range(20, 85, 5))), 0.8


@dataclass(frozen=True)
class Limit:
    """So much of a unit: ``amount``, or, if ``of_dense``, that share of what the dense layers have."""

    unit: str
    amount: Fraction
    of_dense: bool

    def __str__(self) -> str:
        return f"{float(self.amount * 100):g}% {self.unit}" if self.of_dense else f"{float(self.amount):g} {self.unit}"

    def ceiling(self, dense: int) -> int:
        """The most that layers may cost, which cost ``dense`` now; of zeros, the weights that may stay."""
        amount = self.amount * (dense if self.of_dense else UNITS.get(self.unit, 1))
        return dense - math.ceil(amount) if self.unit == "zeros" else math.floor(amount)


class Budget(tuple[Limit, ...]):
    """What `parse_budget` makes of the option: one limit, or two.

    optional: it came from "auto". Where losses cannot be measured, the layers get the pattern instead.
    """

    optional: bool = False

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def parse_budget(value: Any, units: Collection[str] = UNITS) -> Budget | None:
    """``"35% zeros"``, ``"4.2e9 bytes"``, or a mapping of one or two, ``{"zeros": "35%", "ms": 12}``, of ``units``.
    Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return Budget([_limit(value, units)])
    if not isinstance(value, Mapping) or not 1 <= len(value) <= 2:
        raise TypeError(f"budget={value!r}: give one string, such as '35% zeros', or a mapping of one or two units")
    return Budget(_limit(f"{amount} {unit}", units) for unit, amount in value.items())


def zeros_of(pattern: Unstructured) -> tuple[Budget, tuple[Pattern | None, ...]]:
    """An optional budget of as many zeros as a pattern has, and LEVELS with its scope."""
    budget = Budget([Limit("zeros", Fraction(str(pattern.sparsity)), of_dense=True)])
    budget.optional = True
    levels = (replace(pattern, sparsity=each.sparsity) for each in map(parse_pattern, LEVELS[1:]))
    return budget, (None, *levels)


def _limit(text: str, units: Collection[str]) -> Limit:
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"budget={text!r}: say how much, and of what ({', '.join(units)}): '35% {min(units)}' or so")
    amount, percent, unit = Fraction(match[1]), bool(match[2]), match[3]
    problem = ""
    if unit not in units:
        problem = f"unit {unit!r} is not known{nearest(unit, units)}; allowed are {', '.join(units)}"
    elif unit == "kl" and percent:
        problem = "kl is an amount, in nats"
    elif amount <= 0 or (percent and amount > 100):
        problem = "a budget is more than 0, and a share at most 100 %"
    elif unit not in ("ms", "kl") and not percent and amount < 1:
        problem = f"less than one of the {unit}: write a share with %, such as '35% {unit}'"
    if problem:
        raise ValueError(f"budget={text!r}: {problem}")
    return Limit(unit, amount / 100 if percent else amount, percent)


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


def parse_timings(value: Any) -> Any:
    """Layer -> seconds of one call, dense and 2:4, summed over the token counts of a speed report or of its JSON file;
    None and what has been parsed before come back. Raises ValueError for anything else."""
    if value is None or (isinstance(value, Mapping) and "layers" not in value):
        return value
    try:
        if isinstance(value, (str, Path)):
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        layers = (value if isinstance(value, Mapping) else value.as_dict())["layers"]
        times = {layer["name"]: [(t["dense"], t["sparse"]) for t in layer["timings"]] for layer in layers}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"timings={str(value)[:60]!r} are no speed report, or its path: {error!r}") from None
    return {name: tuple(map(sum, zip(*of_counts))) for name, of_counts in times.items() if of_counts}


# the choice -----------------------------------------------------------------------------------------------------------


STATES = 20_000  # partial plans that are held: far more than an exact choice takes but for adversarial losses
LEAST, DOUBLINGS = -140, 210  # the price of a cost is 2**LEAST, which is as good as none, doubled up to so many times
STEPS = 2**60  # between which prices are told apart


def choose(losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int]) -> np.ndarray | None:
    """The choice [N] of the smallest sum of losses with costs within one ceiling, or two; None if none is found.

    Costs get the prices at which the cheapest choices meet the ceilings (Lagrange). What these lose more than the bound
    that the prices give is little, and all plans that lose no more are gone through, layer by layer. Under one ceiling
    those partial plans stay that no other one beats in both cost and loss (dynamic programming, Pisinger 1995).
    """
    least_BN = costs_BNK.min(-1)
    if (least_BN.sum(-1) > ceilings).any():
        return None
    prices = _prices(losses_NK, costs_BNK, ceilings)
    priced_NK, start = _cheapest(prices, losses_NK, costs_BNK)
    more_NK = priced_NK - priced_NK.min(1, keepdims=True)  # than the bound: what a choice adds to it
    loss, bound = _sum(losses_NK, start), priced_NK.min(1).sum() - np.dot(prices, ceilings)
    if any(_sum(costs_NK, start) > ceiling for costs_NK, ceiling in zip(costs_BNK, ceilings)):
        start, loss = None, np.inf
    gap = (loss - bound) * (1 + 1e-9)
    room_BN = np.transpose([ceilings]) - least_BN.sum(-1, keepdims=True) + least_BN.cumsum(-1)  # others cheapest
    plans, costs_BS, sums = np.empty((1, 0), np.int16), np.zeros((len(ceilings), 1), np.int64), np.zeros((2, 1))
    for n in range(len(losses_NK)):
        costs_BS = (costs_BS[..., None] + costs_BNK[:, n, None]).reshape(len(ceilings), -1)
        sums = (sums[..., None] + np.stack((losses_NK[n], more_NK[n]))[:, None]).reshape(2, -1)
        inside = np.flatnonzero((sums[1] <= gap) & (costs_BS <= room_BN[:, n, None]).all(0))
        if len(ceilings) == 1:
            inside = inside[np.lexsort((sums[0, inside], costs_BS[0, inside]))]
            best = np.minimum.accumulate(np.append(np.inf, sums[0, inside]))[:-1]  # of the cheaper ones
            inside = inside[sums[0, inside] < best]
        inside = inside[np.argsort(sums[1, inside], kind="stable")[:STATES]]
        plans = np.column_stack((plans[inside // losses_NK.shape[1]], inside % losses_NK.shape[1]))
        costs_BS, sums = costs_BS[:, inside], sums[:, inside]
    return plans[sums[0].argmin()] if len(plans) and sums[0].min() < loss else start


def _sum(values_NK: np.ndarray, choice_N: np.ndarray) -> Any:
    return values_NK[np.arange(len(choice_N)), choice_N].sum()


def _cheapest(prices: Sequence[float], losses_NK: np.ndarray, costs_BNK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(losses and priced costs, the choice [N] of the least of them; of equal ones the cheapest, and of these the
    first)."""
    priced_NK = losses_NK + np.tensordot(prices, costs_BNK, 1)
    return priced_NK, np.lexsort((costs_BNK[0], priced_NK))[:, 0]


def _prices(
    losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int], later: tuple[float, ...] = ()
) -> tuple[float, ...]:
    """The lowest prices at which the cheapest choices meet the ceilings; those of the ``later`` budgets are set."""
    budget = len(ceilings) - len(later) - 1
    if budget < 0:
        return later

    def at(step: int) -> tuple[float, ...]:
        return _prices(losses_NK, costs_BNK, ceilings, (2 ** (LEAST + DOUBLINGS * step / STEPS), *later))

    def meets(step: int) -> bool:
        return _sum(costs_BNK[budget], _cheapest(at(step), losses_NK, costs_BNK)[1]) <= ceilings[budget]

    return at(bisect_left(range(STEPS), True, key=meets))
