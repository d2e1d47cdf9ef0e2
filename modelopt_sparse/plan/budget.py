"""Budgets: how much a model may cost, and what each layer may become within that."""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from modelopt_sparse.methods.patterns import Pattern, Unstructured, parse_pattern
from modelopt_sparse.reports.text import nearest

BUDGET_UNITS = ("zeros", "bytes", "flops")
BUDGET_TEXT = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%?)\s*(\w+)\s*")
DENSE, AUTO = "dense", "auto"
LEVELS, MAX_BUDGET_SPARSITY = (DENSE, *(f"{level}%" for level in range(20, 85, 5))), 0.8


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


def parse_budget(value: Any, units: Collection[str] = BUDGET_UNITS) -> Budget | None:
    """``"35% zeros"`` or ``"4.2e9 bytes"``, of ``units``. Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, Budget):
        return value
    if not isinstance(value, str):
        raise TypeError(f"budget={value!r}: give text, such as '35% {min(units)}'")
    match = BUDGET_TEXT.fullmatch(value)
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
    patterns = (replace(pattern, sparsity=parsed.sparsity) for parsed in map(parse_pattern, LEVELS[1:]))
    return Budget("zeros", Fraction(str(pattern.sparsity)), of_dense=True, optional=True), (None, *patterns)


def parse_choices(value: Any, where: str = "choices") -> tuple[Pattern | None, ...]:
    """Patterns, and "dense" (None), from a list, or text with commas, of what ``pattern=`` takes; at least one is a
    pattern."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, Iterable):
        raise TypeError(f"{where}={value!r}: give a list, such as ['dense', '2:4']")
    parsed = [*map(parse_choice, value)]
    if not any(parsed):
        raise ValueError(f"{where}={value!r}: give at least one pattern beside 'dense'")
    return tuple(dict.fromkeys(parsed))


def parse_choice(value: Any) -> Pattern | None:
    return None if value in (DENSE, None) else parse_pattern(value)
