"""Blocks that can be run one by one, and blocks that cannot."""

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.calibration.collecting import assert_calibrated, collected
from tests.models.stacked import (
    STACKED,
    Activated,
    AddedToSome,
    Between,
    Branches,
    BranchesOfCopies,
    Counting,
    CountingBranches,
    Exhausting,
    Iterating,
    Normed,
    Rescaled,
    Sized,
    Stacked,
    Twice,
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
    with pytest.warns(UserWarning, match="block 'blocks.2' does not take the output of the block before it"):
        assert_calibrated(Normed(), ["blocks.0", "blocks.2", "blocks.4"], vectors(), sequential)


WHOLE = {
    Activated: "does not take the output of the block before it",
    WrittenBranches: "does not take the output of the block before it",
    Rescaled: "does not take the output of the block before it",
    CountingBranches: "blocks run one by one do not give the model's own output",
    Twice: "blocks are not called once each, in order",
    WritingFirst: "blocks write to their inputs",
    WritingLater: "blocks write to their inputs",
    Counting: "blocks run one by one do not give the model's own output",
    Iterating: "block 'blocks.0' is given a list_iterator, which may change as blocks run",
    Exhausting: r"block 'blocks.0' cannot be run by itself \(pop from empty list\)",
}


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_blocks_that_cannot_be_chained_are_calibrated_through_the_whole_model(kind, sequential):
    """Sparsify says so, and what it costs, in a warning and in the report; the statistics are right all the same."""
    model = kind()
    cost = "3 runs of the model over the data, one for each block, instead of two"
    with pytest.warns(UserWarning, match=f"stack 'blocks' is calibrated .* because .*{WHOLE[kind]}.*{cost}"):
        assert_calibrated(model, STACKED, vectors(), sequential)
    assert any(WHOLE[kind].split(r" \(")[0] in note for note in mts.report(model).notes)


CHAINED = [Stacked, Sized, Branches, BranchesOfCopies, Between, WrittenBetween, AddedToSome]


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("kind", CHAINED, ids=lambda kind: kind.__name__)
def test_blocks_that_can_be_chained_give_the_same_statistics_without_a_note(kind, sequential):
    """Also with another shape in each batch, that the blocks are given as a torch.Size; with branches side by side; and
    where the model adds something between blocks, to all batches or to some."""
    model = assert_calibrated(kind(), STACKED, vectors(6), sequential)
    assert mts.report(model).notes == []
