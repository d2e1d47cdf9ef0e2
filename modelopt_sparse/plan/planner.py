"""Making the plan: options, rules and shapes decide on each layer. What cannot work is refused before any work."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.checks import grouped, shown
from modelopt_sparse.methods import ALIASES, METHODS
from modelopt_sparse.methods.base import NEEDS, Method
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, level_of, parse_pattern
from modelopt_sparse.methods.scores import GivenMask
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.find import OUTSIDE, Unprunable, find_layers, find_stacks, protected_modules, usable
from modelopt_sparse.model.hf import codes_in, holds_codes, quantization_of, refuse_codes, refuse_longer_windows
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import dense_class
from modelopt_sparse.plan.budget import parse_choices
from modelopt_sparse.plan.memory import estimated, experts_at_once, experts_per_token, lacking, tight
from modelopt_sparse.plan.options import Rule, SparsifyConfig, check_globs, first_match, parse_mode, quality_of
from modelopt_sparse.plan.plan import LayerPlan, Plan, takes_shape
from modelopt_sparse.reports.text import first_few, nearest, refuse_unknown
from modelopt_sparse.reports.values import Skipped

ANY_PARAMETER = "mts.set_mask(model, name, mask) and training.Static take any parameter"
MUCH_OUTSIDE = 0.25  # of the weights that can be pruned, in layers outside of the blocks: from there on a note says so
Decision = tuple[Method, Pattern, dict[str, Any], tuple[Pattern | None, ...]]  # method, pattern, options, choices


def make_plan(
    model: nn.Module,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan of ``sparsify(model, method, config, **options)``. The model is not changed, and may be on meta.

    Raises ValueError for what cannot work: unknown names and options, globs that match nothing, patterns that do not
    fit, weights that are not floating point.
    """
    return plan_for(model, *resolve(method, config, options))


def plan_for(model: nn.Module, method: Method, config: SparsifyConfig) -> Plan:
    """`make_plan` for a resolved method and a validated config."""
    model = usable(model, "pruned")
    refuse_longer_windows(model, config.seq_len)
    layers, others = find_layers(model)
    _check_names(model, layers, others, config)
    holders = {module for layer in layers for module in (layer.owner, *layer.hooked_modules)}
    stacks = find_stacks(model, holders)
    block_of = {
        module: name for stack in stacks for name, block in zip(stack.names, stack.blocks) for module in block.modules()
    }
    one_block = any(stack.blocks == (model,) for stack in stacks)
    protected = protected_modules(model, holders, one_block=one_block)

    # each layer is planned, or stays dense like the weights that are no layers
    planned: list[LayerPlan] = []
    skipped = [Skipped(x.name, type(x.module).__name__, x.shape, _reason_for(x, model, protected)) for x in others]
    for layer in layers:
        block = block_of.get(layer.owner)
        shape = tuple(layer.matrix(layer.parameter).shape)
        kind = dense_class(layer.owner).__name__
        reason = next((protected[owner] for owner in (layer.owner, *layer.tied_modules) if owner in protected), None)
        outcome = _decide(model, layer, shape, block, reason, method, config)
        if isinstance(outcome, str):
            skipped.append(Skipped(layer.name, kind, shape, outcome))
            continue
        layer_method, pattern, layer_options, choices = outcome
        steps = _steps(layer, layer_method, block, config)
        needs = "gram" if "polish" in steps else layer_method.needs
        if needs == "nothing" and config.permute and any(isinstance(choice, NM) for choice in (*choices, pattern)):
            needs = "square_sums"
        within_mask = layer.mask is not None and not config.replace
        facts = layer.name, kind, shape, block, layer_method, pattern, layer_options, needs, steps, layer
        layer_plan = LayerPlan(*facts, within_mask=within_mask, choices=choices)
        planned.append(replace(layer_plan, at_once=experts_at_once(layer_plan, config)))
    # in model order; what has another name than a module stands where the module does that holds it
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    skipped.sort(key=lambda weight: order.get(weight.name, order.get(weight.name.rpartition(".")[0], 0)))
    _check_planned(model, planned, skipped, config)
    patterns = {type(choice) for layer_plan in planned for choice in layer_plan.choices or (layer_plan.pattern,)}
    if config.explicit().get("permute") and NM not in patterns:
        raise ValueError("permute is for N:M patterns, and no layer has one: give pattern='2:4', or leave it out")
    memory, streamed = estimated(model, planned, stacks, config)
    plan = Plan(tuple(planned), tuple(skipped), memory, tuple(stacks), streamed=streamed)
    short = filter(None, (lacking(plan, config), tight(plan, config)))
    return replace(plan, notes=(*_notes(model, planned, skipped, config), *short))


