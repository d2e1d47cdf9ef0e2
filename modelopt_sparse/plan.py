"""The plan, made before work: which layer gets which pattern and method, and why the others stay dense."""

import difflib
import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modelopt_sparse.blocks import Stack, find_stacks
from modelopt_sparse.calibration.batches import default_seq_len
from modelopt_sparse.codes import FLOATS, codes_in, holds_codes, quantization_of
from modelopt_sparse.config import SparsifyConfig, resolve, resolve_method
from modelopt_sparse.experts import UP, RoutedKind
from modelopt_sparse.layers import Layer, Unprunable, find_layers
from modelopt_sparse.memory import activations, streamed_memory
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.given import GivenMask
from modelopt_sparse.modules import dense_class
from modelopt_sparse.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.rules import Rule
from modelopt_sparse.runtime.linear import refuse_packed
from modelopt_sparse.wording import nearest

# runtime -> (rows, columns) that a 2:4 weight must be multiples of
HARDWARE: dict[str, tuple[int, int]] = {"asp": (8, 16), "cusparselt": (16, 16), "cutlass": (32, 64)}
# what a solver holds at its peak beside statistics and masks, at most, in numbers of its working precision
WORKSPACE_WEIGHTS = 10  # times the weights
WORKSPACE_GRAMS = 4  # times the Gram matrix
# copies of a block's weights: the optimizer's, their gradients, two moments, the best so far, a graph's masked ones
RECONSTRUCTION = 6
IN_ORDER = 4  # deterministic: sums of one call, those of another process, and totals in float64


@dataclass(frozen=True)
class LayerPlan:
    """One layer that will be pruned. ``shape`` is that of its matrix, [R, C] or [E, R, C]; ``needs`` is what the method
    and the ``steps`` after it have to know of its input; ``at_once`` is how many experts of a mixture are solved
    together under a memory limit, None if all are."""

    name: str
    type: str
    shape: tuple[int, ...]
    block: str | None
    method: Method
    pattern: Pattern
    options: Mapping[str, Any]
    needs: str
    steps: tuple[str, ...]
    layer: Layer = field(repr=False, compare=False)
    at_once: int | None = None

    @property
    def recipe(self) -> str:
        """The method and the steps that follow it: "alps+polish+reconstruct"."""
        return "+".join((self.method.name, *self.steps))

    @property
    def calibrated(self) -> bool:
        """Whether it takes calibration data."""
        return self.needs != "nothing" or "reconstruct" in self.steps

    @property
    def matrices(self) -> int:
        """How many matrices [R, C] it is."""
        return torch.Size(self.shape[:-2]).numel()

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def hardware(self) -> dict[str, bool]:
        """Whether each 2:4 runtime takes this shape."""
        return takes_shape(self.shape)


