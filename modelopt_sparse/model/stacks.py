"""A model's layer stacks: the lists of blocks that run one after the other."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Stack:
    """One list of blocks. ``name`` is the module path of the list, ``names[i]`` that of ``blocks[i]``."""

    name: str
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]


def find_stacks(model: nn.Module, prunable: Collection[nn.Module]) -> list[Stack]:
    """The stacks of a model, in module order; a model without one is a single stack with a single block.

    ``prunable`` are the modules of the prunable layers. A stack is an nn.ModuleList or nn.Sequential of blocks, and its
    blocks are those of its children that hold prunable layers. At least one of them holds two or more (a whole
    attention, MLP or residual branch), and all of them are of one class. Two more rules:

    - A list of mixed classes counts if each block holds two prunable layers or more, and no list of one class encloses
      it (hybrids of attention and state space layers).
    - Of nested stacks the inner ones count if they hold every prunable layer of the outer one (the stages of a ResNet).
      Otherwise the outer one counts (a mixture of experts, whose experts are a list as well).
    """
    held = _Held(prunable)
    stacks = _search(model, "", held, mixed_allowed=True)
    if stacks or held.count(model) == 0:
        return stacks
    return [Stack("", ("",), (model,))]


OUTSIDE = "outside the model's blocks"


def why_outside(model: nn.Module, name: str, prunable: Collection[nn.Module]) -> str:
    """Why a layer is in no block of the model, as the plan shows it.

    For a layer in a list that is no stack it says why the list is none, and how its layers are pruned all the same.
    """
    held = _Held(prunable)
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        module = model.get_submodule(path)
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        counts = [count for child in module.children() if (count := held.count(child))]
        if len(counts) < 2:
            continue
        single = max(counts) == 1
        why = "its members hold one layer each" if single else "its members are of several classes, some with one layer"
        return f"{OUTSIDE}: {path!r} is no stack, for {why}; name '{path}.*' in include to prune them"
    return OUTSIDE


class _Held:
    """How many prunable layers a module holds."""

    def __init__(self, prunable: Collection[nn.Module]) -> None:
        self._prunable = set(prunable)

    def count(self, module: nn.Module) -> int:
        return sum(child in self._prunable for child in module.modules())


def _search(module: nn.Module, path: str, held: _Held, *, mixed_allowed: bool) -> list[Stack]:
    """The stacks in and below a module that lies at ``path``."""
    own = _as_stack(module, path, held, mixed_allowed=mixed_allowed)
    inside: list[Stack] = []
    for name, child in module.named_children():
        inside += _search(child, f"{path}.{name}".removeprefix("."), held, mixed_allowed=mixed_allowed and own is None)
    if own is None:
        return inside
    inner = sum(held.count(block) for stack in inside for block in stack.blocks)
    return inside if inner == held.count(module) else [own]


def _as_stack(module: nn.Module, path: str, held: _Held, *, mixed_allowed: bool) -> Stack | None:
    """A module as a stack, or None if it is none."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return None
    counts = {name: held.count(child) for name, child in module.named_children()}
    members = {name: child for name, child in module.named_children() if counts[name]}
    if not members or max(counts.values()) < 2:
        return None
    one_class = len({type(child) for child in members.values()}) == 1
    if not one_class and not (mixed_allowed and min(counts[name] for name in members) >= 2):
        return None
    names = tuple(f"{path}.{name}".removeprefix(".") for name in members)
    return Stack(path, names, tuple(members.values()))
