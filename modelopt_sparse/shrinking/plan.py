"""What `shrink` will make of a model: its options, the sizes that they lead to, and what these cost."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from modelopt_sparse.methods.patterns import Unstructured, parse_pattern
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.adapters import LAST, RoutedAdapter
from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.model.hf import cache_name, quantization_of
from modelopt_sparse.model.layers import Layer, model_inside
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.plan.budget import parse_budget
from modelopt_sparse.plan.memory import estimated
from modelopt_sparse.plan.options import SparsifyConfig, check_globs, first_match, quality_of
from modelopt_sparse.plan.plan import Plan, memory_table
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.text import Printed, nearest, refuse_unknown
from modelopt_sparse.reports.values import Shrunk
from modelopt_sparse.shrinking.resize import (
    Depth,
    ExpertPool,
    Pool,
    expert_pools_in,
    find_experts,
    find_width,
    numbers_in,
    pools_in,
    spans,
    twin_of,
)
from modelopt_sparse.values import is_whole

CRITERIA = ("gram", "norm", "minitron")  # of channels, and of experts; the first is the default
EXPERT_CRITERIA = ("reap", "reap_sum", "frequency")
BLOCKS_BY = ("kl", "influence")
MULTIPLES = (256, 128, 64, 32, 8)  # of a width, with multiple_of="auto": the first that moves it by no more than
MOVED = 0.02  # of it, else the last
# the options of `sparsify` that shrink takes too
TAKEN = (
    *("data_loader", "collect_func", "max_batches", "data", "tokenizer", "processor", "num_samples", "seq_len"),
    *("batch_size", "seed", "self_data", "count_padding", "quality", "reconstruct", "distill", "device", "autocast"),
    *("progress", "distributed", "split_data", "output", "divergence"),
)
HOW = ("criterion", "refit", "blocks_by")
OWN = ("mlp", "blocks", "experts", "to", "budget", *HOW, "multiple_of", "tensor_parallel", "kept", "protect")
WINDOWS = 4  # of text in a batch, or fewer, so that there are four batches: some fit, and others judge
FURTHER_TOKENS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # names in configs
UNITS = {"params": "parameters", "bytes": "bytes", "flops": "FLOPs of a call"}  # of budgets
SCALES = {"K": "e3", "M": "e6", "G": "e9", "T": "e12"}
CALL = 1, 1024  # of the FLOPs of a budget: windows and tokens
STALE = "parameters that change are new ones: make an optimizer afterwards"
_SAYS = "mlp=0.25 (a quarter of the MLP channels goes), blocks=4 (four blocks go) or budget='70% params' (what stays)"
# names that users of other tools know, and what is not built -> what to do
HINTS = {
    **dict.fromkeys(("ratio", "pruning_ratio", "compression_ratio", "constraints", "export_config"), f"give {_SAYS}"),
    "kv_groups": "heads cost far more accuracy for their parameters than channels and blocks: give mlp= or blocks=",
    "forward_loop": "shrink calls the model itself: give data= or data_loader=",
}


def shrink_config(options: Mapping[str, Any], *, only_planned: bool = False) -> SparsifyConfig:
    """The options of `shrink` that it has in common with `sparsify`, checked."""
    for name in options.keys() & HINTS.keys():
        raise ValueError(f"option {name!r} is not known to shrink: {HINTS[name]}")
    refuse_unknown(options, [*OWN, *TAKEN])
    of_quality = {} if options.get("quality") is None else dict(quality_of(options["quality"]).options)
    of_quality.pop("polish", None)
    chosen = {**of_quality, **options}
    if isinstance(reconstruct := chosen.get("reconstruct"), Mapping):
        if "masks" in (options.get("reconstruct") or {}):
            raise ValueError("reconstruct: masks: a shrunk model has none: leave it out")
        chosen["reconstruct"] = {key: value for key, value in reconstruct.items() if key != "masks"}
    tuned = chosen.get("reconstruct") or chosen.get("distill")  # such runs see to it themselves
    if chosen.get("data_loader") is None and not tuned:
        chosen.setdefault("batch_size", max(1, min(WINDOWS, chosen.get("num_samples", 128) // WINDOWS)))
    config = SparsifyConfig(pattern=Unstructured(0.5), **chosen)
    if not only_planned and config.data is None and config.data_loader is None:
        raise ValueError("shrink needs calibration data: give data_loader=, or data= with tokenizer=")
    return config


def settings_of_run(config: SparsifyConfig, asked: "Asked", *, refit: bool) -> dict[str, Any]:
    """What the report says that the run was asked for."""
    own = {"multiple_of": asked.multiple_of, "tensor_parallel": asked.tensor_parallel, "refit": refit}
    return {**config.settings(), **own}


# sizes ----------------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """The options of `shrink` that say what goes."""

    mlp: float | int | str | None = None
    blocks: float | int | str | Sequence[int] | None = None
    experts: float | int | str | None = None
    to: Mapping[str, int] | None = None
    budget: Any = None
    kept: Any = None
    protect: Mapping[str, Sequence[int]] | None = None
    multiple_of: int | str = "auto"
    tensor_parallel: int = 1

    def in_full(self, planned: Plan) -> "Asked":
        """With ``kept`` as a mapping that names each mixture by the layer of its last matrices, whichever module
        around it other tools name."""
        if self.kept is None:
            return self
        choice = kept_in(self.kept)
        takers = [plan.name for plan in planned.layers if plan.layer.adapter in LAST]
        inside = {
            name: [taker for taker in takers if taker.startswith(f"{name}.")] for name in choice.get("experts", {})
        }
        experts = {taker: choice["experts"][name] for name, of_name in inside.items() for taker in of_name or [name]}
        return self._replace(kept={**choice, **({"experts": experts} if experts else {})})


@dataclass(frozen=True)
class Sizes:
    """What the config will say. width, experts: name -> (as it is, as it will be) of widths of MLPs; of the number of
    experts, which are routed in so many ``groups``, and of heads that predict further tokens, which become none. depth:
    blocks, of which those at the places ``stay`` will; unless they are ``named`` so many, and data chooses them.
    protected: layer of a mixture's last matrices -> experts that stay, whatever their scores."""

    width: Mapping[str, tuple[int, int]]
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    groups: int = 1
    depth: Depth | None = None
    stay: Sequence[int] = ()
    named: bool = False
    protected: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, tuple[int, int]]:
        """Name in the config -> (as it is, as it will be)."""
        depth = self.depth
        of_depth = {} if depth is None else {depth.name: (len(depth.stack.blocks), len(self.stay))}
        return {**self.width, **self.experts, **of_depth}

    def of(self, model: PreTrainedModel, planned: Plan) -> "Sizes":
        """The same of a copy of the model."""
        if (depth := self.depth) is None:
            return self
        stack = next(stack for stack in planned.stacks if stack.name == depth.stack.name)
        return replace(self, depth=Depth(model, stack, depth.name))

    def chosen(self, kept: Mapping[str, Any]) -> "Sizes":
        """The same with the blocks that an earlier run has chosen."""
        if (depth := self.depth) is None:
            return self
        return replace(self, stay=kept["blocks"][depth.stack.name], named=True)

    def guarded(self, pool: ExpertPool) -> ExpertPool:
        """The pool, which knows its protected experts."""
        return replace(pool, protected=tuple(self.protected.get(pool.taker.name, ())))

    def narrow(self, model: PreTrainedModel, stay: Sequence[int] | None = None) -> PreTrainedModel:
        """The twin with this width; ``stay``: and with these blocks alone."""
        depth = {} if self.depth is None or stay is None else self.depth.changes(stay)
        numbers = {name: new for name, (_, new) in [*self.width.items(), *self.experts.items()]}
        return twin_of(model, {**numbers, **depth})

    def pools(self, model: PreTrainedModel, planned: Plan) -> tuple[dict[str, list[Pool]], dict[str, list[ExpertPool]]]:
        """Block -> its channels that go together, and block -> its mixtures, of which fewer stay."""
        narrow, blocks = self.narrow(model), layers_by_block(planned)
        channels = pools_in(model, narrow, blocks) if self.width else {}
        return channels, expert_pools_in(model, narrow, blocks, self.groups) if self.experts else {}

    def refits(self, config: SparsifyConfig, refit: bool | None) -> bool:
        """What ``refit`` stands for: of experts whose blocks are reconstructed, that does as well."""
        return not self.experts or config.reconstruct is None if refit is None else refit


