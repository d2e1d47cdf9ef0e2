"""Sparse Wide (arXiv 2303.11525): a wider model of the same class, and the levels that make it iso-FLOP."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from modelopt_sparse.model.hf import model_class
from modelopt_sparse.training.iso_flop.configs import widened
from modelopt_sparse.training.iso_flop.layers import widened_layers
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
from modelopt_sparse.training.weights import BLOCKS, find_weights, reasons


def wide_of(model: Any, level: float, iso: str, multiple: int, example: Any) -> tuple[nn.Module, IsoPlan]:
    """(the wider model, what becomes of the layers): see `sparse_ift`."""
    if isinstance(model, PretrainedConfig):
        if not model.architectures:
            raise ValueError(
                f"this {type(model).__name__} does not say in architectures which class of models it is for: give a "
                'model instead, which may be on the meta device (with torch.device("meta"): ...)'
            )
        with torch.device("meta"):
            model = model_class(model, model.model_type)(model)
    unit = unit_of(model, example)
    if iso == "model" and unit is None:
        raise ValueError(
            f"this {type(model).__name__} has convolutions, whose FLOPs depend on the size of the images: iso='model' "
            "needs example=, an input to count them with"
        )
    wide, why = _wider(model, (1 / (1 - level)) ** 0.5, multiple, example)
    before, after = find_weights(model), find_weights(wide)
    uses = uses_of(model, before, example)
    sizes = {weight.name: weight.parameter.numel() for weight in before}
    chosen = [weight for weight in after if not why[weight.name]]
    rest = [weight for weight in after if why[weight.name]]
    if not chosen:
        raise ValueError(
            f"no layer of this {type(model).__name__} would be sparse: {', '.join(sorted(set(why.values())))}"
        )
    fixed = [weight for weight in rest if multiplying(weight)]
    other = sum(sizes[weight.name] * uses[weight.name] for weight in fixed)
    new_other = sum(weight.parameter.numel() * uses[weight.name] for weight in fixed)
    levels = {weight.name: 1 - sizes[weight.name] / weight.parameter.numel() for weight in chosen}
    if iso == "model":
        dense = sum(sizes[weight.name] * uses[weight.name] for weight in chosen) + other
        levels = dict.fromkeys(levels, 1 - (dense - new_other) / _multiplications(chosen, uses))
        if not all(0 <= one < 1 for one in levels.values()):
            raise ValueError(
                f"at level {level:g} the layers that stay dense alone cost more than the whole model did: give a lower "
                "level, or iso='layers'"
            )
    rows = []
    for weight in chosen:
        size, own = weight.parameter.numel(), levels[weight.name]
        shape = " x ".join(map(str, weight.shape))
        rows.append(Replaced(weight.name, sizes[weight.name], shape, size, own, live_of(size, own), uses[weight.name]))
    plan = IsoPlan(tuple(rows), skipped_of(rest, why), total(before), total(after), other, new_other, unit)
    return wide, plan


def _multiplications(weights: list[Any], uses: dict[str, float]) -> float:
    return sum(weight.parameter.numel() * uses[weight.name] for weight in weights)


def _wider(model: Any, factor: float, multiple: int, example: Any) -> tuple[nn.Module, dict[str, str]]:
    """(the wider model with random weights, why each of its weights stays dense or "")."""
    if isinstance(model, PreTrainedModel):
        config = widened(model.config, factor, multiple)
        with torch.device(next(model.parameters()).device):
            wide = type(model)(config)
        wide.tie_weights()  # older versions of transformers do not do so on the meta device
        return wide, reasons(wide, find_weights(wide), BLOCKS)
    if example is None:
        raise ValueError(
            f"Sparse Wide runs a {type(model).__name__}, which is no model of transformers, to see which sizes have to "
            "stay: give example=, an input of the model"
        )
    wide, ends = widened_layers(model, factor, multiple, example)
    weights = find_weights(wide)
    why = reasons(wide, weights, BLOCKS)
    for weight in weights:
        why[weight.name] = ends.get(weight.name.rpartition(".")[0]) or why[weight.name]
    return wide, why
