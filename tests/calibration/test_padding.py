"""Padding: which rows count, and where that cannot be told."""

import pytest
import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.calibration.collecting import LAYERS, assert_same, collected, padded
from tests.helpers import refused, tiny_llama
from tests.models.architectures import ARCHITECTURES, ragged
from tests.models.stacked import STACKED, Convolving, ConvolvingModel, CrossModel, EncoderDecoder, Prefixed
from tests.oracles.brute_force import assert_stats, brute_force

pytestmark = pytest.mark.core


def test_padding_leaves_the_statistics_of_the_texts_alone():
    """A causal model sees nothing of padding on the right, so each text by itself gives the same sums."""
    alone = [ids[real.bool()][None] for batch in padded() for ids, real in zip(*batch.values())]
    expected = collected(tiny_llama(), data_loader=alone, sequential="none")
    for name, stats in collected(tiny_llama(), data_loader=padded(), sequential="none").items():
        assert stats.tokens == expected[name].tokens == sum(int(batch["attention_mask"].sum()) for batch in padded())
        torch.testing.assert_close(stats.gram, expected[name].gram, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int32])
def test_the_mask_may_have_any_dtype(mask_dtype):
    batches = [{**batch, "attention_mask": batch["attention_mask"].to(mask_dtype)} for batch in padded("left")]
    found = collected(tiny_llama(), data_loader=batches, sequential="none")
    real = lambda batch, name: batch["attention_mask"].bool()  # noqa: E731
    assert_stats(found, brute_force(tiny_llama(), padded("left"), LAYERS, real))


def test_a_mask_that_is_given_by_position_counts_as_well():
    batches = [tuple(batch.values()) for batch in padded()]  # Llama's second argument is attention_mask
    found = collected(tiny_llama(), data_loader=batches, collect_func=lambda batch: batch)
    assert_same(found, collected(tiny_llama(), data_loader=padded()))


def test_a_forward_loop_has_padding_too():
    found = collected(tiny_llama(), forward_loop=lambda model: [model(**batch) for batch in padded()])
    assert_same(found, collected(tiny_llama(), data_loader=padded()))


def test_count_padding_lets_padding_in():
    """Every row counts, and the report says that they did."""
    model = tiny_llama()
    found = collected(model, data_loader=padded(), sequential="none", count_padding=True)
    assert_stats(found, brute_force(tiny_llama(), padded(), LAYERS))
    assert {stats.tokens for stats in found.values()} == {3 * 12 + 2 * 9}
    assert mts.report(model).settings["count_padding"] is True


def causal(batch: dict[str, Tensor]) -> Tensor:
    length = batch["input_ids"].shape[1]
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def test_a_mask_that_does_not_say_which_tokens_are_padding():
    """Ready-made attention masks are refused, unless the user says that no token is padding."""
    batches = [{**batch, "attention_mask": causal(batch)} for batch in padded()]
    match = r"attention_mask has shape \[1, 1, 12, 12\]: .* count_padding"
    refused(mts.sparsify, tiny_llama(), match=match, data_loader=batches)
    found = collected(tiny_llama(), data_loader=batches, sequential="none", count_padding=True)
    assert_stats(found, brute_force(tiny_llama(), batches, LAYERS))


def test_a_mask_that_is_no_tensor():
    """Gemma 3 takes one ready-made mask for each type of layer."""
    model = ARCHITECTURES["gemma3"].build()
    batches = [
        {"input_ids": b["input_ids"], "attention_mask": {"full_attention": causal(b), "sliding_attention": causal(b)}}
        for b in padded()
    ]
    refused(
        mts.sparsify,
        model,
        match="attention_mask is a dict",
        data_loader=batches,
    )
    mts.sparsify(model, data_loader=batches, count_padding=True, progress=False)


def test_rows_that_cannot_be_matched_are_an_error_that_names_the_layer():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"x": torch.randn(2, 4, 16), "attention_mask": mask}
    match = (
        r"layer 'blocks.0.up' gets an input of shape \[2, 5, 16\], and the token mask has shape \[2, 4\]: which of "
        "its rows are padding cannot be told; give batches without padding, or set count_padding=True"
    )
    assert "cannot take calibration batch" not in refused(mts.sparsify, Prefixed(), match=match, data_loader=[batch])
    found = collected(Prefixed(), STACKED, data_loader=[batch], sequential="none", count_padding=True)
    assert_stats(found, brute_force(Prefixed(), [batch], STACKED))
    batch["attention_mask"] = torch.ones(2, 4)  # without padding there is nothing to match
    assert {stats.tokens for stats in collected(Prefixed(), STACKED, data_loader=[batch]).values()} == {10}