def _check_names(model: nn.Module, layers: list[Layer], others: list[Unprunable], config: SparsifyConfig) -> None:
    """Raise ValueError for a glob that matches no layer, and for a mask that belongs to none.

    A glob that leaves layers dense may also match a weight that is never pruned: a tied output head, for example.
    """
    kind = f"of this {type(model).__name__}"
    parameters = [layer.parameter_name for layer in layers]
    for name in config.masks or ():
        if name not in parameters:
            known = name in dict(model.named_parameters(remove_duplicate=False))
            advice = f": {ANY_PARAMETER}" if known else nearest(name, parameters)
            raise ValueError(f"masks[{name!r}] belongs to no prunable parameter {kind}{advice}")
    names = [name for layer in layers for name in (layer.name, *layer.tied_names)]
    never_pruned = {name: weight.reason for weight in others for name in weight.names}
    rules = [rule for rule in config.rules if rule.type_name is None]
    to_prune = [*(config.include or ()), *(rule.glob for rule in rules if rule.options is not None)]
    to_leave = [*config.exclude, *(rule.glob for rule in rules if rule.options is None)]
    check_globs(to_prune, names, f"prunable layer {kind}", never_pruned)
    check_globs(to_leave, [*names, *never_pruned], f"prunable layer {kind}")


def _reason_for(weight: Unprunable, model: nn.Module, protected: Mapping[nn.Module, str]) -> str:
    """Why a weight that is no layer stays dense: for want of an adapter, unless it is protected or holds codes."""
    if not weight.reason.startswith("no adapter"):
        return weight.reason
    coded = any(holds_codes(parameter) for parameter in weight.module.parameters(recurse=False))
    kind, reason = dense_class(weight.module), weight.reason
    if getattr(nn, kind.__name__, kind) is not kind:  # of another library, as torch_geometric's Linear is
        reason = reason.replace(kind.__name__, f"{kind.__module__}.{kind.__name__}", 1)
    reason = f"{codes_in(model)}: load the model dequantized to prune it" if coded else reason
    return protected.get(weight.module, reason)


def _decide(
    model: nn.Module,
    layer: Layer,
    shape: tuple[int, ...],
    block: str | None,
    protected: str | None,
    method: Method,
    config: SparsifyConfig,
) -> str | Decision:
    """A layer's method, pattern, options and choices; or, as a string, why it stays dense.

    ``protected``: why it stays dense unless it is named in full; None: it does not.
    """
    if not layer.parameter.numel():
        return "no weights"
    names = (layer.name, *layer.tied_names)
    if (glob := next(filter(None, (first_match(name, config.exclude) for name in names)), None)) is not None:
        return f"excluded by {glob!r}"
    matching = (rule for rule in config.rules if any(rule.matches(name, layer.owner) for name in names))
    rule = next(matching, Rule("*", {}))
    if rule.options is None:
        return f"left dense by rule {rule.glob!r}"
    in_full = not {rule.glob, *(config.include or ())}.isdisjoint(names)
    included = in_full or any(first_match(name, config.include or ()) is not None for name in names)
    if config.include is not None and not included:
        return "not in include"
    if protected and not in_full:
        return protected
    if block is None and not included:
        return OUTSIDE

    layer_method, pattern, options, choices = _by_rule(rule, method, config)
    if isinstance(layer_method, GivenMask):
        outcome = _user_mask(layer, pattern, config)
        if isinstance(outcome, str):
            return outcome
        layer_method, pattern = outcome

    refuse_codes(model, layer.name, layer.parameter)
    columns = layer.columns(layer.parameter)
    choices = tuple(choice for choice in choices if choice is None or not _misfit(choice, columns, shape))
    pattern = next(filter(None, choices), pattern)  # until the budget decides
    misfit = pattern.misfit(columns) if isinstance(layer_method, GivenMask) else _misfit(pattern, columns, shape)
    if not misfit and config.hardware_only and not takes_shape(shape)["asp"]:
        misfit = "shape is not a multiple of 8 x 16 (hardware_only)"
    if misfit and in_full:
        raise ValueError(f"layer {layer.name!r}, which you name: {misfit}; choose another pattern or leave it out")
    if not misfit and layer.is_other():
        return _unless_named(layer, layer.why_other, config)
    return misfit or (layer_method, pattern, options, choices)


