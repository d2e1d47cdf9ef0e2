"""The algorithms of sparse training: Static, GMP, SET and RigL, classes to write others with, and groups of them."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from textwrap import shorten
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelopt_sparse.checks import check_choice, check_number, check_whole, shown
from modelopt_sparse.methods.patterns import NM, SCOPES, parse_pattern
from modelopt_sparse.training.planner import Filter, levels_at, parse_filter
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.training.updates import (
    INIT_METHODS,
    AtSteps,
    Constant,
    Cubic,
    Cycling,
    EveryFew,
    InitMethod,
    Scope,
    UpdateSchedule,
    checked_mask,
    drop_and_grow,
    erk_levels,
    generator_for,
    largest_magnitudes,
    parse_schedule,
    parse_update,
    uniform,
)

DISTRIBUTIONS = ("uniform", "erk")
NAMED = 80  # characters of the names of an entry that a Group shows
DESCRIBED = ("sparsity", "pattern", "scope", "init_method", "distribution", "include", "exclude", "seed")


class SparsityAlgorithm(Sparsity):
    """One algorithm for the parameters that it takes. One of your own implements `update`, which is called after every
    optimizer step: it loops over ``self.sparse_params.values()``, each with ``data`` and ``mask``, and assigns masks.

    sparsity: the level, in [0, 1), or a schedule of it (`updates.parse_schedule`).
    pattern: N:M in place of a level; masks are N:M after each update.
    scope: what competes: "matrix" (default) or "row". ``balance_out_groups=g`` or ``balance_in_groups=g``: rows or
      columns in g equal groups, each with the same number of zeros.
    init_method: "random", "topk", "from_zeros", "checkerboard", or a function (weight, level) -> mask
      (`updates.initial_mask`).
    distribution: "uniform", every weight at the level, or "erk", which makes large weights sparser
      (`updates.erk_levels`).
    include: which parameters: None takes all of them, norms and biases too; "default" leaves embeddings, norms, heads
      and weights of one dimension dense; "blocks" takes what `sparsify` prunes; or globs of parameter names; or
      compiled regular expressions.
    exclude: globs of parameters that stay dense. An attribute ``requires_dense`` that is True, of a parameter or of the
      module that holds it, leaves it dense as well.
    seed: random choices depend on it, on the parameter's name and on the step, and on nothing else.
    """

    needs_gradient: ClassVar[bool] = False  # whether `update` reads gradients at pruned places
    asks_for_scope: ClassVar[bool] = False  # whether language models get a warning if no scope is named
    magnitude_first: ClassVar[bool] = False  # whether an initial mask goes by magnitude where none is named

    def __init__(
        self,
        sparsity: Any = None,
        *,
        pattern: Any = None,
        scope: str | None = None,
        balance_in_groups: int | None = None,
        balance_out_groups: int | None = None,
        init_method: InitMethod | None = None,
        distribution: str = "uniform",
        include: Any = None,
        exclude: Any = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        parsed = None if pattern is None else parse_pattern(pattern)
        if not isinstance(parsed, NM | None):
            raise ValueError(f"pattern={shown(pattern)}: {type(self).__name__} takes N:M here, such as '2:4'")
        self.pattern = parsed
        if sparsity is None:
            if self.pattern is None:
                raise ValueError(f"{type(self).__name__} needs a level such as 0.9, or a pattern such as '2:4'")
            sparsity = self.pattern.sparsity
        elif self.pattern is not None and not self.magnitude_first and sparsity != self.pattern.sparsity:
            raise ValueError(f"sparsity={shown(sparsity)}: {self.pattern} stands in its place: leave it out")
        self.sparsity = parse_schedule(sparsity, "sparsity")
        names = {Constant: ("value",), Cubic: ("init", "final")}.get(type(self.sparsity), ())
        levels = [getattr(self.sparsity, name) for name in names]
        for level in self.sparsity.values if isinstance(self.sparsity, Cycling) else levels:
            check_number("sparsity", level, "[0, 1)")
        self.when: UpdateSchedule = EveryFew()
        self.scope = _checked_scope(scope, balance_in_groups, balance_out_groups)
        self.scope_is_chosen = (scope, balance_in_groups, balance_out_groups, self.pattern) != (None,) * 4
        self.init_method = init_method or ("topk" if self.magnitude_first else "random")
        if not callable(self.init_method):
            check_choice("init_method", self.init_method, INIT_METHODS)
        check_choice("distribution", distribution, DISTRIBUTIONS)
        if self.pattern is not None and distribution != "uniform":
            raise ValueError(f"distribution={distribution!r} shares out levels, and pattern {self.pattern} has its own")
        self.distribution = distribution
        self.include = parse_filter(include)
        self.exclude = list(parse_filter(exclude, "exclude").globs) if exclude else []
        if exclude and not self.exclude:
            raise ValueError(f"exclude={shown(exclude)}: give globs of parameter names such as '*.mlp.*.weight'")
        check_whole("seed", seed, 0)
        self.seed = seed

    def __repr__(self) -> str:
        algorithm, *options = self.describe().items()
        return f"{algorithm[1]}({', '.join(f'{name}={value}' for name, value in options if value not in (None, []))})"

    def members(self) -> list[tuple[Filter, Any]]:
        return [(self.include, self)]

    def levels(
        self, shapes: Mapping[str, tuple[int, ...]], step: int, numbers: Mapping[str, int] = {}
    ) -> dict[str, float]:
        """The level of each parameter at a step, by name, in [0, 1). "erk" shares it out by ``shapes``, and ``numbers``
        of matrices."""
        level = self.sparsity(step, max(self.when.before(step + 1) - 1, 0))  # that of the last update
        if level >= 1:
            warnings.warn(f"{self!r}: the level is 1, where no weight is left: end updates before", stacklevel=2)
        level = min(max(level, 0.0), math.nextafter(1.0, 0.0))
        return erk_levels(shapes, level, numbers) if self.distribution == "erk" else dict.fromkeys(shapes, level)

    def describe(self) -> dict[str, Any]:
        """All options, as plain values: what a saved state is compared by."""
        return {"algorithm": type(self).__name__, **{name: plain(getattr(self, name)) for name in DESCRIBED}}


class Static(SparsityAlgorithm):
    """Masks that are made once, before training, and never move.

    ``Static(0.3)`` takes every parameter, norms and biases too: give ``include="default"`` to leave them dense.
    """

    def __init__(self, sparsity: float | None = None, **options: Any) -> None:
        super().__init__(sparsity, **options)
        if not isinstance(self.sparsity, Constant):
            raise ValueError(f"Static keeps one level, and sparsity={shown(sparsity)} is a schedule: use GMP")
        self.when = AtSteps(())

    def update(self) -> None:
        """Nothing moves."""


class DynamicSparsityAlgorithm(SparsityAlgorithm):
    """An algorithm that moves masks by a schedule. One of your own implements `update_mask`.

    update: when: None (after every optimizer step), a number of steps, ``{"freq": 100, "start": 0, "stop": 7500}``,
      ``{"steps": [...]}``, or a function of the step. The step is the number of finished optimizer steps: with freq 100
      masks first move after the 100th. The initial mask is that of step 0, whatever ``start`` is.
    """

    generator: torch.Generator  # random numbers for `update_mask`, new for each parameter and update

    def __init__(self, sparsity: Any = None, *, update: Any = None, **options: Any) -> None:
        super().__init__(sparsity, **options)
        self.when = parse_update(update)

    @abstractmethod
    def update_mask(self, p: Tensor, mask: Tensor, sparsity: float) -> Tensor:
        """The new mask of one weight. ``p`` (its values) and ``mask`` (bool, True = kept) are matrices ``[..., R, C]``;
        ``sparsity`` is the level. With ``needs_gradient``, ``p.grad`` is the gradient in all places."""

    @torch.no_grad()
    def update(self) -> None:
        """Move the masks of all parameters that the algorithm has, by the present step."""
        levels = levels_at(self.step, self.sparse_params.values())
        moving = {name: weight for name, weight in self.sparse_params.items() if not weight.still}
        without = [name for name, weight in moving.items() if self.needs_gradient and weight.local_gradient is None]
        if gone := [name for name in without if moving[name].stepped or len(without) == len(moving)]:
            problem = f"{gone[0]!r} has no gradient after step {self.step}"
            raise RuntimeError(f"{problem}: keep it until all optimizers have made theirs")
        lost, idle = [], []
        for name, weight in moving.items():
            matrix = weight.layer.matrix(weight.data)
            if self.needs_gradient:
                if (gradient := weight.gradient) is None:
                    continue  # no sample of this step came to the layer
                came, pruned = (weight.layer.matrix(x) for x in (gradient != 0, ~weight.mask))
                idle += [name] * (not came.any())
                due = came.any(-1, keepdim=True) & came.any(-2, keepdim=True) & pruned  # by outer products
                lost += [name] * bool(due.any() and not (came & pruned).any())
                matrix = matrix.clone(memory_format=torch.contiguous_format)
                matrix.grad = weight.layer.matrix(gradient).to(matrix.dtype)
            for label, values in (("weight", matrix), ("gradient of", matrix.grad)):
                if values is not None and not values.isfinite().all():
                    raise RuntimeError(f"{label} {name!r} holds NaN or inf after step {self.step}: training diverged")
            self.generator = generator_for(self.seed, name, self.step)
            mask = self.update_mask(matrix, weight.layer.matrix(weight.mask), levels[name])
            weight.mask = weight.layer.unmatrix(checked_mask(mask, matrix, "update_mask")).contiguous()
        if idle and len(idle) == len(moving):
            problem = f"all gradients are zero after step {self.step}, so that nothing new grows"
            warnings.warn(f"{problem}: update masks before zero_grad", stacklevel=2)
        if lost:
            causes = "float16 weights, FSDP's MixedPrecisionPolicy(float16) and fp16_compress_hook lose them"
            problem = f"{len(lost)} weights ({lost[0]!r} first) have no gradient at any pruned place"
            warnings.warn(f"{problem}: {causes}: use bfloat16 or float32", stacklevel=2)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "update": plain(self.when)}


class GMP(DynamicSparsityAlgorithm):
    """Gradual magnitude pruning (Zhu and Gupta, arXiv 1710.01878): at each update the largest abs(w) stay, as many as
    the level of the schedule leaves. Where the level falls, random places come back at 0.0.

    With ``pattern`` the level rises towards N:M: ``GMP(Cubic(0, 0.5, 1000, 3000), pattern="2:4", update=100)``.
    """

    magnitude_first = True

    def __init__(self, sparsity: Any, **options: Any) -> None:
        super().__init__(sparsity, **options)
        if isinstance(self.sparsity, Constant):
            raise ValueError(f"GMP prunes by a schedule, not at one level ({sparsity}): give a Cubic, or use Static")
        if self.pattern is not None and self.init_method != "topk":
            raise ValueError(f"GMP towards {self.pattern} goes by magnitude: leave init_method out")

    def update_mask(self, p: Tensor, mask: Tensor, sparsity: float) -> Tensor:
        return largest_magnitudes(p, mask, sparsity, self.generator, scope=self.scope, pattern=self.pattern)


class DropAndGrow(DynamicSparsityAlgorithm):
    """What `SET` and `RigL` share: at each update a share of the live weights, the smallest, is dropped, and as many
    grow, at 0.0, where a score is largest. They differ in the score.

    drop_fraction: the share, in [0, 1], or a schedule of it.
    """

    asks_for_scope = True

    def __init__(self, sparsity: Any = None, *, drop_fraction: Any = 0.3, **options: Any) -> None:
        super().__init__(sparsity, **options)
        self.drop_fraction = parse_schedule(drop_fraction, "drop_fraction")
        if isinstance(self.drop_fraction, Constant):
            check_number("drop_fraction", self.drop_fraction.value, "[0, 1]")

    @abstractmethod
    def score(self, p: Tensor) -> Tensor:
        """Where weights should grow, shaped like the matrix ``p``; larger = grow."""

    def update_mask(self, p: Tensor, mask: Tensor, sparsity: float) -> Tensor:
        fraction = min(max(self.drop_fraction(self.step, self.when.before(self.step)), 0.0), 1.0)
        return drop_and_grow(
            p, mask, self.score(p), drop_fraction=fraction, level=sparsity, scope=self.scope, pattern=self.pattern
        )

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "drop_fraction": plain(self.drop_fraction)}


class SET(DropAndGrow):
    """Sparse evolutionary training (arXiv 1707.04780): weights grow at random places."""

    def score(self, p: Tensor) -> Tensor:
        return uniform(p, self.generator) + 1  # scores of 0 would leave masks as they are


class RigL(DropAndGrow):
    """Rigging the lottery (arXiv 1911.11134): weights grow where the gradient of the whole batch is largest.

    The gradient comes with the backward passes of the step at whose end masks move (docs/training.md). Grown
    weights start at 0.0, after the optimizer has made its step. The paper's ``drop_fraction`` is
    ``Cosine(0.3, half_period)``, with updates every 100 steps until three quarters of the run.
    """

    needs_gradient = True

    def score(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad.abs()


class Group(Sparsity):
    """Algorithms for different parameters of one model.

    groups: globs of parameter names, or anything else that ``include`` takes -> algorithm, or None: they stay dense.
      The first that matches counts; what none matches stays dense.

    >>> Group({"*.mlp.*": SET(0.9, update=100), "*.self_attn.*weight": Static(0.5)})
    """

    def __init__(self, groups: Mapping[Any, SparsityAlgorithm | None] | None = None) -> None:
        super().__init__()
        self._groups: list[tuple[Filter, SparsityAlgorithm | None]] = []
        if not isinstance(groups, Mapping | None):
            raise TypeError(f"Group takes a mapping of globs to algorithms, and this is a {type(groups).__name__}")
        for include, algorithm in (groups or {}).items():
            self.add(include, algorithm)

    def add(self, include: Any, algorithm: SparsityAlgorithm | None) -> None:
        """One more entry, after the others."""
        if isinstance(algorithm, Group):
            raise ValueError("a Group in a Group: put its entries into the outer one, with extend")
        if algorithm is not None and not isinstance(algorithm, SparsityAlgorithm):
            raise TypeError(f"{shown(include)}: {algorithm!r} is no sparsity algorithm")
        if algorithm is not None and algorithm.include != Filter():
            raise ValueError(f"{shown(include)}: the group says which parameters; leave include out of its algorithms")
        if any(algorithm is member for _, member in self._groups if member is not None):
            raise ValueError(f"{shown(include)}: this {type(algorithm).__name__} is in the group already: make another")
        self._groups.append((parse_filter(include), algorithm))

    def extend(self, other: "Group") -> None:
        """All entries of another group, after these."""
        for include, algorithm in other._groups:
            self.add(include, algorithm)

    def __repr__(self) -> str:
        entries = [f"{shorten(str(include), NAMED, placeholder=' ...')}: {member}" for include, member in self._groups]
        return f"Group({', '.join(entries)})"

    def __getitem__(self, index: int) -> SparsityAlgorithm | None:
        return self._groups[index][1]

    def __len__(self) -> int:
        return len(self._groups)

    def members(self) -> list[tuple[Filter, Any]]:
        if not self._groups:
            raise ValueError("this Group is empty: give it globs of parameter names with algorithms")
        return list(self._groups)

    def update(self) -> None:
        """Move the masks of all algorithms in the group."""
        for algorithm in self.algorithms():
            algorithm.update()


# checks of options ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """An option as text, number or list that is the same in every run."""
    if isinstance(value, (str, int, float, list)) or value is None:
        return value
    function = getattr(value, "function", value)
    if isinstance(function, partial):
        return f"{plain(function.func)} of {function.args}, {function.keywords}"
    if type(function).__repr__ is object.__repr__:  # which names an address
        return f"{plain(type(function))} of {getattr(function, '__dict__', '')}"
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else str(value)


def _checked_scope(scope: str | None, in_groups: int | None, out_groups: int | None) -> Scope:
    if (scope, in_groups, out_groups).count(None) < 2:
        raise ValueError("give one of scope, balance_in_groups and balance_out_groups: each says what competes")
    for kind, groups in (("in_groups", in_groups), ("out_groups", out_groups)):
        if groups is not None:
            check_whole(f"balance_{kind}", groups)
            return Scope(kind, groups)
    scope = "matrix" if scope is None else scope
    check_choice("scope", scope, SCOPES)
    return Scope(scope)