def sizes_for(model: PreTrainedModel, planned: Plan, asked: Asked) -> list[Sizes]:
    """From what the user asks for to sizes; of a budget all that it leaves, by blocks. ``planned``: the model's layers
    and stacks."""
    ways = ("mlp", "blocks", "experts", "to", "budget", "kept")
    said = [name for name in ways if getattr(asked, name) is not None]
    if len(said) != 1 and said not in (["mlp", "blocks"], ["blocks", "experts"]):
        ways = "blocks= with mlp= or experts=, or to=, or budget=, or kept="
        raise ValueError(f"shrink takes {ways}; got {said or 'none of them'}: give {_SAYS}")
    if asked.multiple_of != "auto" and not is_whole(asked.multiple_of, 1):
        raise ValueError(f"multiple_of={asked.multiple_of!r}: give 'auto' or a positive whole number")
    if not is_whole(asked.tensor_parallel, 1):
        raise ValueError(f"tensor_parallel={asked.tensor_parallel!r}: give a positive whole number of devices")
    if asked.protect and (asked.budget is not None or asked.kept is not None):
        raise ValueError("protect= says which experts stay where scores choose them: give experts= or to= beside it")
    if asked.budget is not None:
        return _within(model, planned, asked)
    if asked.kept is not None:
        asked = asked._replace(**_sizes_of(kept_in(asked.kept), planned))
    sizes = Sizes({})
    if asked.mlp is not None:
        _refuse_experts(planned)
        _share("mlp", asked.mlp, 1)  # before widths are tried with it
        name, *of_width = find_width(model, layers_by_block(planned), lambda old: _width(asked, old))
        sizes = replace(sizes, width={name: (of_width[0], of_width[1])})
    if asked.experts is not None:
        sizes = replace(sizes, **_experts(model, planned, lambda old: old - _fewer_experts(asked.experts, old)))
    if asked.blocks is not None:
        sizes = replace(sizes, **_blocks(model, planned, asked.blocks))
    for name, size in (asked.to or {}).items():
        name = model.config.attribute_map.get(name, name)
        sizes = _with_size(model, planned, sizes, name, size)
    for name, (_, new) in sizes.width.items():
        if new % asked.tensor_parallel:
            raise ValueError(f"{name}={new} does not divide by tensor_parallel={asked.tensor_parallel}: give a share")
    sizes.narrow(model, sizes.stay)
    if asked.kept is not None:
        _check_kept(kept_in(asked.kept), model, planned, sizes)
    return [replace(sizes, protected=_protected(asked.protect or {}, model, planned, sizes))]


