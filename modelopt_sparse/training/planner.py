"""Which parameters of a model are trained sparse, by which algorithm, and why the others stay dense.

`find_weights` lists the parameters, a `Filter` names some of them, and `plan_training` decides. It refuses what cannot
work, and changes nothing.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.checks import grouped, shown
from modelopt_sparse.distributed import full, mask_like
from modelopt_sparse.methods.patterns import Unstructured, count_zeros, level_of
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import full_name
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.find import find_layers, protected_modules
from modelopt_sparse.model.forwards import OTHER
from modelopt_sparse.model.hf import holds_codes
from modelopt_sparse.model.layers import Layer, RowAdapter, as_row
from modelopt_sparse.model.masking import (
    SUFFIX,
    SparseModule,
    dense_class,
    dense_gradient,
    masked_copy,
    refuse_what_cannot_be_sparse,
    rezero_all,
    update_mask,
    zero_state,
)
from modelopt_sparse.plan.options import SparsifyConfig, check_globs, first_match
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import attached_report
from modelopt_sparse.reports.text import Column, Printed, by_reason, first_few, paragraph, product_of, rows_of
from modelopt_sparse.reports.values import REPLACED, Skipped
from modelopt_sparse.training.updates import AtSteps, Cubic

BLOCKS, DEFAULT = "blocks", "default"
DENSE_WORDS = ("embedding", "norm", "lm_head")  # in a parameter's name; those of the Cerebras Model Zoo

STILL = "its mask does not move: no optimizer trains it"

# parameters -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SparseParameter:
    """One parameter of a model. The model holds its values, its mask and its gradient.

    name: the first that it has in the model.
    holders: every module that holds it, by the name that it has there in ``model``.
    layer: how it is seen as a matrix ``[..., R, C]``; a parameter of no prunable layer is one row.
    algorithm: trains it sparse. None: it stays dense.
    optimizers: train it, and hold state to be zeroed with it.
    still: whether its mask stays as it is, for optimizers train others and not it.
    faint: its gradient with what reaches pruned places, while an optimizer makes a step with ``shown``, without that.
    stepped: whether it had a gradient when its optimizer made the last step.
    """

    model: nn.Module
    name: str
    holders: Mapping[str, nn.Module]
    layer: Layer
    algorithm: Any = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    still: bool = False
    faint: Tensor | None = None
    shown: Tensor | None = None
    stepped: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter that the model has now: `fully_shard` replaces it."""
        return self.layer.parameter

    @property
    def type(self) -> str:
        """The class of the module that holds it."""
        return dense_class(self.layer.owner).__name__

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_sparse(self) -> bool:
        owner = self.layer.owner
        return isinstance(owner, SparseModule) and self.layer.param + SUFFIX in owner._buffers

    @property
    def moves(self) -> bool:
        """Whether its algorithm moves masks at all."""
        return self.algorithm.when != AtSteps(())

    @property
    def is_layer(self) -> bool:
        return not isinstance(self.layer.adapter, RowAdapter)

    def empty_matrix(self) -> Tensor:
        """The matrix without values, to ask for its shape: a sharded parameter cannot be reshaped at will."""
        return self.layer.matrix(torch.empty(self.shape, device="meta"))

    @property
    def data(self) -> Tensor:
        """Its values. They share its memory, unless it is sharded: then they are gathered from all processes."""
        return full(self.layer.values)

    @property
    def mask(self) -> Tensor:
        """Its mask (bool, True = kept), whole on every process. Assigning one changes it in place in every module that
        holds the parameter, and zeroes the weight and its optimizers' state where it is False."""
        return self.layer.owner.get_buffer(self.layer.param + SUFFIX)

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        for name in self.holders:
            update_mask(self.model, name, mask)
        self._zero_states()
        self.write_report()

    @property
    def local_gradient(self) -> Tensor | None:
        return self.parameter.grad if self.faint is None else self.faint

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient at all places, on steps that let gradients through; gathered if it is sharded."""
        gradient = self.local_gradient
        return None if gradient is None else dense_gradient(full(gradient.detach()), self.mask)

    def hide_faint(self) -> None:
        """Give the optimizer a gradient that is zero at pruned places: it may divide by the mean of a row or column."""
        self.faint, gradient = None, self.parameter.grad
        is_faint = self.layer.param in getattr(self.layer.owner, "faint_parameters", ())
        if is_faint and gradient is not None and gradient.layout == torch.strided:
            self.shown = masked_copy(gradient, mask_like(self.mask, gradient))
            self.faint, self.parameter.grad = gradient, self.shown

    def show_faint(self) -> None:
        """End `hide_faint`. A step that has cleared the gradient leaves it so: masks then move by ``faint``."""
        if self.faint is not None and self.parameter.grad is self.shown:
            self.parameter.grad, self.faint = self.faint, None
        self.shown = None
        self.stepped = self.local_gradient is not None

    def zero(self) -> None:
        """Write +0.0 to pruned places of the weight and of its optimizers' state."""
        for module in self.holders.values():
            rezero_all(module, recurse=False, tell=False)
        self._zero_states()

    def _zero_states(self) -> None:
        for optimizer in self.optimizers:
            zero_state(optimizer, self.parameter, self.mask)

    def zeros_at(self, level: float) -> int:
        """How many zeros its algorithm gives it at a level (not by "from_zeros" or a function)."""
        algorithm, pattern, matrix = self.algorithm, self.algorithm.pattern, self.empty_matrix()
        if pattern is not None and not algorithm.magnitude_first:
            return pattern.zeros_in(matrix.shape)
        size = algorithm.scope.within(matrix).shape[-1]
        reached = level if pattern is None else min(level, pattern.sparsity)
        return matrix.numel() // size * count_zeros(reached, size)

    def counted(self) -> dict[str, Any]:
        """Its zeros, and the pattern that its mask keeps: N:M, or the level that all rows or matrices have."""
        matrix, pattern = self.layer.matrix(self.mask), self.algorithm.pattern
        if pattern is None or pattern.count_nonzero_wrong(matrix):
            pattern = level_of(matrix, "row" if self.algorithm.scope.kind == "row" else "matrix")
        return {"zeros": int((~matrix).sum()), "pattern": str(pattern)}

    def write_report(self) -> None:
        """Bring its entry in the model's report up to date."""
        rows = [] if (report := attached_report(self.model)) is None else report.layers
        for i, row in enumerate(rows):
            if row.parameter == self.name and row.recipe == type(self.algorithm).__name__.lower():
                notes = [note for note in row.notes if not note.startswith((STILL, REPLACED))]
                rows[i] = replace(row, **self.counted(), notes=notes + [STILL] * self.still)