def _misfit(pattern: Pattern, columns: int, shape: tuple[int, ...]) -> str | None:
    """Why matrices of a shape cannot take a pattern; None if they can. Those of depthwise convolutions are small."""
    if reason := pattern.misfit(columns):
        return reason
    size = pattern.by_scope(torch.empty(shape, device="meta")).shape[-1]
    return f"{pattern} leaves none of {size} weights" if pattern.zeros_in_scope(size) == size else None


def _unless_named(layer: Layer, why: str, config: SparsifyConfig) -> str:
    """Why a layer stays dense that cannot be pruned as it is used. Raises ValueError if it is named in full."""
    named = [*(config.include or ()), *(config.masks or ()), *(rule.glob for rule in config.rules)]
    if layer.name in named or layer.parameter_name in named:
        raise ValueError(f"layer {layer.name!r}, which you name: {why}; leave it out")
    return why


def without_others(plan: Plan, reasons: Mapping[str, str], model: nn.Module, config: SparsifyConfig) -> Plan:
    """The plan, with the layers dense for which there is a reason by name, found out by running the model."""
    dense = [
        Skipped(p.name, p.type, p.shape, _unless_named(p.layer, reasons[p.name], config))
        for p in plan.layers
        if p.name in reasons
    ]
    layers, skipped = tuple(p for p in plan.layers if p.name not in reasons), (*plan.skipped, *dense)
    _check_planned(model, layers, skipped, config)
    return replace(plan, layers=layers, skipped=skipped)


def _by_rule(rule: Rule, method: Method, config: SparsifyConfig) -> Decision:
    """The method, pattern, options and choices of the layers that a rule matches; a rule's pattern alone is fixed."""
    rule_options = dict(rule.options or {})
    layer_method, _ = resolve_method(rule_options.pop("method", method))
    fixed = rule_options.get("pattern")
    pattern = parse_pattern(rule_options.pop("pattern", config.pattern)).with_scope(layer_method.scope)
    choices = rule_options.pop("choices", config.choices or () if fixed is None else [pattern])
    if choices and config.budget is not None:
        choices = parse_choices(choices, f"rule {rule.glob!r}: choices")
    elif rule.options and "choices" in rule.options:
        raise ValueError(f"rule {rule.glob!r}: choices go with budget=: give one, such as budget='35% zeros'")
    else:
        choices = ()
    choices = tuple(choice and choice.with_scope(layer_method.scope) for choice in choices)
    pattern = next(filter(None, choices), pattern)
    options = {**layer_method.options, **(config.options if layer_method is method else {}), **rule_options}
    taken = ["method", "pattern", "choices", *layer_method.options]  # the first are not left among the rule's
    refuse_unknown(rule_options, taken, f"rule {rule.glob!r} with method {layer_method.name!r}: ")
    for name, value in options.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{layer_method.name}: {name}={shown(value)}: NaN is no value of an option")
    layer_method.check(options)
    return layer_method, pattern, options, choices


def _user_mask(layer: Layer, pattern: Pattern, config: SparsifyConfig) -> tuple[Method, Pattern] | str:
    """The user's mask of a layer, as a method, and the pattern of the mask; or, as a string, why it stays dense."""
    mask, named = (config.masks or {}).get(layer.parameter_name), f"masks[{layer.parameter_name!r}]"
    if mask is None:
        return "no mask given"
    if mask.shape != layer.parameter.shape:
        raise ValueError(f"{named} has shape {list(mask.shape)}: it must be {list(layer.parameter.shape)}")
    if reason := pattern.misfit(layer.columns(mask)):
        raise ValueError(f"{named}: {reason}")
    matrix = layer.matrix(mask)
    if isinstance(pattern, Unstructured):  # any number of zeros, anywhere: what each matrix has at least
        pattern = level_of(matrix, "matrix")
    present = None if config.replace else layer.mask
    within = pattern if present is None or present.is_meta else replace(pattern, within=present.to(matrix.device))
    if regrown := within.count_regrown(matrix):
        raise ValueError(f"{named} keeps {regrown} weights that the present mask prunes: replace=True drops that mask")
    if isinstance(pattern, NM) and (wrong := within.count_kept_wrong(matrix)):
        raise ValueError(f"{named} breaks pattern {pattern} in {wrong} places: give its own, or 0.5 for any")
    return GivenMask(matrix), pattern


