"""A model of transformers with another number in its config: smaller, and still a plain model of its class.

What depends on a number is found by trial. A twin of the model, of the same class and without values (on the meta
device), is built with another number in its config. What differs between the two depends on it: sizes of tensors,
modules, numbers that modules hold as attributes, other entries of the config. There is no table of classes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from modelopt_sparse.checks import grouped
from modelopt_sparse.model.devices import full_name
from modelopt_sparse.model.experts import LAST
from modelopt_sparse.model.find import Stack
from modelopt_sparse.model.hf import built
from modelopt_sparse.model.layers import HF_CONV1D, LINEAR, Layer

# the names that usually hold the width of an MLP: tried first. One that holds None may stand for a default
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "hidden_dim")
PER_BLOCK = ("layer", "block", "pattern", "idx")  # parts of the names of lists that say something of each block

Changes = dict[str, Any]  # name in the config, with dots: new value
Found = TypeVar("Found")

# twins ----------------------------------------------------------------------------------------------------------------


def twin_of(model: PreTrainedModel, changes: Mapping[str, Any]) -> PreTrainedModel:
    """A model of the same class on the meta device, with these ``changes`` in its config, as `from_pretrained` would
    build it. Raises ValueError with the class's own reason if it takes no such config."""
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        part, _, key = part_with(config, name)
        setattr(part, key, value)
    try:
        config = type(config).from_dict(config.to_dict())
        twin = built(type(model), config)
    except Exception as error:
        values = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise ValueError(f"{type(model).__name__} cannot be built with {values}: {error}") from error
    nn.Module.to(twin.eval(), model.dtype)
    dtypes = {name: x.dtype for name, x in tensors_of(model).items() if x.is_floating_point()}
    for name, x in tensors_of(twin).items():
        x.data = x.data.to(dtypes.get(name, x.dtype))  # some classes hold a few in float32
    return twin


def _parts(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those inside of it, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, full_name(path, name))


def part_with(config: PreTrainedConfig, name: str) -> tuple[PreTrainedConfig, str, str]:
    """(the config inside of a config that holds a number, its path, the number's name there)."""
    path, _, key = name.rpartition(".")
    return dict(_parts(config))[path], path, key


def write_aliases(config: PreTrainedConfig, name: str) -> None:
    """Let the config that is written hold a number under its aliases as well: engines look for "num_experts" in files
    where transformers writes "num_local_experts" alone."""
    part, _, key = part_with(config, name)
    for alias, name_of_alias in part.attribute_map.items():
        if name_of_alias == key:
            vars(part)[alias] = getattr(part, key)


def numbers_in(config: PreTrainedConfig) -> dict[str, int | None]:
    """Name in a config, with dots -> its whole number, those that usually hold a width first; None for one of these
    that has no value."""
    numbers: dict[str, int | None] = {}
    for path, part in _parts(config):
        for key, value in vars(part).items():
            if (type(value) is int or (value is None and key in WIDTHS)) and not key.startswith("_"):
                numbers[full_name(path, key)] = value
    return dict(sorted(numbers.items(), key=lambda pair: pair[0].rpartition(".")[2] not in WIDTHS))


@dataclass(frozen=True)
class Span:
    """A dimension of a tensor whose size depends on the number: ``old`` in the model, ``new`` in the twin."""

    name: str
    dim: int
    old: int
    new: int


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those that are held more than once."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def spans(module: nn.Module, twin: nn.Module) -> list[Span]:
    """The dimensions in which tensors of a module and its twin differ. Raises ValueError if they do not have the same
    tensors, but for those that are not saved and that the twin does without, such as the frequencies of a kind of
    blocks that goes."""
    tensors, twins = tensors_of(module), tensors_of(twin)
    spare = tensors.keys() - twins.keys() - module.state_dict().keys()
    if alone := sorted((tensors.keys() ^ twins.keys()) - spare):
        raise ValueError(f"{alone[0]!r} would be in one of the two models alone")
    different = []
    for name, twin_tensor in twins.items():
        tensor = tensors[name]
        if tensor.dim() != twin_tensor.dim():
            raise ValueError(f"{name!r} would have {twin_tensor.dim()} dimensions, and has {tensor.dim()}")
        sizes = enumerate(zip(tensor.shape, twin_tensor.shape))
        different += [Span(name, dim, old, new) for dim, (old, new) in sizes if old != new]
    return different


