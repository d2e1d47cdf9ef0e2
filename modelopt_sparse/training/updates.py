"""When and how masks change, on numbers and tensors alone: schedules, then initial masks, dropping and growing, ERK.

The step ``t`` counts finished optimizer steps: 0 when an algorithm is applied to the model, 1 after the first
``optimizer.step()``. Schedules are frozen and depend on ``t`` alone. Their formulas are those of
cerebras.pytorch.sparse; `Cubic` is equation 1 of Zhu and Gupta (arXiv 1710.01878). Their ``repr`` stands in saved
states, which are compared by it.

A weight is a matrix ``[..., R, C]``; leading dimensions are independent matrices. A `Scope` says which of its entries
compete: it views the matrix as ``[..., S, n]``, where the last dimension holds the n entries of a scope. Masks are
bool, True = kept. Of scores the larger ones are kept.
"""

import hashlib
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelopt_sparse.checks import check_number, check_options, is_number, is_whole, shown
from modelopt_sparse.methods.patterns import NM, count_zeros, keep_largest
from modelopt_sparse.reports.text import nearest

# levels by the step ---------------------------------------------------------------------------------------------------


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
    """Fall from ``init`` to ``minimum`` in ``half_period`` steps along a cosine, then rise again.

    ``minimum + (init - minimum) * (1 + cos(pi * t / half_period)) / 2``: let updates stop at ``half_period``.
    """

    init: float
    half_period: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        check_number("Cosine: half_period", self.half_period, "(0, inf)")

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
        value = self.function(step)
        if value is None or not math.isfinite(value):
            raise ValueError(f"a schedule gives {value} at step {step}: give a number")
        return float(value)


Schedule = Constant | Linear | Exp | Power | Cosine | Cubic | Cycling | Custom
KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Constant, Linear, Exp, Power, Cosine, Cubic)}
KINDS["exponential"] = Exp


def parse_schedule(value: Any, option: str) -> Schedule:
    """A number, a schedule, ``{"type": "cosine", ...}``, a list of numbers or a function of the step -> a schedule.

    ``option`` names it in the ValueError for anything else.
    """
    if isinstance(value, Schedule):
        return value
    if is_number(value):
        return Constant(float(value))
    kind = str(value.get("type", "")).lower() if isinstance(value, Mapping) else ""
    if kind in KINDS:
        options = {key: number for key, number in value.items() if key != "type"}
        for key, number in options.items():
            if not is_number(number):
                raise ValueError(f"{option}: {key} of {kind} is {number!r}, and must be a number")
        try:
            return KINDS[kind](**options)
        except TypeError as error:
            allowed = ", ".join(field.name for field in fields(KINDS[kind]))
            raise ValueError(f"{option}: {kind} takes {allowed}: {error}") from None
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(is_number, value)):
        return Cycling(tuple(map(float, value)))
    if callable(value):
        return Custom(value)
    allowed = f"a number, numbers, a function of the step, or one of {', '.join(KINDS)} with its values"
    raise ValueError(f"{option}={shown(value)} is no schedule{nearest(kind, KINDS)}; give {allowed}")


# steps ----------------------------------------------------------------------------------------------------------------


class _Updates:
    """Updates at ``steps``, whole numbers that rise."""

    steps: Any

    @property
    def last(self) -> float:
        """The last step with an update; -1: none has one."""
        return self.steps[-1] if self.steps else -1

    def fires(self, step: int) -> bool:
        return step in self.steps

    def before(self, step: int) -> int:
        """How many of the steps 0, 1, ..., step - 1 are updates."""
        return bisect_left(self.steps, step)


@dataclass(frozen=True)
class EveryFew(_Updates):
    """Updates at the steps ``start <= t < stop`` where ``(t - start) % freq == 0``."""

    freq: int = 1
    start: int = field(default=0, metadata={"least": 0})
    stop: int | None = field(default=None, metadata={"least": 0})

    def __post_init__(self) -> None:
        check_options(self, "update: ")

    @property
    def steps(self) -> range:
        return range(self.start, sys.maxsize if self.stop is None else self.stop, self.freq)


