"""Sizes of a smaller model: those that users ask for, what the config says then, and what it costs."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from modelopt_sparse.checks import check_choice, check_flag, check_whole, is_whole, plain_number
from modelopt_sparse.methods.patterns import Unstructured, parse_pattern
from modelopt_sparse.model.devices import full_name, map_leaves
from modelopt_sparse.model.experts import LAST, RoutedAdapter
from modelopt_sparse.model.find import Stack
from modelopt_sparse.model.hf import cache_name
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.budget import parse_budget
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.text import nearest
from modelopt_sparse.reports.values import Shrunk
from modelopt_sparse.shrinking.resize import (
    BlockCount,
    channels_in,
    experts_in,
    find_experts,
    find_width,
    numbers_in,
    part_with,
    tensors_of,
    twin_of,
)

MULTIPLES = (256, 128, 64, 32, 8)  # of a width, with multiple_of="auto": the first that moves it by no more than
MOVED = 0.02  # of it, else the last
FURTHER_TOKENS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # names in configs
COUNTED = {"params": "parameters", "bytes": "bytes", "flops": "FLOPs of a call"}  # unit of a budget -> what it counts
SCALES = {"K": "e3", "M": "e6", "G": "e9", "T": "e12"}
CALL = 1, 1024  # of the FLOPs of a budget: windows and tokens
WAYS = "mlp=0.25 (a quarter of the MLP channels goes), blocks=4 (four blocks go) or budget='70% params' (what stays)"
# what channels and experts are chosen by, the default first, and what blocks are
CRITERIA, EXPERT_CRITERIA = ("gram", "norm", "minitron"), ("reap", "reap_sum", "frequency")
BLOCKS_BY = ("kl", "influence")
NO_HEADS = "heads cost far more accuracy for their parameters than channels and blocks: give mlp= or blocks="

# sizes ----------------------------------------------------------------------------------------------------------------


class ShrinkRequest(NamedTuple):
    """The options that `shrink` alone has: what goes, and how it is chosen."""

    mlp: float | int | str | None = None
    blocks: float | int | str | Sequence[int] | None = None
    experts: float | int | str | None = None
    to: Mapping[str, int] | None = None
    budget: Any = None
    kept: Any = None
    multiple_of: int | str = "auto"
    tensor_parallel: int = 1
    criterion: Any = None
    refit: bool | None = None
    blocks_by: str = "kl"

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> "ShrinkRequest":
        """Take these options out of all that were passed."""
        return cls(**{name: options.pop(name) for name in cls._fields if name in options})

    @property
    def fixed(self) -> dict[str, Sequence[int]]:
        """Layer name -> the channels, or experts, that stay, by the choice ``kept``."""
        return {} if self.kept is None else {**self.kept.get("mlp", {}), **self.kept.get("experts", {})}

    def in_full(self, planned: Plan) -> "ShrinkRequest":
        """The request in plain numbers, with ``kept`` as a choice (`kept_in`) in which each mixture goes by the name of
        the layer of its last matrices, whichever module around it other tools name. `decided` does the rest: then no
        criterion is None, and no refit."""
        request = map_leaves(plain_number, self)
        if request.kept is None:
            return request
        choice, experts = kept_in(request.kept), dict[str, Any]()
        for name, stay in choice.get("experts", {}).items():
            inside = [x.name for x in planned.layers if x.layer.adapter in LAST and x.name.startswith(f"{name}.")]
            experts |= dict.fromkeys(inside or [name], stay)
        return request._replace(kept={**choice, **({"experts": experts} if experts else {})})


@dataclass(frozen=True)
class TargetSizes:
    """The numbers that the config will hold.

    width: name -> (as it is, as it will be), of widths of MLPs.
    experts: the same of the number of experts, and of heads that predict further tokens, which become none.
    groups: how many groups the experts are routed in.
    depth: the number of blocks. stay: indices of those that stay; unless they are ``named``, data chooses so many.
    """

    width: Mapping[str, tuple[int, int]]
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    groups: int = 1
    depth: BlockCount | None = None
    stay: Sequence[int] = ()
    named: bool = False

    def __str__(self) -> str:
        """Text such as "intermediate_size 288, num_hidden_layers 5"."""
        return ", ".join(f"{name} {new:,}" for name, (_, new) in self.changes.items())

    @property
    def changes(self) -> dict[str, tuple[int, int]]:
        """Name in the config -> (as it is, as it will be)."""
        depth = {} if self.depth is None else {self.depth.name: (len(self.depth.blocks), len(self.stay))}
        return {**self.width, **self.experts, **depth}

    def narrow(self, model: PreTrainedModel, stay: Sequence[int] | None = None) -> PreTrainedModel:
        """The model's twin with this width, and, if ``stay`` is given, with these blocks alone."""
        depth = {} if self.depth is None or stay is None else self.depth.changes(stay, model.config)
        numbers = {name: new for name, (_, new) in [*self.width.items(), *self.experts.items()]}
        return twin_of(model, {**numbers, **depth})

    def groups_in(self, model: PreTrainedModel, planned: Plan) -> Mapping[str, Sequence[Any]]:
        """Block -> its channels that go together, or its mixtures, of which the smaller model has fewer."""
        narrow, blocks = self.narrow(model), layers_by_block(planned)
        if self.experts:
            return experts_in(model, narrow, blocks, self.groups)
        return channels_in(model, narrow, blocks) if self.width else {}


