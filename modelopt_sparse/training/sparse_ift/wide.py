"""Sparse Wide: the sizes of a wider model of transformers (Sparse-IFT, arXiv 2303.11525)."""

import copy
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel

from modelopt_sparse.calibration.run import calibrating
from modelopt_sparse.model.devices import flat_tensors
from modelopt_sparse.model.hf import model_class
from modelopt_sparse.reports.fold import Column, by_reason, first_few, nearest, paragraph, rows_of, table
from modelopt_sparse.reports.report import Skipped
from modelopt_sparse.training.planner import BLOCKS, Weight, find_weights, reasons

# configs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Names of the sizes in a config.

    width: of the hidden states. heads: how many attention heads share it. mlp: its width; where the config has None, it
    is four times the width by itself. head_size: where a config has one of its own. rotary: heads have even sizes.
    alike: further sizes that are equal to the width.
    """

    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    mlp: str = "intermediate_size"
    head_size: str | None = None
    rotary: bool = False
    alike: tuple[str, ...] = ()


LLAMA = Family(head_size="head_dim", rotary=True)
BERT = Family()
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3"), LLAMA),
    "gpt_neox": Family(rotary=True),
    "gpt2": Family("n_embd", "n_head", "n_inner"),
    "opt": Family(mlp="ffn_dim", alike=("word_embed_proj_dim",)),
    "t5": Family("d_model", "num_heads", "d_ff", "d_kv"),
    "distilbert": Family("dim", "n_heads", "hidden_dim"),
    **dict.fromkeys(("bert", "roberta", "vit", "deit"), BERT),
}
STAGES = ("resnet", "swin")


def widened(config: PretrainedConfig, factor: float, multiple: int = 1) -> PretrainedConfig:
    """A copy of a config whose hidden states, heads and MLPs are ``factor`` times as wide, rounded up.

    The width is rounded to what its heads need: to a multiple of their number, with even sizes where they are rotary;
    and to ``multiple``, which hardware may want. The MLP grows as the width did. Numbers of layers and heads, the
    vocabulary and all else stay.

    Raises ValueError for a kind of model that is not in FAMILIES or STAGES.
    """
    wide = copy.deepcopy(config)
    if config.model_type in STAGES:
        _widen_stages(wide, factor, multiple)
        return wide
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = sorted([*FAMILIES, *STAGES])
        raise ValueError(
            f"the sizes of {config.model_type!r} are not known{nearest(config.model_type, known)}: Sparse Wide has to "
            f"know which of them are widths. Known are {', '.join(known)}; the other members replace layers anywhere"
        )
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: widths are rounded up to a multiple of it, so it is at least 1")
    width, heads = getattr(config, family.width), getattr(config, family.heads)
    own = getattr(config, family.head_size, None) if family.head_size else None
    if own is None and width % heads:
        near = f"{width // heads * heads} and {rounded_up(width, heads)}"
        raise ValueError(
            f"{family.width}={width} of this {config.model_type!r} is no multiple of {family.heads}={heads}, so that "
            f"no level works: the nearest widths that do are {near}"
        )
    step = multiple if own is not None and own * heads != width else math.lcm(multiple, heads * (1 + family.rotary))
    new = rounded_up(width * factor, step)
    setattr(wide, family.width, new)
    size = new // heads if own is None or own * heads == width else rounded_up(own * factor, 1 + family.rotary)
    if own is not None and family.head_size is not None:
        setattr(wide, family.head_size, size)
    _refuse_sized_rope(config, own or width // heads, size)
    mlp = getattr(config, family.mlp)
    if mlp is not None:
        setattr(wide, family.mlp, rounded_up(mlp * new / width, multiple))
    for name in family.alike:
        if getattr(config, name) == width:
            setattr(wide, name, new)
    return wide


def _refuse_sized_rope(config: PretrainedConfig, old: int, new: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    sized = [name for name, value in rope.items() if isinstance(value, (list, tuple))]
    if sized and old != new:
        raise ValueError(
            f"rope_parameters of this {config.model_type!r} holds a list, {sized[0]!r}, that fits heads of {old}, and "
            f"they would have {new}: the nearest level that works is 0. The other members keep heads as they are"
        )


def _widen_stages(wide: Any, factor: float, multiple: int) -> None:
    """ResNet: the stem's and all stages' widths. Swin: the first stage's, which the others follow."""
    if wide.model_type == "resnet":
        wide.embedding_size = rounded_up(wide.embedding_size * factor, multiple)
        # stages of bottlenecks are divided by four inside
        step = math.lcm(multiple, 4 if wide.layer_type == "bottleneck" else 1)
        wide.hidden_sizes = [rounded_up(size * factor, step) for size in wide.hidden_sizes]
    else:
        wide.embed_dim = rounded_up(wide.embed_dim * factor, _step_of_stages(wide.num_heads, multiple))
        wide.hidden_size = wide.embed_dim * 2 ** (len(wide.depths) - 1)


