"""Making the plan: options, rules and shapes decide on each layer, and what could not work is refused before work."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.layers import Layer, Unprunable, find_layers, refuse_packed
from modelopt_sparse.model.masking import dense_class
from modelopt_sparse.model.quantization import FLOATS, codes_in, holds_codes, quantization_of
from modelopt_sparse.model.stacks import find_stacks
from modelopt_sparse.plan.config import SparsifyConfig, resolve, resolve_method
from modelopt_sparse.plan.memory import estimated, experts_at_once
from modelopt_sparse.plan.plan import LayerPlan, Plan, Skipped, takes_shape
from modelopt_sparse.plan.rules import Rule
from modelopt_sparse.reports.text import nearest


def make_plan(
    model: nn.Module,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """What ``sparsify(model, method, config, **options)`` would do, without doing it. Takes models on meta as well.

    Raises ValueError for anything that could not work: unknown names and options, globs that match nothing, a pattern
    that fits no layer or not one named in full, weights that are not floating point.
    """
    return plan_for(model, *resolve(method, config, options))


def plan_for(model: nn.Module, method: Method, config: SparsifyConfig) -> Plan:
    """The plan of a resolved method and a validated config."""
    refuse_packed(model, "pruned")
    layers, others = find_layers(model)
    _check_globs(model, layers, others, config)
    stacks = find_stacks(model, {module for layer in layers for module in (layer.owner, *layer.hooked_modules)})
    block_of = {
        module: name for stack in stacks for name, block in zip(stack.names, stack.blocks) for module in block.modules()
    }
    protected = _protected(model)

    planned: list[LayerPlan] = []
    skipped = [Skipped(item.name, type(item.module).__name__, item.shape, _why(item, model)) for item in others]
    for layer in layers:
        block = block_of.get(layer.owner)
        shape = tuple(layer.matrix(layer.parameter).shape)
        kind = dense_class(layer.owner).__name__
        reason = next((protected[owner] for owner in (layer.owner, *layer.tied_modules) if owner in protected), None)
        outcome = _decide(model, layer, shape, block, reason, method, config)
        if isinstance(outcome, str):
            skipped.append(Skipped(layer.name, kind, shape, outcome))
            continue
        layer_method, pattern, layer_options = outcome
        steps = _steps(layer, layer_method, block, config)
        needs = "gram" if {"refine", "polish"} & set(steps) else layer_method.needs
        if needs == "nothing" and config.permute and isinstance(pattern, NM):
            needs = "square_sums"
        item = LayerPlan(layer.name, kind, shape, block, layer_method, pattern, layer_options, needs, steps, layer)
        planned.append(replace(item, at_once=experts_at_once(item, config)))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    skipped.sort(key=lambda item: order.get(item.name, order.get(item.name.rpartition(".")[0], 0)))
    _check_planned(model, planned, skipped, config)
    memory, streamed = estimated(model, planned, stacks, config)
    return Plan(tuple(planned), tuple(skipped), memory, tuple(stacks), _notes(planned, config), streamed)


def _check_planned(
    model: nn.Module, planned: Sequence[LayerPlan], skipped: Sequence[Skipped], config: SparsifyConfig
) -> None:
    """Raise ValueError for an empty plan, and for options that no layer of it can have."""
    if not planned:
        reasons = sorted({item.reason for item in skipped}) or ["it holds no weight matrices"]
        if quantization_of(getattr(model, "config", None)) is not None:
            reasons.insert(0, f"{codes_in(model)}: load the model dequantized")
        raise ValueError(f"nothing to prune in this {type(model).__name__}: {'; '.join(reasons)}")
    if config.allocation != "uniform" and not any(isinstance(item.pattern, Unstructured) for item in planned):
        raise ValueError(
            f"allocation={config.allocation!r} shares out the zeros of unstructured patterns, and no layer of the plan "
            f"has one: give a pattern such as 0.5, or leave allocation out"
        )
    if config.permute and not any(isinstance(item.pattern, NM) for item in planned):
        raise ValueError(
            "permute puts channels into better groups for N:M patterns, and no layer of the plan has one: give a "
            "pattern such as '2:4', or leave permute out"
        )
    for item in planned:
        kind = item.layer.adapter
        blind = isinstance(kind, RoutedAdapter) and not kind.sees_all_tokens
        if config.experts == "all_tokens" and (blind or item.layer.mixture is not None):
            raise ValueError(
                f"layer {item.name!r}: {item.type} is given nothing but the rows that are routed to it, so that "
                "experts='all_tokens' cannot be told: use 'pool' or 'weight_only', or exclude it"
            )


def _notes(planned: list[LayerPlan], config: SparsifyConfig) -> tuple[str, ...]:
    """What of the options does not reach some layers."""
    experts = [item.name for item in planned if isinstance(item.layer.adapter, RoutedAdapter)]
    if config.permute and experts:
        return (f"permute leaves the channels of fused experts in their order ({len(experts)} layers)",)
    return ()


def _steps(layer: Layer, method: Method, block: str | None, config: SparsifyConfig) -> tuple[str, ...]:
    """What follows the method, for one layer."""
    if config.refine and config.update and method.updates:
        raise ValueError(
            f"layer {layer.name!r}: refine swaps weights at their dense values, and method {method.name!r} changes "
            "them; add update=False to keep the dense values, or use polish instead"
        )
    asked = {
        "dense-values": method.updates and not config.update,
        "refine": config.refine,
        "polish": config.polish,
        "reconstruct": config.reconstruct is not None and block is not None,
    }
    return tuple(step for step, wanted in asked.items() if wanted)


def _given_mask(layer: Layer, pattern: Pattern, config: SparsifyConfig) -> tuple[Method, Pattern] | str:
    """The user's mask of a layer as its method, and the pattern that it has; or why the layer stays dense."""
    mask = (config.masks or {}).get(layer.parameter_name)
    if mask is None:
        return "no mask given"
    if mask.shape != layer.parameter.shape:
        raise ValueError(
            f"masks[{layer.parameter_name!r}] has shape {list(mask.shape)}: it must be that of the parameter, "
            f"{list(layer.parameter.shape)}"
        )
    if reason := pattern.misfit(layer.columns(mask)):
        raise ValueError(f"masks[{layer.parameter_name!r}]: {reason}")
    matrix = layer.matrix(mask)
    if isinstance(pattern, Unstructured):  # whatever it holds, as one count for the matrix
        zeros = int((~matrix).sum())
        pattern = Unstructured(zeros / matrix.numel(), "matrix")
    if wrong := pattern.count_kept_wrong(matrix):
        raise ValueError(
            f"masks[{layer.parameter_name!r}] breaks pattern {pattern} in {wrong} places; give the pattern that it "
            "has (any pruned fraction, such as 0.5, if it has no N:M)"
        )
    return GivenMask(matrix), pattern


