"""Which parameters of a model an algorithm makes sparse, and why the rest stays dense: names, filters, and the plan."""

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.methods.magnitude import Magnitude
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.model.adapters import RowAdapter
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.layers import Layer, as_row, find_layers
from modelopt_sparse.model.masking import dense_class
from modelopt_sparse.model.roles import protected_modules
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.fold import Column, by_reason, paragraph, rows_of
from modelopt_sparse.reports.values import Skipped

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