def find_weights(model: nn.Module) -> list[SparseParameter]:
    """Every parameter of a model once, in model order."""
    layers = {layer.parameter_name: layer for layer in find_layers(model)[0]}
    holders: dict[int, dict[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), {})[full_name(path, name)] = module
    names = {next(iter(held)): held for held in holders.values()}
    return [SparseParameter(model, name, held, layers.get(name) or as_row(model, name)) for name, held in names.items()]


# filters --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filter:
    """Names of parameters. At most one of the three is set; none: every parameter.

    globs: match a full name whole. regexes: match a part of it. choice: "default" or "blocks", see `reasons`.
    """

    globs: tuple[str, ...] = ()
    regexes: tuple[re.Pattern[str], ...] = ()
    choice: str = ""

    def __str__(self) -> str:
        named = [*map(repr, self.globs), *(f"regex {regex.pattern!r}" for regex in self.regexes)]
        return ", ".join(named) or self.choice or "every parameter"

    def matches(self, name: str) -> bool:
        """Whether a filter without ``choice`` takes a name."""
        if self.regexes:
            return any(regex.search(name) for regex in self.regexes)
        return not self.globs or first_match(name, self.globs) is not None


Members = Sequence[tuple[Filter, Any]]  # (filter, algorithm for what it takes); None leaves it dense


