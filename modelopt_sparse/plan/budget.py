"""Budgets: how much a model may cost, and which choice for each layer loses least within that.

Shape letters: N layers, K choices of each (those that a layer lacks have an infinite loss), B budgets.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from modelopt_sparse.methods.patterns import Pattern, parse_pattern
from modelopt_sparse.reports.fold import nearest

# what the user asks for -----------------------------------------------------------------------------------------------


UNITS = ("zeros", "params", "bytes", "flops", "ms", "kl")
NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*(\w*)\s*")
DENSE = "dense"
LEVELS = (DENSE, *(f"{level}%" for level in range(20, 85, 5)))


@dataclass(frozen=True)
class Limit:
    """So much of a unit: ``amount``, or, if ``of_dense``, that share of what the dense layers have."""

    unit: str
    amount: Fraction
    of_dense: bool

    def __str__(self) -> str:
        return f"{float(self.amount * 100):g}% {self.unit}" if self.of_dense else f"{float(self.amount):g} {self.unit}"


@dataclass(frozen=True)
class Budget:
    """What `parse_budget` makes of the option: one limit, or two."""

    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))


def parse_budget(value: Any, units: Sequence[str] = UNITS) -> Budget | None:
    """``"35% zeros"``, ``"4.2e9 bytes"``, or a mapping of one or two, ``{"zeros": "35%", "ms": 12}``, with ``units``
    that are allowed. Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return Budget((_limit(value, value, None, units),))
    if not isinstance(value, Mapping) or not 1 <= len(value) <= 2:
        raise TypeError(f"budget={value!r}: give one string, such as '35% zeros', or a mapping of one or two units")
    return Budget(tuple(_limit(value, str(amount), unit, units) for unit, amount in value.items()))


def _limit(written: Any, text: str, unit: Any, units: Sequence[str]) -> Limit:
    match, allowed = NUMBER.fullmatch(text), ", ".join(units)
    named = (match[3] or unit) if match is not None else None
    if match is None or not named or (unit and match[3]):
        example = f"write for example '35% {unit or 'zeros'}'"
        raise ValueError(f"budget={written!r}: say how much, and of what ({allowed}): {example}")
    if named not in units:
        raise ValueError(
            f"budget={written!r}: unit {named!r} is not known{nearest(named, units)}; allowed are {allowed}"
        )
    amount, percent = Fraction(match[1]), bool(match[2])
    if (percent and amount > 100) or amount <= 0 or (named == "kl" and percent):
        problem = "kl is an amount, in nats" if named == "kl" else "a share is more than 0 % and at most 100 %"
        raise ValueError(f"budget={written!r}: {problem}")
    if named in ("zeros", "params", "bytes", "flops") and not percent and amount < 1:
        raise ValueError(
            f"budget={written!r}: less than one of the {named}: write a share with %, such as '35% {named}'"
        )
    return Limit(named, amount / 100 if percent else amount, percent)


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


# what costs are counted by --------------------------------------------------------------------------------------------


RUNTIMES = ("cusparselt", "cutlass")


def timings_of(value: Any) -> dict[str, tuple[float, float]] | None:
    """Layer -> seconds of one call, dense and 2:4, summed over the token counts of a speed report (as a dict)."""
    if value is None:
        return None
    try:
        return {
            layer["name"]: (sum(t["dense"] for t in layer["timings"]), sum(t["sparse"] for t in layer["timings"]))
            for layer in value["layers"]
            if layer["timings"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"timings: no speed report ({error!r}): give one, or what `speed --json` printed") from None


# the choice -----------------------------------------------------------------------------------------------------------


STATES = 20_000  # partial plans that are held: far more than an exact choice takes but for adversarial losses
BISECTIONS = 80


def choose(losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int]) -> np.ndarray | None:
    """The choice [N] of the smallest sum of losses with costs within one ceiling, or two; None if there is none.

    With one, costs get the price at which the cheapest choices meet the ceiling (Lagrange); what these lose more than
    the bound that the price gives is little, and all partial plans within it are gone through (dynamic programming,
    Pisinger 1995). With two the second's price is searched by bisection. Last, single choices are exchanged while that
    lowers the loss.
    """
    cheapest = np.where(np.isinf(losses_NK), np.iinfo(np.int64).max, costs_BNK).min(-1).sum(-1)
    if (cheapest > ceilings).any():
        return None
    if len(ceilings) == 1:
        return _with_one(losses_NK, costs_BNK[0], ceilings[0])
    first, second = costs_BNK
    _, choice_N = _priced(lambda price: _with_one(losses_NK + price * second, first, ceilings[0]), second, ceilings[1])
    return None if choice_N is None else _exchanged(choice_N, losses_NK, costs_BNK, ceilings)


