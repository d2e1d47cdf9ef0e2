"""Sparse-IFT: models with larger and sparser layers of the same FLOPs (arXiv 2303.11525), from one knob, the level."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from modelopt_sparse.model.hf import model_class
from modelopt_sparse.reports.report import Skipped
from modelopt_sparse.reports.text import first_few, table
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm, Static
from modelopt_sparse.training.members import (
    Activation,
    Doped,
    Factorized,
    Parallel,
    branches_for,
    folded,
    rank_of_doping,
    rank_of_factors,
    sides,
    why_not,
)
from modelopt_sparse.training.weights import BLOCKS, Weight, find_weights, parse_filter, reasons
from modelopt_sparse.training.wide import widened

MEMBERS = ("wide", "parallel", "factorized", "doped")
ISO = ("layers", "model")
ATTENTION = ("attn", "attention")  # in the names of modules that stay as they are unless they are asked for


@dataclass(frozen=True)
class Replaced:
    """One layer: its weights before, what stands for it, the weights of that, the level, and the live weights."""

    name: str
    weights: int
    by: str
    new_weights: int
    level: float
    live: int


@dataclass(frozen=True)
class IsoPlan:
    """What Sparse-IFT makes of a model. ``print`` shows it.

    layers: those that are wider or replaced, and sparse. skipped: all other weights, with the reason.
    other, new_other: weights of the other layers that multiply (heads, attention that stays), before and after.

    A weight costs two FLOPs for each token or pixel in a forward and six in a training step, if it is live. Attention's
    own products are not counted.
    """

    layers: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    other: int
    new_other: int

    @property
    def ratio(self) -> float:
        """FLOPs of the sparse layers divided by those of the layers that they stand for."""
        return sum(layer.live for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def model_ratio(self) -> float:
        """The same of all layers that multiply."""
        live, dense = (sum(getattr(layer, what) for layer in self.layers) for what in ("live", "weights"))
        return (live + self.new_other) / (dense + self.other)

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON takes."""
        return {
            "layers": [vars(layer) for layer in self.layers],
            "skipped": [each.as_dict() for each in self.skipped],
            "other": self.other,
            "new_other": self.new_other,
            "ratio": self.ratio,
            "model_ratio": self.model_ratio,
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                f"{layer.weights:,}",
                layer.by,
                f"{layer.new_weights:,}",
                f"{layer.level:.4f}",
                f"{layer.live / layer.weights:.4f}",
            )
            for layer in self.layers
        ]
        parts = [table(("layer", "weights", "becomes", "weights", "level", "FLOPs, times dense"), rows)]
        by_reason: dict[str, list[str]] = {}
        for skipped in self.skipped:
            by_reason.setdefault(skipped.reason, []).append(skipped.name)
        parts += [f"as it was: {first_few(names)} ({why})" for why, names in by_reason.items()]
        new, live = (sum(getattr(layer, what) for layer in self.layers) for what in ("new_weights", "live"))
        parts.append(
            f"{len(self.layers)} layers: {sum(layer.weights for layer in self.layers):,} weights become {new:,}, of "
            f"which {live:,} are live. FLOPs of these layers {self.ratio:.4f} times dense, of all layers "
            f"{self.model_ratio:.4f} times."
        )
        return "\n\n".join(parts)


@dataclass(frozen=True)
class SparseIFT:
    """What `sparse_ift` returns: the model, the sparse training that makes it iso-FLOP, and the plan.

    >>> ift.sparsity.apply(ift.model)
    >>> ift.sparsity.apply(optimizer)
    """

    model: nn.Module
    sparsity: Group
    plan: IsoPlan