def decided(
    model: PreTrainedModel, planned: Plan, request: ShrinkRequest, config: SparsifyConfig
) -> tuple[ShrinkRequest, list[TargetSizes]]:
    """(the request checked and in full, the sizes that it leads to: several, by blocks, of a budget). ``planned``: of
    the model as it is."""
    request = request.in_full(planned)
    sizes = _sizes_for(model, planned, request)
    experts = bool(sizes[0].experts)
    criteria = EXPERT_CRITERIA if experts else CRITERIA
    criterion = criteria[0] if request.criterion is None else request.criterion
    check_choice("criterion", criterion, criteria)
    check_choice("blocks_by", request.blocks_by, BLOCKS_BY)
    refit = not experts or config.reconstruct is None if request.refit is None else request.refit
    check_flag("refit", refit)
    return request._replace(criterion="given" if request.kept else criterion, refit=refit), sizes


def _sizes_for(model: PreTrainedModel, planned: Plan, request: ShrinkRequest) -> list[TargetSizes]:
    passed = [name for name in ShrinkRequest._fields[:6] if getattr(request, name) is not None]
    if len(passed) != 1 and passed not in (["mlp", "blocks"], ["blocks", "experts"]):
        ways = "blocks= with mlp= or experts=, or to=, or budget=, or kept="
        raise ValueError(f"shrink takes {ways}; got {passed or 'none of them'}: give {WAYS}")
    if request.multiple_of != "auto" and not is_whole(request.multiple_of, 1):
        raise ValueError(f"multiple_of={request.multiple_of!r}: give 'auto' or a positive whole number")
    check_whole("tensor_parallel", request.tensor_parallel)
    if request.budget is not None:
        return _within(model, planned, request)
    if request.kept is not None:
        request = request._replace(**_sizes_of(request.kept, planned))
    sizes = TargetSizes({})
    if request.mlp is not None:
        _refuse_experts(planned)
        _count_that_goes("mlp", request.mlp, 1)  # before widths are tried with it
        name, old, new = find_width(model, layers_by_block(planned), lambda old: _width(request, old))
        sizes = replace(sizes, width={name: (old, new)})
    if request.experts is not None:
        sizes = replace(sizes, **_experts(model, planned, lambda old: old - _fewer_experts(request.experts, old)))
    if request.blocks is not None:
        stacks = [stack for stack in planned.stacks if request.kept is None or stack.name in request.kept["blocks"]]
        sizes = replace(sizes, **_blocks(model, stacks, request.blocks))
    if not isinstance(request.to or {}, Mapping):
        raise TypeError(f"to={request.to!r}: give a mapping of the config's names to sizes")
    for name, size in (request.to or {}).items():
        sizes = _with_size(model, planned, sizes, model.config.attribute_map.get(name, name), size)
    if not sizes.changes:
        raise ValueError(f"{passed[0]}= takes nothing away: give {WAYS}")
    for name, (_, new) in sizes.width.items():
        if new % request.tensor_parallel:
            raise ValueError(f"{name}={new} does not divide by tensor_parallel={request.tensor_parallel}: give a share")
    sizes.narrow(model, sizes.stay)
    if request.kept is not None:
        _check_kept(request.kept, model, planned, sizes)
    return [sizes]


def layers_by_block(planned: Plan) -> dict[str, tuple[nn.Module, list[Layer]]]:
    """Name of a block -> the block, and its layers."""
    layers = planned.by_block
    return {name: (block, [x.layer for x in layers.get(name, ())]) for name, block in planned.named_blocks.items()}


