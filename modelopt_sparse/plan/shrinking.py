"""What `shrink` will make of a model: its options, the sizes that they lead to, and what these cost."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from modelopt_sparse.methods.patterns import Unstructured, parse_pattern
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.adapters import RoutedAdapter
from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.model.hf import quantization_of
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.resize import Depth, check_width, find_width, numbers_in, spans, twin_of
from modelopt_sparse.model.wrappers import refuse_no_model
from modelopt_sparse.plan.options import Distill, SparsifyConfig, quality_of
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.fold import Printed, nearest, refuse_unknown
from modelopt_sparse.reports.report import Shrunk
from modelopt_sparse.values import is_whole

CRITERIA = ("gram", "norm", "minitron")
MULTIPLES = (256, 128, 64, 32, 8)  # of a width, with multiple_of="auto": the first that moves it by no more than
MOVED = 0.02  # of it, else the last
# the options of `sparsify` that shrink takes too
TAKEN = (
    *("data_loader", "collect_func", "max_batches", "data", "tokenizer", "processor", "num_samples", "seq_len"),
    *("batch_size", "seed", "self_data", "count_padding", "quality", "reconstruct", "distill", "device", "autocast"),
    *("progress", "distributed", "split_data", "deterministic"),
)
OWN = ("mlp", "blocks", "to", "criterion", "refit", "multiple_of", "kept")
WINDOWS = 4  # of text in a batch, or fewer, so that there are four batches: some fit, and others judge
DISTILL = {"epochs": 4, "learning_rate": 0.1}  # a smaller model has more to learn anew than a sparse one
STALE = "parameters that change are new ones: make an optimizer afterwards"
_SAYS = "mlp=0.25 (a quarter of the MLP channels goes), blocks=4 (four blocks go) or to={'intermediate_size': 8192}"
# names that users of other tools know, and what is not built -> what to do
HINTS = {
    **dict.fromkeys(("ratio", "pruning_ratio", "compression_ratio", "constraints", "export_config"), f"give {_SAYS}"),
    "kv_groups": "heads cost far more accuracy for their parameters than channels and blocks: give mlp= or blocks=",
    "budget": "it is not built yet: give mlp= and blocks=, and see what plan_shrink says of their cost",
    "experts": "it is not built yet: give mlp=, blocks= or to=",
    "tensor_parallel": "give multiple_of=8 times the number of devices",
    "forward_loop": "shrink calls the model itself: give data= or data_loader=",
}


def shrink_config(options: Mapping[str, Any]) -> SparsifyConfig:
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
    distill = chosen.get("distill")
    if distill and not isinstance(distill, Distill):
        asked = distill if isinstance(distill, Mapping) else {} if distill is True else {"epochs": distill}
        chosen["distill"] = {**DISTILL, **asked}
    if (
        chosen.get("data") is not None and not chosen.get("reconstruct") and not distill
    ):  # tuned runs see to it themselves
        chosen.setdefault("batch_size", max(1, min(WINDOWS, chosen.get("num_samples", 128) // WINDOWS)))
    return SparsifyConfig(pattern=Unstructured(0.5), **chosen)


# sizes ----------------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """The options of `shrink` that say what goes."""

    mlp: float | int | str | None = None
    blocks: float | int | str | Sequence[int] | None = None
    to: Mapping[str, int] | None = None
    kept: Any = None
    multiple_of: int | str = "auto"


@dataclass(frozen=True)
class Sizes:
    """What the config will say. width: name -> (as it is, as it will be) of widths of MLPs. depth: of blocks, of which
    so many ``go``, or just these."""

    width: Mapping[str, tuple[int, int]]
    depth: Depth | None = None
    go: int | tuple[int, ...] = 0

    @property
    def narrow(self) -> dict[str, int]:
        return {name: new for name, (_, new) in self.width.items()}

    def choices(self) -> list[list[int]]:
        """Blocks that may stay: the one choice, or some that show whether any works."""
        count = 0 if self.depth is None else len(self.depth.stack.blocks)
        if not isinstance(self.go, int):
            return [[place for place in range(count) if place not in self.go]]
        ends = range(count, self.go - 1, -1)
        return [[place for place in range(count) if not end - self.go <= place < end] for end in ends]

    def twin(self, model: PreTrainedModel) -> PreTrainedModel:
        """A twin that shows what the model will cost. Raises ValueError if none can be built."""
        if self.depth is None:
            return twin_of(model, self.narrow)
        problem = ValueError("no block can go")
        for places in self.choices():
            try:
                self.depth.twin(places)
                return self.depth.twin(places, self.narrow)
            except ValueError as error:
                problem = error
        raise problem


@dataclass(frozen=True)
class ShrinkPlan(Printed):
    """What `shrink` will do to a model: ``print`` shows it, ``as_dict`` and ``to_json`` are for machines.

    changes: what -> (before, after): names in the config, "parameters", "bytes", and, where the model can be called on
      token ids, "FLOPs of a call" and "bytes of keys and values" after it.
    notes: sentences for the reader.
    """

    changes: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    sizes: Sizes = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes."""
        return {"changes": {what: list(pair) for what, pair in self.changes.items()}, "notes": list(self.notes)}

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows."""
        del all_rows
        lines = [f"{what}: {old:,} -> {new:,} ({new / old:.1%})" for what, (old, new) in self.changes.items() if old]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def plan_shrink(model: nn.Module, *, batch_size: int = 1, length: int = 1024, **sizes: Any) -> ShrinkPlan:
    """The plan of ``shrink(model, ...)`` with the same ``sizes`` (mlp, blocks, to, kept, multiple_of), without data.

    The model is not changed, and may be on meta. ``batch_size`` and ``length`` are those of the call whose FLOPs and
    cache it tells.

    Raises ValueError for what cannot work, with the model's own reasons.
    """
    plain = checked(model)
    planned = plan_for(plain, Magnitude(), SparsifyConfig(pattern=Unstructured(0.5)))
    refuse_unknown(sizes, Asked._fields)
    wanted = sizes_for(plain, planned, Asked(**sizes))
    twins = twin_of(plain, {}), wanted.twin(plain)
    old, new = (costs(twin, batch_size, length) for twin in twins)
    notes = [f"calls are of {batch_size} x {length} tokens", STALE]
    if "FLOPs of a call" not in new:
        notes[0] = "FLOPs and cache are not known: the model cannot be called without values, or writes no text"
    if isinstance(wanted.go, int) and wanted.go:
        notes.append("which blocks go is chosen with data")
    changed = {**wanted.width}
    if wanted.depth is not None:
        changed[wanted.depth.name] = len(wanted.depth.stack.blocks), len(wanted.choices()[0])
    return ShrinkPlan(
        {**changed, **{what: (old[what], new[what]) for what in old if what in new}}, tuple(notes), wanted
    )


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
        layers = getattr(getattr(output, "past_key_values", None), "layers", ())
        held = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        known["FLOPs of a call"] = counter.get_total_flops()
        known["bytes of keys and values"] = sum(value.numel() * value.element_size() for value in held)
    return known


def checked(model: nn.Module) -> PreTrainedModel:
    """Raise ValueError for a model that shrink does not take."""
    refuse_no_model(model)
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"shrink changes the model's config: a {kind} has none, give a model of transformers, unwrapped"
        )
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


def sizes_for(
    model: PreTrainedModel,
    planned: Plan,
    asked: Asked,
) -> Sizes:
    """From what the user asks for to sizes. ``planned``: the layers and stacks of the model."""
    mlp, blocks, to, kept, multiple_of = asked
    said = [name for name, value in zip(asked._fields[:-1], asked) if value is not None]
    if said not in (["mlp"], ["blocks"], ["mlp", "blocks"], ["to"], ["kept"]):
        raise ValueError(f"shrink takes mlp= and blocks=, or to=, or kept=; got {said or 'none of them'}: give {_SAYS}")
    if multiple_of != "auto" and not is_whole(multiple_of, 1):
        raise ValueError(f"multiple_of={multiple_of!r}: give 'auto' or a positive whole number")
    by_block = layers_by_block(planned)
    width: dict[str, tuple[int, int]] = {}
    depth: Depth | None = None
    go: int | tuple[int, ...] = 0
    if kept is not None:
        mlp, blocks = _sizes_of(kept_in(kept), planned)
    if mlp is not None:
        _refuse_experts(planned)
        _share("mlp", mlp, 1)  # before widths are tried with it
        name, old, new = find_width(model, by_block, lambda old: _width(mlp, old, multiple_of))
        width[name] = old, new
    if blocks is not None:
        depth, go = _depth(model, planned, blocks)
    for asked_name, size in (to or {}).items():
        name = model.config.attribute_map.get(asked_name, asked_name)
        axis = _axis(model, planned, by_block, name, size)
        if isinstance(axis, Depth):
            depth, go = axis, len(axis.stack.blocks) - size
        else:
            width[name] = axis, size
    sizes = Sizes(width, depth, go)
    sizes.twin(model)
    return sizes


def layers_by_block(planned: Plan) -> dict[str, tuple[nn.Module, list[Layer]]]:
    """Name of a block -> the block, and its layers."""
    names = {name: block for stack in planned.stacks for name, block in zip(stack.names, stack.blocks)}
    return {
        name: (block, [plan.layer for plan in planned.layers if plan.block == name]) for name, block in names.items()
    }


def _refuse_experts(planned: Plan) -> None:
    for plan in planned.layers:
        if isinstance(plan.layer.adapter, RoutedAdapter) or plan.layer.mixture is not None:
            raise ValueError(
                f"mlp= is for MLPs, and {plan.name!r} holds experts: name the width of those that are none, "
                "such as to={'shared_expert_intermediate_size': 1024}, or give blocks="
            )


def _share(name: str, value: Any, whole: int) -> float:
    """How many of ``whole`` go, of a share (0.25, "25%") or a number."""
    if is_whole(value, 1):
        return value
    with suppress(ValueError):  # whose words are of patterns
        if isinstance(value, (float, str)) and isinstance(pattern := parse_pattern(value), Unstructured):
            return pattern.sparsity * whole
    raise ValueError(f"{name}={value!r}: give what goes, as a share (0.25, '25%') or a number")


def _width(mlp: Any, old: int, multiple_of: int | str) -> int:
    exact = old - _share("mlp", mlp, old)
    multiples = (1,) if is_whole(mlp, 1) else MULTIPLES if multiple_of == "auto" else (int(multiple_of),)
    rounded = [round(exact / multiple) * multiple for multiple in multiples]
    new = next((size for size in rounded if abs(size - exact) <= MOVED * old), rounded[-1])
    if not 0 < new < old:
        raise ValueError(
            f"mlp={mlp!r} makes {new} of {old} channels: give a share in between, or a smaller multiple_of"
        )
    return new


def _depth(model: PreTrainedModel, planned: Plan, blocks: Any) -> tuple[Depth, int | tuple[int, ...]]:
    if len(planned.stacks) != 1:
        advice = " or ".join(f"to={{{Depth.find(model, stack).name!r}: ...}}" for stack in planned.stacks)
        raise ValueError(f"blocks= is for a model with one stack of blocks: give {advice}")
    count = len(planned.stacks[0].blocks)
    go: Any = tuple(blocks) if isinstance(blocks, (list, tuple)) else round(_share("blocks", blocks, count))
    places = go if isinstance(go, tuple) else range(go)
    if not 0 < len(set(places)) == len(places) < count or not all(is_whole(x, 0) and x < count for x in places):
        raise ValueError(f"blocks={blocks!r}: give how many of the {count} blocks go, or name some, each once, from 0")
    return Depth.find(model, planned.stacks[0]), go


def _axis(
    model: PreTrainedModel,
    planned: Plan,
    by_block: Mapping[str, tuple[nn.Module, Sequence[Layer]]],
    name: str,
    size: Any,
) -> Depth | int:
    """What ``to={name: size}`` means: a number of blocks, or the width (as it is) of MLPs."""
    numbers, problem = numbers_in(model.config), None
    if name not in numbers:
        raise ValueError(f"to={{{name!r}: ...}}: the config has no such number{nearest(name, numbers)}")
    old = numbers[name]
    if not is_whole(size, 1) or (old is not None and size >= old):
        raise ValueError(f"to={{{name!r}: {size!r}}}: give a whole number below {old}")
    for stack in planned.stacks:
        try:
            if old == len(stack.blocks):
                return Depth.find(model, stack, name)
        except ValueError as error:
            problem = error
    try:
        if old is None:  # it stands for a width that the class computes
            return find_width(model, by_block, lambda _: size)[1]
        check_width(model, twin_of(model, {name: size}), by_block)
    except ValueError as error:
        raise ValueError(f"to={{{name!r}: {size}}} cannot be cut: {problem or error}; {HINTS['kv_groups']}") from error
    return old


def kept_in(kept: Any) -> Mapping[str, Any]:
    """The choice in what ``kept=`` takes: a ``Shrunk``, the section of a report, or its part ``kept``."""
    choice = kept.kept if isinstance(kept, Shrunk) else kept.get("kept", kept) if isinstance(kept, Mapping) else None
    if not choice or choice.keys() - {"mlp", "blocks"}:
        raise ValueError("kept= takes report.shrunk, or that section of sparsity.json: 'mlp' and 'blocks'")
    return choice


def _sizes_of(choice: Mapping[str, Any], planned: Plan) -> tuple[int | None, list[int] | None]:
    """(how many channels go, which blocks go)."""
    widths = {plan.name: plan.shape[-1] for plan in planned.layers}
    gone = set()
    for name, indices in choice.get("mlp", {}).items():
        if sorted(set(indices)) != list(indices) or not set(indices) <= set(range(widths.get(name, 0))):
            raise ValueError(
                f"kept= of {name!r}: give ascending indices of its {widths.get(name, 0)} channels, each once"
            )
        gone.add(widths[name] - len(indices))
    if len(gone) > 1:
        raise ValueError("kept= has different numbers of channels: all blocks must have one width")
    counts = {stack.name: len(stack.blocks) for stack in planned.stacks}
    of_stacks = choice.get("blocks", {})
    if of_stacks.keys() - counts.keys():
        raise ValueError(f"kept= names blocks of {sorted(of_stacks)[0]!r}, which is no stack of this model")
    blocks = [place for name, stay in of_stacks.items() for place in range(counts[name]) if place not in stay]
    return (gone.pop() if gone else None), blocks or None