def _check_globs(model: nn.Module, layers: list[Layer], others: list[Unprunable], config: SparsifyConfig) -> None:
    """Raise ValueError for a glob that matches no layer, or a mask that belongs to none. A glob that leaves layers
    dense may also match a weight that is never pruned: a tied output head, for example."""
    names = [layer.name for layer in layers]
    parameters = [layer.parameter_name for layer in layers]
    if strange := [name for name in config.masks or {} if name not in parameters]:
        raise ValueError(
            f"masks[{strange[0]!r}] belongs to no prunable parameter of this {type(model).__name__}"
            f"{nearest(strange[0], parameters)}"
        )
    never_pruned = [name for item in others for name in item.names]
    rules = [rule for rule in config.rules if rule.type_name is None]
    to_prune = [*(config.include or ()), *(rule.glob for rule in rules if rule.options is not None)]
    to_leave = [*config.exclude, *(rule.glob for rule in rules if rule.options is None)]
    for glob in [*to_prune, *to_leave]:
        if fnmatch.filter(names, glob) or (glob in to_leave and fnmatch.filter(never_pruned, glob)):
            continue
        reasons = sorted({item.reason for item in others if fnmatch.filter(item.names, glob)})
        close = difflib.get_close_matches(glob, names, n=3, cutoff=0.3)
        raise ValueError(
            f"{glob!r} matches no prunable layer of this {type(model).__name__}"
            + (f", only weights that stay dense: {'; '.join(reasons)}" if reasons else "")
            + f"; names look like {', '.join(close or names[:3]) or '(there is no prunable layer)'}"
        )


