"""What calibration costs: how often blocks run, what is recorded."""

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.recorder import StackRecorder
from modelopt_sparse.methods import METHODS
from modelopt_sparse.model.devices import flat_tensors
from tests.calibration.collecting import collected
from tests.helpers import tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import STACKED, Routed, Stacked, vectors


@pytest.mark.parametrize(
    ("sequential", "begun", "ended", "last"),
    [("block", 4 + 4, 1 + 4, 1), ("stage", 4 * 4 + 4, 4 * 1 + 4, 4), ("none", 4, 4, 4)],
)
def test_how_often_a_block_runs(sequential, begun, ended, last):
    """The first batch in a dense run and for the self-check; then each of them once, or once for each stage, to collect
    (to the end in the first batch alone), and once to go on. Nothing is behind the last block. In "none" the run that
    collects goes on."""
    model = tiny_llama(num_hidden_layers=3)
    beginnings: list[int] = []
    ends: list[int] = []
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: beginnings.append(index))
        block.register_forward_hook(lambda *_, index=index: ends.append(index))
    mts.sparsify(model, data_loader=token_batches(4), sequential=sequential, progress=False)
    assert beginnings.count(1) == 2 + begun
    assert [ends.count(index) for index in range(3)] == [2 + ended, 2 + ended, 2 + last]


def test_later_stacks_are_recorded_without_what_is_behind_them():
    """What is behind the decoder runs for every batch that is not like an earlier one, in the dense run alone."""
    architecture = ARCHITECTURES["t5"]
    model, calls = architecture.build(), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    mts.sparsify(model, data_loader=architecture.batches("right") * 2, progress=False)
    assert len(calls) == 3


def test_a_layer_that_only_a_later_batch_reaches_is_calibrated():
    """The first batch reaches one expert alone; the others are like it, and would not be run as a whole."""
    model = Stacked(block=Routed)
    model.stem = nn.Identity()
    x = vectors()[0].abs()
    found = collected(model, STACKED, data_loader=[-x, torch.cat([x[:2], -x[2:]])])
    assert found["blocks.0.experts.0"].tokens == 2 * len(x) - 2
    assert found["blocks.0.experts.1"].tokens == 2


def test_each_distinct_tensor_is_recorded_once():
    """Masks and rotary tables are the same in every block and every batch of one length."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0

    def count_stored(batches: list[Tensor]) -> int:
        model = tiny_llama(num_hidden_layers=3)
        recorder = StackRecorder(mts.make_plan(model, "magnitude").stacks[0], lambda: None, lambda x: x)
        recorder.start()
        with torch.no_grad():
            for batch in batches:
                recorder.begin(TokenMasks())
                model(batch, attention_mask=mask, use_cache=False)
        recorder.stop()
        assert recorder.problem is None
        calls = recorder.recording.calls
        assert len(calls) == len(batches)
        return len({x.data_ptr() for of_blocks in calls for call in of_blocks for x in flat_tensors(call)})

    one = count_stored(token_batches(1))
    assert 1 + 3 <= one <= 1 + 5  # hidden states; mask, cosines, sines, and positions in one or two forms
    assert count_stored(token_batches(6)) == one + 5  # each further batch has other hidden states


def test_one_attention_called_on_itself_and_on_another_sequence_sums_both():
    """nn.MultiheadAttention used as self-attention and as cross-attention: q sees both queries, k and v their own."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, y, cross_first):
            calls = [(x, x, x), (y, x, x)]
            return [self.attention(*call, need_weights=False)[0] for call in (calls[::-1] if cross_first else calls)]

    x, y = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
    gram_x, gram_y = flat_x.T @ flat_x, flat_y.T @ flat_y
    expected = torch.stack([gram_x + gram_y, 2 * gram_x, 2 * gram_x])
    for cross_first in (False, True):
        grams = []

        class Watching(type(METHODS["sparsegpt"])):
            def prepare(self, stats, options):
                grams.append(stats.gram)  # noqa: B023 - one list for each pass of the loop
                return super().prepare(stats, options)

        mts.sparsify(Both().eval(), Watching(), data_loader=[(x, y, cross_first, {})], progress=False)
        torch.testing.assert_close(grams[0], expected)