@dataclass(frozen=True)
class AtSteps(_Updates):
    """Updates at these steps."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class When:
    """Updates at the steps for which a function returns True. ``last``: nobody knows the last one."""

    function: Callable[[int], Any]
    last: ClassVar[float] = math.inf

    def fires(self, step: int) -> bool:
        return bool(self.function(step))

    def before(self, step: int) -> int:
        """How many of the steps 0, 1, ..., step - 1 are updates."""
        return sum(map(self.fires, range(step)))


UpdateSchedule = EveryFew | AtSteps | When


def parse_update(value: Any) -> UpdateSchedule:
    """None (every step), a number of steps, ``{"freq": 100, "start": 0, "stop": 7500}``, ``{"steps": [...]}``, or a
    function of the step -> when masks are updated. Raises ValueError for anything else."""
    if value is None or is_whole(value):
        return EveryFew(1 if value is None else value)
    if isinstance(value, Mapping) and set(value) <= {"freq", "start", "stop"}:
        return EveryFew(**value)
    steps = value["steps"] if isinstance(value, Mapping) and list(value) == ["steps"] else None
    if isinstance(steps, Sequence) and steps and all(is_whole(step, 0) for step in steps):
        return AtSteps(tuple(sorted(set(steps))))
    if callable(value):
        return When(value)
    allowed = "a number of steps, {'freq': 100, 'start': 0, 'stop': 7500}, {'steps': [...]}, a function, or None"
    raise ValueError(f"update={shown(value)}: give {allowed}")


# initial masks --------------------------------------------------------------------------------------------------------

InitMethod = str | Callable[[Tensor, float], Tensor]
INIT_METHODS = ("random", "topk", "from_zeros", "checkerboard")


@dataclass(frozen=True)
class Scope:
    """The entries of a matrix ``[..., R, C]`` that compete with each other, each scope with the same number of zeros.

    kind: "matrix", "row", "out_groups" (rows in ``groups`` groups) or "in_groups" (columns in ``groups`` groups).
    """

    kind: str = "matrix"
    groups: int = 1

    def misfit(self, rows: int, columns: int) -> str | None:
        """Why a matrix of this size has no such scopes, or None if it has."""
        size, unit = (rows, "rows") if self.kind == "out_groups" else (columns, "columns")
        return f"{size} {unit} cannot be divided into {self.groups} equal groups" if size % self.groups else None

    def within(self, matrix: Tensor) -> Tensor:
        """``[..., R, C]`` -> ``[..., S, n]``."""
        if self.kind == "row":
            return matrix
        if self.kind == "in_groups":
            return matrix.unflatten(-1, (self.groups, -1)).movedim(-2, -3).flatten(-2)
        return matrix.unflatten(-2, (self.groups, -1)).flatten(-2)  # "matrix" is one group of all rows

    def back(self, scopes: Tensor, like: Tensor) -> Tensor:
        """``[..., S, n]`` -> the shape of the matrix ``like``."""
        if self.kind != "in_groups":
            return scopes.reshape(like.shape)
        return scopes.unflatten(-1, (like.shape[-2], -1)).movedim(-3, -2).flatten(-2)

    def __str__(self) -> str:
        return f"{self.groups} {self.kind}" if self.groups > 1 else self.kind


def initial_mask(
    weight: Tensor,
    level: float,
    method: InitMethod,
    generator: torch.Generator,
    *,
    present: Tensor | None = None,
    scope: Scope = Scope(),
    pattern: NM | None = None,
) -> Tensor:
    """The mask of a weight ``[..., R, C]`` at a level, before training.

    ``present`` is a mask that the weight carries already. A higher level keeps its zeros and prunes live weights: the
    smallest ("topk") or random ones. A lower level keeps all live weights and regrows random places. The same level
    changes nothing.

    "random": random places. "topk": the largest abs(w) stay. "from_zeros": exactly the zeros of the weight are pruned,
    whatever the level. "checkerboard": kept places spread evenly, each row shifted by one against the row before. A
    function gets the weight and the level and returns the mask.
    """
    if callable(method):
        return checked_mask(method(weight, level), weight, "init_method")
    if method == "from_zeros":
        return (weight != 0) if present is None else (weight != 0) & present
    if method == "checkerboard" and present is None and pattern is None:
        return scope.back(_spread(scope.within(weight), level), weight).to(weight.device)
    random = uniform(weight, generator)
    score = weight.abs() if method == "topk" else random
    if present is not None:
        score = torch.where(present, score, -1 - random)
    if pattern is not None:
        return pattern.mask(score)
    scores = scope.within(score)
    return scope.back(keep_largest(scores, keep_count(scores, level)), weight)


def checked_mask(mask: Any, weight: Tensor, source: str) -> Tensor:
    """The mask that a function of the user's has returned. Raises ValueError for what is no mask of the weight."""
    if not isinstance(mask, Tensor) or (mask.dtype, mask.shape) != (torch.bool, weight.shape):
        form = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{source} returned {form}, no bool mask {list(weight.shape)}")
    return mask


def _spread(scopes: Tensor, level: float) -> Tensor:
    """The checkerboard of each scope ``[..., S, n]``: of n places, kept ones as far from each other as can be."""
    *leading, count, size = scopes.shape
    live = keep_count(scopes, level)
    index = torch.arange(size, dtype=torch.int64, device="cpu")
    row = ((index + 1) * live).div(size, rounding_mode="floor") > (index * live).div(size, rounding_mode="floor")
    rows = torch.stack([row.roll(shift) for shift in range(count)])
    return rows.expand(*leading, count, size).contiguous()


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) shaped like a tensor, float32, drawn on the CPU: the same ones on every device."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