def _step_of_stages(heads: Sequence[int], multiple: int) -> int:
    """What the first width has to be a multiple of, so that each stage, twice as wide as the last, has its heads."""
    steps = (count // math.gcd(count, 2**stage) for stage, count in enumerate(heads))
    return math.lcm(multiple, *steps)


def rounded_up(size: float, step: int) -> int:
    """The next multiple of ``step``; a size that is one but for rounding stays."""
    return math.ceil(round(size / step, 6)) * step


# plan -----------------------------------------------------------------------------------------------------------------
# What Sparse-IFT makes of a model, and what that costs.


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Replaced:
    """One layer: its weights before, what stands for it, the weights of that, the level, and the live weights.

    uses: how often each weight is multiplied: once for a token; in the example's forward, as often as torch counts.
    """

    name: str
    weights: int
    by: str
    new_weights: int
    level: float
    live: int
    uses: float = 1.0


@dataclass(frozen=True)
class IsoPlan:
    """What Sparse-IFT makes of a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all rows.

    layers: those that are wider or replaced, and sparse.
    skipped: all other weights, with the reason.
    parameters, new_parameters: of the whole model, before and after, pruned ones included.
    other, new_other: multiplications with weights of the other layers (heads, attention that stays), before and after.
    unit: what multiplications are counted for: "a token", or "the example". None: the model has convolutions, and
      without an example nobody knows how many pixels each of them sees.

    A multiplication and its addition are two FLOPs in a forward and six in a training step. Attention's own products
    are not counted, and neither are the dense gradients that RigL asks for (see `cost`).
    """

    layers: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    parameters: int
    new_parameters: int
    other: float
    new_other: float
    unit: str | None

    @property
    def live_parameters(self) -> int:
        """Parameters after, without those that are pruned."""
        return self.new_parameters - sum(layer.new_weights - layer.live for layer in self.layers)

    @property
    def ratio(self) -> float:
        """FLOPs of the sparse layers divided by those of the layers that they stand for."""
        live, dense = self._multiplications("live"), self._multiplications("weights")
        return live / dense

    @property
    def model_ratio(self) -> float | None:
        """The same of all layers that multiply. None if ``unit`` is."""
        return None if self.flops is None else self.flops[1] / self.flops[0]

    @property
    def flops(self) -> tuple[int, int] | None:
        """FLOPs of a forward before and after, in all layers that multiply. None if ``unit`` is."""
        if self.unit is None:
            return None
        before = self._multiplications("weights") + self.other
        after = self._multiplications("live") + self.new_other
        return round(2 * before), round(2 * after)

    def _multiplications(self, what: str) -> float:
        return sum(getattr(layer, what) * layer.uses for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON takes."""
        return {
            **vars(self),
            "layers": [vars(layer) for layer in self.layers],
            "skipped": [each.as_dict() for each in self.skipped],
            "live_parameters": self.live_parameters,
            "ratio": self.ratio,
            "model_ratio": self.model_ratio,
            "flops": self.flops,
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [layer.name for layer in self.layers]
        skipped = {each.name: each.reason for each in self.skipped}
        columns = [
            Column("weights", [f"{layer.weights:,}" for layer in self.layers]),
            Column("becomes", [layer.by for layer in self.layers]),
            Column("new weights", [f"{layer.new_weights:,}" for layer in self.layers]),
            Column("level", [f"{layer.level:.4f}" for layer in self.layers], "levels"),
            Column("FLOPs, times dense", [f"{layer.live / layer.weights:.4f}" for layer in self.layers], "range"),
        ]
        parts = [
            paragraph(self._summary(), all_rows=all_rows),
            rows_of("layer", names, columns, skipped, all_rows=all_rows),
            by_reason("not sparse", skipped, names, all_rows=all_rows),
            self._costs(),
        ]
        return "\n\n".join(part for part in parts if part)

    def _summary(self) -> str:
        whole = ": with example=, which says how many pixels each convolution sees"
        if self.flops is not None:
            whole = f" {self.model_ratio:.4f} times"
        return (
            f"FLOPs of the {len(self.layers)} sparse layers {self.ratio:.4f} times dense, of all layers{whole}. "
            "They count as if zeros were skipped."
        )

    def _costs(self) -> str:
        rows = [
            ("parameters", f"{self.parameters:,}", f"{self.new_parameters:,}"),
            ("of them live", f"{self.parameters:,}", f"{self.live_parameters:,}"),
        ]
        if self.flops is not None:
            before, after = self.flops
            rows.append((f"FLOPs of {self.unit}, forward", f"{before:,}", f"{after:,}"))
            rows.append((f"FLOPs of {self.unit}, training", f"{3 * before:,}", f"{3 * after:,}"))
        return table(("", "before", "after"), rows)


def unit_of(model: nn.Module, example: Any) -> str | None:
    """What multiplications in a model can be counted for, see `IsoPlan`."""
    if example is not None:
        return "the example"
    return None if any(isinstance(module, CONVOLUTIONS) for module in model.modules()) else "a token"


def call(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tuple holds positional arguments, a mapping keywords, else it is the only
    argument."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def multiplying(weight: Weight) -> bool:
    """Whether a weight is multiplied with every token: heads are, tied ones too, and embeddings are looked up."""
    looked_up_only = not any(isinstance(module, nn.Linear) for module, _ in weight.holders) and not weight.is_layer
    return len(weight.shape) > 1 and not looked_up_only


def uses_of(model: nn.Module, weights: list[Weight], example: Any) -> dict[str, float]:
    """How often each weight is multiplied in a forward of the example, by torch's counter; 1 without an example."""
    if example is None:
        return {weight.name: 1.0 for weight in weights}
    with calibrating(model), FlopCounterMode(display=False) as counter:
        call(model, example)
    counts, root = counter.get_flop_counts(), type(model).__name__
    uses = {}
    for weight in weights:
        modules = {".".join([root, *name.split(".")[:-1]]) for name in weight.names}
        flops = sum(sum(counts.get(module, {}).values()) for module in modules)
        uses[weight.name] = flops / 2 / max(1, _weights_in(weight))
    return uses


def _weights_in(weight: Weight) -> int:
    """Weights of two or more dimensions in the module that holds this one, whose products torch counts as one."""
    module, _ = weight.holders[0]
    return sum(each.numel() for each in module.parameters(recurse=False) if each.dim() > 1)


def total(weights: list[Weight]) -> int:
    return sum(weight.parameter.numel() for weight in weights)


def live_of(size: int, level: float) -> int:
    return round(size * (1 - level))


def skipped_of(weights: list[Weight], why: Mapping[str, str]) -> tuple[Skipped, ...]:
    return tuple(Skipped(weight.name, weight.type, weight.shape, why[weight.name]) for weight in weights)


# layers ---------------------------------------------------------------------------------------------------------------
# Sparse Wide for plain modules: the layers of a copy are made wider, all by the same factor.
#
# Every width is multiplied by the same fraction, so that whatever is equal, concatenated or flattened in the model
# stays
# so. What the model reads and gives keeps its size.


CHANNELS = ("in_channels", "out_channels")
SIZES: dict[type[nn.Module], tuple[str, str]] = {  # names of a layer's inputs and outputs; "": it has none
    nn.Linear: ("in_features", "out_features"),
    nn.Embedding: ("", "embedding_dim"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), CHANNELS),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), CHANNELS),
}
NORMS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "num_features"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "num_features"),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), "normalized_shape"),
    nn.GroupNorm: "num_channels",
}