def _steps(layer: Layer, method: Method, block: str | None, config: SparsifyConfig) -> tuple[str, ...]:
    """The steps that follow the method for one layer, in order."""
    wanted = {
        "dense-values": method.updates and not config.update,
        "polish": config.polish,
        "reconstruct": config.reconstruct is not None and block is not None,
        "distill": config.distill is not None,
    }
    return tuple(step for step, is_wanted in wanted.items() if is_wanted)


def _check_planned(
    model: nn.Module, planned: Sequence[LayerPlan], skipped: Sequence[Skipped], config: SparsifyConfig
) -> None:
    """Raise ValueError for an empty plan, and for options that fit none of its layers, or not all that they concern."""
    if not planned:
        reasons = sorted({weight.reason for weight in skipped}) or ["it holds no weight matrices"]
        if quantization_of(getattr(model, "config", None)) is not None:
            reasons.insert(0, f"{codes_in(model)}: load the model dequantized")
        reasons += [ANY_PARAMETER] if any("no adapter" in reason for reason in reasons) else []
        raise ValueError(f"nothing to prune in this {type(model).__name__}: {'; '.join(reasons)}")
    homes = {_memory(x): name for name, x in model.named_buffers()}
    by_home = grouped(model.named_parameters(), lambda named: _memory(named[1].detach()))
    for layer_plan in planned:
        layer, where = layer_plan.layer, f"layer {layer_plan.name!r}"
        if (home := _memory(layer.values)) and home in homes:
            raise ValueError(f"{where} and the buffer {homes[home]!r} share memory: clone one of them, or exclude it")
        for name, parameter in by_home.get(home, ()) if home else ():
            if parameter is not layer.parameter and _overlap(layer.values, parameter):
                advice = "make them one Parameter, or clone one of them"
                raise ValueError(f"{where} and the parameter {name!r} share memory: {advice}")
        if config.budget is not None and not config.budget.optional and layer_plan.within_mask:
            raise ValueError(f"{where} carries a mask whose zeros stay, against a budget: give replace=True")
        if layer_plan.within_mask and not isinstance(layer_plan.method, GivenMask):  # it lies within the present one
            _check_present_mask(layer_plan)
        blind = isinstance(layer.adapter, RoutedAdapter) and not layer.adapter.sees_all_tokens
        if config.experts == "all_tokens" and (blind or layer.mixture is not None):
            raise ValueError(f"{where} is given nothing but the rows that are routed to it: use experts='pool'")


def _check_present_mask(layer_plan: LayerPlan) -> None:
    """Raise ValueError if the mask that a layer carries has more zeros than the pattern."""
    mask, pattern, columns = layer_plan.layer.mask, layer_plan.pattern, layer_plan.shape[-1]
    zeros = 0 if mask is None or mask.is_meta else int((~mask).sum())
    # at its level whatever the scope: 50% of each row, rounded, may be more than 50% of the matrix
    most = layer_plan.size // columns * math.ceil(Fraction(str(pattern.sparsity)) * columns)
    if zeros > (pattern.zeros_in(layer_plan.shape) if isinstance(pattern, NM) else most):
        problem = f"{zeros / layer_plan.size:.2%} zeros in the present mask, and pattern {pattern} has fewer"
        raise ValueError(f"layer {layer_plan.name!r}: {problem}: give one with as many, or replace=True")


