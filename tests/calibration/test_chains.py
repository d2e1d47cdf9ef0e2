"""Blocks that can be run one by one, and blocks that cannot."""

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.calibration.collecting import thread_state
from tests.calibration.collecting import assert_calibrated, collected
from tests.models.stacked import (
    STACKED,
    Activated,
    AddedToSome,
    Appending,
    Attributes,
    Autocast,
    Between,
    Branches,
    BranchesOfCopies,
    Calling,
    Checkpointed,
    Counting,
    CountingBranches,
    Exhausting,
    Handing,
    Inference,
    Iterating,
    Locked,
    NoGrad,
    Noisy,
    Normed,
    Overwriting,
    Remembering,
    Rescaled,
    Shuffled,
    Sized,
    Skipping,
    Stacked,
    Swallowing,
    Twice,
    WithGradients,
    WritingFirst,
    WritingLater,
    WrittenBetween,
    WrittenBranches,
    vectors,
)
from tests.oracles.brute_force import assert_stats, brute_force


@pytest.mark.filterwarnings("ignore:stack 'blocks' is calibrated through the whole model")
def test_a_loop_may_be_in_inference_mode_for_a_part_of_the_data():
    """Statistics are ordinary tensors, which methods may go on with as they like."""

    def loop(model: nn.Module) -> None:
        first, *others = vectors()
        with torch.inference_mode():
            model(first)
        for batch in others:
            model(batch)

    found = collected(Between(), STACKED, forward_loop=loop, sequential="none")
    assert_stats(found, brute_force(Between(), vectors(), STACKED))
    assert not any(stats.gram.is_inference() or stats.square_sums.is_inference() for stats in found.values())


@pytest.mark.parametrize("sequential", ["block", "none"])
def test_what_stands_between_blocks_is_run_as_well(sequential):
    model = assert_calibrated(Normed(), ["blocks.0", "blocks.2", "blocks.4"], vectors(), sequential)
    assert not any("whole model" in note for note in mts.report(model).notes)


OTHER = "blocks run one by one do not give the model's own output"
TWICE = "its blocks are called more than once in a call of the model"
WHOLE = {
    Appending: OTHER,
    Attributes: OTHER,
    Autocast: "the model runs its blocks in another mode of torch than it is called in",
    Calling: OTHER,
    Counting: OTHER,
    CountingBranches: OTHER,
    Exhausting: OTHER,
    Inference: "the model runs its blocks in another mode of torch than it is called in",
    Iterating: OTHER,
    Locked: "the model holds a lock, and calls of one thread would wait for each other",
    Shuffled: "its blocks are called in another order in some calls than in others",
    Twice: TWICE,
    WithGradients: "the model runs its blocks in another mode of torch than it is called in",
    WritingFirst: "blocks write to their inputs",
    WritingLater: "blocks write to their inputs",
}


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_blocks_at_which_calls_cannot_wait_are_calibrated_through_the_whole_model(kind, sequential):
    """Sparsify says so, and what it costs, in a warning and in the report; the statistics are right all the same, and
    torch's state of the thread is as it was."""
    model, before = kind(), thread_state()
    cost = "3 runs of the model over the data, one for each block, instead of two"
    with pytest.warns(UserWarning, match=f"stack 'blocks' is calibrated .* because {WHOLE[kind]}: {cost}"):
        assert_calibrated(model, STACKED, vectors(), sequential)
    assert any(WHOLE[kind] in note for note in mts.report(model).notes)
    assert thread_state() == before


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", [Handing, Overwriting, Remembering], ids=lambda kind: kind.__name__)
def test_calls_of_one_kind_that_disturb_each_other_are_found_out(kind, count):
    """By the first that comes, by the last one, or by the one that was in a block before. Of three calls of one kind
    only the first has run alone."""
    batches = [x[:5] for x in vectors(count)]
    with pytest.warns(UserWarning, match=f"stack 'blocks' is calibrated .* because {OTHER}"):
        collected(kind(), STACKED, data_loader=batches)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_call_may_write_to_what_it_has_made_of_its_data(count):
    """No other call holds an equal tensor, in the check of waiting calls neither."""

    class Fading(Stacked):
        def forward(self, x):
            weight, x = x.abs().mean(-1, keepdim=True), self.stem(x)
            for block in self.blocks:
                x = block(x * weight)
                weight.mul_(0.9)
            return self.head(x)

    assert_calibrated(Fading(), STACKED, [x[:5] for x in vectors(count)], "block")


def test_random_numbers_in_a_block_are_found_out():
    """No statistics are right then; the model is calibrated through whole runs, as it is without waiting calls."""
    with pytest.warns(UserWarning, match=OTHER):
        mts.sparsify(Stacked(block=Noisy), data_loader=vectors(), min_tokens=1, progress=False)


def test_random_numbers_in_front_of_the_blocks_are_no_matter():
    """The check draws what the dense run has drawn."""

    class Masking(Stacked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    model = mts.sparsify(Masking(), data_loader=vectors(), min_tokens=1, progress=False)
    assert not any("whole model" in note for note in mts.report(model).notes)


CHAINED = [
    Stacked,
    Activated,
    AddedToSome,
    Between,
    Branches,
    BranchesOfCopies,
    Checkpointed,
    NoGrad,
    Rescaled,
    Sized,
    Skipping,
    Swallowing,
    WrittenBetween,
    WrittenBranches,
]


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("kind", CHAINED, ids=lambda kind: kind.__name__)
def test_calls_that_wait_give_the_same_statistics_without_a_note(kind, sequential):
    """Also with another shape in each batch, that the blocks are given as a torch.Size; with branches side by side;
    where the model does something between blocks, to all batches or to some; and where some batches skip a block."""
    model, before = kind(), thread_state()
    assert_calibrated(model, STACKED, vectors(6), sequential)
    assert not any("whole model" in note for note in mts.report(model).notes)
    assert thread_state() == before
