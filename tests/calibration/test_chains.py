"""Blocks that can be run one by one, and blocks that cannot."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.calibration.collecting import assert_calibrated, collected, thread_state
from tests.helpers import assert_same_state, state_of
from tests.models import stacked
from tests.models.odd_blocks import Again, SameTwice, Sometimes, WrittenBetween
from tests.models.stacked import STACKED, Between, Stacked, vectors
from tests.oracles.brute_force import assert_stats, brute_force


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
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


def test_calls_of_a_loop_that_go_on_behind_the_blocks_are_run_again_like_others():
    """What a layer behind them has seen of one call is not part of the next one's."""
    looped, given = Stacked(), Stacked()
    options = {"include": ["blocks.*", "head"], "progress": False}
    mts.sparsify(looped, forward_loop=lambda model: [model(x) for x in vectors()], **options)
    mts.sparsify(given, data_loader=vectors(), **options)
    assert mts.report(looped).notes == mts.report(given).notes
    assert "head" in [layer.name for layer in mts.report(looped).layers]
    assert_same_state(looped, state_of(given))


OTHER = "blocks that answer in the place of computing do not give the model's own output"
ORDER = "calls come to its blocks more than once, or in another order in some of them"
WHOLE = {
    (stacked.Appending, "block"): OTHER,
    (stacked.Appending, "none"): OTHER,
    (stacked.Exhausting, "block"): OTHER,
    (stacked.Iterating, "none"): OTHER,
    (stacked.Shuffled, "none"): ORDER,
    (stacked.Twice, "none"): ORDER,
    (stacked.Kept, "block"): "a call that is run again computes something else",
    (stacked.CalledLater, "block"): "layers of its blocks are called after these as well",
    (stacked.Confident, "block"): "its blocks leave something beside their output",
    (stacked.Confident, "none"): "its blocks leave something beside their output",
}


@pytest.mark.parametrize(("kind", "sequential"), WHOLE, ids=lambda x: getattr(x, "__name__", x))
def test_blocks_whose_answers_are_not_enough_are_calibrated_through_the_whole_model(kind, sequential):
    """Sparsify says so, and what it costs, in a warning and in the report; the statistics are right all the same, and
    torch's state of the thread is as it was."""
    model, before = kind(), thread_state()
    why, cost = WHOLE[kind, sequential], "3 runs of the model over the data, one for each block, instead of two"
    # no two runs of some models compute the same
    calibrate = assert_calibrated if kind is not stacked.Kept else lambda *_: mts.sparsify(model, data_loader=vectors())
    with pytest.warns(UserWarning, match=f"{kind.__name__} is calibrated .* because {why}: {cost}"):
        calibrate(model, STACKED, vectors(), sequential)
    assert any(why in note for note in mts.report(model).notes)
    assert thread_state() == before


@dataclass(frozen=True)
class Said:
    stop: bool


SAYING = {
    "bool": bool,
    "NumPy": np.bool_,
    "text": str,
    "record": Said,
    "Enum": partial(Enum("Choice", {"A": 0, "B": 1})),
}


@pytest.mark.parametrize("said", SAYING)
def test_what_a_block_says_beside_its_output_may_decide(said):
    """Calls with the same shapes go other ways, and the first of a shape the shortest."""
    long, short = (torch.randn(2, length, 16, generator=torch.Generator().manual_seed(0)) for length in (8, 6))
    batches = [long - 9, short + 9, short - 9, short - 9, long - 9, short - 9, short + 9]
    assert_calibrated(stacked.Deciding(SAYING[said]), STACKED, batches, "block")


def test_what_hooks_hand_on_from_block_to_block():
    """In an object that all calls share. Blocks that answer hand it on as those that compute."""
    found = collected(stacked.Handing(), STACKED, data_loader=vectors(), sequential="none", min_tokens=1)
    assert_stats(found, brute_force(stacked.Handing(), vectors(), STACKED))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_call_may_write_to_what_it_has_made_of_its_data(count):
    class Fading(Stacked):
        def forward(self, x):
            weight, x = x.abs().mean(-1, keepdim=True), self.stem(x)
            for block in self.blocks:
                x = block(x * weight)
                weight.mul_(0.9)
            return self.head(x)

    assert_calibrated(Fading(), STACKED, [x[:5] for x in vectors(count)], "block")


KINDS = """
    Stacked Activated AddedToSome Attributes Autocast Calling Counting CountingBranches Inference Locked Overwriting
    Remembering WithGradients WritingFirst WritingLater Between Branches BranchesOfCopies Checkpointed NoGrad Rescaled
    Prepared Sized Skipping Swallowing WrittenBetween WrittenBranches
"""
CHAINED = {kind: (getattr(stacked, kind), STACKED) for kind in KINDS.split()}
for block in (Again, SameTwice, Sometimes, WrittenBetween, stacked.Routed):
    CHAINED[f"block {block.__name__}"] = partial(Stacked, block=block), STACKED
CHAINED["input written to in inference mode"] = partial(stacked.Inference, block=WrittenBetween), STACKED
CHAINED["norms between blocks"] = stacked.Normed, ["blocks.0", "blocks.2", "blocks.4"]
CHAINED["two stacks"] = stacked.Nested, ["early.0", "early.1", "late.0", "late.1"]
CHAINED["stacks in turns"] = stacked.Interleaved, ["one.0", "other.0", "one.1", "other.1"]


@pytest.mark.parametrize("sequential", ["block", "none"])
@pytest.mark.parametrize("case", CHAINED)
def test_calls_that_are_run_again_give_the_same_statistics_without_a_note(case, sequential):
    """Also with another shape in each batch, that the blocks are given as a torch.Size; with branches side by side;
    where the model does something between blocks, to all batches or to some; and where some batches skip a block.
    Layers that share some of their inputs share no statistics; one that is called twice sees both inputs."""
    build, within = CHAINED[case]
    model, before = build(), thread_state()
    assert_calibrated(model, within, vectors(6), sequential)
    assert not any("whole model" in note for note in mts.report(model).notes)
    assert thread_state() == before
