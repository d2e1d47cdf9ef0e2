"""The options of `shrink`, and what it will do to a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.model.find import model_inside
from modelopt_sparse.model.hf import quantization_of
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.plan.memory import estimated
from modelopt_sparse.plan.options import SparsifyConfig, quality_of
from modelopt_sparse.plan.plan import memory_table
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.text import Printed, refuse_unknown
from modelopt_sparse.shrinking.resize import spans, twin_of
from modelopt_sparse.shrinking.sizes import NO_HEADS, WAYS, ShrinkRequest, block_size, costs, decided

# the options of `sparsify` that shrink takes too
TAKEN = (
    *("data_loader", "collect_func", "max_batches", "data", "tokenizer", "processor", "num_samples", "seq_len"),
    *("batch_size", "seed", "self_data", "count_padding", "quality", "reconstruct", "distill", "device", "autocast"),
    *("progress", "distributed", "split_data", "output", "divergence"),
)
BATCH_WINDOWS = 4  # of text in a batch, or fewer, so that there are four batches: some fit, and others judge
STALE = "parameters that change are new ones: make an optimizer afterwards"
# names that users of other tools know, and what is not built -> what to do
HINTS = {
    **dict.fromkeys(("ratio", "pruning_ratio", "compression_ratio", "constraints", "export_config"), f"give {WAYS}"),
    "kv_groups": NO_HEADS,
    "protect": "give kept=, the experts that stay",
    "forward_loop": "shrink calls the model itself: give data= or data_loader=",
}


def shrink_config(options: Mapping[str, Any], *, only_planned: bool = False) -> SparsifyConfig:
    """The options of `shrink` that it has in common with `sparsify`, checked."""
    for name in options.keys() & HINTS.keys():
        raise ValueError(f"option {name!r} is not known to shrink: {HINTS[name]}")
    refuse_unknown(options, [*ShrinkRequest._fields, *TAKEN])
    quality_options = {} if options.get("quality") is None else dict(quality_of(options["quality"]).options)
    quality_options.pop("polish", None)
    chosen = {**quality_options, **options}
    if isinstance(reconstruct := chosen.get("reconstruct"), Mapping):
        if "masks" in (options.get("reconstruct") or {}):
            raise ValueError("reconstruct: masks: a shrunk model has none: leave it out")
        chosen["reconstruct"] = {key: value for key, value in reconstruct.items() if key != "masks"}
    tuned = chosen.get("reconstruct") or chosen.get("distill")  # such runs see to it themselves
    if chosen.get("data_loader") is None and not tuned:
        chosen.setdefault("batch_size", max(1, min(BATCH_WINDOWS, chosen.get("num_samples", 128) // BATCH_WINDOWS)))
    config = SparsifyConfig(pattern=Unstructured(0.5), **chosen)
    if not only_planned and config.data is None and config.data_loader is None:
        raise ValueError("shrink needs calibration data: give data_loader=, or data= with tokenizer=")
    return config


def settings_of_run(config: SparsifyConfig, request: ShrinkRequest) -> dict[str, Any]:
    """The settings of a run, for the report."""
    names = ("multiple_of", "tensor_parallel", "refit")
    return {**config.settings(), **{name: getattr(request, name) for name in names}}


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
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return {"changes": changes, "streamed_memory_bytes": self.streamed, "notes": list(self.notes)}

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows, whatever ``all_rows`` says."""
        lines = [f"{name}: {old:,} -> {new:,} ({new / old:.1%})" for name, (old, new) in self.changes.items() if old]
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
    request = ShrinkRequest.taken_from(options)
    config = shrink_config({**options, **({"batch_size": batch_size} if batch_size else {})}, only_planned=True)
    planned = plan_for(plain, Magnitude(), config)
    request, (first, *rest) = decided(plain, planned, request, config)
    twins = twin_of(plain, {}), first.narrow(plain, first.stay)
    old, new = (costs(twin, batch_size or 1, length) for twin in twins)
    groups = [group for block_groups in first.groups_in(plain, planned).values() for group in block_groups]
    refitted = {group.consumer.name: bool(request.refit) for group in groups}
    _, streamed = estimated(plain, planned.layers, planned.stacks, replace(config, enforce=False), refitted)
    streamed = {place: {part: size for part, size in held.items() if size} for place, held in streamed.items()}
    notes = [f"calls are of {batch_size or 1} x {length} tokens", STALE]
    if "FLOPs of a call" not in new:
        notes[0] = "FLOPs and cache are not known: the model cannot be called without values, or writes no text"
    if (first.depth is not None and not first.named) or rest:
        names = () if first.depth is None else first.depth.blocks
        differ = len({block_size(plain.get_submodule(name)) for name in names}) > 1
        size = "; they differ in size, and the numbers are those without the last that can go"
        notes.append(f"which blocks go is chosen with data{size if differ else ''}")
    if first.experts:
        notes.append("which experts stay is chosen with data; a token is worked on by as many as before")
        if further := [name for name, (_, new) in first.experts.items() if new == 0]:
            notes.append(f"{further[0]} becomes 0: transformers leaves the weights of these heads out")
    if rest:
        notes.append(f"data chooses among this and {', or '.join(map(str, rest))}")
    changes = {**first.changes, **{name: (old[name], new[name]) for name in old if name in new}}
    return ShrinkPlan(changes, tuple(notes), {} if request.budget is not None else streamed)


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