def _refuse_experts(planned: Plan) -> None:
    for layer_plan in planned.layers:
        if isinstance(layer_plan.layer.adapter, RoutedAdapter) or layer_plan.layer.mixture is not None:
            advice = "give experts= or blocks=, or to={'shared_expert_intermediate_size': 1024} or so"
            raise ValueError(f"mlp= is for MLPs, and {layer_plan.name!r} holds experts: {advice}")


def _count_that_goes(name: str, value: Any, whole: int) -> float:
    """How many of ``whole`` go, which is given as a fraction (0.25, "25%") or a number."""
    if is_whole(value, 1):
        return value
    with suppress(ValueError):  # whose words are of patterns
        if isinstance(value, (float, str)) and isinstance(pattern := parse_pattern(value), Unstructured):
            return pattern.sparsity * whole
    raise ValueError(f"{name}={value!r}: give what goes, as a share (0.25, '25%') or a number")


def _width(request: ShrinkRequest, old: int) -> int:
    """The width that ``mlp`` leaves of an ``old`` one."""
    exact = old - _count_that_goes("mlp", request.mlp, old)
    new = int(exact) if is_whole(request.mlp, 1) else _rounded(request, old, exact, round)
    if not 0 < new < old:
        raise ValueError(f"mlp={request.mlp!r} makes {new} of {old} channels: give another, or a smaller multiple_of")
    return new


def _rounded(request: ShrinkRequest, old: int, exact: float, rounding: Callable[[float], int]) -> int:
    """A width such that each device's part of it is a multiple."""
    multiples = MULTIPLES if request.multiple_of == "auto" else (int(request.multiple_of),)
    steps = [multiple * request.tensor_parallel for multiple in multiples]
    sizes = [rounding(exact / step) * step for step in steps]
    return next((size for size in sizes if abs(size - exact) <= MOVED * old), sizes[-1])


def _fewer_experts(experts: Any, old: int) -> int:
    """How many of ``old`` experts go."""
    gone = math.floor(_count_that_goes("experts", experts, old) + 1e-9)
    if not 0 < gone < old:
        raise ValueError(f"experts={experts!r} takes {gone} of {old} experts away: give a share of 1/{old} or more")
    return gone


def _experts(model: PreTrainedModel, planned: Plan, new_of: Callable[[int], int]) -> dict[str, Any]:
    """Fields of `TargetSizes` for fewer experts: ``new_of`` how many there are."""
    name, old, new = find_experts(model, layers_by_block(planned), new_of)
    config, path, _ = part_with(model.config, name)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    groups = getattr(config, "n_group", None) or 1
    in_chosen_groups = (getattr(config, "topk_group", None) or groups) * new // groups
    if in_chosen_groups < chosen:
        raise ValueError(f"{name}={new} leaves {in_chosen_groups} experts for a token, which takes {chosen}: keep more")
    if groups > 1 and (new % groups or new < 2 * groups):
        raise ValueError(f"{name}={new} in {groups} groups: give a multiple of {groups}, at least {2 * groups}")
    # heads that predict further tokens: transformers leaves their weights out, and engines would miss them
    held = ((key, count) for key, count in vars(config).items() if key in FURTHER_TOKENS and count)
    further = {full_name(path, key): (count, 0) for key, count in held}
    return {"experts": {name: (old, new), **further}, "groups": groups}


def _blocks(model: PreTrainedModel, stacks: Sequence[Stack], blocks: Any) -> dict[str, Any]:
    """Fields of `TargetSizes` for what ``blocks=`` says of one of the ``stacks``."""
    if len(stacks) != 1:
        advice = " or ".join(f"to={{{BlockCount.find(model, stack).name!r}: ...}}" for stack in stacks)
        raise ValueError(f"blocks= is for a model with one stack of blocks: give {advice}")
    count, named = len(stacks[0].blocks), isinstance(blocks, (list, tuple))
    gone = blocks if named else range(round(_count_that_goes("blocks", blocks, count)))
    if not 0 < len(set(gone)) == len(gone) < count or not all(is_whole(x, 0) and x < count for x in gone):
        raise ValueError(f"blocks={blocks!r}: give how many of the {count} blocks go, or name some, each once, from 0")
    depth = BlockCount.find(model, stacks[0])
    stay = [index for index in range(count) if index not in gone]
    if named and (problem := depth.misfit(stay, model)):
        raise ValueError(problem)
    return {"depth": depth, "stay": stay if named else depth.any_without(len(gone), model), "named": named}