def sparse_ift(
    model_or_config: nn.Module | PretrainedConfig,
    sparsity: float,
    member: str = "wide",
    *,
    rule: Callable[[float], SparsityAlgorithm] = Static,
    iso: str = "layers",
    multiple: int = 1,
    include: Any = None,
    activation: Activation = nn.ReLU,
) -> SparseIFT:
    """A model with larger, sparser layers of the same FLOPs, to be trained from scratch.

    model_or_config: a model; a config of transformers for "wide", which then gives a model on the meta device: build
      yours from ``ift.model.config``. A model on meta stays there.
    sparsity: the level, in [0, 1), which says how much larger layers become:
    member: - "wide": a new model of transformers, of the same class, ``sqrt(1 / (1 - level))`` times as wide.
      - "parallel": 1 / (1 - level) layers beside each other, each with its own non-linearity, added up.
      - "factorized": two layers with a non-linearity between them.
      - "doped": the layer, sparse, plus two dense ones of low rank.
      The last three replace layers of the model in place, with new random weights.
    rule: level -> sparsity algorithm, for each level that occurs: ``lambda level: SET(level, update=100)``.
    iso: "layers": the level of each layer is solved so that its FLOPs are those of the dense one. "model" (wide): one
      level for all, so that those of the whole model are, its head included.
    multiple: widths are rounded up to a multiple of this.
    include: globs of layers to replace. The default is all of the blocks but attention's projections; a model without
      blocks keeps its first and its last layer.
    activation: a class of non-linearities for "parallel" and "factorized"; None: none.

    Raises ValueError, with the model as it was, for a level or a model that does not work.
    """
    if not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity!r}: the level must be in [0, 1), for example 0.75")
    if member not in MEMBERS:
        raise ValueError(f"member={member!r}: allowed are {', '.join(MEMBERS)}")
    if iso not in ISO:
        raise ValueError(f"iso={iso!r}: allowed are {', '.join(ISO)}")
    if member == "wide":
        if include is not None:
            raise ValueError("include is for the members that replace layers; Sparse Wide widens the whole model")
        return _wide(model_or_config, float(sparsity), rule, iso, multiple)
    if not isinstance(model_or_config, nn.Module):
        raise ValueError(f"member {member!r} replaces layers of a model: build it from the config first")
    if iso == "model" or multiple != 1:
        raise ValueError(f"member {member!r} is iso-FLOP layer by layer: iso='model' and multiple are for 'wide'")
    return _replace(model_or_config, float(sparsity), member, rule, include, activation)


# wide -----------------------------------------------------------------------------------------------------------------


def _wide(model: Any, level: float, rule: Any, iso: str, multiple: int) -> SparseIFT:
    if isinstance(model, PretrainedConfig):
        with torch.device("meta"):
            model = model_class(model, model.model_type)(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"Sparse Wide needs a model of transformers, whose config says what its sizes are, and this is a "
            f"{type(model).__name__}: the other members replace layers in any model"
        )
    config = widened(model.config, (1 / (1 - level)) ** 0.5, multiple)
    with torch.device(next(model.parameters()).device):
        wide = type(model)(config)
    before, after = find_weights(model), find_weights(wide)
    why = reasons(wide, after, BLOCKS)
    sizes = {weight.name: weight.parameter.numel() for weight in before}
    chosen = [weight for weight in after if not why[weight.name]]
    rest = [weight for weight in after if why[weight.name]]
    multiplying = [weight.name for weight in rest if _multiplies(weight)]
    other = sum(sizes[name] for name in multiplying)
    new_other = sum(weight.parameter.numel() for weight in rest if weight.name in multiplying)
    levels = {weight.name: 1 - sizes[weight.name] / weight.parameter.numel() for weight in chosen}
    if iso == "model":
        maskable = sum(weight.parameter.numel() for weight in chosen)
        dense = sum(sizes[weight.name] for weight in chosen)
        one = 1 - (dense + other - new_other) / maskable
        if not 0 <= one < 1:
            raise ValueError(
                f"at level {level:g} the layers that stay dense alone cost more than the whole model did: give a lower "
                "level, or iso='layers'"
            )
        levels = dict.fromkeys(levels, one)
    layers = tuple(
        Replaced(
            weight.name,
            sizes[weight.name],
            " x ".join(map(str, weight.shape)),
            weight.parameter.numel(),
            levels[weight.name],
            _live(weight.parameter.numel(), levels[weight.name]),
        )
        for weight in chosen
    )
    skipped = tuple(Skipped(weight.name, weight.type, weight.shape, why[weight.name]) for weight in rest)
    return SparseIFT(wide, _group(levels, rule), IsoPlan(layers, skipped, other, new_other))


def _multiplies(weight: Weight) -> bool:
    """Whether a weight is multiplied with every token: heads are, tied ones too, and embeddings are looked up."""
    return any(isinstance(module, nn.Linear) for module, _ in weight.holders) or weight.is_layer


# members that replace layers ------------------------------------------------------------------------------------------