@torch.no_grad()
def select(module: nn.Module, indices: Mapping[tuple[str, int], Tensor]) -> None:
    """Make tensors of a module hold what ``indices`` name, in place. (Name of a tensor, dimension) -> indices.

    Parameters that change are new ones; ties hold.
    """
    new: dict[Tensor, Tensor] = {}
    for name, dims in grouped(indices, itemgetter(0)).items():
        path, _, key = name.rpartition(".")
        tensor = getattr(module.get_submodule(path), key)
        if tensor not in new:
            values = tensor.detach()
            for _, dim in dims:
                values = values.index_select(dim, indices[name, dim].to(values.device))
            is_parameter = isinstance(tensor, nn.Parameter)
            new[tensor] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        setattr(module.get_submodule(path), key, new[tensor])


def resize_module(module: nn.Module, dense: nn.Module, twin: nn.Module, stay: Mapping[tuple[str, int], Tensor]) -> None:
    """Make a module as large as its twin, in place. ``stay``: (name of a tensor, dimension) -> the indices that stay.

    Sizes that modules and configs hold become those of the twin, if these differ in a twin that is as ``dense`` as the
    module: others the user may have set. What has its size already is left alone, so that this can be called again.
    """
    select(module, {(span.name, span.dim): stay[span.name, span.dim] for span in spans(module, twin)})
    for part, *twins in zip(module.modules(), dense.modules(), twin.modules(), strict=True):
        _take_sizes(vars(part), *map(vars, twins))
        if isinstance(config := vars(part).get("config"), PreTrainedConfig):
            configs = (config, *(vars(twin_part)["config"] for twin_part in twins))
            for inner, *new in zip(*map(_parts, configs), strict=True):
                _take_sizes(vars(inner[1]), *(vars(new_part) for _, new_part in new))