def test_padding_of_a_convolution_cannot_be_told_even_when_the_shapes_agree():
    """Its input is [batch, channels, positions], and 16 channels look like 16 tokens."""
    mask = torch.arange(16) < torch.tensor([[16], [9]])
    batch = {"x": torch.randn(2, 16, 16), "attention_mask": mask}
    refused(
        mts.sparsify,
        ConvolvingModel(block=Convolving),
        match=r"layer 'blocks.0.mix' gets .* \[2, 16, 16\]",
        data_loader=[batch],
    )
    mts.sparsify(ConvolvingModel(block=Convolving), data_loader=[batch], exclude="*.mix", progress=False)


def test_cross_attention_takes_the_mask_of_the_encoder_even_when_both_are_equally_long():
    """Keys and values are of encoder tokens, all else in the decoder of its own."""
    model = ARCHITECTURES["t5"].build()
    blocks = ARCHITECTURES["t5"].block_names(model)
    ids, mask = ragged(2, 9, "right", 0)
    decoder_mask = mask.flip(0).clone()
    decoder_mask[0, -1] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": decoder_mask}
    for name, stats in collected(model, blocks, data_loader=[batch]).items():
        of_encoder = name.startswith("encoder") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        assert stats.tokens == (mask if of_encoder else decoder_mask).sum(), name


def test_labels_say_which_decoder_tokens_are_padding():
    """Without decoder_attention_mask: -100 is what the loss ignores."""
    model = ARCHITECTURES["t5"].build()
    labels = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])
    batch = {"input_ids": ragged(2, 9, "right", 0)[0], "labels": labels}
    found = collected(model, ARCHITECTURES["t5"].block_names(model), data_loader=[batch])
    assert found["decoder.block.0.layer.0.SelfAttention.q"].tokens == 5
    assert found["decoder.block.0.layer.1.EncDecAttention.k"].tokens == 2 * 9


def _sequence_first() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)  # layers start as copies of one
    return model


@pytest.mark.parametrize("length", [7, 3], ids=["longer than the batch", "as long as the batch"])
def test_tokens_may_come_before_the_batch(length):
    """torch's default: inputs [sequence, batch, width] with masks [batch, sequence]."""
    _, mask = ragged(3, length, "right", 0)
    batch = {"src": torch.randn(length, 3, 16), "src_key_padding_mask": mask == 0}
    blocks = ["layers.0", "layers.1"]
    found = collected(_sequence_first(), blocks, data_loader=[batch], sequential="none")
    expected = brute_force(_sequence_first(), [batch], blocks, lambda batch, name: mask.bool().T)
    assert_stats(found, expected)


def test_two_padding_masks_that_differ():
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    tokens, mask = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    batch = {"src": tokens, "tgt": tokens, "src_key_padding_mask": mask, "tgt_key_padding_mask": mask.flip(0)}
    refused(mts.sparsify, model, match="src_key_padding_mask and tgt_key_padding_mask differ", data_loader=[batch])


def test_queries_and_keys_of_one_attention_with_two_masks():
    """nn.MultiheadAttention's one weight meets both; each mask fits, but they are two."""
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    x = torch.randn(2, 4, 16)
    batch = {"x": x, "memory": x + 1, "attention_mask": mask, "decoder_attention_mask": mask.flip(0)}
    match = r"layer 'blocks.0.attention.in_proj_weight' gets .* the token mask of its queries is another one: which"
    refused(mts.sparsify, EncoderDecoder(), match=match, data_loader=[batch])
    batch["decoder_attention_mask"] = mask
    mts.sparsify(EncoderDecoder(), data_loader=[batch], progress=False)


def test_keys_that_are_longer_than_the_queries_match_no_mask_of_theirs():
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    batch = {"x": torch.randn(2, 4, 16), "memory": torch.randn(2, 6, 16), "attention_mask": mask}
    refused(
        mts.sparsify,
        CrossModel(),
        match=r"layer 'blocks.0.attention.in_proj_weight' gets .* \[2, 6, 16\]",
        data_loader=[batch],
    )