def layers_by_block(planned: Plan) -> dict[str, tuple[nn.Module, list[Layer]]]:
    """Name of a block -> the block, and its layers."""
    layers = planned.by_block
    return {name: (block, [x.layer for x in layers.get(name, ())]) for name, block in planned.named_blocks.items()}


def _refuse_experts(planned: Plan) -> None:
    for plan in planned.layers:
        if isinstance(plan.layer.adapter, RoutedAdapter) or plan.layer.mixture is not None:
            advice = "give experts= or blocks=, or to={'shared_expert_intermediate_size': 1024} or so"
            raise ValueError(f"mlp= is for MLPs, and {plan.name!r} holds experts: {advice}")


def _share(name: str, value: Any, whole: int) -> float:
    """How many of ``whole`` go, of a share (0.25, "25%") or a number."""
    if is_whole(value, 1):
        return value
    with suppress(ValueError):  # whose words are of patterns
        if isinstance(value, (float, str)) and isinstance(pattern := parse_pattern(value), Unstructured):
            return pattern.sparsity * whole
    raise ValueError(f"{name}={value!r}: give what goes, as a share (0.25, '25%') or a number")


def _width(asked: Asked, old: int) -> int:
    """The width that ``mlp`` leaves of an ``old`` one."""
    exact = old - _share("mlp", asked.mlp, old)
    new = int(exact) if is_whole(asked.mlp, 1) else _rounded(asked, old, exact, round)
    if not 0 < new < old:
        raise ValueError(f"mlp={asked.mlp!r} makes {new} of {old} channels: give another, or a smaller multiple_of")
    return new