def _why(item: Unprunable, model: nn.Module) -> str:
    """Why a weight that is no layer stays dense. Classes made for codes have no adapter, whatever they stand for."""
    codes = any(holds_codes(parameter) for parameter in item.module.parameters(recurse=False))
    if codes and item.reason.startswith("no adapter"):
        return f"{codes_in(model)}: load the model dequantized to prune it"
    return item.reason


def _decide(
    model: nn.Module,
    layer: Layer,
    shape: tuple[int, ...],
    block: str | None,
    protected: str | None,
    method: Method,
    config: SparsifyConfig,
) -> str | tuple[Method, Pattern, dict[str, Any]]:
    """Why a layer stays dense, or its method, pattern and options."""
    for glob in config.exclude:
        if fnmatch.fnmatchcase(layer.name, glob):
            return f"excluded by {glob!r}"
    rule = next((rule for rule in config.rules if rule.matches(layer.name, layer.owner)), Rule("*", {}))
    if rule.options is None:
        return f"left dense by rule {rule.glob!r}"
    in_full = layer.name in (rule.glob, *(config.include or ()))
    included = in_full or any(fnmatch.fnmatchcase(layer.name, glob) for glob in config.include or ())
    if config.include is not None and not included:
        return "not in include"
    if protected and not in_full:
        return protected
    if block is None and not included:
        return "outside the model's blocks"

    given = dict(rule.options)
    layer_method = method
    if "method" in given:
        layer_method, _ = resolve_method(given.pop("method"), None)
    pattern = parse_pattern(given.pop("pattern", config.pattern)).with_scope(layer_method.scope)
    options = {**layer_method.options, **(config.options if layer_method is method else {}), **given}
    for key in given:
        if key not in layer_method.options:
            allowed = sorted(["method", "pattern", *layer_method.options])
            raise ValueError(
                f"rule {rule.glob!r}: option {key!r} is not known{nearest(key, allowed)}; "
                f"allowed with method {layer_method.name!r} are {', '.join(allowed)}"
            )
    layer_method.check(options)
    if isinstance(layer_method, GivenMask):
        found = _given_mask(layer, pattern, config)
        if isinstance(found, str):
            return found
        layer_method, pattern = found

    if holds_codes(layer.parameter):
        dtype, cls = layer.parameter.dtype, type(layer.parameter)
        what = cls.__name__ if dtype in FLOATS else str(dtype)
        raise ValueError(
            f"layer {layer.name!r} holds {what} codes, this {type(model).__name__} is {codes_in(model)}: load the "
            "model dequantized, exclude the layer, or sparsify first and quantize after"
        )
    misfit = pattern.misfit(layer.columns(layer.parameter))
    if not misfit and config.hardware_only and not takes_shape(shape)["asp"]:
        misfit = "shape is not a multiple of 8 x 16 (hardware_only)"
    if misfit and in_full:
        raise ValueError(f"layer {layer.name!r}, which you name: {misfit}; choose another pattern or leave it out")
    return misfit or (layer_method, pattern, options)


def _protected(model: nn.Module) -> dict[nn.Module, str]:
    """Layers that stay dense unless named in full: output heads, routers, weights read behind the module's back."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            found[head] = "output head"
        for name, child in module.named_children():
            has_experts = any(
                other.startswith("experts") or "experts" in dense_class(beside).__name__.lower()
                for other, beside in module.named_children()
            )
            is_gate = name in ("gate", "router", "wg") and has_experts
            if is_gate or "router" in type(child).__name__.lower() or name == "shared_expert_gate":
                found.update((inner, "MoE router") for inner in child.modules())
            if name == "dt_proj" and "mamba" in type(module).__name__.lower():
                found[child] = f"{type(module).__name__} reads the weight without calling the module"
    for name, module in model.named_children():
        if name == "lm_head":
            found.setdefault(module, "output head")
    return found
