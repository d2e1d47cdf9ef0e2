"""A model of transformers with another number in its config: smaller, and still a plain model of its class.

What depends on a number is found by trial. A twin of the model, of the same class and without values (on the meta
device), is built with another number in its config. What differs between the two depends on it: sizes of tensors,
modules, numbers that modules hold as attributes, other entries of the config. There is no table of classes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from modelopt_sparse.model.adapters import HF_CONV1D, LINEAR
from modelopt_sparse.model.layers import Layer, Stack
from modelopt_sparse.model.wrappers import full_name

# the names that usually hold the width of an MLP: tried first. One that holds None may stand for a default
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "hidden_dim")
PER_BLOCK = ("layer", "block", "pattern", "idx")  # parts of the names of lists that say something of each block

Changes = dict[str, Any]  # name in the config, with dots: new value

# twins ----------------------------------------------------------------------------------------------------------------


def twin_of(model: PreTrainedModel, changes: Mapping[str, Any]) -> PreTrainedModel:
    """A model of the same class on the meta device, with these ``changes`` in its config, as `from_pretrained` would
    build it. Raises ValueError with the class's own reason if it takes no such config."""
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        path, _, key = name.rpartition(".")
        setattr(attrgetter(path)(config) if path else config, key, value)
    try:
        config = type(config).from_dict(config.to_dict())
        with torch.device("meta"):
            twin = type(model)(config)
        twin.tie_weights()  # older versions of transformers do not do so on the meta device
    except Exception as error:
        said = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise ValueError(f"{type(model).__name__} cannot be built with {said}: {error}") from error
    nn.Module.to(twin.eval(), model.dtype)
    return twin


def _parts(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those inside of it, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, full_name(path, name))


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
    """What differs in size between a module and its twin. Raises ValueError if they do not have the same tensors."""
    own, other = tensors_of(module), tensors_of(twin)
    if alone := sorted(own.keys() ^ other.keys()):
        raise ValueError(f"{alone[0]!r} would be in one of the two models alone")
    different = []
    for name, tensor in own.items():
        if tensor.dim() != other[name].dim():
            raise ValueError(f"{name!r} would have {other[name].dim()} dimensions, and has {tensor.dim()}")
        sizes = enumerate(zip(tensor.shape, other[name].shape))
        different += [Span(name, dim, old, new) for dim, (old, new) in sizes if old != new]
    return different


@torch.no_grad()
def cut(module: nn.Module, twin: nn.Module, stay: Mapping[tuple[str, int], Tensor]) -> None:
    """Make a module as large as its twin, in place. ``stay``: (name of a tensor, dimension) -> the indices that stay.

    Parameters that change are new ones, with the values that stay; ties hold. Numbers that modules have as attributes
    become those of the twin.
    """
    new: dict[int, Tensor] = {}
    wanted = spans(module, twin)
    for path, part in module.named_modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            of_tensor = [span for span in wanted if span.name == full_name(path, name)]
            if of_tensor and id(tensor) not in new:
                values = tensor.detach()
                for span in of_tensor:
                    values = values.index_select(span.dim, stay[span.name, span.dim].to(values.device))
                is_parameter = isinstance(tensor, nn.Parameter)
                new[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            if of_tensor:
                setattr(part, name, new[id(tensor)])
    for part, of_twin in zip(module.modules(), twin.modules(), strict=True):
        for name, value in vars(of_twin).items():
            private = name.startswith("_") or name == "training"
            if not private and _is_number(value) and vars(part).get(name, value) != value:
                vars(part)[name] = copy.copy(value)  # not by setattr: some are behind a property without a setter


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float))


