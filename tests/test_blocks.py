"""Which lists of a model are its stacks of blocks, by eye."""

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.architectures import ARCHITECTURES
from tests.brute_force import Recording, assert_stats, brute_force, matrices_of

pytestmark = pytest.mark.core


class Pair(nn.Module):
    """A block: two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class OtherPair(Pair):
    """A block of another class."""


class Experts(Pair):
    """A block with a list of its own, of which it is more than the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Pair(), Pair()])


class Stage(nn.Module):
    def __init__(self, downsample: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(), Pair()])
        if downsample:
            self.downsample = nn.Linear(16, 16)


def found(model: nn.Module, **options) -> list[tuple[str, ...]]:
    return [stack.names for stack in mts.make_plan(model, "magnitude", **options).stacks]


def branch() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


STACKS = {
    "a list of blocks": (lambda: {"layers": nn.ModuleList([Pair(), Pair()])}, [("layers.0", "layers.1")]),
    "two lists": (
        lambda: {"encoder": nn.ModuleList([Pair()]), "decoder": nn.ModuleList([Pair(), Pair()])},
        [("encoder.0",), ("decoder.0", "decoder.1")],
    ),
    "heads are no blocks": (
        lambda: {"layers": nn.ModuleList([Pair()]), "heads": nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])},
        [("layers.0",)],
    ),
    "branches are no blocks": (lambda: {"layers": nn.ModuleList([branch(), branch()])}, [("layers.0", "layers.1")]),
    "hybrids": (
        lambda: {"layers": nn.ModuleList([Pair(), OtherPair(), Pair()])},
        [("layers.0", "layers.1", "layers.2")],
    ),
    "experts are no blocks": (lambda: {"layers": nn.ModuleList([Experts(), Experts()])}, [("layers.0", "layers.1")]),
    "stages that are all blocks": (
        lambda: {"stages": nn.ModuleList([Stage(False), Stage(False)])},
        [("stages.0.blocks.0", "stages.0.blocks.1"), ("stages.1.blocks.0", "stages.1.blocks.1")],
    ),
    "stages that are more": (
        lambda: {"stages": nn.ModuleList([Stage(True), Stage(False)])},
        [("stages.0", "stages.1")],
    ),
    "no list at all": (lambda: {"one": nn.Linear(16, 16), "two": nn.Linear(16, 16)}, [("",)]),
    "a chain of single layers": (lambda: {"layers": branch()}, [("",)]),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacks(case):
    make, expected = STACKS[case]
    assert found(nn.ModuleDict(make())) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_blocks_of_every_architecture(name):
    """The stacks of the plan, one after the other, are the blocks that the table names."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    assert [block for names in found(model) for block in names] == architecture.block_names(model)


def test_what_stands_between_blocks_is_run_as_well():
    """A Sequential with a norm between its blocks: the second block does not get what the first one gave."""
    torch.manual_seed(0)
    model = nn.Sequential(Pair(), nn.LayerNorm(16), Pair())
    assert found(model) == [("0", "2")]
    dense, method, batches = matrices_of(model, ["0", "2"]), Recording(), [torch.randn(7, 16), torch.randn(5, 16)]
    dense = {name: matrix.clone() for name, matrix in dense.items()}
    expected = brute_force(model, batches, ["0", "2"])
    with pytest.warns(UserWarning, match="block '2' does not take the output of the block before it"):
        mts.sparsify(model, method, data_loader=batches, sequential="none", progress=False)
    assert_stats(method.by_layer(dense), expected)