def _sum(values_NK: np.ndarray, choice_N: np.ndarray) -> Any:
    return values_NK[np.arange(len(choice_N)), choice_N].sum()


def _priced(at: Callable[[float], np.ndarray], costs_NK: np.ndarray, ceiling: int) -> tuple[float, np.ndarray | None]:
    """The lowest price of a cost whose choice, ``at`` it, meets the ceiling, and that choice; None if none does."""

    def fits(price: float) -> bool:
        return _sum(costs_NK, at(price)) <= ceiling

    low, high = 0.0, 0.0
    while not fits(high):
        low, high = high, max(high * 8, 1e-40)
        if high > 1e40:
            return high, None
    for _ in range(BISECTIONS if high else 0):
        middle = math.sqrt(max(low, high * 1e-6) * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high, at(high)


def _with_one(losses_NK: np.ndarray, costs_NK: np.ndarray, ceiling: int) -> np.ndarray:
    """The choice within one ceiling, which some choice keeps."""

    def at(price: float) -> np.ndarray:
        """Of equal ones the cheapest, and of these the first."""
        return np.lexsort((costs_NK, losses_NK + price * costs_NK), axis=-1)[:, 0]

    price, start = _priced(at, costs_NK, ceiling)
    assert start is not None
    start = _exchanged(start, losses_NK, costs_NK[None], [ceiling])
    priced = losses_NK + price * costs_NK
    more_NK = priced - priced.min(1, keepdims=True)  # than the bound: what a choice adds to it
    gap = _sum(losses_NK, start) - (priced.min(1).sum() - price * ceiling)
    searched = _searched(losses_NK, costs_NK, more_NK, max(gap, 0.0) * (1 + 1e-9), ceiling, start)
    return _exchanged(searched, losses_NK, costs_NK[None], [ceiling])


def _searched(
    losses_NK: np.ndarray, costs_NK: np.ndarray, more_NK: np.ndarray, gap: float, ceiling: int, start: np.ndarray
) -> np.ndarray:
    """The best of all plans whose choices add no more than ``gap`` to the bound; ``start`` if none is better.

    Of partial plans those stay that no other one beats in both cost and loss."""
    cost, loss, more = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    cheapest = np.where(np.isinf(losses_NK), np.iinfo(np.int64).max, costs_NK).min(1)
    left = cheapest.sum()
    came: list[tuple[np.ndarray, np.ndarray]] = []
    for n in range(len(losses_NK)):
        left -= cheapest[n]
        sums = [
            np.add.outer(have, add[n]).ravel() for have, add in ((cost, costs_NK), (loss, losses_NK), (more, more_NK))
        ]
        inside = np.flatnonzero((sums[2] <= gap) & (sums[0] <= ceiling - left))
        inside = inside[np.lexsort((sums[1][inside], sums[0][inside]))]
        best = np.minimum.accumulate(np.concatenate(([np.inf], sums[1][inside][:-1])))
        inside = inside[sums[1][inside] < best]
        if len(inside) > STATES:
            inside = np.sort(inside[np.argsort(sums[2][inside], kind="stable")[:STATES]])
        cost, loss, more = (each[inside] for each in sums)
        came.append((inside // losses_NK.shape[1], inside % losses_NK.shape[1]))
    if not len(loss) or not loss.min() < _sum(losses_NK, start):
        return start
    place, chosen = int(loss.argmin()), []
    for parents, choices in reversed(came):
        chosen.append(choices[place])
        place = parents[place]
    return np.array(chosen[::-1])


def _exchanged(
    choice_N: np.ndarray, losses_NK: np.ndarray, costs_BNK: np.ndarray, ceilings: Sequence[int]
) -> np.ndarray:
    """Exchange one layer's choice, the one that gains most, as long as that lowers the loss within the ceilings."""
    choice_N, layers = choice_N.copy(), np.arange(len(choice_N))
    while True:
        gain = losses_NK[layers, choice_N][:, None] - losses_NK
        fits = np.ones(gain.shape, bool)
        for costs_NK, ceiling in zip(costs_BNK, ceilings):
            own = costs_NK[layers, choice_N]
            fits &= costs_NK - own[:, None] <= ceiling - own.sum()
        gain = np.where(fits, gain, 0)
        n, k = np.unravel_index(gain.argmax(), gain.shape)
        if gain[n, k] <= 1e-12 * abs(losses_NK[n, choice_N[n]]):
            return choice_N
        choice_N[n] = k
