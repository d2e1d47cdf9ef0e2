"""Members of Sparse-IFT (arXiv 2303.11525): a wider model, or several layers in the place of one.

Sparse Wide makes the config of a model of transformers wider. Of any other model the layers of a copy are made wider,
all by the same fraction, so that what is equal, concatenated or flattened in the model stays so. What the model reads
and gives keeps its size.

Parallel, Factorized and Doped replace one layer by several. Din and Dout are a layer's inputs and outputs; of a
convolution Din counts kernel positions too.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from modelopt_sparse.model.devices import flat_tensors, map_tensors
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.reports.text import first_few, nearest
from modelopt_sparse.run import calibrating
from modelopt_sparse.shrinking.resize import WIDTHS

REPLACEABLE: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Activation = Callable[[], nn.Module] | None


def call(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tuple holds positional arguments, a mapping keywords, else it is the only
    argument. Of a model on the meta device it is moved there."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta:
        example = map_tensors(lambda x: x.to("meta"), example)
    try:
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)
    except RuntimeError as error:
        if not on_meta:
            raise
        raise ValueError("the model cannot be run on the meta device: build it, or leave example out") from error


# configs --------------------------------------------------------------------------------------------------------------


FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3", "gpt_neox", "gpt2", "opt"),
    *("t5", "distilbert", "bert", "roberta", "vit", "deit"),
)
STAGES = ("resnet", "swin")


def widened(config: PretrainedConfig, factor: float, multiple: int = 1) -> PretrainedConfig:
    """A copy of a config whose hidden states, heads and MLPs are ``factor`` times as wide, rounded up.

    The width is rounded to what its heads need: to a multiple of their number, with even sizes where they are rotary;
    and to ``multiple``, which hardware may want. The MLP grows as the width did. Numbers of layers and heads, the
    vocabulary and all else stay.

    Raises ValueError for a kind of model that is not in FAMILIES or STAGES.
    """
    wide: Any = copy.deepcopy(config)
    if config.model_type in STAGES:
        _widen_stages(wide, factor, multiple)
        return wide
    if config.model_type not in FAMILIES:
        close = nearest(config.model_type, [*FAMILIES, *STAGES])
        raise ValueError(f"the sizes of {config.model_type!r} are not known{close}: choose another member")
    # by the names that transformers has for all models: `attribute_map` leads from them to a config's own
    width, heads, head = wide.hidden_size, wide.num_attention_heads, getattr(wide, "head_dim", None) or 0
    if not head and width % heads:
        names = [wide.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
        near = rounded_up(width, heads)
        raise ValueError(f"{names[0]}={width} is no multiple of {names[1]}={heads}, as {near} would be")
    apart = head and head * heads != width  # the sizes of heads do not add up to the width
    even = 1 + hasattr(wide, "rope_parameters")
    wide.hidden_size = rounded_up(width * factor, multiple if apart else math.lcm(multiple, heads * even))
    size = rounded_up(head * factor, even) if apart else wide.hidden_size // heads
    if head:
        wide.head_dim = size
    rope = getattr(wide, "rope_parameters", None) or {}
    if size != (head or width // heads) and any(isinstance(value, (list, tuple)) for value in rope.values()):
        raise ValueError(f"rope_parameters holds a list, which does not fit heads of {size}: choose another member")
    mlp = next(name for name in WIDTHS if hasattr(wide, name))
    if getattr(wide, mlp) is not None:  # None stands for four times the width
        setattr(wide, mlp, rounded_up(getattr(wide, mlp) * wide.hidden_size / width, multiple))
    if getattr(wide, "word_embed_proj_dim", None) == width:
        wide.word_embed_proj_dim = wide.hidden_size
    return wide


def _widen_stages(wide: Any, factor: float, multiple: int) -> None:
    """ResNet: the widths of the stem and of all stages. Swin: that of the first stage, which the others follow."""
    if wide.model_type == "resnet":
        # stages of bottlenecks are divided by four inside; the stem has a stage's width where the model has it so
        step, sizes = math.lcm(multiple, 4 if wide.layer_type == "bottleneck" else 1), wide.hidden_sizes
        wide.embedding_size, *wide.hidden_sizes = (rounded_up(x * factor, step) for x in (wide.embedding_size, *sizes))
    else:
        steps = (heads // math.gcd(heads, 2**stage) for stage, heads in enumerate(wide.num_heads))
        wide.embed_dim = rounded_up(wide.embed_dim * factor, math.lcm(multiple, *steps))
        wide.hidden_size = wide.embed_dim * 2 ** (len(wide.depths) - 1)


def rounded_up(size: float, step: int) -> int:
    """The next multiple of ``step``; a size that is one but for rounding stays."""
    return math.ceil(round(size / step, 6)) * step


# layers ---------------------------------------------------------------------------------------------------------------


READS, MAKES = "reads what the model reads", "makes what the model gives"
CHANNELS, BOTH = {"in_channels": {READS}, "out_channels": {MAKES}}, {READS, MAKES}
FEATURES, SHAPE = {"num_features": BOTH}, {"normalized_shape": BOTH}
SIZES: dict[type[nn.Module], dict[str, set[str]]] = {  # a module's sizes -> the ends of a model where they stay
    nn.Linear: {"in_features": {READS}, "out_features": {MAKES}},
    nn.Embedding: {"embedding_dim": {MAKES}},
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), CHANNELS),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), CHANNELS),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), FEATURES),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), FEATURES),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), SHAPE),
    nn.GroupNorm: {"num_channels": BOTH},
}
LAYERS = [kind for kind, sizes in SIZES.items() if BOTH not in sizes.values()]  # the others are norms


def rebuilt(module: nn.Module, **changes: Any) -> Any:
    """A new module of the same kind and settings, but for ``changes``, freshly initialized as torch does it.

    torch's layers and norms keep the arguments of their constructors under the same names.
    """
    kind = next(kind for kind in SIZES if isinstance(module, kind))
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


def widened_layers(model: nn.Module, factor: float, multiple: int, example: Any) -> tuple[nn.Module, dict[str, str]]:
    """Copy a model with wider layers -> (the copy, layer name -> why it is to stay dense, or "").

    All inner widths grow by one factor, the smallest of at least ``factor`` that keeps them whole, multiples of
    ``multiple`` and divisible by their groups. All layers of the copy are new; their weights are random. The copy is
    run once.

    Raises ValueError for parameters in modules whose sizes are not known, for layers that the example does not reach,
    and for a model that does not run or gives another shape when it is wider.
    """
    _refuse_unknown(model)
    ends, shapes = _ends(model, example)
    sizes = {module: _inner_sizes(module, fixed) for module, fixed in ends.items()}
    inner = [size for widths in sizes.values() for size in widths.values()]
    if not inner:
        raise ValueError(f"this {type(model).__name__} has no width of its own: its first layer is its last")
    unit, step = math.gcd(*inner), multiple
    for module, widths in sizes.items():
        groups = getattr(module, "groups", getattr(module, "num_groups", 1))
        if not _depthwise(module, widths):  # there groups grow with the channels
            step = math.lcm(step, *(groups // math.gcd(groups, size // unit) for size in widths.values()))
    new = rounded_up(factor * unit, step)
    wide = copy.deepcopy(model)
    new_modules = {}
    for module, widths in sizes.items():
        changes = {side: size // unit * new for side, size in widths.items()}
        if _depthwise(module, widths):
            changes["groups"] = changes["in_channels"]
        new_modules[module] = rebuilt(module, **changes)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new_modules:
            wide.set_submodule(name, new_modules[module])
    _tie(model, wide)
    _check(wide, example, shapes)
    layers = [(name, module) for name, module in model.named_modules() if type(module) in LAYERS]
    return wide, {name: next((end for end in (READS, MAKES) if end in ends[module]), "") for name, module in layers}


def _refuse_unknown(model: nn.Module) -> None:
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        known = type(module) in SIZES or (isinstance(module, nn.PReLU) and module.num_parameters == 1)
        if parameters and not known:
            owner = f"{path or type(model).__name__!r} ({type(module).__name__} with {next(iter(parameters))!r})"
            raise ValueError(f"Sparse Wide does not know which sizes of {owner} are widths: choose another member")
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) != 1:
            raise ValueError(f"Sparse Wide: {path!r} is normalized over {list(module.normalized_shape)}")
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError(f"this {type(model).__name__} is on the meta device: build it, to run it on the example")


def _ends(model: nn.Module, example: Any) -> tuple[dict[nn.Module, set[str]], list[torch.Size]]:
    """(READS and MAKES for each layer and norm whose sizes stay, the shapes of what the model gives).

    Such a layer reads memory that the model reads, or writes what the model gives. What runs before the first layer
    reads, what runs after the last one makes."""
    ends: dict[nn.Module, set[str]] = {module: set() for module in model.modules() if type(module) in SIZES}
    calls: list[tuple[nn.Module, Any, Any]] = []  # what they hold keeps its memory, so that none is used twice
    with calibrating(model), ExitStack() as hooks:
        for module in ends:
            hooks.enter_context(module.register_forward_hook(lambda *seen: calls.append(seen)))
        output = call(model, example)
    reached = {module for module, _, _ in calls}
    if missed := [path for path, module in model.named_modules() if module in ends and module not in reached]:
        raise ValueError(f"the example does not reach {first_few(missed)}: whether its sizes may change is not known")
    inputs, outputs = _memory(example), _memory(output)
    layers = [number for number, (module, _, _) in enumerate(calls) if type(module) in LAYERS]
    for number, (module, read, made) in enumerate(calls):
        if number <= layers[0] or _memory(read) & inputs:
            ends[module].add(READS)
        if number >= layers[-1] or _memory(made) & outputs:
            ends[module].add(MAKES)
    return ends, [x.shape for x in flat_tensors(output)]


def _memory(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in flat_tensors(value)}


def _inner_sizes(module: nn.Module, ends: set[str]) -> dict[str, int]:
    """The sizes of a module that are widths of the model, by the name of the setting."""
    inner = {name: getattr(module, name) for name, fixed in SIZES[type(module)].items() if not ends & fixed}
    return {name: size[0] if isinstance(size, tuple) else size for name, size in inner.items()}


def _depthwise(module: nn.Module, widths: Mapping[str, int]) -> bool:
    return len(widths) == 2 and getattr(module, "groups", 1) == getattr(module, "in_channels", 0) > 1


def _tie(model: nn.Module, wide: nn.Module) -> None:
    """Modules of the wide model share the parameters that they share in the model."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        path, _, key = name.rpartition(".")
        if wide.get_parameter(known).shape != wide.get_parameter(name).shape:
            raise ValueError(f"{known!r} and {name!r} are one parameter, and differ in size in a wider model")
        wide.get_submodule(path).register_parameter(key, wide.get_parameter(known))