def _take_sizes(attributes: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Take over sizes that differ from the ``old``. Not by setattr: some are behind a property without a setter."""
    for name, value in new.items():
        if (_is_size(value) or name == "_heterogeneity_spec") and name in attributes and old.get(name) != value:
            attributes[name] = copy.copy(value)


def _is_size(value: Any) -> bool:
    """A number, or a list that may say something of each block; no flag."""
    if isinstance(value, (tuple, list)):
        return all(isinstance(part, str) or _is_size(part) for part in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def clone(module: nn.Module, *, hooks: bool = True) -> Any:
    """Copy a model or block with its config; all tensors are shared. Without ``hooks``, its own hooks are left out, and
    those of modules inside are copied."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(module).values()}
    if not hooks:  # what they are bound to may not be copied
        shared |= {id(value): type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
        forward = vars(module).get("forward")
        shared[id(forward)] = forward  # one of the instance's own, which holds what it is bound to
    return copy.deepcopy(module, shared)


# channels -------------------------------------------------------------------------------------------------------------


Blocks = Mapping[str, tuple[nn.Module, Sequence[Layer]]]  # name -> a block, and its layers
COLUMNS = {LINEAR: 1, HF_CONV1D: 0}  # the dimension of a weight that its input channels lie along


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of a block that go together: columns of ``consumer``, and what makes them, rows and biases.

    span: the columns of the consumer, in the block.
    interleaved: where a tensor makes several values for each channel (gate and up in one), those of a channel follow
      each other; else all of the first kind come first.
    """

    consumer: Layer
    span: Span
    producers: tuple[Span, ...]
    interleaved: bool = False

    def cuts(self, stay: Tensor) -> dict[tuple[str, int], Tensor]:
        """The indices for `resize_module` that keep the channels ``stay``."""
        cuts = {(self.span.name, self.span.dim): stay}
        for producer in self.producers:
            kinds = torch.arange(producer.old // self.span.old, device="cpu")
            both = stay[:, None] * len(kinds) + kinds if self.interleaved else stay + kinds[:, None] * self.span.old
            cuts[producer.name, producer.dim] = both.flatten()
        return cuts


def channels_in(model: nn.Module, twin: nn.Module, blocks: Blocks) -> dict[str, list[ChannelGroup]]:
    """Block -> its channels that the twin has fewer of. Raises ValueError if anything else differs, or nothing."""
    return _by_block(model, twin, blocks, _channel_groups, "channels")


def _by_block(
    model: nn.Module, twin: nn.Module, blocks: Blocks, groups_of: Callable[..., list[Found]], kind: str
) -> dict[str, list[Found]]:
    """Block -> ``groups_of`` it, its twin and its layers, if there are any. ``kind``: what they are, in words."""
    names = tuple(f"{name}." for name in blocks)
    if outside := [span.name for span in spans(model, twin) if not span.name.startswith(names)]:
        raise ValueError(f"it is a size of {outside[0]!r}, outside of the blocks")
    groups = {name: groups_of(block, twin.get_submodule(name), layers) for name, (block, layers) in blocks.items()}
    if not any(groups.values()):
        raise ValueError(f"no {kind} depend on it")
    return {name: block_groups for name, block_groups in groups.items() if block_groups}


def _channel_groups(block: nn.Module, twin: nn.Module, layers: Sequence[Layer]) -> list[ChannelGroup]:
    paths = {module: path for path, module in block.named_modules()}
    by_name = {full_name(paths[layer.owner], layer.param): layer for layer in layers}
    modules = {name.rpartition(".")[0] for name in by_name}
    producers: dict[Span, list[Span]] = {}  # of each consumer
    rest: list[Span] = []
    for span in spans(block, twin):
        layer = by_name.get(span.name)
        if layer is not None and (layer.tied_modules or layer.adapter not in COLUMNS):
            raise ValueError(f"it is a size of {layer.name!r}, which is no linear layer of its own")
        if layer is not None and span.dim == COLUMNS[layer.adapter]:
            producers[span] = []
        else:
            rest.append(span)
    for span in rest:
        near = max(producers, key=lambda consumer: _common(consumer.name, span.name), default=None)
        linear = span.name.rpartition(".")[0] in modules  # no norm, which would see the other channels
        if near is None or not linear or span.old % near.old or span.old * near.new != span.new * near.old:
            raise ValueError(f"it is a size of {span.name!r}, which is not of channels between two linear layers")
        producers[near].append(span)
    return [ChannelGroup(by_name[span.name], span, tuple(made)) for span, made in producers.items()]


def _common(*names: str) -> int:
    """The number of parts that the paths of names have in common, from the beginning."""
    return sum(1 for _ in takewhile(lambda parts: len({*parts}) == 1, zip(*(name.split(".") for name in names))))


def _first(
    candidates: Iterable[tuple[str, int]], fits: Callable[[str, int], int | None], problem: str, otherwise: str
) -> tuple[str, int, int]:
    """The first of the candidates, (name in the config, number), that ``fits`` has a new number for, and that number.

    Raises ValueError if there is none: the ``problem``, with what ``fits`` raised, or else ``otherwise``.
    """
    reasons: list[str] = []
    for name, old in candidates:
        try:
            if (new := fits(name, old)) is not None:
                return name, old, new
        except ValueError as error:
            reasons.append(f"{name}: {error}")
    raise ValueError(f"{problem}: {'; '.join(reasons) or otherwise}")


def find_width(model: PreTrainedModel, blocks: Blocks, new_of: Callable[[int], int]) -> tuple[str, int, int]:
    """(the name of the MLP's width in the config, the width, ``new_of`` of it).

    Raises ValueError, with the reasons, if no number is the width of all.
    """
    columns = {layer.columns(layer.parameter) for _, layers in blocks.values() for layer in layers}
    numbers = numbers_in(model.config)

    def fits(name: str, old: int) -> int | None:
        groups = channels_in(model, twin_of(model, {name: new_of(old)}), blocks)
        if numbers[name] is None and spans(model, twin_of(model, {name: old})):
            return None  # it stands for another width
        for block in blocks:
            if all(group.span.old != old for group in groups.get(block, ())):
                raise ValueError(f"block {block!r} does not depend on it")
        return new_of(old)

    # a number of another name may be any width: it counts where no layer has more columns
    widest = {name: columns if name.rpartition(".")[2] in WIDTHS else {max(columns)} for name in numbers}
    candidates = ((name, old) for name, size in numbers.items() for old in widest[name] if size in (None, old))
    problem = f"this {type(model).__name__} has no width that all of its MLPs share"
    return _first(candidates, fits, problem, "no number in its config is one (such as 4 x hidden_size, always)")


# experts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of a mixture in a block: slices of the experts' own tensors, and of the router's.

    consumer: the layer of their last matrices. span: the experts in it. spans: in all tensors. groups: the router
    chooses among groups of experts that follow each other, of each of which as many stay.
    """

    consumer: Layer
    span: Span
    spans: tuple[Span, ...]
    groups: int = 1

    def cuts(self, stay: Tensor) -> dict[tuple[str, int], Tensor]:
        """The indices for `resize_module` and `select` that keep the experts ``stay``, and all that follows the experts
        in a tensor (a shared one, one without weights)."""
        return {
            (span.name, span.dim): torch.cat([stay, torch.arange(self.span.old, span.old, device="cpu")])
            for span in self.spans
        }

    def per_group(self, experts: Iterable[int]) -> list[int]:
        """How many of these experts are in each group that holds any."""
        return [*Counter(expert // (self.span.old // self.groups) for expert in experts).values()]


def experts_in(model: nn.Module, twin: nn.Module, blocks: Blocks, groups: int = 1) -> dict[str, list[ExpertGroup]]:
    """Block -> its mixtures, of whose experts the twin has fewer. Raises ValueError if anything else differs, or
    nothing."""
    return _by_block(model, twin, blocks, partial(_expert_groups, groups=groups), "experts")


def _expert_groups(block: nn.Module, twin: nn.Module, layers: Sequence[Layer], groups: int) -> list[ExpertGroup]:
    paths = {module: path for path, module in block.named_modules()}
    consumers = {full_name(paths[layer.owner], layer.param): layer for layer in layers if layer.adapter in LAST}
    by_consumer: dict[str, list[Span]] = {name: [] for name in consumers}
    for span in spans(block, twin):
        near = max(consumers, key=lambda name: _common(name, span.name), default=None)
        if near is None:
            raise ValueError(f"it is a size of {span.name!r}, and the block has no fused experts")
        by_consumer[near].append(span)
    mixtures = []
    for name, mixture_spans in by_consumer.items():
        last = next((span for span in mixture_spans if span.name == name and span.dim == 0), None)
        routed = [span for span in mixture_spans if not span.name.startswith(name.rpartition(".")[0] + ".")]
        if last is None or not routed:
            raise ValueError(f"it is not the number of experts of {name!r} that a router chooses among")
        if odd := [span.name for span in mixture_spans if span.old - span.new != last.old - last.new]:
            raise ValueError(f"{odd[0]!r} would lose another number than the experts")
        mixtures.append(ExpertGroup(consumers[name], last, tuple(mixture_spans), groups))
    return mixtures


def find_experts(model: PreTrainedModel, blocks: Blocks, new_of: Callable[[int], int]) -> tuple[str, int, int]:
    """(the name of the number of experts in the config, the number, ``new_of`` of it).

    Raises ValueError, with the reasons, if no number is that of all mixtures, and what ``new_of`` raises.
    """
    consumers = [layer for _, layers in blocks.values() for layer in layers if layer.adapter in LAST]
    counts = {len(layer.parameter) for layer in consumers}
    new = {old: new_of(old) for old in counts - {1}}

    def fits(name: str, old: int) -> int | None:
        twin = twin_of(model, {name: new[old]})
        left = [tensors_of(twin).get(layer.parameter_name) for layer in consumers]
        if all(x is not None and len(x) == len(layer.parameter) for x, layer in zip(left, consumers)):
            return None  # a number of something else
        if any(x is None for x in left):
            raise ValueError(f"with {new[old]} the class builds no mixture: keep more")
        mixtures = experts_in(model, twin, blocks)
        if different := counts - {group.span.old for block_mixtures in mixtures.values() for group in block_mixtures}:
            raise ValueError(f"other mixtures have {min(different)} experts")
        return new[old]

    candidates = [(name, old) for name, old in numbers_in(model.config).items() if old is not None and old in new]
    problem = f"this {type(model).__name__} has no number of experts that can be smaller"
    return _first(candidates, fits, problem, "it has no mixtures of several fused experts")


# blocks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCount:
    """The number of ``blocks`` in a ``stack``, both by module path, and its ``name`` in the config. Methods take as
    ``stay`` the indices of the blocks that stay."""

    stack: str
    blocks: tuple[str, ...]
    name: str

    @classmethod
    def find(cls, model: PreTrainedModel, stack: Stack, name: str | None = None) -> "BlockCount":
        """``name``: the only one that is tried. Raises ValueError, with the reasons, if no number is the blocks'."""
        count = len(stack.blocks)
        named = [key for key, size in numbers_in(model.config).items() if size == count > 1 and name in (None, key)]
        problem = f"the blocks in {stack.name!r} of this {type(model).__name__} cannot be fewer"
        otherwise = f"no number in its config is {count}, and changes it"

        def fits(key: str, _: int) -> int:
            return len(cls(stack.name, stack.names, key).any_without(1, model))

        return cls(stack.name, stack.names, _first([(key, count) for key in named], fits, problem, otherwise)[0])

    def any_without(self, gone: int, model: PreTrainedModel) -> list[int]:
        """Indices that stay when ``gone`` blocks in a row go, the last that can. Raises ValueError if none can."""
        count, reasons = len(self.blocks), []
        for end in range(count, gone - 1, -1):
            stay = [index for index in range(count) if not end - gone <= index < end]
            if not (reason := self.misfit(stay, model)):
                return stay
            reasons.append(reason)
        raise ValueError("; ".join(dict.fromkeys(reasons)))

    def changes(self, stay: Sequence[int], config: PreTrainedConfig) -> Changes:
        """The new values in the config: the number, and every list beside it that goes by blocks."""
        part, path, _ = part_with(config, self.name)
        changes: Changes = {self.name: len(stay)}
        for name, value in vars(part).items():
            if isinstance(value, (list, tuple)) and any(part in name for part in PER_BLOCK) and value:
                if len(value) == len(self.blocks):
                    changes[full_name(path, name)] = [value[index] for index in stay]
                elif all(type(index) is int and 0 <= index < len(self.blocks) for index in value):
                    changes[full_name(path, name)] = [stay.index(index) for index in value if index in stay]
        if getattr(part, "is_heterogeneous", False):  # entries of single blocks, as Gemma 4 has
            by_block = {int(index): entries for index, entries in part.to_dict()["per_layer_config"].items()}
            left = {stay.index(index): entries for index, entries in by_block.items() if index in stay}
            changes[full_name(path, "per_layer_config")] = left
        stages = getattr(part, "stage_names", None) or []
        if len(stages) == len(self.blocks) + 1:  # of a backbone: before the blocks, and after each
            changes[full_name(path, "stage_names")] = stages[: len(stay) + 1]
            if part.out_features == stages[-1:]:
                changes |= {full_name(path, name): None for name in ("_out_features", "_out_indices")}
        return changes

    def misfit(self, stay: Sequence[int], model: PreTrainedModel) -> str:
        """Why the model without the other blocks is not built as its twin is, or "" if it is."""
        try:
            twin, left = twin_of(model, self.changes(stay, model.config)), clone(model)
            self.drop(left, stay)
            # by name, for torch makes a class for each module that is parametrized
            kinds, twin_kinds = (
                {name: type(part).__qualname__ for name, part in m.named_modules()} for m in (left, twin)
            )
            if different := sorted(name for name, _ in kinds.items() ^ twin_kinds.items()):
                return f"{different[0]!r} would be of another kind at its new place"
            sizes = spans(left, twin)
        except ValueError as error:
            return str(error)
        return f"{sizes[0].name!r} would have another size" if sizes else ""

    def drop(self, model: nn.Module, stay: Sequence[int]) -> None:
        """Take the other blocks out of a model, those that a call that was stopped has left."""
        blocks: Any = model.get_submodule(self.stack)
        gone = [index for index in reversed(range(len(self.blocks))) if index not in stay]
        for index in gone[len(self.blocks) - len(blocks) :]:
            del blocks[index]