def _rounded(asked: Asked, old: int, exact: float, rounding: Callable[[float], int]) -> int:
    """A width such that each device's part of it is a multiple."""
    multiples = MULTIPLES if asked.multiple_of == "auto" else (int(asked.multiple_of),)
    sizes = [rounding(exact / (each * asked.tensor_parallel)) * each * asked.tensor_parallel for each in multiples]
    return next((size for size in sizes if abs(size - exact) <= MOVED * old), sizes[-1])


def _fewer_experts(experts: Any, old: int) -> int:
    """How many of ``old`` experts go."""
    gone = math.floor(_share("experts", experts, old) + 1e-9)
    if not 0 < gone < old:
        raise ValueError(f"experts={experts!r} takes {gone} of {old} experts away: give a share of 1/{old} or more")
    return gone


def _experts(model: PreTrainedModel, planned: Plan, new_of: Callable[[int], int]) -> dict[str, Any]:
    """Fields of `Sizes` for fewer experts: ``new_of`` how many there are."""
    name, old, new = find_experts(model, layers_by_block(planned), new_of)
    path, _, _ = name.rpartition(".")
    config = attrgetter(path)(model.config) if path else model.config
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    groups = getattr(config, "n_group", None) or 1
    in_chosen_groups = (getattr(config, "topk_group", None) or groups) * new // groups
    if in_chosen_groups < chosen:
        raise ValueError(f"{name}={new} leaves {in_chosen_groups} experts for a token, which takes {chosen}: keep more")
    if groups > 1 and (new % groups or new < 2 * groups):
        raise ValueError(f"{name}={new} in {groups} groups: give a multiple of {groups}, at least {2 * groups}")
    # heads that predict further tokens: transformers leaves their weights out, and engines would miss them
    further = {key: (count, 0) for key, count in vars(config).items() if key in FURTHER_TOKENS and count}
    further = {f"{path}.{key}" if path else key: counts for key, counts in further.items()}
    return {"experts": {name: (old, new), **further}, "groups": groups}


