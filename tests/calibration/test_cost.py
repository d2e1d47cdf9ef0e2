"""What calibration costs: how often blocks run, what is recorded."""

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from tests.calibration.collecting import collected
from tests.helpers import tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES
from tests.models.stacked import STACKED, Routed, Stacked, vectors


@pytest.mark.parametrize(("sequential", "passes", "last"), [("block", 2, 1), ("stage", 5, 4), ("none", 1, 1)])
def test_how_often_a_block_computes(sequential, passes, last):
    """One of four batches in the dense run; a row of it and one of another batch twice as a whole, and in the rehearsal
    once to be seen and once to go on; then each batch once, or once for each stage, to collect, and once to go on.
    Nothing is behind the last block, so that the rehearsal sees it twice. In "none" the pass that collects goes on."""
    model = tiny_llama(num_hidden_layers=3)
    rows = [0, 0, 0]

    def count(index, output):
        rows[index] += len(output)

    for index, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda module, args, output, index=index: count(index, output))
    mts.sparsify(model, data_loader=token_batches(4, batch=5), sequential=sequential, progress=False)
    tried = 5 + 2 * 2 + 2 * 2
    assert rows == [tried + 20 * passes, tried + 20 * passes, tried + 20 * last]


def test_the_rehearsal_has_padding_where_the_data_has_some():
    """The row of a batch that is run for it is the first one with padding; a batch that cannot be cut is run whole."""
    model, seen = tiny_llama(), []
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, 9:] = 0
    batches = [{"input_ids": ids, "attention_mask": mask} for ids in token_batches(2, batch=3)]
    model.model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    mts.sparsify(model, data_loader=batches, progress=False)
    assert [list(x.shape) for x in seen[:3]] == [[3, 16], [1, 16], [1, 16]]
    assert torch.equal(seen[1], mask[1:2])


def test_later_stacks_are_reached_without_what_is_behind_them():
    """What is behind the decoder computes in the dense run, for a batch of each kind, and in the rehearsal, for rows of
    these and of another batch, twice."""
    architecture = ARCHITECTURES["t5"]
    model, calls = architecture.build(), []
    batches = architecture.batches("right")
    model.lm_head.register_forward_hook(lambda *args: calls.append(type(args[-1]) is torch.Tensor))
    mts.sparsify(model, data_loader=batches * 2, progress=False)
    assert sum(calls) == len(batches) + 2 * (len(batches) + 1)


def test_a_layer_that_only_a_later_batch_reaches_is_calibrated():
    """The first batch reaches one expert alone; the others are like it, and would not be run as a whole."""
    model = Stacked(block=Routed)
    model.stem = nn.Identity()
    x = vectors()[0].abs()
    found = collected(model, STACKED, data_loader=[-x, torch.cat([x[:2], -x[2:]])])
    assert found["blocks.0.experts.0"].tokens == 2 * len(x) - 2
    assert found["blocks.0.experts.1"].tokens == 2


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
        found = collected(Both().eval(), [""], data_loader=[(x, y, cross_first, {})])
        torch.testing.assert_close(found["attention.in_proj_weight"].gram, expected)