def write_config(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Give every config in a model that is cut, in place, the numbers and lists of its twin's."""
    for part, of_twin in zip(model.modules(), twin.modules(), strict=True):
        config, other = vars(part).get("config"), vars(of_twin).get("config")
        if not isinstance(config, PreTrainedConfig) or not isinstance(other, PreTrainedConfig):
            continue
        for (_, own), (_, changed) in zip(_parts(config), _parts(other), strict=True):
            for name, value in vars(changed).items():
                if type(value) in (int, list, tuple) and not name.startswith("_") and vars(own).get(name) != value:
                    setattr(own, name, copy.copy(value))


# channels -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Channels of a block that go together: columns of ``taker``, and what makes them, rows and biases.

    span: the columns of the taker, in the block.
    """

    taker: Layer
    span: Span
    makers: tuple[Span, ...]

    def cuts(self, stay: Tensor, *, interleaved: bool) -> dict[tuple[str, int], Tensor]:
        """What `cut` takes, for the channels ``stay``. Where a tensor makes several values for each channel (gate and
        up in one), those of a channel follow each other if ``interleaved``; else all of the first kind come first."""
        cuts = {(self.span.name, self.span.dim): stay}
        for maker in self.makers:
            kinds = torch.arange(maker.old // self.span.old)
            both = stay[:, None] * len(kinds) + kinds if interleaved else stay + kinds[:, None] * self.span.old
            cuts[maker.name, maker.dim] = both.flatten()
        return cuts


def pools(block: nn.Module, twin: nn.Module, layers: Sequence[Layer]) -> list[Pool]:
    """The channels of a block that differ from its twin's. ``layers``: those of the block.

    Raises ValueError if anything differs that is no channel between linear layers.
    """
    paths = {module: path for path, module in block.named_modules()}
    of_name = {full_name(paths[layer.owner], layer.param): layer for layer in layers}
    owners = {name.rpartition(".")[0] for name in of_name}
    takers: list[tuple[Span, Layer]] = []
    others: list[Span] = []
    for span in spans(block, twin):
        layer = of_name.get(span.name)
        if layer is not None and (layer.tied_modules or layer.adapter not in (LINEAR, HF_CONV1D)):
            raise ValueError(f"it is a size of {layer.name!r}, which is no linear layer of its own")
        columns = {None: None, LINEAR: 1, HF_CONV1D: 0}[layer and layer.adapter]
        if layer is not None and span.dim == columns:
            takers.append((span, layer))
        else:
            others.append(span)
    makers: dict[str, list[Span]] = {span.name: [] for span, _ in takers}
    for span in others:
        near = max(takers, key=lambda taker: _common(taker[0].name, span.name), default=None)
        linear = span.name.rpartition(".")[0] in owners  # no norm, which would see the other channels
        if near is None or not linear or span.old % near[0].old or span.old * near[0].new != span.new * near[0].old:
            raise ValueError(f"it is a size of {span.name!r}, which is not of channels between two linear layers")
        makers[near[0].name].append(span)
    return [Pool(layer, span, tuple(makers[span.name])) for span, layer in takers]


def _common(name: str, other: str) -> int:
    """How many parts of their paths two names have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), other.split("."))))