def parse_filter(include: Any, option: str = "include") -> Filter:
    """None (every parameter), "default", "blocks", a glob or several of parameter names, or compiled regular
    expressions -> a filter. Raises ValueError for anything else."""
    if include is None or isinstance(include, Filter):
        return include or Filter()
    if include in (BLOCKS, DEFAULT):
        return Filter(choice=include)
    if isinstance(include, Set):  # text has another order in each process
        include = sorted(include, key=str)
    several = isinstance(include, Iterable) and not isinstance(include, (str, bytes, Mapping))
    entries: tuple[Any, ...] = tuple(include) if several else (include,)
    if entries and all(isinstance(one, str) for one in entries):
        return Filter(globs=entries)
    if entries and all(isinstance(one, re.Pattern) for one in entries):
        return Filter(regexes=entries)
    allowed = f"globs such as '*.mlp.*.weight', compiled regular expressions, {DEFAULT!r}, {BLOCKS!r} or None (all)"
    raise ValueError(f"{option}={shown(include)}: give {allowed}")


def reasons(model: nn.Module, weights: Sequence[SparseParameter], choice: str) -> dict[str, str]:
    """Why parameters of a model stay dense under a choice, by name; "" for those that it takes.

    "default" takes no weights of one dimension, none with "embedding", "norm" or "lm_head" in its name, as in the
    Cerebras Model Zoo, and none that `sparsify` leaves dense for its type or role: embeddings, heads, routers.
    "blocks" takes what `sparsify` prunes, and layers whose forwards do something else with the weight; nothing else.
    """
    protected = protected_modules(model, (), one_block=False)
    no_layer = {name: weight.reason for weight in find_layers(model)[1] for name in weight.names}
    default = {weight.name: _reason(weight, protected, no_layer) for weight in weights}
    if choice == DEFAULT:
        return default
    plan = plan_for(model, Magnitude(), SparsifyConfig(pattern=Unstructured(0.5), replace=True))
    planned = {layer_plan.layer.parameter_name for layer_plan in plan.layers}
    skipped = {weight.name: "" if OTHER in weight.reason else weight.reason for weight in plan.skipped}
    return {
        name: "" if name in planned else reason or skipped.get(name.removesuffix(".weight"), "not in a block")
        for name, reason in default.items()
    }


def _reason(weight: SparseParameter, protected: Mapping[nn.Module, str], no_layer: Mapping[str, str]) -> str:
    if len(weight.shape) < 2:
        return "one dimension"
    if any(isinstance(module, nn.Embedding) for module in weight.holders.values()):
        return "embedding"
    if role := next((protected[module] for module in weight.holders.values() if module in protected), ""):
        return role
    if not weight.is_layer and (reason := no_layer.get(weight.name.removesuffix(".weight"))):
        return reason
    word = next((word for word in DENSE_WORDS if word in weight.name.lower()), "")
    return f"{word!r} in its name" if word else ""


# the plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter that an algorithm makes sparse.

    zeros: how many of its ``size`` weights are pruned when the algorithm is applied to the model.
    scope: which of its weights compete; the N:M pattern stands before it.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    algorithm: str
    schedule: str
    scope: str
    zeros: int
    size: int


