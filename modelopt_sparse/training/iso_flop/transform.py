"""Sparse-IFT (arXiv 2303.11525): larger, sparser layers at the FLOPs of the dense ones, from one number, the level."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from modelopt_sparse.checks import check_choice, check_number, check_whole, grouped
from modelopt_sparse.model.hf import built, model_class
from modelopt_sparse.reports.text import Column, Printed, by_reason, first_few, paragraph, product_of, rows_of, table
from modelopt_sparse.reports.values import Skipped
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm, Static
from modelopt_sparse.training.costs import counting
from modelopt_sparse.training.iso_flop.members import (
    Activation,
    Convolution,
    call,
    member_of,
    why_not,
    widened,
    widened_layers,
)
from modelopt_sparse.training.planner import (
    BLOCKS,
    SparseParameter,
    find_weights,
    levels_at,
    parse_filter,
    plan_training,
    reasons,
)
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.training.updates import Constant

MEMBERS = ("wide", "parallel", "factorized", "doped")
ISO = ("layers", "model")
ATTENTION = ("attn", "attention")  # in the names of modules that stay as they are unless they are asked for


@dataclass(frozen=True)
class Replaced:
    """One layer: its weights before, what stands for it, the weights of that, the level, and the live weights.

    live: as the algorithm of the rule counts them: with a schedule at the level, otherwise before training. What
      ``init_method="from_zeros"`` or a function leaves is not known here.
    uses: how often each weight is multiplied: once for a token; in the example's forward, as often as torch counts.
    """

    name: str
    weights: int
    by: str
    new_weights: int
    level: float
    live: int
    uses: float = 1.0


@dataclass(frozen=True)
class IsoPlan(Printed):
    """What Sparse-IFT makes of a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all rows.

    layers: those that are wider or replaced, and sparse.
    skipped: all other weights, with the reason.
    parameters, new_parameters: of the whole model, before and after, pruned ones included.
    other, new_other: multiplications with weights of the other layers (heads, attention that stays), before and after.
    unit: what multiplications are counted for: "a token", or "the example". None: the model has convolutions, and
      without an example nobody knows how many pixels each of them sees.

    A multiplication and its addition are two FLOPs in a forward and six in a training step. Attention's own products
    are not counted, and neither are the dense gradients that RigL asks for (see `cost`).
    """

    layers: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    parameters: int
    new_parameters: int
    other: float
    new_other: float
    unit: str | None

    @property
    def live_parameters(self) -> int:
        """Parameters after, without those that are pruned."""
        return self.new_parameters - sum(layer.new_weights - layer.live for layer in self.layers)

    @property
    def ratio(self) -> float:
        """FLOPs of the sparse layers divided by those of the layers that they stand for."""
        return self.multiplications("live") / self.multiplications("weights")

    @property
    def model_ratio(self) -> float | None:
        """FLOPs of all layers that multiply, divided by those before. None if ``unit`` is."""
        return None if self.flops is None else self.flops[1] / self.flops[0]

    @property
    def flops(self) -> tuple[int, int] | None:
        """FLOPs of a forward before and after, in all layers that multiply. None if ``unit`` is."""
        if self.unit is None:
            return None
        before = self.multiplications("weights") + self.other
        after = self.multiplications("live") + self.new_other
        return round(2 * before), round(2 * after)

    def multiplications(self, field: str) -> float:
        """Multiplications with the ``weights``, the ``new_weights`` or the ``live`` weights of ``layers``."""
        return sum(getattr(layer, field) * layer.uses for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes."""
        derived = ("live_parameters", "ratio", "model_ratio", "flops")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [layer.name for layer in self.layers]
        skipped = {layer.name: layer.reason for layer in self.skipped}
        whole = ": with example=, which says how many pixels each convolution sees"
        if self.model_ratio is not None:
            whole = f" {self.model_ratio:.4f} times"
        summary = (
            f"FLOPs of the {len(names)} sparse layers {self.ratio:.4f} times dense, of all layers{whole}. They count "
            "as if zeros were skipped."
        )
        columns = [
            Column("weights", [f"{layer.weights:,}" for layer in self.layers]),
            Column("becomes", [layer.by for layer in self.layers]),
            Column("new weights", [f"{layer.new_weights:,}" for layer in self.layers]),
            Column("level", [f"{layer.level:.4f}" for layer in self.layers], "levels"),
            Column("FLOPs, times dense", [f"{layer.live / layer.weights:.4f}" for layer in self.layers], "range"),
        ]
        costs = [("parameters", self.parameters, self.new_parameters)]
        costs.append(("of them live", self.parameters, self.live_parameters))
        if (flops := self.flops) is not None:
            costs.append((f"FLOPs of {self.unit}, forward", *flops))
            costs.append((f"FLOPs of {self.unit}, training", 3 * flops[0], 3 * flops[1]))
        parts = [
            paragraph(summary, all_rows=all_rows),
            rows_of("layer", names, columns, skipped, all_rows=all_rows),
            by_reason("not sparse", skipped, names, all_rows=all_rows),
            table(("", "before", "after"), [(title, f"{old:,}", f"{new:,}") for title, old, new in costs]),
        ]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class SparseIFT:
    """What `sparse_ift` returns: the model, the sparse training that makes it iso-FLOP, and the plan.

    >>> ift.sparsity.apply(ift.model)
    >>> ift.sparsity.apply(optimizer)
    """

    model: nn.Module
    sparsity: Group
    plan: IsoPlan

    def __repr__(self) -> str:
        return f"SparseIFT({type(self.model).__name__}, {len(self.plan.layers)} layers, {self.sparsity})"


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
    example: Any = None,
) -> SparseIFT:
    """A model with larger, sparser layers of the same FLOPs, to be trained from scratch.

    model_or_config: a model; a config of transformers for "wide", which then gives a model on the meta device: build
      yours from ``ift.model.config``. A model on meta stays there.
    sparsity: the level, in [0, 1), which says how much larger layers become.
    member: what becomes larger. All but "wide" replace layers of the model in place, with new random weights:
      "wide": a new model of the same class, ``sqrt(1 / (1 - level))`` times as wide, with random weights. Of a model
        of transformers the config is scaled. In any other model Linear, convolutions, embeddings and norms are made
        wider; what it reads and gives keeps its size, and the layers there stay dense.
      "parallel": 1 / (1 - level) layers beside each other, each with its own non-linearity, added up.
      "factorized": two layers with a non-linearity between them.
      "doped": the layer, sparse, plus two dense ones of low rank.
    rule: level -> sparsity algorithm, for each level that occurs: ``lambda level: SET(level, update=100)``.
    iso: "layers": the level of each layer is solved so that its FLOPs are those of the dense one. "model" (wide): one
      level for all, so that those of the whole model are, its head included.
    multiple: widths are rounded up to a multiple of this.
    include: globs of layers to replace. The default is all of the blocks but attention's projections; a model without
      blocks keeps its first and its last layer.
    activation: a class of non-linearities for "parallel" and "factorized"; None: none.
    example: an input of the model, a tuple of positional arguments or a mapping of keywords, which the model is run on.
      FLOPs are then those of this input, else of a token. Sparse Wide needs it for a model that is not of transformers,
      and ``iso="model"`` for convolutions.

    Raises ValueError, with the model as it was, for a level or a model that does not work, and names the nearest levels
    that do.
    """
    check_number("sparsity", sparsity, "[0, 1)")
    check_choice("member", member, MEMBERS)
    check_choice("iso", iso, ISO)
    check_whole("multiple", multiple)
    level, model = float(sparsity), model_or_config
    if member == "wide":
        if include is not None:
            raise ValueError("include is for the members that replace layers; Sparse Wide widens the whole model")
        model, plan = _widened(model, level, iso, multiple, example)
        return _with_rule(model, plan, {layer.name: [layer.name] for layer in plan.layers}, rule)
    if not isinstance(model, nn.Module):
        raise ValueError(f"member {member!r} replaces layers of a model: build it from the config first")
    if iso == "model" or multiple != 1:
        raise ValueError(f"member {member!r} is iso-FLOP layer by layer: iso='model' and multiple are for 'wide'")
    modules, sparse, plan = _replaced(model, level, member, include, activation, example)
    before = {name: model.get_submodule(name) for name in modules}
    try:
        _put(model, modules)
        return _with_rule(model, plan, sparse, rule)
    except BaseException:
        _put(model, before)
        raise


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        model.set_submodule(name, module)


