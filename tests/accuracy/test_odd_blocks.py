"""Reconstruction of blocks with more outputs than one, that cannot be trained, or that calls come to by other ways."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import assert_alike
from tests.models.stacked import Block, Stacked, vectors


class TwoStreams(nn.Module):
    """Blocks on a context and a text that attend to each other, as in Flux; the model puts out the text."""

    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.from_both, self.of_context, self.of_text = nn.Linear(16, 48), Block(), Block()

        def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.cat([context, x], 1)
            both = both + F.scaled_dot_product_attention(*self.from_both(both).chunk(3, -1))
            count = context.shape[1]
            return self.of_context(both[:, :count]), self.of_text(both[:, count:])

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([self.Joint(), self.Joint()])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            context, x = block(x, context)
        return x


def error(model: nn.Module, dense: nn.Module, batches: list[dict[str, Tensor]], which: int) -> float:
    with torch.no_grad():
        pairs = [(model(**batch)[which], dense(**batch)[which]) for batch in batches]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))


def test_all_streams_of_a_block_come_closer():
    random = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 16, 16, generator=random)} for _ in range(32)]
    for batch in batches:
        batch["context"] = torch.randn(4, 4, 16, generator=random)
    dense, errors = TwoStreams(), {}
    for reconstruct in (None, 4):
        model = TwoStreams()
        mts.sparsify(model, "sparsegpt", data_loader=batches, reconstruct=reconstruct, progress=False)
        errors[reconstruct] = [error(model.blocks[0], dense.blocks[0], batches, which) for which in (0, 1)]
    assert all(after < 0.7 * before for before, after in zip(errors[None], errors[4]))
    (first, _) = mts.report(model).blocks
    assert min(errors[4]) < first.error_after < first.error_before


class Exiting(Stacked):
    """Goes on behind the second block where the values are small; which calls do so is another for sparse blocks."""

    limit = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1 and x.mean() > self.limit:
                break
        return x


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "exclude": "blocks.2.*"}], ids=str)
def test_a_call_is_tuned_towards_its_own_output_whichever_way_it_goes(options):
    batches = [x[None, :5] for seed in range(40) for x in vectors(1, seed)]
    with torch.no_grad():
        means = sorted(float(Stacked(2).blocks[1](Stacked(2).blocks[0](x)).mean()) for x in batches)
    model = Exiting(4)
    model.limit = means[8]
    mts.sparsify(model, "sparsegpt", data_loader=batches, reconstruct=2, min_tokens=1, progress=False, **options)
    blocks = mts.report(model).blocks
    assert [block.name for block in blocks][-1] == "blocks.3"
    assert all(block.error_before < 0.3 for block in blocks)  # towards the output of another call it would be over 1


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.down(F.relu_(self.up(x)))
        return x


class InnerGradient(Block):
    """Takes a step of its own in each call, as in test-time training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (step,) = torch.autograd.grad((x.detach() @ self.inner - 1).square().mean(), self.inner)
        return super().forward(x @ (self.inner - 0.1 * step))


@pytest.mark.filterwarnings("ignore:layer .* saw")
@pytest.mark.parametrize("block", [InPlace, InnerGradient])
def test_a_block_that_cannot_be_trained_stays_as_it_was_solved(block):
    solved, tuned = Stacked(block=block), Stacked(block=block)
    for model, options in ((solved, {}), (tuned, {"reconstruct": 1})):
        batches = [x.clone() for x in vectors(36)]
        mts.sparsify(model, "sparsegpt", data_loader=batches, include="blocks.*", progress=False, **options)
    assert_alike(solved.state_dict(), tuned.state_dict())
    assert all(parameter.requires_grad for parameter in tuned.parameters())
    notes = [note for note in mts.report(tuned).notes if "is not reconstructed: to train it fails (" in note]
    assert len(notes) == 3
    assert not mts.report(tuned).blocks


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
def test_what_comes_to_a_block_past_its_arguments():
    """In an object that the model writes to, which nobody sees."""

    class Gated(Block):
        def forward(self, x: Tensor, context: Any = None) -> Tensor:
            return x + self.down(self.up(x).relu()) * context.gate

    class Writing(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            context: Any = SimpleNamespace(gate=1.0)
            for place, block in enumerate(self.blocks):
                x = block(x, context)
                if place == 0:
                    context.gate = torch.sigmoid(x)
            return x

    model = Writing(4, Gated)
    mts.sparsify(model, "sparsegpt", data_loader=vectors(36), include="blocks.*", reconstruct=1, progress=False)
    assert any("calls cannot be run again" in note for note in mts.report(model).notes)
    mts.verify(model, "2:4")