def rebuilt(module: nn.Module, **changes: Any) -> Any:
    """A new module of the same kind and settings, but for ``changes``, freshly initialized as torch does it.

    torch's layers and norms keep the arguments of their constructors under the same names.
    """
    kind = next(kind for kind in (*SIZES, *NORMS) if isinstance(module, kind))
    settings: dict[str, Any] = {}
    for name in inspect.signature(kind).parameters:
        if name == "bias":
            settings[name] = module.bias is not None
        elif name not in ("device", "dtype") and not name.startswith("_"):
            settings[name] = getattr(module, name)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in (tensor for tensor in tensors if tensor.is_floating_point()):
        settings.update(device=tensor.device, dtype=tensor.dtype)
    return kind(**{**settings, **changes}).train(module.training)


@dataclass
class Ends:
    """Whether a module reads what the model reads, or makes what the model gives: those sizes stay."""

    reads: bool = False
    makes: bool = False


def widened_layers(model: nn.Module, factor: float, multiple: int, example: Any) -> tuple[nn.Module, dict[str, str]]:
    """(a wider copy of a model, why layers are to stay dense by name).

    Widths grow by ``factor``, rounded up to the next fraction that keeps all of them whole, multiples of ``multiple``
    and divisible by their groups. All layers of the copy are new; their weights are random. The copy is run once.

    Raises ValueError for parameters in modules whose sizes are not known, for layers that the example does not reach,
    and for a model that does not run or gives another shape when it is wider.
    """
    _refuse_unknown(model)
    ends = _ends(model, example)
    sizes: dict[str, dict[str, int]] = {
        name: dict(_inner_sizes(model.get_submodule(name), ends[name])) for name in ends
    }
    inner = [size for own in sizes.values() for size in own.values()]
    if not inner:
        raise ValueError(f"this {type(model).__name__} has no width of its own: its first layer is its last")
    unit = math.gcd(*inner)
    steps = [step for name, own in sizes.items() for step in _steps(model.get_submodule(name), own, unit)]
    new = math.ceil(round(factor * unit / math.lcm(multiple, *steps), 6)) * math.lcm(multiple, *steps)
    wide = copy.deepcopy(model)
    wider = {
        model.get_submodule(name): _wider_layer(model.get_submodule(name), own, unit, new)
        for name, own in sizes.items()
    }
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in wider:
            wide.set_submodule(name, wider[module])
    _tie(model, wide)
    _check(model, wide, example)
    why = {name: _why(end) for name, end in ends.items() if type(model.get_submodule(name)) in SIZES}
    return wide, why