def _with_rule(
    model: nn.Module, plan: IsoPlan, sparse: Mapping[str, list[str]], rule: Callable[[float], SparsityAlgorithm]
) -> SparseIFT:
    """The new model with its sparsity, and the plan with its parameters and the live weights that this leaves.
    ``sparse``: the names of the sparse parameters of each layer."""
    if not callable(rule) or isinstance(rule, Sparsity):
        name = type(rule).__name__ if isinstance(rule, Sparsity) else "Static"
        raise ValueError(f"rule is a function of the level: rule=lambda level: {name}(level, ...)")
    group, levels = Group(), {name: layer.level for layer in plan.layers for name in sparse[layer.name]}
    for level, names in names_by_level(levels).items():
        group.add(names, rule(level))
    chosen = plan_training(model, group.members())[1] if len(group) else []
    levels |= levels_at(0, [weight for weight in chosen if isinstance(weight.algorithm.sparsity, Constant)])
    zeros = {weight.name: weight.zeros_at(levels[weight.name]) for weight in chosen}
    layers = tuple(
        replace(layer, live=layer.new_weights - sum(zeros.get(name, 0) for name in sparse[layer.name]))
        for layer in plan.layers
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return SparseIFT(model, group, replace(plan, layers=layers, new_parameters=parameters))


def names_by_level(levels: Mapping[str, float]) -> dict[float, list[str]]:
    """Names of parameters for each level that occurs; those at level 0 stay dense."""
    return grouped((name for name, level in levels.items() if level > 0), levels.__getitem__)


# wide -----------------------------------------------------------------------------------------------------------------


def _widened(model: Any, level: float, iso: str, multiple: int, example: Any) -> tuple[nn.Module, IsoPlan]:
    """(the wider model, what becomes of the layers)."""
    if isinstance(model, PretrainedConfig):
        model = built(model_class(model, model.model_type), model)
    factor, ends = (1 / (1 - level)) ** 0.5, {}
    if isinstance(model, PreTrainedModel):
        wide: Any = built(type(model), widened(model.config, factor, multiple), next(model.parameters()).device)
    elif example is None:
        raise ValueError(f"this {type(model).__name__} is no model of transformers: give example=, an input")
    else:
        wide, ends = widened_layers(model, factor, multiple, example)
    weights, rows = find_weights(wide), {}
    why = reasons(wide, weights, BLOCKS)
    why = {name: ends.get(name.rpartition(".")[0]) or reason for name, reason in why.items()}
    for weight in weights:
        if not why[weight.name]:
            old, new = model.get_parameter(weight.name).numel(), weight.parameter.numel()
            rows[weight.name] = Replaced(weight.name, old, product_of(weight.shape), new, 1 - old / new, new)
    plan = _plan(model, find_weights(model), weights, why, rows, example)
    if iso == "model":
        if plan.unit is None:
            raise ValueError(f"iso='model' needs example= for the convolutions in this {type(model).__name__}")
        for_sparse = plan.multiplications("weights") + plan.other - plan.new_other
        one = 1 - for_sparse / plan.multiplications("new_weights")
        if not 0 <= one < 1:
            raise ValueError(f"at level {level:g} the dense layers cost more than the model did: give iso='layers'")
        plan = replace(plan, layers=tuple(replace(row, level=one) for row in plan.layers))
    return wide, plan


# other members --------------------------------------------------------------------------------------------------------


def _replaced(
    model: nn.Module, level: float, member: str, include: Any, activation: Activation, example: Any
) -> tuple[dict[str, nn.Module], dict[str, list[str]], IsoPlan]:
    """(new modules by the name of the layer that they are to replace, which parameters of them are to be sparse, by the
    same name, the plan).

    The model is left as it is.
    """
    if isinstance(activation, str | nn.Module):
        raise ValueError(f"activation={activation!r}: give a class such as nn.ReLU, or None")
    weights = find_weights(model)
    why = _why_dense(model, weights, include)
    modules, sparse, rows = {}, {}, {}
    for weight in weights:
        if why[weight.name]:
            continue
        name, layer = weight.layer.name, weight.layer.owner
        new, words, parts, layer_level = member_of(layer, member, level, activation)
        sparse[name] = [f"{name}.{part}.weight" for part in parts]
        size = sum(parameter.numel() for parameter in new.parameters() if parameter.dim() > 1)
        rows[weight.name] = Replaced(name, weight.parameter.numel(), words, size, layer_level, size)
        if new is not layer:
            modules[name] = new
    return modules, sparse, _plan(model, weights, weights, why, rows, example)


def _why_dense(model: nn.Module, weights: list[SparseParameter], include: Any) -> dict[str, str]:
    """Why layers are not replaced, by name of the parameter; "" for those that are."""
    layers = [weight for weight in weights if weight.is_layer]
    ends = {layers[0].name, layers[-1].name} if len(layers) > 2 else set()
    asked = None if include is None else parse_filter(include)
    why = reasons(model, weights, BLOCKS)
    if asked is not None and (asked.choice or not any(asked.matches(weight.layer.name) for weight in layers)):
        raise ValueError(f"{asked} matches no layer of this {type(model).__name__}")
    for weight in weights:
        name, misfit = weight.layer.name, why_not(weight.layer.owner)
        if not weight.is_layer or not weight.name.endswith("weight"):
            why[weight.name] = why[weight.name] or "not a layer of its own"
        elif len(weight.holders) > 1:
            why[weight.name] = "tied"
        elif asked is not None:
            why[weight.name] = misfit if asked.matches(name) else "not in include"
        elif not why[weight.name]:
            if any(word in name.lower() for word in ATTENTION):
                misfit = "a projection of attention"
            elif not isinstance(model, PreTrainedModel) and weight.name in ends:
                misfit = "the first or the last layer"
            why[weight.name] = misfit
    return why


# counts ---------------------------------------------------------------------------------------------------------------


def _plan(
    model: nn.Module,
    before: list[SparseParameter],
    after: list[SparseParameter],
    why: Mapping[str, str],
    rows: Mapping[str, Replaced],
    example: Any,
) -> IsoPlan:
    """Count the costs before and after.

    before: the weights of the model. after: those of the new model, or the same where others stay.
    rows: by names of weights. How many parameters there are afterwards is filled in later.
    """
    if not rows:
        kinds = first_few(sorted(set(why.values())))
        raise ValueError(f"no layer of this {type(model).__name__} would be sparse: {kinds}")
    sizes = {weight.name: weight.parameter.numel() for weight in before}
    uses = dict.fromkeys(sizes, 1.0)  # how often each weight is multiplied
    unit = None if any(isinstance(module, Convolution) for module in model.modules()) else "a token"
    if example is not None:
        unit = "the example"
        with counting(model, before) as products:
            call(model, example)
        uses = {name: products.flops[name] / 2 / max(1, size) for name, size in sizes.items()}
    rest = [weight for weight in after if why[weight.name]]
    fixed = [weight for weight in rest if example is not None or _multiplies(weight)]
    fixed_cost = sum(sizes[weight.name] * uses[weight.name] for weight in fixed)
    new_other = sum(weight.parameter.numel() * uses[weight.name] for weight in fixed)
    skipped = tuple(Skipped(weight.name, weight.type, weight.shape, why[weight.name]) for weight in rest)
    layers = tuple(replace(row, uses=uses[name]) for name, row in rows.items())
    return IsoPlan(layers, skipped, sum(sizes.values()), 0, fixed_cost, new_other, unit)


def _multiplies(weight: SparseParameter) -> bool:
    """Whether a weight is multiplied with every token: heads are, tied ones too, and embeddings are looked up."""
    in_linear = any(isinstance(module, nn.Linear) for module in weight.holders.values())
    return len(weight.shape) > 1 and (weight.is_layer or in_linear)
