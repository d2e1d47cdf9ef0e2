"""What `shrink` will make of a model: its options, the sizes that they lead to, and what these cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from modelopt_sparse.methods.patterns import Unstructured, parse_pattern
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.adapters import RoutedAdapter
from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.model.hf import quantization_of, takes
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
MULTIPLES = (
    256,
    128,
    64,
    32,
)  # of a width, with multiple_of="auto", if that moves it by no more than this share of it:
MOVED, ELSE = 0.02, 8
# the options of `sparsify` that shrink takes too
TAKEN = (
    *("data_loader", "collect_func", "max_batches", "data", "tokenizer", "processor", "num_samples", "seq_len"),
    *("batch_size", "seed", "self_data", "count_padding", "quality", "reconstruct", "distill", "device", "autocast"),
    *("progress", "distributed", "split_data", "deterministic"),
)
OWN = ("mlp", "blocks", "to", "criterion", "refit", "multiple_of", "kept")
DISTILL = {"epochs": 4, "learning_rate": 0.1}  # a smaller model has more to learn anew than a sparse one
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
    given = dict(options)
    if given.get("quality") is not None:
        of_quality = dict(quality_of(given["quality"]).options)
        of_quality.pop("polish", None)
        given = {**of_quality, **given}
    reconstruct, distill = given.get("reconstruct"), given.get("distill")
    if isinstance(reconstruct, Mapping) and reconstruct is options.get("reconstruct") and "masks" in reconstruct:
        raise ValueError("reconstruct: masks: a shrunk model has none: leave it out")
    if isinstance(reconstruct, Mapping):
        given["reconstruct"] = {key: value for key, value in reconstruct.items() if key != "masks"}
    if isinstance(distill, Mapping):
        given["distill"] = {**DISTILL, **distill}
    elif distill is not None and not isinstance(distill, Distill):
        given["distill"] = {**DISTILL, **({} if distill is True else {"epochs": distill})} if distill else False
    return SparsifyConfig(pattern=Unstructured(0.5), **given)


# sizes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """parameters, bytes: of the model. flops: of one call on so many tokens; cache: bytes of keys and values after it;
    None where the model cannot be called on token ids alone."""

    parameters: int
    bytes: int
    flops: int | None = None
    cache: int | None = None


@dataclass(frozen=True)
class ShrinkPlan(Printed):
    """What `shrink` will do to a model: ``print`` shows it, ``as_dict`` and ``to_json`` are for machines.

    sizes: name in the config -> (as it is, as it will be).
    before, after: what the model costs (``Costs``: parameters, bytes, flops, cache).
    tokens: (batch, length) that ``flops`` and ``cache`` are of.
    notes: sentences for the reader.
    """

    sizes: Mapping[str, tuple[int, int]]
    before: Costs
    after: Costs
    tokens: tuple[int, int]
    notes: tuple[str, ...]
    width: Mapping[str, int] = field(repr=False)
    depth: Depth | None = field(repr=False)
    kept_blocks: tuple[int, ...] | None = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes."""
        sizes = {name: list(pair) for name, pair in self.sizes.items()}
        costs = {"before": asdict(self.before), "after": asdict(self.after)}
        return {"sizes": sizes, **costs, "tokens": list(self.tokens), "notes": list(self.notes)}

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows."""
        del all_rows
        lines = [f"{name}: {old:,} -> {new:,} ({1 - new / old:.1%} off)" for name, (old, new) in self.sizes.items()]
        batch, length = self.tokens
        rows = {
            "parameters": "parameters",
            "bytes": "bytes",
            "flops": f"FLOPs of {batch} x {length} tokens",
            "cache": f"bytes of keys and values after {batch} x {length} tokens",
        }
        for key, said in rows.items():
            old, new = getattr(self.before, key), getattr(self.after, key)
            lines.append(f"{said}: {old:,} -> {new:,} ({new / old:.1%})" if old and new else f"{said}: not known")
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def plan_shrink(
    model: nn.Module,
    *,
    mlp: Any = None,
    blocks: Any = None,
    to: Mapping[str, int] | None = None,
    multiple_of: int | str = "auto",
    kept: Any = None,
    batch_size: int = 1,
    length: int = 1024,
) -> ShrinkPlan:
    """The plan of ``shrink(model, ...)`` with the same sizes, without data. The model is not changed, and may be on
    meta. ``batch_size`` and ``length`` are those of the call whose FLOPs and cache it tells.

    Raises ValueError for what cannot work, with the model's own reasons.
    """
    refuse_no_model(model)
    plain = checked(model)
    planned = plan_for(plain, Magnitude(), SparsifyConfig(pattern=Unstructured(0.5)))
    return sizes_for(plain, planned, mlp, blocks, to, multiple_of, kept, (batch_size, length))


def checked(model: nn.Module) -> PreTrainedModel:
    """Raise ValueError for a model that shrink does not take."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"shrink writes the model's config: a {kind} has none, give a model of transformers, unwrapped"
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