def _memory(x: Tensor) -> int:
    """Where the memory of a plain tensor begins; 0 if it has none, or if it is sparse or of another class."""
    return x.untyped_storage().data_ptr() if type(x) is Tensor and x.layout == torch.strided else 0


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one memory begin at one place, or one of them within the other that lies in one piece."""
    pairs = ((x, y), (y, x))
    within = (whole.is_contiguous() and 0 <= x.data_ptr() - whole.data_ptr() < whole.nbytes for x, whole in pairs)
    return x.data_ptr() == y.data_ptr() or any(within)


def _notes(model: nn.Module, planned: list[LayerPlan], skipped: list[Skipped], config: SparsifyConfig) -> Iterator[str]:
    """Sentences on weights that stay dense, options that do not reach some layers, masks that stay, and ties."""
    pruned = sum(math.prod(layer_plan.shape) for layer_plan in planned)
    outside = sum(math.prod(weight.shape) for weight in skipped if weight.reason == OUTSIDE)
    if (share := outside / (pruned + outside)) > MUCH_OUTSIDE:
        yield f"{share:.0%} of the weights that can be pruned lie outside of the blocks, dense: include='*' adds them"
    if any(layer_plan.calibrated for layer_plan in planned) and config.widens(model):
        yield "layers of bfloat16 are multiplied in float32 on the CPU (float32_products=False: in bfloat16)"
    if masked := sum(layer_plan.within_mask for layer_plan in planned):
        yield f"{masked} of the layers carry masks, whose zeros stay and count (replace=True drops the masks)"
    if config.budget is not None:
        if config.budget.unit == "bytes" and any(p.layer.parameter.element_size() != 2 for p in planned):
            yield f"bytes are those of weights in 16 bits, which {config.runtime} takes: convert the model"
        way_out = " where losses can be measured; budget=None keeps the pattern" if config.budget.optional else ""
        yield f"a budget of {config.budget} decides what each layer becomes{way_out}"
    for layer_plan in planned:
        if names := layer_plan.layer.tied_names:
            yield f"{layer_plan.name} is tied: also held by {', '.join(names)}"
    for choice in filter(None, config.choices or ()):
        why = [choice.misfit(layer_plan.layer.columns(layer_plan.layer.parameter)) for layer_plan in planned]
        if misfits := [reason for reason in why if reason]:
            yield f"choice '{choice}' is none for {len(misfits)} of {len(planned)} layers: {misfits[0]}"
    unknown = [p.name for p in planned if not p.calibrated and p.layer.is_other() is None]
    if unknown:
        yield f"{first_few(unknown)}: a forward of its own, which cannot be run alone to see what it computes"
    experts = [layer_plan.name for layer_plan in planned if layer_plan.routed]
    if experts and experts_per_token(model) is None:
        yield "memory is that of all experts: the config has no num_experts_per_tok, and a plan runs no router"
    if config.permute and experts:
        yield f"permute leaves the channels of fused experts in their order ({len(experts)} layers)"


# from what the user gave to a method and checked options --------------------------------------------------------------


DEFAULT_METHOD = "sparsegpt"


def resolve(
    method: object, config: SparsifyConfig | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[Method, SparsifyConfig]:
    """Resolve the user's input to the method and the checked config. Without a method, ``masks`` or ``quality`` choose.

    ``mode`` among the options is ModelOpt's name for the method.
    """
    options = dict(options)
    if "mode" in options:  # ModelOpt's name for the method
        if method is not None:
            raise ValueError(f"method={shown(method)} and mode={shown(options['mode'])} mean the same; give one")
        method = options.pop("mode")
    all_options = _written(config, options)
    if all_options.get("masks") is not None:
        if method is not None:
            raise ValueError(f"masks= takes the place of a method, and method={method!r} is given; keep one")
        method = GivenMask()
    elif method is None:
        quality = all_options.get("quality")
        method = DEFAULT_METHOD if quality is None else quality_of(quality).method
    resolved, rules = resolve_method(method)
    if rules and all_options.get("rules"):
        raise ValueError("rules are given both in the mode list and as an option; keep one")
    if rules:
        options["rules"] = rules
    return resolved, SparsifyConfig.make(resolved, config, **options)


def distributed_in(config: SparsifyConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Any:
    """The option ``distributed``, read before all others: processes tell each other what is wrong with those."""
    return _written(config, options).get("distributed")


def _written(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the user gave, unchecked: those of the config, and keywords, which win."""
    config = config.explicit() if isinstance(config, SparsifyConfig) else config
    return {**(config if isinstance(config, Mapping) else {}), **options}


def resolve_method(method: object) -> tuple[Method, tuple[Rule, ...]]:
    """A name, alias, Method object or ModelOpt mode list -> the method, and the mode's class rules."""
    if isinstance(method, Method):
        if method.needs not in NEEDS:
            raise ValueError(f"method {method.name!r}: needs={method.needs!r}; allowed are {', '.join(NEEDS)}")
        return method, ()
    if isinstance(method, list):
        if len(method) != 1:
            raise ValueError(f"a mode list names one method, this one has {len(method)}: {shown(method)}")
        name, rules = parse_mode(method[0])
        return resolve_method(name)[0], rules
    if not isinstance(method, str):
        raise TypeError(f"method is a {type(method).__name__}: give a name ({', '.join(METHODS)}) or a Method object")
    name = ALIASES.get(method, method)
    if name not in METHODS:
        allowed, quoted = [*METHODS, *ALIASES], shown(method)
        raise ValueError(f"method {quoted} is not known{nearest(method, allowed)}; allowed are {', '.join(allowed)}")
    return METHODS[name], ()
