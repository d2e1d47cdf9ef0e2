"""Which parameters get which algorithm, and their initial masks. What cannot work is refused here, before work."""

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.distributed import full
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.adapters import RowAdapter
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.hf import holds_codes
from modelopt_sparse.model.layers import Layer, as_row, find_layers, protected_modules
from modelopt_sparse.model.masking import dense_class, refuse_what_cannot_be_sparse
from modelopt_sparse.plan.names import check_globs
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.fold import Column, by_reason, first_few, paragraph, rows_of
from modelopt_sparse.reports.report import Skipped
from modelopt_sparse.training import updates as rules

# weights --------------------------------------------------------------------------------------------------------------
# Which parameters of a model an algorithm makes sparse, and why the rest stays dense: names, filters, and the plan.


BLOCKS, DEFAULT = "blocks", "default"
DENSE_WORDS = ("embedding", "norm", "lm_head")  # in a parameter's name; those of the Cerebras Model Zoo


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    name: its first name in ``model.named_parameters()``.
    names: all its names there.
    holders: (module, name in it) of everything that holds it.
    layer: how it is seen as a matrix ``[..., R, C]``; what is no prunable layer is one row.
    """

    names: tuple[str, ...]
    holders: tuple[tuple[nn.Module, str], ...]
    layer: Layer

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        module, name = self.holders[0]
        return module.get_parameter(name)

    @property
    def type(self) -> str:
        """The class of the module that holds it."""
        return dense_class(self.holders[0][0]).__name__

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_layer(self) -> bool:
        return not isinstance(self.layer.adapter, RowAdapter)

    def empty_matrix(self) -> Tensor:
        """The matrix without values, to ask for its shape: a sharded parameter cannot be reshaped at will."""
        return self.layer.matrix(torch.empty(self.shape, device="meta"))

    def kernel_shape(self) -> tuple[int, ...]:
        """The sizes that ERK goes by: those of the parameter, of experts those of one expert's matrix."""
        routed = isinstance(self.layer.adapter, RoutedAdapter)
        return self.shape[-2:] if routed else self.shape


def find_weights(model: nn.Module) -> list[Weight]:
    """Every parameter of a model once, in model order."""
    layers = {layer.parameter_name: layer for layer in find_layers(model)[0]}
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((f"{path}.{name}".removeprefix("."), module, name))
    weights = []
    for held in holders.values():
        names = tuple(full_name for full_name, _, _ in held)
        layer = layers.get(names[0]) or as_row(model, names[0])
        weights.append(Weight(names, tuple((module, name) for _, module, name in held), layer))
    return weights


# which of them --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filter:
    """Names of parameters. At most one of the three is set; none: every parameter.

    globs: match a full name whole. regexes: match a part of it. choice: "default" or "blocks", see `reasons`.
    """

    globs: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    choice: str = ""

    def __str__(self) -> str:
        named = [*map(repr, self.globs), *(f"regex {regex!r}" for regex in self.regexes)]
        return ", ".join(named) or self.choice or "every parameter"

    def matches(self, name: str) -> bool:
        """Whether a name is meant, for filters of names."""
        if self.regexes:
            return any(re.search(regex, name) for regex in self.regexes)
        return not self.globs or any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)


def parse_filter(include: Any) -> Filter:
    """None (every parameter), "default", "blocks", a glob or several of parameter names, or compiled regular
    expressions -> a filter. Raises ValueError for anything else."""
    if include is None or isinstance(include, Filter):
        return include or Filter()
    if include in (BLOCKS, DEFAULT):
        return Filter(choice=include)
    each = [include] if isinstance(include, (str, re.Pattern)) else list(include) if _several(include) else []
    if each and all(isinstance(one, str) for one in each):
        return Filter(globs=tuple(each))
    regexes = [one for one in each if isinstance(one, re.Pattern)]
    if each and len(regexes) == len(each):
        return Filter(regexes=tuple(one.pattern for one in regexes))
    raise ValueError(
        f"include={include!r}: give a glob of parameter names such as '*.mlp.*.weight', several, compiled regular "
        f"expressions, {DEFAULT!r}, {BLOCKS!r}, or None for every parameter"
    )


