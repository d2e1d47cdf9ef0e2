"""Blocks are left as soon as the last of their layers has its input, and only where nothing is missed by it."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).relu())


class Often(Block):
    """Goes over its layers once more for inputs with a large first entry."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return super().forward(x) if x[0, 0] > 10 else x


class Never(Block):
    """Calls one of its layers for inputs with a large first entry alone, and last."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return x + (self.last(y) if x[0, 0] > 10 else y)


class Swapped(Block):
    """Calls its layers the other way round for inputs with a large first entry."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = (self.last, self.first) if x[0, 0] > 10 else (self.first, self.last)
        return x + other(one(x).relu())


class Longer(Block):
    """Calls its first layer twice for inputs with a large first entry."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return x + self.last(self.first(y) if x[0, 0] > 10 else y)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sharing(Block):
    """Its layers share an input if that has a large first entry."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(x) + self.last(x if x[0, 0] > 10 else x * 2)


def data(large: int | None) -> list[Tensor]:
    """Batches, of which number ``large`` has a large first entry."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 8, generator=generator) for _ in range(3)]
    if large is not None:
        batches[large][0, 0] = 40.0
    return batches


def inputs_of(model: nn.Module, name: str, batches: list[Tensor]) -> Tensor:
    """Everything that a layer of the model is given, as rows."""
    seen: list[Tensor] = []
    with torch.no_grad(), model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        for batch in batches:
            model(batch)
    return torch.cat(seen)


class Watched(mts.Method):
    """Magnitude that keeps the statistics it is given."""

    name, needs = "watched", "gram"

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.grams: list[Tensor] = []

    def prepare(self, stats, options):
        assert stats is not None
        assert stats.gram is not None
        self.tokens.append(stats.tokens)
        self.grams.append(stats.gram)

    def solve(self, weight, state, pattern, options):
        mask = pattern.mask(weight.abs())
        return mts.Solution(weight.masked_fill(~mask, 0), mask, 0.0)


def sparsified(model: nn.Module, batches: list[Tensor]) -> Watched:
    method = Watched()
    mts.sparsify(model, method, pattern="2:4", data_loader=batches, progress=False)
    return method


@pytest.mark.parametrize(
    ("block", "large"), [(Block, 1), (Never, 1), (Swapped, 1), (Longer, 1), (Sharing, 1), (Sharing, 2)]
)
def test_statistics_are_those_of_whole_runs(block, large):
    """Also of layers that the first batch calls in another order than the second, or not at all."""
    torch.manual_seed(0)
    model, batches = Stack(block(), Block()), data(large)  # the last block would not be left
    dense = copy.deepcopy(model)
    found = sparsified(model, batches)
    for name, gram, tokens in zip(("blocks.0.first", "blocks.0.last"), found.grams, found.tokens):
        rows = inputs_of(dense, name, batches).double()
        assert tokens == len(rows)
        torch.testing.assert_close(gram.double(), rows.T @ rows, rtol=1e-5, atol=1e-5)


def products(model: nn.Module, name: str, batches: list[Tensor]) -> int:
    """How often a layer is computed while the model is made sparse."""
    counted: list[int] = []
    model.get_submodule(name).register_forward_hook(lambda *_: counted.append(1))
    sparsified(model, batches)
    return len(counted)


def test_what_comes_after_the_last_input_is_left_out():
    """Two dense runs of the first batch; one to the end that shows which layer is the last; those that go on."""
    torch.manual_seed(0)
    assert products(Stack(Block(), Block()), "blocks.0.last", data(large=None)) == 2 + 1 + 3
    assert products(Stack(Block(), Block()), "blocks.0.first", data(large=None)) == 2 + 3 + 3


def test_the_last_block_is_left_if_one_of_its_kind_was_checked():
    """Nothing runs through it to the end afterwards, which would show that it was left too early."""
    torch.manual_seed(0)
    assert products(Stack(Block(), Block()), "blocks.1.last", data(large=None)) == 2 + 1
    assert products(Stack(Often(), Block()), "blocks.1.last", data(large=None)) == 2 + 3


def test_a_block_that_was_left_too_early_is_named_and_the_others_run_to_the_end():
    torch.manual_seed(0)
    model, batches = Stack(Often(), Often(), Often()), data(large=1)
    with pytest.warns(UserWarning, match=r"block 'blocks\.0' calls its layers a number of times that depends on"):
        found = sparsified(model, batches)
    assert any("block 'blocks.0' calls its layers" in note for note in mts.report(model).notes)
    # the first block saw one call of three where there were two; the others saw them all
    assert found.tokens == [18, 18, 24, 24, 24, 24]


def test_a_block_under_hooks_of_accelerate_is_not_left():
    """They put the weights away after the forward. The dense run is whole for every batch there, too."""
    torch.manual_seed(0)
    model = Stack(Block(), Block())
    model.blocks[0].first._hf_hook = None  # type: ignore[assignment] - there is one, whatever it does
    assert products(model, "blocks.0.last", data(large=None)) == 3 + 1 + 3 + 3


@pytest.mark.parametrize("sequential", ["block", "stage"])
def test_the_result_is_that_of_whole_runs(sequential, monkeypatch):
    """To the bit, for a model of transformers."""

    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options = {"data_loader": token_batches(3), "sequential": sequential, "progress": False}
            return mts.sparsify(tiny_llama(num_hidden_layers=3), "sparsegpt", pattern="2:4", **options)

    left = made().state_dict()
    monkeypatch.setattr("modelopt_sparse.calibration.early_exit.EarlyExit.after", lambda *_: None)
    whole = made().state_dict()
    assert all(torch.equal(left[name], whole[name]) for name in whole)