def layers_by_block(model: nn.Module, planned: Plan) -> dict[str, tuple[nn.Module, list[Layer]]]:
    """Name of a block -> the block, and its layers."""
    blocks = {}
    for stack in planned.stacks:
        for name, block in zip(stack.names, stack.blocks):
            blocks[name] = block, [plan.layer for plan in planned.layers if plan.block == name]
    return blocks


def sizes_for(
    model: PreTrainedModel,
    planned: Plan,
    mlp: Any,
    blocks: Any,
    to: Mapping[str, int] | None,
    multiple_of: int | str,
    kept: Any,
    tokens: tuple[int, int],
) -> ShrinkPlan:
    """From what the user asks for to sizes. ``planned``: the layers and stacks of the model."""
    asked = {"mlp": mlp, "blocks": blocks, "to": to, "kept": kept}
    given = [name for name, value in asked.items() if value is not None]
    if not given or (len(given) > 1 and given != ["mlp", "blocks"]):
        raise ValueError(
            f"shrink takes mlp= and blocks=, or to=, or kept=, and got {given or 'none of them'}: give {_SAYS}"
        )
    if multiple_of != "auto" and not is_whole(multiple_of, 1):
        raise ValueError(f"multiple_of={multiple_of!r}: give 'auto' or a positive whole number")
    by_block = layers_by_block(model, planned)
    width: dict[str, tuple[int, int]] = {}
    depth, gone = None, None
    if kept is not None:
        mlp, blocks = _sizes_of(kept, planned)
    if mlp is not None:
        _refuse_experts(planned)
        name, old, new = find_width(model, by_block, lambda old: _width(mlp, old, multiple_of))
        width[name] = old, new
    if blocks is not None:
        depth, gone = _depth(model, planned, blocks)
    for name, size in (to or {}).items():
        name = model.config.attribute_map.get(name, name)
        found = _named(model, planned, by_block, name, size)
        if isinstance(found, Depth):
            depth, gone = found, len(found.stack.blocks) - size
        else:
            width[name] = found, size
    return _plan(model, width, depth, gone, tokens)


def _plan(
    model: PreTrainedModel,
    width: Mapping[str, tuple[int, int]],
    depth: Depth | None,
    gone: int | Sequence[int] | None,
    tokens: tuple[int, int],
) -> ShrinkPlan:
    sizes, kept, notes = dict(width), None, ["parameters become new ones: make an optimizer afterwards"]
    narrow = {name: new for name, (_, new) in width.items()}
    if depth is None:
        after = twin_of(model, narrow)
    else:
        count = len(depth.stack.blocks)
        if isinstance(gone, int):
            notes.append("which blocks go is chosen with data")
            after = None
            for last in range(count - 1, gone - 2, -1):  # a choice that works shows the cost of any
                choice = [place for place in range(count) if not last - gone < place <= last]
                try:
                    depth.twin(choice)
                except ValueError:
                    continue
                after = depth.twin(choice, narrow)
                break
            if after is None:
                depth.twin(range(count - gone))  # which says why
        else:
            kept = tuple(place for place in range(count) if place not in set(gone or ()))
            depth.twin(kept)
            after = depth.twin(kept, narrow)
        sizes[depth.name] = count, len(list(after.get_submodule(depth.stack.name).children()))
    before = twin_of(model, {})
    return ShrinkPlan(sizes, costs(before, *tokens), costs(after, *tokens), tokens, tuple(notes), narrow, depth, kept)


def costs(twin: PreTrainedModel, batch: int, length: int) -> Costs:
    """Of a model on the meta device, which is called there: no formula, and no values."""
    parameters = list(twin.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    own = Costs(sum(parameter.numel() for parameter in parameters), size)
    if not takes(twin, "input_ids") or twin.config.is_encoder_decoder:
        return own
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = twin(input_ids=torch.zeros(batch, length, dtype=torch.long, device="meta"), use_cache=True)
    except Exception:  # a forward that looks at values
        return own
    held = [value for layer in getattr(getattr(output, "past_key_values", None), "layers", ()) for value in vars(layer).values()]
    cache = sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))
    return replace(own, flops=counter.get_total_flops(), cache=cache)


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
    if isinstance(value, (float, str)):
        pattern = parse_pattern(value)
        if isinstance(pattern, Unstructured) and pattern.sparsity > 0:
            return pattern.sparsity * whole
    raise ValueError(f"{name}={value!r}: give what goes, as a share (0.25, '25%') or a number")