def _protected(
    protect: Mapping[str, Sequence[int]], model: PreTrainedModel, planned: Plan, sizes: Sizes
) -> dict[str, list[int]]:
    """Layer of a mixture's last matrices -> the experts that ``protect=`` names, by globs of mixtures and layers."""
    mixtures = sizes.pools(model, planned)[1] if protect else {}
    pools = {pool.taker.name: pool for of_block in mixtures.values() for pool in of_block}
    holders = {name: [name, *accumulate(name.split("."), "{}.{}".format)] for name in pools}
    check_globs(protect, [each for of_layer in holders.values() for each in of_layer], "mixture whose experts go")
    protected: dict[str, list[int]] = {}
    for name, pool in pools.items():
        globs = [glob for glob in protect if any(first_match(each, [glob]) for each in holders[name])]
        experts = sorted({expert for glob in globs for expert in protect[glob]})
        if not all(is_whole(expert, 0) and expert < pool.old for expert in experts):
            raise ValueError(f"protect= of {globs[0]!r}: give numbers of its {pool.old} experts, from 0")
        in_groups = Counter(expert // (pool.old // pool.groups) for expert in experts)
        if max(in_groups.values(), default=0) > pool.new // pool.groups:
            where = f" in each of {pool.groups} groups" if pool.groups > 1 else ""
            raise ValueError(f"protect= of {globs[0]!r}: {pool.new // pool.groups} experts stay{where}: protect fewer")
        protected[name] = experts
    return protected


def _blocks(model: PreTrainedModel, planned: Plan, blocks: Any) -> dict[str, Any]:
    """Fields of `Sizes` for what ``blocks=`` says."""
    if len(planned.stacks) != 1:
        advice = " or ".join(f"to={{{Depth.find(model, stack).name!r}: ...}}" for stack in planned.stacks)
        raise ValueError(f"blocks= is for a model with one stack of blocks: give {advice}")
    count, named = len(planned.stacks[0].blocks), isinstance(blocks, (list, tuple))
    gone = blocks if named else range(round(_share("blocks", blocks, count)))
    if not 0 < len(set(gone)) == len(gone) < count or not all(is_whole(x, 0) and x < count for x in gone):
        raise ValueError(f"blocks={blocks!r}: give how many of the {count} blocks go, or name some, each once, from 0")
    depth = Depth.find(model, planned.stacks[0])
    stay = [place for place in range(count) if place not in gone]
    if named:
        depth.check(stay)
    return {"depth": depth, "stay": stay if named else depth.any_without(len(gone)), "named": named}


def _with_size(model: PreTrainedModel, planned: Plan, sizes: Sizes, name: str, size: Any) -> Sizes:
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
                depth = Depth.find(model, stack, name)
            except ValueError as error:
                problem = error
            else:
                return replace(sizes, depth=depth, stay=depth.any_without(old - size))
    try:
        if old is None:  # it stands for a width that the class computes
            _, old, _ = find_width(model, blocks, lambda _: size)
        twin = twin_of(model, {name: size})
        with suppress(ValueError):
            expert_pools_in(model, twin, blocks)
            return replace(sizes, **_experts(model, planned, lambda _: size))
        pools_in(model, twin, blocks)
    except ValueError as error:
        advice = HINTS["kv_groups"] if "head" in name else "give mlp=, experts= or blocks="
        raise ValueError(f"to={{{name!r}: {size}}} cannot be cut: {problem or error}; {advice}") from error
    return replace(sizes, width={**sizes.width, name: (old, size)})


def kept_in(kept: Any) -> Mapping[str, Any]:
    """The choice in what ``kept=`` takes: a ``Shrunk``, the section of a report, its part ``kept``, or mixture ->
    experts, as other tools have it."""
    choice = kept.kept if isinstance(kept, Shrunk) else kept.get("kept", kept) if isinstance(kept, Mapping) else None
    if choice and all(isinstance(each, (list, tuple)) for each in choice.values()):
        choice = {"experts": choice}
    if not choice or choice.keys() - {"mlp", "experts", "blocks"}:
        raise ValueError("kept= takes report.shrunk, that section of sparsity.json, or mixtures and their experts")
    return choice


def _sizes_of(choice: Mapping[str, Any], planned: Plan) -> dict[str, Any]:
    """``mlp``, ``experts`` and ``blocks`` of a choice."""
    gone: dict[str, int | None] = {"mlp": None, "experts": None}
    for what, unit, dim in (("mlp", "channels", -1), ("experts", "experts", 0)):
        sizes = {plan.name: plan.shape[dim] for plan in planned.layers}
        counts = set()
        for name, indices in choice.get(what, {}).items():
            old = sizes.get(name, 0)
            if sorted(set(indices)) != list(indices) or not set(indices) <= set(range(old)):
                raise ValueError(f"kept= of {name!r}: give ascending indices of its {old} {unit}, each once")
            counts.add(old - len(indices))
        if len(counts) > 1:
            raise ValueError(f"kept= has different numbers of {unit}: all blocks must have as many")
        gone[what] = next(iter(counts), None)
    counts = {stack.name: len(stack.blocks) for stack in planned.stacks}
    of_stacks = choice.get("blocks", {})
    if of_stacks.keys() - counts.keys():
        raise ValueError(f"kept= names blocks of {sorted(of_stacks)[0]!r}, which is no stack of this model")
    blocks = [place for name, stay in of_stacks.items() for place in range(counts[name]) if place not in stay]
    return {**gone, "blocks": blocks or None}


def _check_kept(choice: Mapping[str, Any], model: PreTrainedModel, planned: Plan, sizes: Sizes) -> None:
    """Raise ValueError if a choice does not name just the layers that are cut in blocks that stay, or if it leaves
    more experts of one group than of another."""
    depth, (channels, mixtures) = sizes.depth, sizes.pools(model, planned)
    if depth is not None:
        gone = {name for place, name in enumerate(depth.stack.names) if place not in sizes.stay}
    else:
        gone = set[str]()
    for what, pools in (("mlp", channels), ("experts", mixtures)):
        takers = {pool.taker.name for name, of_block in pools.items() if name not in gone for pool in of_block}
        if different := sorted(takers ^ choice.get(what, {}).keys()):
            raise ValueError(f"kept= of {what!r}: {different[0]!r} is missing, or is not cut: name the layers that are")
    for pool in (pool for of_block in mixtures.values() for pool in of_block):
        stay = choice["experts"].get(pool.taker.name, ())
        in_groups = Counter(expert // (pool.old // pool.groups) for expert in stay)
        if stay and (len(in_groups) < pool.groups or len({*in_groups.values()}) > 1):
            raise ValueError(f"kept= of {pool.taker.name!r}: as many experts must stay in each of {pool.groups} groups")


# a budget -------------------------------------------------------------------------------------------------------------


def _within(model: PreTrainedModel, planned: Plan, asked: Asked) -> list[Sizes]:
    """The widest MLPs within a budget for each number of blocks that go, as long as any have to."""
    counted, ceiling = _ceiling(model, asked.budget)

    def cost(sizes: Sizes) -> int:
        return costs(sizes.narrow(model, sizes.stay), *CALL)[counted]

    problems = []
    try:
        _refuse_experts(planned)
        name, old, half = find_width(model, layers_by_block(planned), lambda old: old // 2)
    except ValueError as error:
        problems.append(str(error))
        name, old, half = "", 0, 0
    fitting: list[Sizes] = []
    for gone in range(len(planned.stacks[0].blocks) if len(planned.stacks) == 1 else 1):
        try:
            sizes = Sizes({}, **(_blocks(model, planned, gone) if gone else {}))
        except ValueError as error:
            problems.append(str(error))
            break
        whole = cost(sizes)
        if gone and whole <= ceiling:  # from here on blocks alone are enough
            return [*fitting, sizes]
        if name:
            halved = replace(sizes, width={name: (old, half)})
            each = (whole - cost(halved)) / (old - half)  # what a channel of all blocks costs
            new = _rounded(asked, old, old - (whole - ceiling) / each, math.floor)
            if 0 < new < old:
                fitting.append(replace(sizes, width={name: (old, new)}))
    if not fitting:
        why = "; ".join(problems) or "MLPs would have no channels"
        raise ValueError(f"budget={asked.budget!r} cannot be met: {why}")
    return fitting


def _ceiling(model: PreTrainedModel, budget: Any) -> tuple[str, int]:
    """What a budget counts, by its name among costs, and the most that it leaves."""
    if isinstance(budget, str):
        budget = re.sub(r"([KMGT])B( bytes)?$", lambda match: f"{SCALES[match[1]]} bytes", budget.strip())
    parsed = parse_budget(budget, tuple(UNITS))
    assert parsed is not None
    dense, counted = costs(twin_of(model, {}), *CALL), UNITS[parsed.unit]
    if counted not in dense:
        raise ValueError(f"budget={budget!r}: calls of this model cannot be counted: give params, such as '70% params'")
    if (ceiling := parsed.ceiling(dense[counted])) >= dense[counted]:
        raise ValueError(f"budget={budget!r}: the model has {dense[counted]:,} {parsed.unit} already: give less")
    return counted, ceiling


# what it will cost ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShrinkPlan(Printed):
    """What `shrink` will do to a model: ``print`` shows it, ``as_dict`` and ``to_json`` are for machines.

    changes: what -> (before, after): names in the config, "parameters", "bytes", and, where the model can be called on
      token ids, "FLOPs of a call" and "bytes of keys and values" after it.
    notes: sentences for the reader.
    streamed: place ("host", and the device if it is another) -> part -> bytes that a run of `shrink_checkpoint` takes
      at most; {} if it cannot be streamed.
    """

    changes: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    streamed: Mapping[str, Mapping[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes."""
        changes = {what: list(pair) for what, pair in self.changes.items()}
        return {"changes": changes, "streamed_memory_bytes": self.streamed, "notes": list(self.notes)}

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows."""
        del all_rows
        lines = [f"{what}: {old:,} -> {new:,} ({new / old:.1%})" for what, (old, new) in self.changes.items() if old]
        memory = [f"\n{memory_table({}, self.streamed)}\n"] if self.streamed else []
        return "\n".join([*lines, *memory, *(f"Note: {note}." for note in self.notes)])


def plan_shrink(model: nn.Module, *, batch_size: int | None = None, length: int = 1024, **options: Any) -> ShrinkPlan:
    """The plan of ``shrink(model, ...)`` with the same ``options``: what goes (mlp, blocks, experts, to, budget, kept,
    multiple_of, tensor_parallel), and what the memory of `shrink_checkpoint` depends on (num_samples, seq_len, quality
    and others). It needs no data.

    The model is not changed, and may be on meta. ``batch_size`` and ``length`` are those of the call whose FLOPs and
    cache it tells; batches of calibration data have that size too.

    Raises ValueError for what cannot work, with the model's own reasons.
    """
    plain = checked(model)
    asked = Asked(**{name: options.pop(name) for name in Asked._fields if name in options})
    refit = {name: options.pop(name) for name in HOW if name in options}.get("refit")
    config = shrink_config({**options, **({"batch_size": batch_size} if batch_size else {})}, only_planned=True)
    planned = plan_for(plain, Magnitude(), config)
    first, *others = sizes_for(plain, planned, asked.in_full(planned))
    twins = twin_of(plain, {}), first.narrow(plain, first.stay)
    old, new = (costs(twin, batch_size or 1, length) for twin in twins)
    pools = [pool for kind in first.pools(plain, planned) for of_block in kind.values() for pool in of_block]
    takers = {pool.taker.name: first.refits(config, refit) for pool in pools}
    _, streamed = estimated(plain, planned.layers, planned.stacks, replace(config, enforce=False), takers)
    streamed = {place: {part: size for part, size in held.items() if size} for place, held in streamed.items()}
    notes = [f"calls are of {batch_size or 1} x {length} tokens", STALE]
    if "FLOPs of a call" not in new:
        notes[0] = "FLOPs and cache are not known: the model cannot be called without values, or writes no text"
    if (first.depth is not None and not first.named) or others:
        notes.append("which blocks go is chosen with data")
    if first.experts:
        notes.append("which experts stay is chosen with data; a token is worked on by as many as before")
        if further := [name for name, (_, new) in first.experts.items() if new == 0]:
            notes.append(f"{further[0]} becomes 0: transformers leaves the weights of these heads out")
    if others:
        notes.append(f"data chooses among this and {', or '.join(map(said_of, others))}")
    changes = {**first.changes, **{what: (old[what], new[what]) for what in old if what in new}}
    return ShrinkPlan(changes, tuple(notes), {} if asked.budget is not None else streamed)


def said_of(sizes: Sizes) -> str:
    """Such as "intermediate_size 288, num_hidden_layers 5"."""
    return ", ".join(f"{name} {new:,}" for name, (_, new) in sizes.changes.items())


def costs(model: PreTrainedModel, batch: int = 0, length: int = 0) -> dict[str, int]:
    """Of a model; on the meta device also of a call, which is made there: no formula, and no values."""
    known = {"parameters": sum(each.numel() for each in model.parameters())}
    known["bytes"] = sum(each.numel() * each.element_size() for each in model.parameters())
    if batch and model.can_generate() and not model.config.is_encoder_decoder:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                output = model(input_ids=torch.zeros(batch, length, dtype=torch.long, device="meta"), use_cache=True)
        except (RuntimeError, NotImplementedError, ValueError):  # a forward that looks at values
            return known
        layers = getattr(getattr(output, cache_name(model) or "", None), "layers", ())
        held = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        known["FLOPs of a call"] = counter.get_total_flops()
        known["bytes of keys and values"] = sum(value.numel() * value.element_size() for value in held)
    return known


def checked(model: nn.Module) -> PreTrainedModel:
    """Raise ValueError for a model that shrink does not take."""
    model_inside(model)  # raises for what is no model
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"shrink changes a model's config: a {kind} has none, give a model of transformers, unwrapped")
    if any(True for _ in named_masks(model)):
        raise ValueError(f"this {kind} is sparse: shrink it first, and sparsify it afterwards (export drops the masks)")
    if quantization_of(model.config) is not None:
        raise ValueError(f"this {kind} is quantized: load it dequantized, and quantize it afterwards")
    if any(map(has_hook, model.modules())):
        raise ValueError(f"this {kind} is offloaded by accelerate: load it without device_map, and give device=")
    try:
        different = [span.name for span in spans(model, twin_of(model, {}))]
    except ValueError as error:
        different = [str(error)]
    if different:
        raise ValueError(f"this {kind} is not what its config builds ({different[0]}): merge adapters first")
    return model