def _with_size(model: PreTrainedModel, planned: Plan, sizes: TargetSizes, name: str, size: Any) -> TargetSizes:
    """The sizes with what ``to={name: size}`` says: of a number of blocks, of experts, or of a width of MLPs."""
    numbers, problem, blocks = numbers_in(model.config), None, layers_by_block(planned)
    if name not in numbers:
        raise ValueError(f"to={{{name!r}: ...}}: the config has no such number{nearest(name, numbers)}")
    old = numbers[name]
    if not is_whole(size, 1) or (old is not None and size >= old):
        raise ValueError(f"to={{{name!r}: {size!r}}}: give a whole number below {old}")
    for stack in planned.stacks:
        if old == len(stack.blocks):
            try:
                depth = BlockCount.find(model, stack, name)
            except ValueError as error:
                problem = error
            else:
                if sizes.depth is not None:
                    earlier = sizes.depth.name
                    raise ValueError(
                        f"to= has {earlier!r} and {name!r}, blocks of two stacks: shrink twice, by one each"
                    )
                return replace(sizes, depth=depth, stay=depth.any_without(old - size, model))
    try:
        if old is None:  # it stands for a width that the class computes
            _, old, _ = find_width(model, blocks, lambda _: size)
        twin = twin_of(model, {name: size})
        try:
            experts_in(model, twin, blocks)
        except ValueError:
            channels_in(model, twin, blocks)
            if "head" in name:
                raise ValueError("its channels are no MLP's") from None
        else:
            return replace(sizes, **_experts(model, planned, lambda _: size))
    except ValueError as error:
        advice = NO_HEADS if "head" in name else "give mlp=, experts= or blocks="
        raise ValueError(f"to={{{name!r}: {size}}} cannot be cut: {problem or error}; {advice}") from error
    return replace(sizes, width={**sizes.width, name: (old, size)})


def kept_in(kept: Any) -> Mapping[str, Any]:
    """The choice in what ``kept=`` takes: a ``Shrunk``, the section of a report, its part ``kept``, or mixture ->
    experts, as other tools have it."""
    choice = kept.kept if isinstance(kept, Shrunk) else kept.get("kept", kept) if isinstance(kept, Mapping) else None
    if choice and all(isinstance(stay, (list, tuple)) for stay in choice.values()):
        choice = {"experts": choice}
    known = {"mlp", "experts", "blocks"}
    if not choice or choice.keys() - known or not all(isinstance(stay, Mapping) for stay in choice.values()):
        raise ValueError("kept= takes report.shrunk, that section of sparsity.json, or mixtures and their experts")
    return choice


def _sizes_of(choice: Mapping[str, Any], planned: Plan) -> dict[str, Any]:
    """The options ``mlp``, ``experts`` and ``blocks`` that a choice amounts to."""
    gone: dict[str, Any] = {}
    for option, unit, dim in (("mlp", "channels", -1), ("experts", "experts", 0)):
        sizes = {layer_plan.name: layer_plan.shape[dim] for layer_plan in planned.layers}
        layers = choice.get(option, {}).items()
        counts = {len(_gone(name, indices, sizes.get(name, 0), unit)) for name, indices in layers}
        if len(counts) > 1:
            raise ValueError(f"kept= has different numbers of {unit}: all blocks must have as many")
        gone[option] = next(iter(counts), None)
    counts = {stack.name: len(stack.blocks) for stack in planned.stacks}
    blocks: list[int] = []
    for name, stay in sorted(choice.get("blocks", {}).items()):
        if name not in counts:
            raise ValueError(f"kept= names blocks of {name!r}, which is no stack of this model")
        blocks += _gone(name, stay, counts[name], "blocks")
    return {**gone, "blocks": blocks or None}


def _gone(name: str, stay: Sequence[int], old: int, unit: str) -> list[int]:
    """The indices that go where these ``stay`` of ``old`` ones."""
    if not isinstance(stay, Iterable) or sorted(set(stay)) != list(stay) or not set(stay) <= set(range(old)):
        raise ValueError(f"kept= of {name!r}: give ascending indices of its {old} {unit}, each once")
    return [index for index in range(old) if index not in stay]