def generator_for(seed: int, name: str, event: object) -> torch.Generator:
    """The random numbers of one parameter at one event ("init", or the step of an update): they depend on nothing else.

    The seed is SHA-256 of the three, so that no random state has to be saved and all processes draw the same.
    """
    digest = hashlib.sha256(f"{seed}\n{name}\n{event}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


# counts ---------------------------------------------------------------------------------------------------------------


def keep_count(scopes: Tensor, level: float) -> int:
    """How many entries of each scope ``[..., S, n]`` a level keeps: n - round-half-even(level * n)."""
    return scopes.shape[-1] - count_zeros(level, scopes.shape[-1])


def _as_number(counts: Tensor) -> int | Tensor:
    """Counts ``[..., S, 1]`` as one number if they are all equal, as they are unless a mask came from elsewhere."""
    low, high = counts.aminmax()
    return int(low) if low == high else counts


# drop and grow --------------------------------------------------------------------------------------------------------


def drop_and_grow(
    weight: Tensor,
    mask: Tensor,
    score: Tensor,
    *,
    drop_fraction: float,
    level: float,
    scope: Scope = Scope(),
    pattern: NM | None = None,
) -> Tensor:
    """One update of SET or RigL (arXiv 1911.11134, algorithm 1): the new mask of a weight ``[..., R, C]``.

    In each scope the smallest live weights are dropped: round-half-even(drop_fraction * live) of them, more where more
    would be left than the level keeps, and of equal ones the higher indices. Then those grow that are not kept and have
    the largest ``score``, just-dropped ones included, until the level is reached. With N:M, growth fills each group of
    M up to N.
    A scope (of N:M: a matrix) whose scores are all zero at places not kept stays as it is: they say nothing.
    """
    masks, scores = scope.within(mask), scope.within(score)
    count, live = keep_count(masks, level), masks.sum(-1, keepdim=True)
    left = live - (live.double() * drop_fraction).round().to(live.dtype)  # torch rounds half to even
    if pattern is None:
        left = left.clamp_max(count)
    stays = keep_largest(torch.where(masks, scope.within(weight).abs(), -1), _as_number(left)) & masks
    silent = ~((scores != 0) & ~stays).any(-1, keepdim=True)
    if pattern is None:
        new = scope.back(keep_largest(torch.where(stays, torch.inf, scores), count) | stays, mask)
        silent &= live == count
    else:
        new = pattern.mask(torch.where(scope.back(stays, mask), torch.inf, score))
    return torch.where(scope.back(silent.expand_as(masks), mask), mask, new)


# magnitude ------------------------------------------------------------------------------------------------------------


def largest_magnitudes(
    weight: Tensor,
    mask: Tensor,
    level: float,
    generator: torch.Generator,
    *,
    scope: Scope = Scope(),
    pattern: NM | None = None,
) -> Tensor:
    """One update of gradual magnitude pruning (arXiv 1710.01878): the largest abs(w) of each scope stay.

    Live weights come before pruned ones, so masks nest while the level rises. Where it falls, random pruned places come
    back. Towards N:M, zeros are taken among the places that the pattern prunes, the share
    ``level / pattern.sparsity`` of them, so that at its level the mask is N:M.
    """
    magnitude = torch.where(mask, weight.abs(), -1)
    scores, masks = scope.within(magnitude), scope.within(mask)
    count: int | Tensor = keep_count(scores, level)
    if pattern is not None:
        stays = scope.within(pattern.mask(magnitude))
        fraction = min(level / pattern.sparsity, 1.0) if pattern.sparsity else 0.0
        pruned = (~stays).sum(-1, keepdim=True)
        zeros = (pruned.double() * fraction).round().to(pruned.dtype)
        scores, count = torch.where(stays, torch.inf, scores), _as_number(stays.shape[-1] - zeros)
    elif (masks.sum(-1) < count).any():
        scores = torch.where(masks, scores, -1 - scope.within(uniform(weight, generator)))
    return scope.back(keep_largest(scores, count), weight)


# levels over layers ---------------------------------------------------------------------------------------------------


def erk_levels(shapes: Mapping[str, Sequence[int]], level: float, numbers: Mapping[str, int] = {}) -> dict[str, float]:
    """The level of each weight under the Erdos-Renyi-Kernel rule of RigL (arXiv 1911.11134, section 3), by name.

    The density of a weight is ``eps * sum(shape) / prod(shape)``, at most 1, with the eps for which all weights
    together have ``level``. ``numbers``: how many of its shape a weight has, as a bank of experts.
    """
    sizes = {name: math.prod(shape) * numbers.get(name, 1) for name, shape in shapes.items()}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    wanted = (1 - level) * sum(sizes.values())
    dense: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in dense]
        spread = sum(raw[name] * sizes[name] for name in rest)
        eps = (wanted - sum(sizes[name] for name in dense)) / spread if rest else 0.0
        over = [name for name in rest if eps * raw[name] > 1]
        if not over:
            return {name: 0.0 if name in dense else 1 - eps * raw[name] for name in shapes}
        dense.add(max(over, key=lambda name: raw[name]))


# comparing ------------------------------------------------------------------------------------------------------------


def digest(mask: Tensor) -> int:
    """A number that differs between masks of a shape but for one pair in 2^64: to compare them across processes.

    Eight entries at a time, read as an integer and times an odd number of their own, are added up modulo 2^64.
    """
    flat = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(torch.int64)
    positions = torch.arange(len(flat), device=mask.device)
    return int((flat * (positions * 0x9E3779B97F4A7C15 % 2**63 | 1)).sum())
