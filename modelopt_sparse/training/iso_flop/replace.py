"""The members of Sparse-IFT that replace layers of a model: which layers, by what, at which level; and folding."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from modelopt_sparse.reports.text import first_few
from modelopt_sparse.training.iso_flop.members import (
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
from modelopt_sparse.training.iso_flop.plan import (
    IsoPlan,
    Replaced,
    live_of,
    multiplying,
    skipped_of,
    total,
    unit_of,
    uses_of,
)
from modelopt_sparse.training.weights import BLOCKS, Weight, find_weights, parse_filter, reasons

ATTENTION = ("attn", "attention")  # in the names of modules that stay as they are unless they are asked for


def members_for(
    model: nn.Module, level: float, member: str, include: Any, activation: Activation, example: Any
) -> tuple[dict[str, nn.Module], dict[str, float], IsoPlan]:
    """(new modules by the name of the layer that they are to replace, levels by parameter, the plan): see `sparse_ift`.

    The model is left as it is.
    """
    weights = find_weights(model)
    why = _reasons(model, weights, include)
    chosen = [weight for weight in weights if not why[weight.name]]
    if not chosen:
        kinds = first_few(sorted(set(why.values())))
        raise ValueError(f"no layer of this {type(model).__name__} is to be replaced: {kinds}")
    uses = uses_of(model, weights, example)
    count = branches_for(level) if member == "parallel" else 0
    modules, levels, rows = {}, {}, []
    parameters = total(weights)
    for weight in chosen:
        name, layer = weight.name.removesuffix(".weight"), weight.holders[0][0]
        new, parts, own = _member(layer, member, level, count, activation)
        levels.update({f"{name}.{part}.weight": own for part in parts})
        masked = [new.get_submodule(part).get_parameter("weight").numel() for part in parts]
        size = sum(each.numel() for each in new.parameters() if each.dim() > 1)
        live = size - sum(masked) + sum(live_of(each, own) for each in masked)
        dense = layer.get_parameter("weight").numel()
        rows.append(Replaced(name, dense, _described(new), size, own, live, uses[weight.name]))
        if new is not layer:
            modules[name] = new
            parameters += sum(each.numel() for each in new.parameters())
            parameters -= sum(each.numel() for each in layer.parameters())
    rest = [weight for weight in weights if why[weight.name]]
    other = sum(weight.parameter.numel() * uses[weight.name] for weight in rest if multiplying(weight))
    skipped, unit = skipped_of(rest, why), unit_of(model, example)
    return modules, levels, IsoPlan(tuple(rows), skipped, total(weights), parameters, other, other, unit)


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