def _several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def reasons(model: nn.Module, weights: Sequence[Weight], choice: str) -> dict[str, str]:
    """Why parameters of a model stay dense under a choice, by name; "" for those that it takes.

    "default" takes no weights of one dimension, none with "embedding", "norm" or "lm_head" in its name, as in the
    Cerebras Model Zoo, and none that `sparsify` leaves dense for its type or role: embeddings, heads, routers.
    "blocks" takes what `sparsify` prunes, and nothing else.
    """
    layers, others = find_layers(model)
    prunable = {module for layer in layers for module in (layer.owner, *layer.hooked_modules)}
    protected = protected_modules(model, prunable, one_block=False)
    no_layer = {name: other.reason for other in others for name in other.names}
    default = {weight.name: _reason(weight, protected, no_layer) for weight in weights}
    if choice == DEFAULT:
        return default
    plan = plan_for(model, Magnitude(), SparsifyConfig(pattern=Unstructured(0.5), replace=True))
    planned = {layer_plan.layer.parameter_name for layer_plan in plan.layers}
    skipped = {weight.name: weight.reason for weight in plan.skipped}
    return {
        name: "" if name in planned else reason or skipped.get(name.removesuffix(".weight"), "not in a block")
        for name, reason in default.items()
    }


def _reason(weight: Weight, protected: Mapping[nn.Module, str], no_layer: Mapping[str, str]) -> str:
    if len(weight.shape) < 2:
        return "one dimension"
    if role := next((protected[module] for module, _ in weight.holders if module in protected), ""):
        return role
    if not weight.is_layer and (reason := no_layer.get(weight.name) or no_layer.get(weight.name[: -len(".weight")])):
        return reason
    word = next((word for word in DENSE_WORDS if word in weight.name.lower()), "")
    return f"{word!r} in its name" if word else ""


# the plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
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
class TrainingPlan:
    """What ``sparsity.apply(model)`` would make sparse, and why the rest stays dense. ``print`` shows it with
    equal rows folded, ``text(all_rows=True)`` all rows.

    notes: what is worth a warning.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON takes."""
        rows = [{**vars(row), "shape": list(row.shape)} for row in self.rows]
        return {"rows": rows, "skipped": [each.as_dict() for each in self.skipped], "notes": list(self.notes)}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [row.name for row in self.rows]
        skipped = {each.name: each.reason for each in self.skipped}
        zeros, size = sum(row.zeros for row in self.rows), sum(row.size for row in self.rows)
        summary = f"{len(names)} parameters sparse" + (f", {zeros / size:.2%} zeros at the start" if size else "")
        parts = [f"{summary}."]
        if names:
            columns = [
                Column("type", [row.type for row in self.rows]),
                Column("shape", [" x ".join(map(str, row.shape)) for row in self.rows]),
                Column("algorithm", [row.algorithm for row in self.rows]),
                Column("level", [row.schedule for row in self.rows], "levels"),
                Column("counted per", [row.scope for row in self.rows]),
                Column("zeros at the start", [f"{row.zeros / max(row.size, 1):.2%}" for row in self.rows], "range"),
            ]
            parts.append(rows_of("parameter", names, columns, skipped, all_rows=all_rows))
        if skipped:
            parts.append(by_reason("stays dense", skipped, names, all_rows=all_rows))
        return "\n\n".join([*parts, *(paragraph(f"note: {note}", all_rows=all_rows) for note in self.notes)])