def clone(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own, with a config of its own, that shares all tensors."""
    return copy.deepcopy(model, {id(each): each for each in tensors_of(model).values()})


# the two axes ---------------------------------------------------------------------------------------------------------


def find_width(
    model: PreTrainedModel, blocks: Mapping[str, tuple[nn.Module, Sequence[Layer]]], new_of: Callable[[int], int]
) -> tuple[str, int, int]:
    """(the name of the MLP's width in the config, the width, ``new_of`` of it).

    ``blocks``: name -> a block and its layers. Raises ValueError, with the reasons, if no number is the width of all.
    """
    columns = {layer.columns(layer.parameter) for _, layers in blocks.values() for layer in layers}
    reasons: list[str] = []
    for name, value in numbers_in(model.config).items():
        for old in columns if value is None else {value} & columns:
            try:
                twin = twin_of(model, {name: new_of(old)})
                if value is None and spans(model, twin_of(model, {name: old})):
                    continue  # None stands for another width
                check_width(model, twin, blocks, everywhere=old)
            except ValueError as error:
                reasons.append(f"{name}: {error}")
                continue
            return name, old, new_of(old)
    kind = type(model).__name__
    why = "; ".join(reasons) or "no number in its config is one (such as 4 x hidden_size, always)"
    raise ValueError(f"this {kind} has no width that all of its MLPs share: {why}")


def check_width(
    model: nn.Module,
    twin: nn.Module,
    blocks: Mapping[str, tuple[nn.Module, Sequence[Layer]]],
    everywhere: int | None = None,
) -> None:
    """Raise ValueError if a twin differs in more than channels inside of blocks; ``everywhere``: if not each block has
    channels of this number."""
    names = tuple(f"{name}." for name in blocks)
    if outside := [span.name for span in spans(model, twin) if not span.name.startswith(names)]:
        raise ValueError(f"it is a size of {outside[0]!r}, outside of the blocks")
    count = 0
    for name, (block, layers) in blocks.items():
        different = pools(block, twin.get_submodule(name), layers)
        count += len(different)
        if everywhere is not None and not any(pool.span.old == everywhere for pool in different):
            raise ValueError(f"block {name!r} does not depend on it")
    if not count:
        raise ValueError("no channels depend on it")


@dataclass(frozen=True)
class Depth:
    """The number of blocks of a ``stack``, and the ``name`` that it has in the config."""

    model: PreTrainedModel
    stack: Stack
    name: str

    @classmethod
    def find(cls, model: PreTrainedModel, stack: Stack, asked: str | None = None) -> "Depth":
        """``asked``: its name. Raises ValueError, with the reasons, if no number in the config is the blocks'."""
        count, reasons = len(stack.blocks), []
        for name, value in numbers_in(model.config).items():
            depth = cls(model, stack, name)
            if value != count or count < 2 or asked not in (None, name):
                continue
            for gone in range(count - 1, -1, -1):  # one that can go says that the name is right
                try:
                    depth.twin([place for place in range(count) if place != gone])
                except ValueError as error:
                    reasons.append(f"{name}: {error}")
                else:
                    return depth
        why = "; ".join(dict.fromkeys(reasons)) or f"no number in its config is {count}, and changes it"
        raise ValueError(f"the blocks in {stack.name!r} of this {type(model).__name__} cannot be fewer: {why}")

    def changes(self, stay: Sequence[int]) -> Changes:
        """In the config: the number, and every list of what lies beside it that says something of each block."""
        path, _, _ = self.name.rpartition(".")
        config = attrgetter(path)(self.model.config) if path else self.model.config
        changes: Changes = {self.name: len(stay)}
        for name, value in vars(config).items():
            if isinstance(value, (list, tuple)) and any(part in name for part in PER_BLOCK) and value:
                if len(value) == len(self.stack.blocks):
                    changes[full_name(path, name)] = [value[place] for place in stay]
                elif all(type(each) is int and 0 <= each < len(self.stack.blocks) for each in value):
                    changes[full_name(path, name)] = [stay.index(each) for each in value if each in stay]
        return changes

    def twin(self, stay: Sequence[int], width: Mapping[str, int] | None = None) -> PreTrainedModel:
        """The twin with these blocks alone, and another ``width``. Raises ValueError if it does not have the modules of
        the blocks that stay, or those have other sizes."""
        twin = twin_of(self.model, {**self.changes(stay), **(width or {})})
        there = list(twin.get_submodule(self.stack.name).children())
        outside = [
            {k: x.shape for k, x in tensors_of(m).items() if not k.startswith(f"{self.stack.name}.")}
            for m in (self.model, twin)
        ]
        if not width and outside[0] != outside[1]:
            raise ValueError("modules outside of the blocks depend on it")
        if len(there) != len(stay):
            raise ValueError(f"{len(there)} blocks are there, not {len(stay)}")
        for place, of_twin in zip(stay, there):
            name, block = self.stack.names[place], self.stack.blocks[place]
            if [*map(type, block.modules())] != [*map(type, of_twin.modules())]:
                raise ValueError(f"block {name!r} would be of another kind at its new place")
            if (different := spans(block, of_twin)) and not width:
                raise ValueError(f"{different[0].name!r} of block {name!r} would have another size at its new place")
        return twin

    def drop(self, stay: Sequence[int]) -> None:
        """Take the other blocks out of the model."""
        blocks: Any = self.model.get_submodule(self.stack.name)
        for place in range(len(self.stack.blocks) - 1, -1, -1):
            if place not in stay:
                del blocks[place]