def _replace(model: nn.Module, level: float, member: str, rule: Any, include: Any, activation: Activation) -> SparseIFT:
    weights = find_weights(model)
    why = _reasons(model, weights, include)
    chosen = [weight for weight in weights if not why[weight.name]]
    if not chosen:
        kinds = first_few(sorted(set(why.values())))
        raise ValueError(f"no layer of this {type(model).__name__} is to be replaced: {kinds}")
    count = branches_for(level) if member == "parallel" else 0
    levels: dict[str, float] = {}
    layers = []
    for weight in chosen:
        name, layer = weight.name.removesuffix(".weight"), weight.holders[0][0]
        new, parts, own = _member(layer, member, level, count, activation)
        levels.update({f"{name}.{part}.weight": own for part in parts})
        size, masked = layer.get_parameter("weight").numel(), [new.get_submodule(part) for part in parts]
        all_weights = sum(p.numel() for p in new.parameters() if p.dim() > 1)
        sparse = [part.get_parameter("weight").numel() for part in masked]
        live = all_weights - sum(sparse) + sum(_live(each, own) for each in sparse)
        layers.append((weight, new, Replaced(name, size, _described(new), all_weights, own, live)))
    for weight, new, _ in layers:  # nothing has changed up to here
        if not isinstance(new, type(weight.holders[0][0])):
            model.set_submodule(weight.name.removesuffix(".weight"), new)
    rest = [weight for weight in weights if why[weight.name]]
    other = sum(weight.parameter.numel() for weight in rest if _multiplies(weight))
    skipped = tuple(Skipped(weight.name, weight.type, weight.shape, why[weight.name]) for weight in rest)
    plan = IsoPlan(tuple(row for _, _, row in layers), skipped, other, other)
    return SparseIFT(model, _group(levels, rule), plan)


def _reasons(model: nn.Module, weights: list[Weight], include: Any) -> dict[str, str]:
    """Why layers are not replaced, by name of the parameter; "" for those that are."""
    layers = [weight for weight in weights if weight.is_layer]
    ends = {layers[0].name, layers[-1].name} if len(layers) > 2 else set()
    asked = None if include is None else parse_filter(include)
    why = reasons(model, weights, BLOCKS)
    if asked is not None and not any(asked.matches(weight.name.removesuffix(".weight")) for weight in layers):
        raise ValueError(f"{asked} matches no layer of this {type(model).__name__}")
    for weight in weights:
        name, module = weight.name.removesuffix(".weight"), weight.holders[0][0]
        if not weight.is_layer or not weight.name.endswith("weight"):
            why[weight.name] = why[weight.name] or "not a layer of its own"
        elif len(weight.holders) > 1:
            why[weight.name] = "tied"
        elif asked is not None:
            why[weight.name] = (why_not(module) or "") if asked.matches(name) else "not in include"
        elif not why[weight.name]:
            if any(word in part for part in name.lower().split(".") for word in ATTENTION):
                why[weight.name] = "a projection of attention"
            elif not isinstance(model, PreTrainedModel) and weight.name in ends:
                why[weight.name] = "the first or the last layer"
            else:
                why[weight.name] = why_not(module) or ""
    return why


def _member(
    layer: nn.Module, member: str, level: float, count: int, activation: Activation
) -> tuple[nn.Module, list[str], float]:
    """(what stands for a layer, its parts that carry masks, their level)."""
    inputs, outputs = sides(layer)
    dense = inputs * outputs
    if member == "parallel":
        return Parallel(layer, count, activation), [f"branches.{i}" for i in range(count)], 1 - 1 / count
    if member == "factorized":
        if level == 0:
            return layer, [], 0.0
        rank = rank_of_factors(layer, level)
        return Factorized(layer, rank, activation), ["first", "second"], 1 - dense / (rank * (inputs + outputs))
    rank = rank_of_doping(layer, level)
    if rank == 0:
        return layer, [], 0.0
    return Doped(layer, rank), ["sparse"], rank * (inputs + outputs) / dense


def _described(module: nn.Module) -> str:
    if isinstance(module, Parallel):
        return f"{len(module.branches)} in parallel"
    if isinstance(module, Factorized):
        return f"factors of rank {module.first.get_parameter('weight').shape[0]}"
    if isinstance(module, Doped):
        return f"itself and rank {module.first.get_parameter('weight').shape[0]}"
    return "itself"


def fold(model: nn.Module) -> list[str]:
    """Replace members by one layer each where that computes the same, in place -> names of those that cannot be: a
    non-linearity stands inside. Call `mts.export` first: sparse modules are left as they are, and folded weights are
    dense. Names of the layers end as they were before `sparse_ift`."""
    left = []
    for name, module in list(model.named_modules()):
        if isinstance(module, (Parallel, Factorized, Doped)):
            layer = folded(module)
            if layer is None:
                left.append(name)
            else:
                model.set_submodule(name, layer)
    return left


# both -----------------------------------------------------------------------------------------------------------------


def _live(size: int, level: float) -> int:
    return round(size * (1 - level))


def _group(levels: Mapping[str, float], rule: Callable[[float], SparsityAlgorithm]) -> Group:
    """One algorithm for each level that occurs; weights at level 0 stay dense."""
    by_level: dict[float, list[str]] = {}
    for name, level in levels.items():
        if level > 0:
            by_level.setdefault(level, []).append(name)
    group = Group()
    for level, names in by_level.items():
        group.add(names, rule(level))
    return group
