"""Budgets: how much a model may cost, and which choice for each layer loses least within that.

Shape letters: N layers, K choices of each (those that a layer lacks have an infinite loss), B budgets, one or two.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_sparse.methods.patterns import Pattern, parse_pattern
from modelopt_sparse.reports.fold import nearest

# what the user asks for -----------------------------------------------------------------------------------------------


UNITS = {"zeros": 1, "bytes": 1, "flops": 1, "ms": 10**6, "kl": 1}  # unit -> how many one is, of those that are counted
NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%?)\s*(\w+)\s*")
DENSE = "dense"
LEVELS = (DENSE, *(f"{level}%" for level in range(20, 85, 5)))
RUNTIMES = ("cusparselt", "cutlass")


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
        amount = self.amount * (dense if self.of_dense else UNITS[self.unit])
        return dense - math.ceil(amount) if self.unit == "zeros" else math.floor(amount)


class Budget(tuple[Limit, ...]):
    """What `parse_budget` makes of the option: one limit, or two."""

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


def _limit(text: str, units: Collection[str]) -> Limit:
    match, allowed = NUMBER.fullmatch(text), ", ".join(units)
    if match is None:
        raise ValueError(
            f"budget={text!r}: say how much, and of what ({allowed}): write for example '35% {next(iter(units))}'"
        )
    amount, percent, unit = Fraction(match[1]), bool(match[2]), match[3]
    problem = ""
    if unit not in units:
        problem = f"unit {unit!r} is not known{nearest(unit, units)}; allowed are {allowed}"
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
    parsed = [None if each in (DENSE, None) else parse_pattern(each) for each in value]
    if not any(parsed):
        raise ValueError(f"{where}={value!r}: give at least one pattern beside 'dense'")
    return tuple(dict.fromkeys(parsed))


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
        problem = f"timings={str(value)[:60]!r} are no speed report ({error!r})"
        raise ValueError(f"{problem}: give one, or the path of what `speed --json` printed") from None
    return {name: tuple(map(sum, zip(*of_counts))) for name, of_counts in times.items() if of_counts}


# the choice -----------------------------------------------------------------------------------------------------------


STATES = 20_000  # partial plans that are held: far more than an exact choice takes but for adversarial losses
PRICES = -140.0, 70.0  # powers of two, between which the price of a cost lies
BISECTIONS = 60


def choose(losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int]) -> np.ndarray | None:
    """The choice [N] of the smallest sum of losses with costs within one ceiling, or two; None if there is none.

    With two the second's price is searched by bisection. What that leaves is used by exchanges of single choices.
    """
    costs_BNK = np.where(np.isinf(losses_NK), costs_BNK.max(), costs_BNK)
    if (costs_BNK.min(-1).sum(-1) > ceilings).any():
        return None

    def at(price: float) -> np.ndarray:
        return _within_first(losses_NK + price * costs_BNK[-1], costs_BNK[0], ceilings[0])

    _, choice_N = _priced(at, costs_BNK[-1], ceilings[-1])
    within = all(_sum(costs_NK, choice_N) <= ceiling for costs_NK, ceiling in zip(costs_BNK, ceilings))
    return _exchanged(choice_N, losses_NK, costs_BNK, ceilings) if within else None


def _sum(values_NK: np.ndarray, choice_N: np.ndarray) -> Any:
    return values_NK[np.arange(len(choice_N)), choice_N].sum()


def _priced(at: Callable[[float], np.ndarray], costs_NK: np.ndarray, ceiling: int) -> tuple[float, np.ndarray]:
    """The lowest price of a cost whose choice, ``at`` it, meets the ceiling, and that choice."""
    if _sum(costs_NK, free := at(0.0)) <= ceiling:
        return 0.0, free
    low, high = PRICES
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _sum(costs_NK, at(2**middle)) <= ceiling else (middle, high)
    return 2**high, at(2**high)


def _within_first(losses_NK: np.ndarray, costs_NK: np.ndarray, ceiling: int) -> np.ndarray:
    """The choice within one ceiling, which some choice keeps.

    Costs get the price at which the cheapest choices meet the ceiling (Lagrange). What these lose more than the bound
    that the price gives is little, and all plans that lose no more are gone through, layer by layer; of partial plans
    those stay that no other one beats in both cost and loss (dynamic programming, Pisinger 1995).
    """

    def at(price: float) -> np.ndarray:
        """Of equal ones the cheapest, and of these the first."""
        return np.lexsort((costs_NK, losses_NK + price * costs_NK), axis=-1)[:, 0]

    price, start = _priced(at, costs_NK, ceiling)
    priced = losses_NK + price * costs_NK
    more_NK = priced - priced.min(1, keepdims=True)  # than the bound: what a choice adds to it
    gap = (_sum(losses_NK, start) - priced.min(1).sum() + price * ceiling) * (1 + 1e-9)
    room = ceiling - costs_NK.min(1).sum() + costs_NK.min(1).cumsum()  # for the first layers, the others cheapest
    plans, sums = np.empty((1, 0), np.int16), (np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    for n in range(len(losses_NK)):
        each_sum = (np.add.outer(sum_, of[n]).ravel() for sum_, of in zip(sums, (costs_NK, losses_NK, more_NK)))
        cost, loss, more = each_sum
        inside = np.flatnonzero((more <= gap) & (cost <= room[n]))
        inside = inside[np.lexsort((loss[inside], cost[inside]))]
        best = np.minimum.accumulate(np.append(np.inf, loss[inside]))[:-1]  # of the cheaper ones
        inside = inside[loss[inside] < best]
        inside = inside[np.argsort(more[inside], kind="stable")[:STATES]]
        plans = np.column_stack((plans[inside // losses_NK.shape[1]], inside % losses_NK.shape[1]))
        sums = cost[inside], loss[inside], more[inside]
    better = len(plans) and sums[1].min() < _sum(losses_NK, start)
    return plans[sums[1].argmin()] if better else start


def _exchanged(
    choice_N: np.ndarray, losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int]
) -> np.ndarray:
    """Exchange one layer's choice, the one that gains most, as long as that lowers the loss within the ceilings."""
    choice_N, layers = choice_N.copy(), np.arange(len(choice_N))
    while True:
        room_B = np.array(ceilings) - costs_BNK[:, layers, choice_N].sum(-1)
        extra_BNK = costs_BNK - costs_BNK[:, layers, choice_N][..., None]
        fits = (extra_BNK <= room_B[:, None, None]).all(0)
        gain = np.where(fits, losses_NK[layers, choice_N][:, None] - losses_NK, 0)
        n, k = np.unravel_index(gain.argmax(), gain.shape)
        if gain[n, k] <= 1e-12 * abs(losses_NK[n, choice_N[n]]):
            return choice_N
        choice_N[n] = k