# planner --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """The plan of a model, and what `apply` needs beside it.

    chosen: each parameter that becomes sparse, and its algorithm.
    description: of the algorithms, in plain values.
    """

    plan: TrainingPlan
    chosen: tuple[tuple[Weight, Any], ...]
    description: dict[str, Any]


def plan_training(model: nn.Module, members: Sequence[tuple[Filter, Any]]) -> Planned:
    """Decide on every parameter of a model. Raises ValueError for what could not work."""
    weights = find_weights(model)
    _check_globs(model, weights, members)
    by_choice = {
        choice: reasons(model, weights, choice)
        for choice in {include.choice for include, _ in members} | {DEFAULT}
        if choice
    }
    chosen: list[tuple[Weight, Any]] = []
    skipped: list[Skipped] = []
    for weight in weights:
        outcome = _decide(weight, members, by_choice)
        if isinstance(outcome, str):
            skipped.append(Skipped(weight.name, weight.type, weight.shape, outcome))
        else:
            refuse_what_cannot_be_sparse(weight.holders[0][0], weight.holders[0][1])
            chosen.append((weight, outcome))
    if not chosen:
        why = first_few(sorted({each.reason for each in skipped})) or "it has no parameters"
        raise ValueError(f"nothing to make sparse in this {type(model).__name__}: {why}")
    rows = _rows(chosen)
    notes = _notes(model, chosen, members, by_choice[DEFAULT])
    described = [[str(include), None if each is None else each.describe()] for include, each in members]
    return Planned(TrainingPlan(rows, tuple(skipped), notes), tuple(chosen), {"algorithms": described})


def _check_globs(model: nn.Module, weights: Sequence[Weight], members: Sequence[tuple[Filter, Any]]) -> None:
    names = [weight.name for weight in weights]
    for include, algorithm in members:
        globs = (*include.globs, *(algorithm.exclude if algorithm is not None else ()))
        check_globs(globs, names, f"parameter of this {type(model).__name__}")
        if include.regexes and not any(include.matches(name) for name in names):
            raise ValueError(
                f"{include} matches no parameter of this {type(model).__name__}; names look like {', '.join(names[:3])}"
            )


def _decide(weight: Weight, members: Sequence[tuple[Filter, Any]], by_choice: Mapping[str, dict[str, str]]) -> Any:
    """A parameter's algorithm; or, as a string, why it stays dense."""
    if getattr(weight.parameter, "requires_dense", False):
        return "requires_dense"
    if any(getattr(module, "requires_dense", False) for module, _ in weight.holders):
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
        glob = next((glob for glob in algorithm.exclude if fnmatch.fnmatchcase(weight.name, glob)), None)
        return f"excluded by {glob!r}" if glob is not None else _misfit(weight, algorithm) or algorithm
    return why


def _misfit(weight: Weight, algorithm: Any) -> str | None:
    """Why an algorithm cannot take a parameter. Raises ValueError for what is a mistake."""
    parameter, kind = weight.parameter, type(algorithm).__name__
    if not parameter.is_floating_point() or holds_codes(parameter):
        return f"{str(parameter.dtype).removeprefix('torch.')} values are no weights to prune"
    if parameter.numel() == 0:
        return "it is empty"
    if any(isinstance(module, nn.Embedding) and module.sparse for module, _ in weight.holders):
        raise ValueError(
            f"{weight.name!r} is of an Embedding(sparse=True), whose gradients are sparse tensors that no mask can be "
            "put on: build it with sparse=False, or leave it dense with exclude"
        )
    if algorithm.needs_gradient and parameter.dtype == torch.float16:
        raise ValueError(
            f"{weight.name!r} is float16, which cannot hold the faint gradients that {kind} grows by: keep weights in "
            "float32 and run under autocast, or use bfloat16"
        )
    rows, columns = weight.empty_matrix().shape[-2:]
    if algorithm.pattern is not None:
        if not weight.is_layer:
            return f"{algorithm.pattern} is for weight matrices"
        if misfit := algorithm.pattern.misfit(weight.layer.columns(torch.empty(weight.shape, device="meta"))):
            return misfit
        if algorithm.scope.kind == "in_groups" and columns // algorithm.scope.groups % algorithm.pattern.m:
            raise ValueError(
                f"{weight.name!r}: {algorithm.scope.groups} groups of columns cut through groups of "
                f"{algorithm.pattern.m}: choose fewer groups"
            )
    if misfit := algorithm.scope.misfit(rows, columns):
        raise ValueError(f"{weight.name!r}: {misfit}; choose another number, or leave it out with include or exclude")
    return None


def _first_levels(chosen: Sequence[tuple[Weight, Any]]) -> dict[str, float]:
    """The level of each parameter at step 0, by name."""
    levels: dict[str, float] = {}
    for algorithm in dict.fromkeys(algorithm for _, algorithm in chosen):
        shapes = {weight.name: weight.kernel_shape() for weight, own in chosen if own is algorithm}
        levels.update(algorithm.levels(shapes, 0))
    return levels


def _rows(chosen: Sequence[tuple[Weight, Any]]) -> tuple[Row, ...]:
    levels = _first_levels(chosen)
    rows = []
    for weight, algorithm in chosen:
        options = algorithm.describe()
        pattern, scope = algorithm.pattern, algorithm.scope
        zeros = _zeros_at(weight, algorithm, levels[weight.name])
        rows.append(
            Row(
                weight.name,
                weight.type,
                weight.shape,
                options["algorithm"],
                str(getattr(algorithm.sparsity, "value", options["sparsity"])),
                str(scope) if pattern is None else f"{pattern}, {scope}",
                zeros,
                weight.parameter.numel(),
            )
        )
    return tuple(rows)


