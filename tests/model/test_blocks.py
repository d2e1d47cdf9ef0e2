"""Where a model's layer stacks are found, beside the architectures of test_architectures.py."""

from collections.abc import Callable

import pytest
from torch import nn

from modelopt_sparse.model.find import find_layers, find_stacks
from tests.helpers import tiny_llama

pytestmark = pytest.mark.core


def stacks_of(model: nn.Module) -> dict[str, list[str]]:
    """Stack name -> names of its blocks, which must be the modules of these names."""
    layers, _ = find_layers(model)
    stacks = find_stacks(model, {module for layer in layers for module in (layer.owner, *layer.hooked_modules)})
    for stack in stacks:
        assert [model.get_submodule(name) for name in stack.names] == list(stack.blocks)
    return {stack.name: list(stack.names) for stack in stacks}


class Block(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = nn.ModuleList(layers)


class OtherBlock(Block):
    pass


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{i}" for i in range(count)]


def blocks(*kinds: type) -> nn.ModuleList:
    return nn.ModuleList(kind() for kind in kinds)


def beside_lists_of_single_layers() -> nn.Module:
    stem = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))
    heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return nn.ModuleDict({"stem": stem, "layers": blocks(Block, Block), "heads": heads})


def with_experts() -> nn.Module:
    """A list of experts inside of a block is no stack of its own."""
    return nn.ModuleDict({"layers": nn.ModuleList(Block(Block(), Block(), Block()) for _ in range(2))})


def with_a_norm() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.LayerNorm(8), Block()])})


def nested() -> nn.Module:
    return nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))})


# case -> (model, stack -> how many blocks it has, or their names)
STACKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int | list[str]]]] = {
    "a single layer": (lambda: tiny_llama(num_hidden_layers=1), {"model.layers": 1}),
    "a list of experts": (with_experts, {"layers": 2}),
    "nested lists that hold everything": (nested, {"stages.0": 2, "stages.1": 2}),
    "a sequence of blocks": (lambda: nn.Sequential(Block(), Block()), {"": ["0", "1"]}),
    "lists of single layers": (beside_lists_of_single_layers, {"layers": 2}),
    "blocks of two kinds": (lambda: nn.ModuleDict({"layers": blocks(Block, OtherBlock, Block)}), {"layers": 3}),
    "a block and a layer": (lambda: nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.Linear(8, 8)])}), {"": [""]}),
    "what is no block between": (with_a_norm, {"layers": ["layers.0", "layers.2"]}),
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), {}),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacks_are_found(case):
    build, expected = STACKS[case]
    names = {stack: numbered(stack, size) if isinstance(size, int) else size for stack, size in expected.items()}
    assert stacks_of(build()) == names