def _refuse_unknown(model: nn.Module) -> None:
    name = type(model).__name__
    for path, module in model.named_modules():
        known = type(module) in SIZES or type(module) in NORMS
        own = [each for each, _ in module.named_parameters(recurse=False)]
        if own and not known and not (isinstance(module, nn.PReLU) and module.num_parameters == 1):
            raise ValueError(
                f"Sparse Wide does not know which sizes of {path or name!r} ({type(module).__name__} with {own[0]!r}) "
                "are widths: the other members replace layers anywhere"
            )
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
            raise ValueError(
                f"Sparse Wide: {path!r} is normalized over {list(module.normalized_shape)}: allowed is one"
            )
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            raise ValueError(f"this {name} is on the meta device: build it, so that it can be run on the example")


def _ends(model: nn.Module, example: Any) -> dict[str, Ends]:
    """How each layer and norm stands to the model's inputs and outputs, from a run: by the memory that they read and
    write, and by their order. What runs before the first layer reads, what runs after the last one makes."""
    paths = {module: path for path, module in model.named_modules() if type(module) in SIZES or type(module) in NORMS}
    order: list[nn.Module] = []
    read, made = [], []
    with calibrating(model), _watched(paths, order, read, made):
        outputs = _memory(call(model, example))
    if missed := [path for module, path in paths.items() if module not in set(order)]:
        raise ValueError(f"the example does not reach {first_few(missed)}: whether its sizes may change is not known")
    inputs = _memory(example)
    layers = [number for number, module in enumerate(order) if type(module) in SIZES]
    ends = {path: Ends() for path in paths.values()}
    for number, module in enumerate(order):
        end = ends[paths[module]]
        end.reads |= number <= layers[0] or bool(read[number] & inputs)
        end.makes |= number >= layers[-1] or bool(made[number] & outputs)
    return ends


