"""Schedules: levels and drop fractions as functions of the step, and the steps at which masks are updated.

The step ``t`` counts finished optimizer steps: 0 when an algorithm is applied to the model, 1 after the first
``optimizer.step()``. Schedules are frozen and depend on ``t`` alone. Their formulas are those of
cerebras.pytorch.sparse; `Cubic` is equation 1 of Zhu and Gupta (arXiv 1710.01878). Their ``repr`` stands in saved
states, which are compared by it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelopt_sparse.reports.fold import nearest
from modelopt_sparse.values import check_whole, is_number, is_whole, shown

# values ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """``value`` at every step."""

    value: float

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.value


@dataclass(frozen=True)
class Linear:
    """``init + slope * t``."""

    init: float
    slope: float

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.init + step * self.slope


@dataclass(frozen=True)
class Exp:
    """``final + (init - final) * exp(gamma * t)``; it goes to ``final`` for a negative ``gamma``."""

    init: float
    gamma: float
    final: float = 1.0

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.final + (self.init - self.final) * math.exp(self.gamma * step)


@dataclass(frozen=True)
class Power:
    """``init * beta ** t``."""

    init: float
    beta: float

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.init * self.beta**step


@dataclass(frozen=True)
class Cosine:
    """From ``init`` down to ``minimum`` in ``half_period`` steps along a cosine, then up again.

    ``minimum + (init - minimum) * (1 + cos(pi * t / half_period)) / 2``: let updates stop at ``half_period``.
    """

    init: float
    half_period: float
    minimum: float = 0.0

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.minimum + (self.init - self.minimum) * (1 + math.cos(math.pi * step / self.half_period)) / 2


@dataclass(frozen=True)
class Cubic:
    """``init`` until step ``start``, ``final`` from step ``stop`` on, and between them fast at first, then slowly.

    ``final + (init - final) * (1 - (t - start) / (stop - start)) ** 3`` (arXiv 1710.01878, equation 1).
    """

    init: float
    final: float
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start >= self.stop:
            raise ValueError(f"Cubic: start {self.start} must be before stop {self.stop}")

    def __call__(self, step: int, updates: int = 0) -> float:
        done = min(max((step - self.start) / (self.stop - self.start), 0.0), 1.0)
        return self.final + (self.init - self.final) * (1 - done) ** 3


@dataclass(frozen=True)
class Cycling:
    """The next of ``values`` at each update, the first again after the last. ``updates``: how many there have been."""

    values: tuple[float, ...]

    def __call__(self, step: int, updates: int = 0) -> float:
        return self.values[updates % len(self.values)]


@dataclass(frozen=True)
class Custom:
    """A function of the step."""

    function: Callable[[int], Any]

    def __call__(self, step: int, updates: int = 0) -> float:
        return float(self.function(step))


Schedule = Constant | Linear | Exp | Power | Cosine | Cubic | Cycling | Custom
KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Constant, Linear, Exp, Power, Cosine, Cubic)}
KINDS["exponential"] = Exp


def parse_schedule(value: Any, what: str) -> Schedule:
    """A number, a schedule, ``{"type": "cosine", ...}``, a list of numbers or a function of the step -> a schedule.

    ``what`` names the option in the ValueError for anything else.
    """
    if isinstance(value, Schedule):
        return value
    if is_number(value):
        return Constant(float(value))
    if isinstance(value, Mapping):
        return _from_mapping(value, what)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value or not all(map(is_number, value)):
            raise ValueError(f"{what}={shown(value)}: a list of levels holds numbers, at least one")
        return Cycling(tuple(map(float, value)))
    if callable(value):
        return Custom(value)
    raise ValueError(
        f"{what}={shown(value)} is no schedule: give a number, a list of numbers, a function of the step, or one of "
        f"{', '.join(KINDS)} with its values, such as Cosine(0.3, half_period=1000)"
    )


def _from_mapping(value: Mapping[str, Any], what: str) -> Schedule:
    rest = dict(value)
    kind = str(rest.pop("type", "")).lower()
    if kind not in KINDS:
        raise ValueError(
            f"{what}={shown(dict(value))}: type must be one of {', '.join(KINDS)}{nearest(kind, list(KINDS))}"
        )
    for key, number in rest.items():
        if not is_number(number):
            raise ValueError(f"{what}: {key} of {kind} is {number!r}, and must be a number")
    try:
        return KINDS[kind](**rest)
    except TypeError as error:
        allowed = ", ".join(field.name for field in fields(KINDS[kind]))
        raise ValueError(f"{what}: {kind} takes {allowed}: {error}") from None


# steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryFew:
    """Updates at the steps ``start <= t < stop`` where ``(t - start) % freq == 0``."""

    freq: int = 1
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        check_whole("update: freq", self.freq)
        check_whole("update: start", self.start, 0)
        if self.stop is not None:
            check_whole("update: stop", self.stop, 0)

    def fires(self, step: int) -> bool:
        return self.start <= step and (self.stop is None or step < self.stop) and (step - self.start) % self.freq == 0

    def before(self, step: int) -> int:
        """How many of the steps 0, 1, ..., step - 1 are updates."""
        last = step if self.stop is None else min(step, self.stop)
        return max(0, -(-(last - self.start) // self.freq))


@dataclass(frozen=True)
class AtSteps:
    """Updates at these steps."""

    steps: tuple[int, ...]

    def fires(self, step: int) -> bool:
        return step in self.steps

    def before(self, step: int) -> int:
        """How many of the steps 0, 1, ..., step - 1 are updates."""
        return sum(each < step for each in self.steps)


@dataclass(frozen=True)
class When:
    """Updates at the steps for which a function returns True."""

    function: Callable[[int], Any]

    def fires(self, step: int) -> bool:
        return bool(self.function(step))

    def before(self, step: int) -> int:
        """How many of the steps 0, 1, ..., step - 1 are updates."""
        return sum(map(self.fires, range(step)))


UpdateSchedule = EveryFew | AtSteps | When


def parse_update(value: Any) -> UpdateSchedule:
    """None (every step), a number of steps, ``{"freq": 100, "start": 0, "stop": 7500}``, ``{"steps": [...]}``, or a
    function of the step -> when masks are updated. Raises ValueError for anything else."""
    if isinstance(value, UpdateSchedule):
        return value
    if value is None:
        return EveryFew()
    if is_whole(value):
        return EveryFew(value)
    if isinstance(value, Mapping) and list(value) == ["steps"]:
        steps = value["steps"]
        if not isinstance(steps, Sequence) or not steps or not all(is_whole(step, 0) for step in steps):
            raise ValueError(f"update: steps is {steps!r}, and must be a list of whole numbers")
        return AtSteps(tuple(sorted(set(steps))))
    if isinstance(value, Mapping):
        if others := [key for key in value if key not in ("freq", "start", "stop")]:
            raise ValueError(f"update takes freq, start and stop, or steps alone, not {others[0]!r}")
        return EveryFew(**value)
    if callable(value):
        return When(value)
    raise ValueError(
        f"update={shown(value)}: give a number of steps, {{'freq': 100, 'start': 0, 'stop': 7500}}, "
        "{'steps': [...]}, a function of the step, or None for every step"
    )