def _zeros_at(weight: Weight, algorithm: Any, level: float) -> int:
    """How many zeros a parameter has at a level, if its mask goes by the level (not by "from_zeros" or a function)."""
    parameter = weight.parameter
    matrix = weight.empty_matrix()
    if algorithm.pattern is not None and not algorithm.magnitude_first:
        return algorithm.pattern.zeros_in(matrix.shape)
    if algorithm.pattern is not None:
        level = min(level, algorithm.pattern.sparsity)
    scopes = algorithm.scope.within(matrix)
    return parameter.numel() // scopes.shape[-1] * (scopes.shape[-1] - rules.keep_count(scopes, level))


def _notes(
    model: nn.Module,
    chosen: Sequence[tuple[Weight, Any]],
    members: Sequence[tuple[Filter, Any]],
    default: Mapping[str, str],
) -> tuple[str, ...]:
    """Sentences that are worth a warning."""
    notes = []
    everything = [algorithm for include, algorithm in members if include == Filter() and algorithm is not None]
    unusual = [weight.name for weight, algorithm in chosen if algorithm in everything and default[weight.name]]
    if unusual:
        kinds = sorted({default[name] for name in unusual})
        notes.append(
            f"{type(everything[0]).__name__} takes every parameter, {len(unusual)} among them that mostly stay dense "
            f"({first_few(kinds)}; {first_few(unusual, 3)}): include='default' leaves those dense, include='blocks' "
            "takes what sparsify prunes"
        )
    open_scopes = {
        type(algorithm).__name__
        for _, algorithm in chosen
        if algorithm.asks_for_scope and not algorithm.scope_is_chosen
    }
    if isinstance(model, PreTrainedModel) and open_scopes:
        notes.append(
            f"{' and '.join(sorted(open_scopes))} without a scope counts per matrix, as published; on language models "
            "RigL then lost to Static in our measurements, and did better with scope='row' (docs/sparse-training.md)"
        )
    return tuple(notes)


# initial masks --------------------------------------------------------------------------------------------------------


def initial_masks(planned: Planned) -> dict[str, Tensor]:
    """The masks of all chosen parameters at step 0, by name, shaped like the parameters.

    NaN in a weight marks a pruned place (docs/sparse-training.md). Raises ValueError for inf, and for meta tensors.
    """
    masks = {}
    levels = _first_levels(planned.chosen)
    for weight, algorithm in planned.chosen:
        module, name = weight.holders[0]
        values = full(stored(module, name).detach())
        if values.is_meta:
            raise ValueError(f"{weight.name!r} is on the meta device and has no values: load the model first")
        if values.isinf().any():
            raise ValueError(f"{weight.name!r} holds inf, so the weights are damaged: load them again")
        masks[weight.name] = _initial_mask(weight, algorithm, values, levels[weight.name])
    return masks


@torch.no_grad()
def zero_sentinels(weight: Weight) -> None:
    """Write 0 in the place of NaN: some of these places may grow again."""
    module, name = weight.holders[0]
    values = stored(module, name)
    values.masked_fill_(values.isnan(), 0)


def _initial_mask(weight: Weight, algorithm: Any, values: Tensor, level: float) -> Tensor:
    layer = weight.layer
    present = layer.mask
    if values.isnan().any():
        finite = layer.matrix(~values.isnan())
        present = finite if present is None else present & finite
        values = values.nan_to_num(0.0)
    matrix = layer.matrix(values)
    generator = rules.generator_for(algorithm.seed, weight.name, "init")
    if algorithm.pattern is not None and algorithm.magnitude_first:
        alive = torch.ones_like(matrix, dtype=torch.bool) if present is None else present
        mask = rules.largest_magnitudes(
            matrix,
            alive,
            level,
            lambda: rules.uniform(matrix, generator),
            scope=algorithm.scope,
            pattern=algorithm.pattern,
        )
    else:
        mask = rules.initial_mask(
            matrix,
            level,
            algorithm.init_method,
            generator,
            present=present,
            scope=algorithm.scope,
            pattern=algorithm.pattern,
        )
    return layer.unmatrix(mask).contiguous()