@contextmanager
def _watched(
    paths: Mapping[nn.Module, str], order: list[nn.Module], read: list[set[int]], made: list[set[int]]
) -> Iterator[None]:
    """While it is open: every call of a module, and the memory that it reads and writes. Outputs are held, so that no
    memory is used twice."""
    held = []

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        held.append((args, output))
        order.append(module)
        read.append(_memory(args))
        made.append(_memory(output))

    handles = [module.register_forward_hook(after) for module in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _memory(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in flat_tensors(value) if isinstance(tensor, Tensor)}


def _inner_sizes(module: nn.Module, end: Ends) -> Iterator[tuple[str, int]]:
    """The sizes of a module that are widths of the model, by the name of the setting."""
    if type(module) in NORMS:
        name = NORMS[type(module)]
        value = getattr(module, name)
        if not end.reads and not end.makes:
            yield name, value[0] if isinstance(value, tuple) else value
        return
    inputs, outputs = SIZES[type(module)]
    if inputs and not end.reads:
        yield inputs, getattr(module, inputs)
    if not end.makes:
        yield outputs, getattr(module, outputs)


def _depthwise(module: nn.Module, own: Mapping[str, int]) -> bool:
    return len(own) == 2 and getattr(module, "groups", 1) == getattr(module, "in_channels", 0) > 1


def _steps(module: nn.Module, own: Mapping[str, int], unit: int) -> Iterator[int]:
    """What ``new / unit`` times the sizes must be divided by: groups, unless they grow with the channels."""
    groups = getattr(module, "groups", getattr(module, "num_groups", 1))
    if groups > 1 and not _depthwise(module, own):
        for size in own.values():
            yield groups // math.gcd(groups, size // unit)


def _wider_layer(module: nn.Module, own: Mapping[str, int], unit: int, new: int) -> nn.Module:
    changes: dict[str, Any] = {name: size // unit * new for name, size in own.items()}
    if "normalized_shape" in changes:
        changes["normalized_shape"] = (changes["normalized_shape"],)
    if _depthwise(module, own):
        changes["groups"] = changes["in_channels"]
    return rebuilt(module, **changes)


def _tie(model: nn.Module, wide: nn.Module) -> None:
    """Modules of the wide model share the parameters that they share in the model."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        path, _, own = name.rpartition(".")
        if wide.get_parameter(known).shape != wide.get_parameter(name).shape:
            raise ValueError(
                f"{known!r} and {name!r} are one parameter, and would have different sizes in a wider model"
            )
        wide.get_submodule(path).register_parameter(own, wide.get_parameter(known))


def _why(end: Ends) -> str:
    if end.reads:
        return "reads what the model reads"
    return "makes what the model gives" if end.makes else ""


def _check(model: nn.Module, wide: nn.Module, example: Any) -> None:
    """Run both on the example. Raises ValueError unless the shapes of what they give are the same."""
    shapes = []
    for each in (model, wide):
        try:
            with calibrating(each):
                shapes.append([tuple(tensor.shape) for tensor in flat_tensors(call(each, example))])
        except (RuntimeError, ValueError, TypeError) as error:
            if each is model:
                raise
            raise ValueError(
                f"this {type(model).__name__} does not run when its layers are wider: its forward holds a size of its "
                f"own. The other members replace layers and keep sizes ({error})"
            ) from error
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"this {type(model).__name__} gives {shapes[1]} instead of {shapes[0]} when its layers are wider: what it "
            "gives is not the output of one of its layers. The other members replace layers and keep sizes"
        )


# wide -----------------------------------------------------------------------------------------------------------------
# Sparse Wide (arXiv 2303.11525): a wider model of the same class, and the levels that make it iso-FLOP.


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