def _check(wide: nn.Module, example: Any, shapes: list[torch.Size]) -> None:
    """Run the wide model on the example. Raises ValueError unless what it gives has the ``shapes`` of the model's."""
    try:
        with calibrating(wide):
            wider = [x.shape for x in flat_tensors(call(wide, example))]
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"this {type(wide).__name__} does not run when its layers are wider: {error}") from error
    if wider != shapes:
        now, before = ([tuple(shape) for shape in several] for several in (wider, shapes))
        raise ValueError(f"this {type(wide).__name__} gives {now} instead of {before} when its layers are wider")


# several layers for one -----------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """k layers of the same shape beside each other, each with its own non-linearity, added up.

    With one branch, or without an activation, nothing is applied to a branch.
    """

    def __init__(self, layer: nn.Module, count: int, activation: Activation) -> None:
        super().__init__()
        self.branches = nn.ModuleList(rebuilt(layer) for _ in range(count))
        self.activation = nn.Identity() if activation is None or count == 1 else activation()

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(torch.add, (self.activation(branch(x)) for branch in self.branches))


class Factorized(nn.Module):
    """Two layers with a width of ``rank`` between them, and a non-linearity there."""

    def __init__(self, layer: nn.Module, rank: int, activation: Activation) -> None:
        super().__init__()
        self.first, self.second = factors_of(layer, rank, bias=True)
        self.activation = nn.Identity() if activation is None else activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Doped(nn.Module):
    """A sparse layer, plus two dense ones with a width of ``rank`` between them. Only ``sparse`` is to carry a mask."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.sparse = rebuilt(layer)
        self.first, self.second = factors_of(layer, rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.sparse(x) + self.second(self.first(x))


def factors_of(layer: nn.Module, rank: int, *, bias: bool) -> tuple[Any, Any]:
    """Two layers with ``rank`` channels between them; of a convolution the first has its kernel, the second one place.
    ``bias``: the second has the bias that the layer has."""
    bias = bias and layer.bias is not None
    if not isinstance(layer, Convolution):
        return rebuilt(layer, out_features=rank, bias=False), rebuilt(layer, in_features=rank, bias=bias)
    one = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    return rebuilt(layer, out_channels=rank, bias=False), rebuilt(layer, in_channels=rank, bias=bias, **one)


def why_not(layer: nn.Module) -> str:
    """Why a layer cannot be replaced by a member, or "" if it can."""
    if type(layer) not in REPLACEABLE:
        return f"{type(layer).__name__} is no Linear or convolution of torch's own"
    return "a grouped convolution" if isinstance(layer, Convolution) and layer.groups > 1 else ""


# sizes ----------------------------------------------------------------------------------------------------------------


def member_of(
    layer: nn.Module, member: str, level: float, activation: Activation
) -> tuple[nn.Module, str, list[str], float]:
    """(what replaces a layer, the same in words, its parts that carry masks, their level). At level 0 a layer may stay
    as it is.

    parallel: k = 1 / (1 - level) branches. factorized: d = Din Dout / ((Din + Dout) (1 - level)), rounded up. doped:
    d = level Din Dout / (Din + Dout), rounded down.
    """
    if member == "parallel":
        count = branches_for(level)
        parts = [f"branches.{i}" for i in range(count)]
        return Parallel(layer, count, activation), f"{count} in parallel", parts, 1 - 1 / count
    weight = layer.get_parameter("weight")
    dense, outputs = weight.numel(), len(weight)
    per_rank = dense // outputs + outputs  # Din + Dout
    if member == "factorized":
        rank = math.ceil(round(dense / (per_rank * (1 - level)), 6))
        if level > 0:
            words = f"factors of rank {rank}"
            return Factorized(layer, rank, activation), words, ["first", "second"], 1 - dense / (rank * per_rank)
    elif rank := math.floor(round(level * dense / per_rank, 6)):
        return Doped(layer, rank), f"itself and rank {rank}", ["sparse"], rank * per_rank / dense
    return layer, "itself", [], 0.0


def branches_for(level: float) -> int:
    """k = 1 / (1 - level). Raises ValueError, which names the nearest levels that work, unless k is whole."""
    count = 1 / (1 - level)
    if abs(count - round(count)) > 1e-6 * count:
        lower, upper = 1 - 1 / math.floor(count), 1 - 1 / math.ceil(count)
        raise ValueError(f"{count:.2f} branches at level {level:g}: levels that work are {lower:.6g} and {upper:.6g}")
    return round(count)


# one layer again ------------------------------------------------------------------------------------------------------


def fold(model: nn.Module) -> list[str]:
    """Replace members by one layer each where that computes the same, in place -> names of those that cannot be: a
    non-linearity stands inside, or masks do. Call `mts.export` first: folded weights are dense. Names of the layers end
    as they were before `sparse_ift`."""
    left = []
    for name, module in list(model.named_modules()):
        if isinstance(module, (Parallel, Factorized, Doped)):
            if any(named_masks(module)) or (layer := merge_members(module)) is None:
                left.append(name)
            else:
                model.set_submodule(name, layer)
    return left


@torch.no_grad()
def merge_members(module: Parallel | Factorized | Doped) -> nn.Module | None:
    """One layer that computes what a member does; None if a non-linearity stands between. Weights may become dense."""
    if isinstance(module, Doped):
        layer: Any = module.sparse
        return _layer(layer, layer.weight + _product(module.first, module.second), layer.bias)
    if not isinstance(module.activation, nn.Identity):
        return None
    if isinstance(module, Factorized):
        first, second = module.first, module.second
        outputs = "out_channels" if isinstance(first, Convolution) else "out_features"
        return _layer(first, _product(first, second), second.bias, **{outputs: getattr(second, outputs)})
    branches: list[Any] = list(module.branches)
    bias = None if branches[0].bias is None else sum(branch.bias for branch in branches)
    return _layer(branches[0], sum(branch.weight for branch in branches), bias)


def _layer(like: Any, weight: Any, bias: Any, **changes: Any) -> nn.Module:
    """A layer of the kind and settings of another one, but for ``changes``, with this weight and bias."""
    layer = rebuilt(like, bias=bias is not None, **changes)
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return layer


def _product(first: Any, second: Any) -> Tensor:
    """The weight of ``second`` after ``first``."""
    left = second.weight.flatten(1)
    return (left @ first.weight.flatten(1)).view(left.shape[0], *first.weight.shape[1:])