def _check_kept(choice: Mapping[str, Any], model: PreTrainedModel, planned: Plan, sizes: TargetSizes) -> None:
    """Raise ValueError if a choice does not name just the layers that are cut in blocks that stay, or if it leaves
    more experts of one group than of another."""
    blocks = () if sizes.depth is None else sizes.depth.blocks
    gone = {name for index, name in enumerate(blocks) if index not in sizes.stay}
    groups = sizes.groups_in(model, planned)
    cut = {group.consumer.name: group for name, in_block in groups.items() if name not in gone for group in in_block}
    for option, is_cut in (("mlp", not sizes.experts), ("experts", bool(sizes.experts))):
        if different := sorted((cut.keys() if is_cut else set()) ^ choice.get(option, {}).keys()):
            advice = "name the layers that are"
            raise ValueError(f"kept= of {option!r}: {different[0]!r} is missing, or is not cut: {advice}")
    for name, mixture in cut.items() if sizes.experts else ():
        counts = mixture.per_group(choice["experts"][name])
        if len(counts) < mixture.groups or len({*counts}) > 1:
            raise ValueError(f"kept= of {name!r}: as many experts must stay in each of {mixture.groups} groups")


# a budget -------------------------------------------------------------------------------------------------------------


def _within(model: PreTrainedModel, planned: Plan, request: ShrinkRequest) -> list[TargetSizes]:
    """The widest MLPs within a budget for each number of blocks that go, as long as any have to."""
    counted, call, ceiling = _ceiling(model, request.budget)

    def cost(sizes: TargetSizes) -> int:
        return costs(sizes.narrow(model, sizes.stay), *call)[counted]

    problems = []
    try:
        _refuse_experts(planned)
        name, old, half = find_width(model, layers_by_block(planned), lambda old: old // 2)
    except ValueError as error:
        problems.append(str(error))
        name, old, half = "", 0, 0
    fitting: list[TargetSizes] = []
    counts = [*range(len(planned.stacks[0].blocks))] if len(planned.stacks) == 1 else [0]
    if len({block_size(block) for block in planned.blocks}) > 1:  # what goes is chosen later
        problems.append("blocks differ in size, so name those that go by blocks=")
        counts = [0]
    for gone in counts:
        try:
            sizes = TargetSizes({}, **(_blocks(model, planned.stacks, gone) if gone else {}))
        except ValueError as error:
            problems.append(str(error))
            break
        whole = cost(sizes)
        if gone and whole <= ceiling:  # from here on blocks alone are enough
            return [*fitting, sizes]
        if name:
            halved = replace(sizes, width={name: (old, half)})
            channel = (whole - cost(halved)) / (old - half)  # what one of all blocks costs
            new = _rounded(request, old, old - (whole - ceiling) / channel, math.floor)
            if 0 < new < old:
                fitting.append(replace(sizes, width={name: (old, new)}))
    if not fitting:
        why = "; ".join(problems) or "MLPs would have no channels"
        raise ValueError(f"budget={request.budget!r} cannot be met: {why}")
    return fitting


def _ceiling(model: PreTrainedModel, budget: Any) -> tuple[str, tuple[int, ...], int]:
    """(what a budget counts, by its name among costs; the call that is made to know it, which takes seconds of large
    models; the most that it leaves)."""
    if isinstance(budget, str):
        budget = re.sub(r"\s*([KMGT])B( bytes)?$", lambda match: f"{SCALES[match[1]]} bytes", budget.strip())
    parsed = parse_budget(budget, tuple(COUNTED))
    assert parsed is not None
    counted, call = COUNTED[parsed.unit], CALL if parsed.unit == "flops" else ()
    dense = costs(twin_of(model, {}), *call)
    if counted not in dense:
        raise ValueError(f"budget={budget!r}: calls of this model cannot be counted: give params, such as '70% params'")
    if (ceiling := parsed.ceiling(dense[counted])) >= dense[counted]:
        raise ValueError(f"budget={budget!r}: the model has {dense[counted]:,} {parsed.unit} already: give less")
    return counted, call, ceiling


def block_size(block: nn.Module) -> frozenset[Any]:
    """The tensors of a block, by name, shape and dtype."""
    return frozenset((name, x.shape, x.dtype) for name, x in tensors_of(block).items())


def costs(model: PreTrainedModel, batch: int = 0, length: int = 0) -> dict[str, int]:
    """Parameters and bytes of a model; on the meta device also FLOPs and cache of a call, which is made there: no
    formula, and no values."""
    known = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    known["bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    if batch and model.can_generate() and not model.config.is_encoder_decoder:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                output = model(input_ids=torch.zeros(batch, length, dtype=torch.long, device="meta"), use_cache=True)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):  # it looks at values, or takes no ids
            return known
        layers = getattr(getattr(output, cache_name(model) or "", None), "layers", ())
        held = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        known["FLOPs of a call"] = counter.get_total_flops()
        known["bytes of keys and values"] = sum(value.nbytes for value in held)
    return known