@dataclass(frozen=True)
class Skipped:
    """A weight that stays dense, and why."""

    name: str
    type: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `sparsify` will do to a model. ``print(plan)`` shows it; ``as_dict`` and ``to_json`` are for machines."""

    layers: tuple[LayerPlan, ...]
    skipped: tuple[Skipped, ...]
    memory: Mapping[str, int]
    stacks: tuple[Stack, ...] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    # of `sparsify_checkpoint`, in all: place -> what lies there -> bytes; empty for what cannot be streamed
    streamed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        layers = [
            {
                "name": item.name,
                "type": item.type,
                "shape": list(item.shape),
                "block": item.block,
                "method": item.method.name,
                "recipe": item.recipe,
                "pattern": str(item.pattern),
                "options": dict(item.options),
                "hardware": item.hardware,
            }
            for item in self.layers
        ]
        skipped = [
            {"name": item.name, "type": item.type, "shape": list(item.shape), "reason": item.reason}
            for item in self.skipped
        ]
        return {
            "layers": layers,
            "skipped": skipped,
            "memory_bytes": dict(self.memory),
            "streamed_memory_bytes": {place: dict(parts) for place, parts in self.streamed.items()},
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        head = ("layer", "type", "shape", "recipe", "pattern", *(f"fits {name}" for name in HARDWARE))
        rows = [
            (
                item.name,
                item.type,
                " x ".join(map(str, item.shape)),
                item.recipe + "".join(f" {key}={value}" for key, value in item.options.items()),
                str(item.pattern),
                *("yes" if fits else "no" for fits in item.hardware.values()),
            )
            for item in self.layers
        ]
        parts = [table(head, rows)]
        if self.skipped:
            stay = [(item.name, item.type, " x ".join(map(str, item.shape)), item.reason) for item in self.skipped]
            parts.append(table(("stays dense", "type", "shape", "why"), stay))
        pruned = sum(item.size for item in self.layers)
        total = pruned + sum(torch.Size(item.shape).numel() for item in self.skipped)
        parts.append(f"{len(self.layers)} layers with {pruned:,} of {total:,} matrix weights will be pruned.")
        parts.append(f"Memory beside the model: {_sizes(self.memory)}.")
        parts += [
            f"Memory of a run that streams, {place}, at most {sum(held.values()) / 2**20:,.1f} MiB: {_sizes(held)}."
            for place, held in self.streamed.items()
        ]
        parts += [f"Note: {note}." for note in self.notes]
        return "\n\n".join(parts)


def _sizes(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size / 2**20:,.1f} MiB" for name, size in memory.items())


def takes_shape(shape: tuple[int, ...]) -> dict[str, bool]:
    rows, columns = shape[-2:]
    return {name: rows % r == 0 and columns % c == 0 for name, (r, c) in HARDWARE.items()}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


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
    stacks = find_stacks(model, {module for layer in layers for module in (layer.owner, *layer.observed)})
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
        reason = next((protected[owner] for owner in (layer.owner, *layer.twins) if owner in protected), None)
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
        planned.append(replace(item, at_once=_at_once(item, config)))

    for item in planned:
        kind = item.layer.kind
        blind = isinstance(kind, RoutedKind) and not kind.sees_all_tokens
        if config.experts == "all_tokens" and (blind or item.layer.expert_of is not None):
            raise ValueError(
                f"layer {item.name!r}: {item.type} is given nothing but the rows that are routed to it, so that "
                "experts='all_tokens' cannot be told: use 'pool' or 'weight_only', or exclude it"
            )
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    skipped.sort(key=lambda item: order.get(item.name, order.get(item.name.rpartition(".")[0], 0)))
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
    chosen = getattr(_text_config(model), "num_experts_per_tok", None)
    memory = _memory(model, planned, config, chosen)
    # how much a data_loader or a forward_loop gives is not known yet
    known = config.data_loader is None and config.forward_loop is None and any(item.calibrated for item in planned)
    tokens = config.num_samples * (config.seq_len or default_seq_len(model)) if known else None
    streamed = streamed_memory(model, planned, stacks, config, memory, tokens, chosen)
    return Plan(tuple(planned), tuple(skipped), memory, tuple(stacks), _notes(planned, config), streamed)


def _notes(planned: list[LayerPlan], config: SparsifyConfig) -> tuple[str, ...]:
    """What of the options does not reach some layers."""
    experts = [item.name for item in planned if isinstance(item.layer.kind, RoutedKind)]
    if config.permute and experts:
        return (f"permute leaves the channels of fused experts in their order ({len(experts)} layers)",)
    return ()


def _at_once(item: LayerPlan, config: SparsifyConfig) -> int | None:
    """How many experts of a mixture the memory limit leaves room for; None if it leaves room for all."""
    if config.memory_limit is None or not isinstance(item.layer.kind, RoutedKind):
        return None
    each = sum(_numbers(item)) * _width(item)
    if each > config.memory_limit:
        raise ValueError(
            f"layer {item.name!r}: statistics and solver of one expert take {each:,} bytes, more than "
            f"memory_limit={config.memory_limit:,}: raise it, or use a method that needs no Gram matrix"
        )
    fit = config.memory_limit // each
    return None if fit >= item.shape[0] else fit


def _numbers(item: LayerPlan) -> tuple[int, int]:
    """How many numbers the statistics of one of a layer's matrices hold, and its solver beside them at its peak."""
    *_, rows, columns = item.shape
    needed = {"nothing": 0, "square_sums": columns, "gram": columns**2}[item.needs]
    return needed, WORKSPACE_WEIGHTS * rows * columns + WORKSPACE_GRAMS * needed


def _width(item: LayerPlan) -> int:
    """Bytes of a number: statistics and solvers work in float32 or better."""
    return max(4, item.layer.parameter.element_size())


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


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if isinstance(config, PreTrainedConfig) else config


def _memory(model: nn.Module, planned: list[LayerPlan], config: SparsifyConfig, chosen: int | None) -> dict[str, int]:
    """Bytes beside the model: upper bounds, from shapes alone."""
    statistics: dict[str, int] = {}
    tuned: dict[str, int] = {}
    kept: dict[str, int] = {}
    workspace = 0
    tokens = None if config.data is None else config.num_samples * (config.seq_len or default_seq_len(model))
    for item in planned:
        width, (needed, solver) = _width(item), _numbers(item)
        together = item.name if item.block is None else item.block
        if item.at_once is None:
            statistics[together] = statistics.get(together, 0) + width * item.matrices * needed
            workspace = max(workspace, width * item.matrices * solver)
        else:  # Gram matrices are formed as experts are solved, and square sums are all that is held of the others
            sums = item.matrices * item.shape[-1] if item.needs != "nothing" else 0
            statistics[together] = statistics.get(together, 0) + width * sums
            workspace = max(workspace, width * item.at_once * (needed + solver))
            if tokens is not None and chosen is not None and item.needs == "gram":
                rows = tokens * item.shape[-1] * (1 if item.layer.kind is UP else chosen)
                kept[together] = kept.get(together, 0) + rows * item.layer.parameter.element_size()
        tuned[together] = tuned.get(together, 0) + RECONSTRUCTION * width * item.size
    copies = IN_ORDER if config.deterministic else 1
    memory = {"statistics_of_one_block": copies * max(statistics.values()), "solver_workspace": workspace}
    if config.enforce:
        memory["masks"] = sum(item.size * (1 + len(item.layer.twins)) for item in planned)
    if config.reconstruct is not None:
        memory["reconstruction_of_one_block"] = max(tuned.values())
    if kept:
        memory["routed_tokens_of_one_block"] = max(kept.values())
    if tokens is not None and (cached := activations(model, planned, config, tokens)):
        memory["cached_activations"] = cached
    return memory