@dataclass(frozen=True)
class TrainingPlan(Printed):
    """What ``sparsity.apply(model)`` would make sparse, and why the rest stays dense. ``print`` shows it with
    equal rows folded, ``text(all_rows=True)`` all rows.

    notes: what is worth a warning.
    """

    rows: tuple[PlannedParameter, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [row.name for row in self.rows]
        skipped = {weight.name: weight.reason for weight in self.skipped}
        zeros, size = sum(row.zeros for row in self.rows), sum(row.size for row in self.rows)
        columns = [
            Column("type", [row.type for row in self.rows]),
            Column("shape", [product_of(row.shape) for row in self.rows]),
            Column("algorithm", [row.algorithm for row in self.rows]),
            Column("level", [row.schedule for row in self.rows], "levels"),
            Column("counted per", [row.scope for row in self.rows]),
            Column("zeros at the start", [f"{row.zeros / row.size:.2%}" for row in self.rows], "range"),
        ]
        parts = [
            f"{len(names)} parameters sparse, {zeros / size:.2%} zeros at the start.",
            rows_of("parameter", names, columns, skipped, all_rows=all_rows),
            by_reason("stays dense", skipped, names, all_rows=all_rows),
            *(paragraph(f"note: {note}", all_rows=all_rows) for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part)


def plan_training(model: nn.Module, members: Members) -> tuple[TrainingPlan, list[SparseParameter]]:
    """(the plan, the weights that become sparse, with their algorithms). Raises ValueError for what could not work.

    members: the first that takes a parameter counts.
    """
    weights = find_weights(model)
    names = [weight.name for weight in weights]
    for include, algorithm in members:
        globs = (*include.globs, *(() if algorithm is None else algorithm.exclude))
        check_globs(globs, names, f"parameter of this {type(model).__name__}")
        if include.regexes and not any(map(include.matches, names)):
            raise ValueError(f"{include} matches no parameter of this {type(model).__name__}, such as {names[0]}")
    choices = {include.choice for include, _ in members} | {DEFAULT}
    by_choice = {choice: reasons(model, weights, choice) for choice in choices if choice}
    skipped = []
    for weight in weights:
        outcome = _decide(weight, members, by_choice)
        if isinstance(outcome, str):
            skipped.append(Skipped(weight.name, weight.type, weight.shape, outcome))
        else:
            refuse_what_cannot_be_sparse(weight.layer.owner, weight.layer.param)
            weight.algorithm = outcome
    chosen = [weight for weight in weights if weight.algorithm is not None]
    if not chosen:
        why = first_few(sorted({weight.reason for weight in skipped})) or "it has no parameters"
        raise ValueError(f"nothing to make sparse in this {type(model).__name__}: {why}")
    levels = levels_at(0, chosen)
    rows = tuple(_row(weight, levels[weight.name]) for weight in chosen)
    return TrainingPlan(rows, tuple(skipped), _notes(model, chosen, members, by_choice[DEFAULT])), chosen


def _decide(weight: SparseParameter, members: Members, by_choice: Mapping[str, dict[str, str]]) -> Any:
    """A parameter's algorithm; or, as a string, why it stays dense."""
    if getattr(weight.parameter, "requires_dense", False):
        return "requires_dense"
    if any(getattr(module, "requires_dense", False) for module in weight.holders.values()):
        return "requires_dense of its module"
    why = "no glob matches its name"
    for include, algorithm in members:
        if include.choice:
            if why := by_choice[include.choice][weight.name]:
                continue
        elif not include.matches(weight.name):
            continue
        if algorithm is None:
            return f"left dense by {include}"
        glob = first_match(weight.name, algorithm.exclude)
        return f"excluded by {glob!r}" if glob is not None else _misfit(weight, algorithm) or algorithm
    return why


def _misfit(weight: SparseParameter, algorithm: Any) -> str | None:
    """Why an algorithm cannot take a parameter. Raises ValueError for what is a mistake."""
    parameter, pattern, scope = weight.parameter, algorithm.pattern, algorithm.scope
    if not parameter.is_floating_point() or holds_codes(parameter):
        return f"{str(parameter.dtype).removeprefix('torch.')} values are no weights to prune"
    if not parameter.requires_grad:
        return "frozen: nothing trains it (requires_grad is False)"
    if parameter.numel() == 0:
        return "it is empty"
    embeddings = [module for module in weight.holders.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    if algorithm.needs_gradient and any(module.sparse for module in embeddings):
        problem = f"{weight.name!r} is of an embedding with sparse=True, whose gradient has no pruned places"
        raise ValueError(f"{problem}: build it with sparse=False")
    if algorithm.needs_gradient and parameter.dtype == torch.float16:
        raise ValueError(f"{weight.name!r} is float16, too coarse for gradients: use float32 under autocast")
    rows, columns = weight.empty_matrix().shape[-2:]
    if pattern is not None:
        if not weight.is_layer:
            return f"{pattern} is for weight matrices"
        if misfit := pattern.misfit(weight.layer.columns(torch.empty(weight.shape, device="meta"))):
            return misfit
        if scope.kind == "in_groups" and columns // scope.groups % pattern.m:
            raise ValueError(f"{weight.name!r}: {scope.groups} groups of columns cut through groups of {pattern.m}")
    if misfit := scope.misfit(rows, columns):
        raise ValueError(f"{weight.name!r}: {misfit}; choose another number, or leave it out with exclude")
    return None


def levels_at(step: int, weights: Collection[SparseParameter]) -> dict[str, float]:
    """The level of each sparse parameter at a step, by name."""
    levels: dict[str, float] = {}
    for algorithm, members in grouped(weights, lambda weight: weight.algorithm).items():
        shapes = {
            weight.name: weight.shape[-2:] if isinstance(weight.layer.adapter, RoutedAdapter) else weight.shape
            for weight in members
        }
        numbers = {weight.name: math.prod(weight.shape) // math.prod(shapes[weight.name]) for weight in members}
        banks = [numbers] if max(numbers.values()) > 1 else []  # subclasses of the user's may take no more than two
        levels |= algorithm.levels(shapes, step, *banks)  # ERK goes by shapes, of experts by that of one
    return levels


def _row(weight: SparseParameter, level: float) -> PlannedParameter:
    algorithm, pattern, options = weight.algorithm, weight.algorithm.pattern, weight.algorithm.describe()
    schedule = str(getattr(algorithm.sparsity, "value", options["sparsity"]))
    scope = str(algorithm.scope) if pattern is None else f"{pattern}, {algorithm.scope}"
    zeros, size = weight.zeros_at(level), weight.parameter.numel()
    return PlannedParameter(weight.name, weight.type, weight.shape, options["algorithm"], schedule, scope, zeros, size)


def _notes(
    model: nn.Module, chosen: Sequence[SparseParameter], members: Members, default: Mapping[str, str]
) -> tuple[str, ...]:
    """Sentences that are worth a warning."""
    notes = []
    everything = [algorithm for include, algorithm in members if include == Filter() and algorithm is not None]
    unusual = [weight.name for weight in chosen if weight.algorithm in everything and default[weight.name]]
    if unusual:
        kinds = first_few(sorted({default[name] for name in unusual}))
        notes.append(
            f"{type(everything[0]).__name__} takes every parameter, {len(unusual)} among them that mostly stay dense "
            f"({kinds}; {first_few(unusual, 3)}): choose others by include='default' or include='blocks'"
        )
    algorithms = dict.fromkeys(weight.algorithm for weight in chosen)
    open_scopes = {type(x).__name__ for x in algorithms if x.asks_for_scope and not x.scope_is_chosen}
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None and open_scopes:
        notes.append(
            f"{' and '.join(sorted(open_scopes))} without a scope counts per matrix, as published: in language models "
            "a few rows may take all that grows. Try scope='row' (docs/training.md)"
        )
    if over := [weight.name for weight in chosen if _prunes_live_weights_by_chance(weight)]:
        notes.append(
            f"{first_few(over, 3)}: zeros are there already, and a random mask prunes other weights as well: give "
            "init_method='topk', which keeps the largest, or 'from_zeros'"
        )
    for algorithm in algorithms:
        if algorithm.when != AtSteps(()) and algorithm.when.last < 1:
            notes.append(f"masks of {algorithm!r} never move: update stops before it comes to a step")
        elif isinstance(algorithm.sparsity, Cubic) and algorithm.when.last < algorithm.sparsity.stop:
            last = f"the level of {algorithm!r} ends at {algorithm.sparsity(algorithm.when.last):.2%}"
            notes.append(f"{last}: its last update is at step {algorithm.when.last}, before the schedule's stop")
    return tuple(notes)


def _prunes_live_weights_by_chance(weight: SparseParameter) -> bool:
    """Whether a tenth or more of a weight without a mask is zero, and where its zeros are does not count."""
    algorithm, values = weight.algorithm, weight.layer.values
    by_magnitude = algorithm.pattern is not None and algorithm.magnitude_first
    if weight.is_sparse or values.is_meta or by_magnitude or algorithm.init_method not in ("random", "checkerboard"):
        return False
    zeros = int((full(values) == 0).sum())
    return values.numel() <= 10 * zeros < 10 * values.numel()