def _width(mlp: Any, old: int, multiple_of: int | str) -> int:
    exact = old - _share("mlp", mlp, old)
    if is_whole(mlp, 1):
        new = int(exact)
    elif multiple_of == "auto":
        rounded = {multiple: round(exact / multiple) * multiple for multiple in (*MULTIPLES, ELSE)}
        near = (size for size in rounded.values() if abs(size - exact) <= MOVED * old)
        new = next(near, rounded[ELSE])
    else:
        new = round(exact / int(multiple_of)) * int(multiple_of)
    if not 0 < new < old:
        raise ValueError(
            f"mlp={mlp!r} makes {new} of {old} channels: give a share in between, or a smaller multiple_of"
        )
    return new


def _depth(model: PreTrainedModel, planned: Plan, blocks: Any) -> tuple[Depth, int | list[int]]:
    if len(planned.stacks) != 1:
        names = [Depth.find(model, stack).name for stack in planned.stacks]
        advice = " or ".join(f"to={{{name!r}: ...}}" for name in names)
        raise ValueError(f"blocks= is for a model with one stack of blocks, this one has {len(names)}: give {advice}")
    (stack,) = planned.stacks
    count = len(stack.blocks)
    if isinstance(blocks, (list, tuple)):
        wrong = [place for place in blocks if not is_whole(place, 0) or place >= count]
        if wrong or len(set(blocks)) != len(blocks) or not 0 < len(blocks) < count:
            raise ValueError(f"blocks={blocks!r}: name some of the blocks 0 to {count - 1}, each once, and not all")
        return Depth.find(model, stack), list(blocks)
    gone = round(_share("blocks", blocks, count))
    if not 0 < gone < count:
        raise ValueError(f"blocks={blocks!r} takes {gone} of {count} blocks off: give 1 to {count - 1}")
    return Depth.find(model, stack), gone


def _named(
    model: PreTrainedModel,
    planned: Plan,
    by_block: Mapping[str, tuple[nn.Module, Sequence[Layer]]],
    name: str,
    size: Any,
) -> Depth | int:
    """What ``to={name: size}`` means: a number of blocks, or, as a number, the width that is to be another one."""
    numbers = numbers_in(model.config)
    old = numbers.get(name)
    if name in numbers and old is None:  # which stands for a default
        return find_width(model, by_block, lambda _: size)[1]
    if old is None:
        raise ValueError(f"to={{{name!r}: ...}}: the config has no such number{nearest(name, numbers)}")
    if not is_whole(size, 1) or size >= old:
        raise ValueError(f"to={{{name!r}: {size!r}}}: give a whole number below {old}")
    problems = []
    for stack in planned.stacks:
        try:
            depth = Depth.find(model, stack, name)
        except ValueError as error:
            problems.append(str(error))
        else:
            return depth
    try:
        check_width(model, twin_of(model, {name: size}), by_block)
    except ValueError as error:
        raise ValueError(f"to={{{name!r}: {size}}} cannot be cut: {error}; {HINTS['kv_groups']}") from error
    return old


def _sizes_of(kept: Any, planned: Plan) -> tuple[int | None, list[int] | None]:
    """(how many channels go, which blocks go) of a choice from elsewhere."""
    choice = kept_in(kept)
    gone = None
    if choice.get("blocks"):
        if len(planned.stacks) != 1 or len(choice["blocks"]) != 1:
            raise ValueError("kept= names blocks of other stacks than this model has")
        ((_, places),) = choice["blocks"].items()
        gone = [place for place in range(len(planned.stacks[0].blocks)) if place not in set(places)]
    shapes = {plan.name: plan.shape[-1] for plan in planned.layers}
    sizes = set()
    for name, indices in (choice.get("mlp") or {}).items():
        size = shapes.get(name, 0)
        if sorted(set(indices)) != list(indices) or not indices or not 0 <= indices[0] <= indices[-1] < size:
            raise ValueError(f"kept= of {name!r}: give ascending indices below {size}, each once")
        sizes.add(size - len(indices))
    if len(sizes) > 1:
        raise ValueError("kept= has different numbers of channels: all blocks must have one width")
    return (sizes.pop() if sizes else None), gone


def kept_in(kept: Any) -> Mapping[str, Any]:
    """The choice in what ``kept=`` takes: a ``Shrunk``, the section of a report, or its part ``kept``."""
    if isinstance(kept, Shrunk):
        return kept.kept
    if not isinstance(kept, Mapping):
        raise TypeError(f"kept is a {type(kept).__name__}: give report.shrunk, or that section of sparsity.json")
    choice = kept.get("kept", kept)
    if unknown := choice.keys() - {"mlp", "blocks"}:
        raise ValueError(f"kept={{{sorted(unknown)[0]!r}: ...}}: allowed are 'mlp' and 'blocks'")
    return choice
