"""Padding: which rows count, and where that cannot be told."""

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

import modelopt_sparse as mts
from tests.calibration.collecting import LAYERS, assert_same, collected, padded
from tests.helpers import assert_same_state, refused, state_of, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES, VOCAB, ragged
from tests.models.stacked import STACKED, Block, Convolving, CrossModel, EncoderDecoder, Masked, Prefixed, Stacked
from tests.models.tiny import tiny_t5
from tests.oracles.brute_force import assert_stats, brute_force

pytestmark = pytest.mark.core
PADDED_ROWS = sum(int(batch["attention_mask"].sum()) for batch in padded())


def zero_padded() -> list[Tensor]:
    return [batch["input_ids"].clamp_min(1) * batch["attention_mask"] for batch in padded()]


def counted(model: nn.Module, *batches: dict, **options) -> tuple[dict[str, int], list[str]]:
    """Sparsify the model -> (the tokens of each layer, the notes of the report)."""
    report = mts.report(mts.sparsify(model, "wanda", progress=False, **{"data_loader": batches or None, **options}))
    return {layer.name: layer.tokens for layer in report.layers}, report.notes


MASKS_BY = {
    # Llama's second argument is attention_mask
    "position": {"data_loader": [tuple(batch.values()) for batch in padded()], "collect_func": lambda batch: batch},
    "a loop": {"forward_loop": lambda model: [model(**batch) for batch in padded()]},
}
for dtype in (torch.bool, torch.float32, torch.int32):
    batches = [{**batch, "attention_mask": batch["attention_mask"].to(dtype)} for batch in padded()]
    MASKS_BY[str(dtype)] = {"data_loader": batches}


@pytest.mark.parametrize("by", MASKS_BY)
def test_masks_by_position_in_a_loop_and_of_any_dtype_count_as_well(by):
    assert_same(collected(tiny_llama(), **MASKS_BY[by]), collected(tiny_llama(), data_loader=padded()))


def test_cross_attention_takes_the_mask_of_the_encoder_even_when_both_are_equally_long():
    """Keys and values are of encoder tokens, all else in the decoder of its own."""
    model, (_, batch, _) = ARCHITECTURES["t5"].build(), ARCHITECTURES["t5"].batches("right")
    batch["decoder_attention_mask"][-1, -1] = 0  # as many tokens as the encoder has, but for this one
    for name, stats in collected(model, ARCHITECTURES["t5"].block_names(model), data_loader=[batch]).items():
        of_encoder = name.startswith("encoder") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        assert stats.tokens == batch["attention_mask" if of_encoder else "decoder_attention_mask"].sum(), name


def test_labels_say_which_decoder_tokens_are_padding():
    """Without decoder_attention_mask: -100 is what the loss ignores."""
    model = ARCHITECTURES["t5"].build()
    labels = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])
    batch = {"input_ids": ragged(2, 9, "right", 0)[0], "labels": labels}
    found = collected(model, ARCHITECTURES["t5"].block_names(model), data_loader=[batch])
    assert found["decoder.block.0.layer.0.SelfAttention.q"].tokens == 5
    assert found["decoder.block.0.layer.1.EncDecAttention.k"].tokens == 2 * 9


TORCH_MASKS = {  # of nn.Transformer: the arguments -> which tokens of the encoder and the decoder are real
    "src": (("src",), (True, False)),
    "tgt": (("tgt",), (False, True)),
    "src, tgt": (("src", "tgt"), (True, True)),
    "memory": (("memory",), (True, False)),
    "src, memory": (("src", "memory"), (True, False)),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("case", TORCH_MASKS)
def test_torchs_encoder_decoder_has_a_mask_for_each_of_its_sides(case, batch_first):
    """Equally long or not; its cross-attention's one weight meets queries of the decoder and keys of the encoder."""
    torch.manual_seed(0)
    names, (source_masked, target_masked) = TORCH_MASKS[case]
    source = torch.arange(6) < torch.tensor([[6], [3]])

    def build() -> nn.Transformer:
        torch.manual_seed(1)
        return nn.Transformer(16, 4, 1, 1, 32, batch_first=batch_first).eval()

    for length in (6, 4):
        target = torch.arange(length) < torch.tensor([[2], [4]])
        batch = {"src": torch.randn(2, 6, 16), "tgt": torch.randn(2, length, 16)}
        of_encoder = source if source_masked else torch.ones_like(source)
        of_decoder = target if target_masked else torch.ones_like(target)
        if not batch_first:
            batch = {name: x.transpose(0, 1) for name, x in batch.items()}
            of_encoder, of_decoder = of_encoder.T, of_decoder.T
        batch |= {f"{name}_key_padding_mask": ~(target if name == "tgt" else source) for name in names}
        real = {"encoder": of_encoder, "decoder": of_decoder}
        blocks = [f"{side}.layers.0" for side in real]
        expected = brute_force(build(), [batch], blocks, lambda _, name, real=real: real[name[:7]])
        found = collected(build(), blocks, data_loader=[batch], sequential="none")
        cross = found.pop("decoder.layers.0.multihead_attn.in_proj_weight")
        of_queries = expected.grams.pop("decoder.layers.0.multihead_attn.in_proj_weight")
        padding = batch.get("src_key_padding_mask")
        memory = build().encoder(batch["src"], src_key_padding_mask=padding).detach()[of_encoder]
        for gram, of_inputs in zip(cross.gram, (of_queries, memory.T @ memory, memory.T @ memory)):
            torch.testing.assert_close(gram.double(), of_inputs.double(), rtol=1e-4, atol=1e-4)
        assert cross.tokens == max(of_encoder.sum(), of_decoder.sum())
        assert_stats(found, expected)


def test_a_decoder_without_a_mask_has_no_padding_whatever_the_modules_around_it_are_given():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

        def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor) -> Tensor:
            return self.inner(src, tgt, src_key_padding_mask=src_key_padding_mask)

    batch = {"src": torch.randn(2, 4, 16), "tgt": torch.randn(2, 4, 16), "src_key_padding_mask": ~MASK}
    blocks = ["inner.encoder.layers.0", "inner.decoder.layers.0"]
    for name, stats in collected(Around().eval(), blocks, data_loader=[batch]).items():
        assert stats.tokens == (MASK.sum() if name.startswith(blocks[0]) else 8), name


# masks that lie deeper in the arguments, or are made inside -----------------------------------------------------------


class Ids(Stacked):
    """Residual blocks on the embeddings of tokens, whose blocks look at nothing else than their own token. ``ids`` is
    how the tokens are taken from the argument, ``given``: what the blocks are called with beside their input."""

    class Block(Block):
        def forward(self, x: Tensor, attention_mask=None, padding_mask=None, mask=None) -> Tensor:
            return super().forward(x)

    def __init__(self, ids=lambda batch: batch, given=lambda ids: {}) -> None:
        super().__init__(block=self.Block)
        self.ids, self.given = ids, given
        self.embedding = nn.Embedding(VOCAB, 16)

    def forward(self, batch) -> Tensor:
        ids = self.ids(batch)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, **self.given(ids))
        return x


def causal(batch: dict[str, Tensor]) -> Tensor:
    length = batch["input_ids"].shape[1]
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


class SeveralLengths(Ids):
    """How it pads samples is not known."""

    def forward(self, batch: list[dict[str, Tensor]]) -> Tensor:
        return super().forward(nn.utils.rnn.pad_sequence([each["input_ids"] for each in batch], batch_first=True))


class SourceAndTarget(nn.Module):
    """Whose two inputs are no encoder's and decoder's of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask=None, tgt_key_padding_mask=None) -> Tensor:
        return self.first(src) + self.second(tgt)


class ListedExperts(nn.Module):
    """Each of two experts gets all tokens, those that like it best first."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        for number, expert in enumerate(self.experts):
            order = self.router(rows)[:, number].argsort()
            rows = rows.index_add(0, order, expert(rows[order]))
        return rows.view_as(x)


class OwnNames(nn.Transformer):
    def __init__(self) -> None:
        super().__init__(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, src_padding_mask=None) -> Tensor:
        return self.decoder(tgt, self.encoder(src))


MASK = torch.arange(4) < torch.tensor([[4], [2]])
FIRST = padded()[0]
READY = {**FIRST, "attention_mask": causal(FIRST)}
# Gemma 3 takes one ready-made mask for each type of layer
OF_TYPES = {**FIRST, "attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), causal(FIRST))}
SEQUENCES, MEMORY = {"x": torch.randn(2, 4, 16), "attention_mask": MASK}, {"memory": torch.randn(2, 6, 16)}
BOTH = {"x": torch.randn(2, 4, 16), "memory": torch.randn(2, 4, 16), "attention_mask": MASK}
SIXTEEN = {"x": torch.randn(2, 16, 16), "attention_mask": torch.arange(16) < torch.tensor([[16], [9]])}
SAMPLES = [{"input_ids": torch.arange(1, n), "attention_mask": torch.ones(n - 1)} for n in (5, 8)]
PAIR = {"src": SEQUENCES["x"], "tgt": SEQUENCES["x"]}
TWO_MASKS = {f"{name}_key_padding_mask": ~rows for name, rows in (("src", MASK), ("tgt", MASK.flip(0)))}
OF_ONE = "src_key_padding_mask is of src or of tgt, and nothing says which tokens of both are real"
CANNOT = (
    r"layer 'blocks.0.up' gets an input of shape \[2, 5, 16\], the token mask has \[2, 4\]: which of "
    "its rows are padding cannot be told; give batches without padding, or set count_padding=True"
)
# case -> (model, batch, words of the error); its rows can be counted all
UNKNOWN = {
    "ready-made masks": (tiny_llama, READY, r"attention_mask has shape \[1, 1, 12, 12\]: .* count_padding"),
    "one for each type": (ARCHITECTURES["gemma3"].build, OF_TYPES, "attention_mask is a dict"),
    "a token before": (Prefixed, SEQUENCES, CANNOT),
    # its input is [batch, channels, positions], and 16 channels look like 16 tokens
    "a convolution": (partial(Masked, block=Convolving), SIXTEEN, r"layer 'blocks.0.mix' gets .* \[2, 16, 16\]"),
    "masks that differ": (SourceAndTarget, PAIR | TWO_MASKS, "src_key_padding_mask and tgt_key_padding_mask differ"),
    "names of its own": (OwnNames, PAIR | {"src_padding_mask": ~MASK}, "src_padding_mask is of src or of tgt"),
    "a mask of one of two": (SourceAndTarget, PAIR | {"src_key_padding_mask": ~MASK}, OF_ONE),
    "longer keys": (CrossModel, SEQUENCES | MEMORY, r"'blocks.0.attention.in_proj_weight' gets .* \[2, 6, 16\]"),
    "experts in a list": (partial(Masked, block=ListedExperts), SEQUENCES, "'blocks.0.experts.0' gets an input"),
    "several lengths": (SeveralLengths, {"batch": SAMPLES}, "attention_mask is a list: give it as a tensor"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_padding_that_cannot_be_told_is_refused_and_may_be_counted(case):
    build, batch, match = UNKNOWN[case]
    assert "cannot take calibration batch" not in refused(mts.sparsify, build(), match=match, data_loader=[batch])
    mts.sparsify(build(), count_padding=True, progress=False, data_loader=[batch])


def test_all_rows_are_counted_where_the_user_says_so_or_none_is_padding():
    for batches in (padded(), [READY]):
        found = collected(model := tiny_llama(), data_loader=batches, sequential="none", count_padding=True)
        assert_stats(found, brute_force(tiny_llama(), batches, LAYERS))
        assert mts.report(model).settings["count_padding"] is True
    found = collected(Prefixed(), STACKED, data_loader=[SEQUENCES], sequential="none", count_padding=True)
    assert_stats(found, brute_force(Prefixed(), [SEQUENCES], STACKED))
    full = {**SEQUENCES, "attention_mask": torch.ones(2, 4)}  # without padding there is nothing to match
    assert {stats.tokens for stats in collected(Prefixed(), STACKED, data_loader=[full]).values()} == {10}
    mts.sparsify(EncoderDecoder(), data_loader=[{**BOTH, "decoder_attention_mask": MASK}], progress=False)


@dataclass
class Record:
    input_ids: Tensor
    attention_mask: Tensor


@dataclass
class Output(ModelOutput):
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None


class Pair(NamedTuple):
    input_ids: Tensor
    padding_mask: Tensor


def in_attribute(batch):
    return batch.input_ids


def parts_of(batch, *parts):
    return [{name: rows[part] for name, rows in batch.items()} for part in parts]


DEEPER = {
    "a mapping": (itemgetter("input_ids"), lambda batch: batch),
    "a mapping in a mapping": (lambda batch: batch["net_input"]["input_ids"], lambda batch: {"net_input": batch}),
    "a tuple": (lambda batch: batch[1]["input_ids"], lambda batch: (1, batch)),
    "a named tuple": (in_attribute, lambda batch: Pair(batch["input_ids"], batch["attention_mask"] == 0)),
    "a list of samples": (
        lambda samples: torch.stack([sample["input_ids"] for sample in samples]),
        lambda batch: parts_of(batch, *range(len(batch["input_ids"]))),
    ),
    "parts of the batch": (
        lambda parts: torch.cat([part["input_ids"] for part in parts]),
        lambda batch: parts_of(batch, slice(0, 1), slice(1, None)),
    ),
    "a dataclass": (in_attribute, lambda batch: Record(**batch)),
    "a ModelOutput": (itemgetter("input_ids"), lambda batch: Output(**batch)),
    "an object": (in_attribute, lambda batch: SimpleNamespace(**batch)),
    "an object in a list": (lambda batch: batch[0].input_ids, lambda batch: [SimpleNamespace(**batch)]),
}


@pytest.mark.parametrize("source", ["data_loader", "forward_loop"])
@pytest.mark.parametrize("form", DEEPER)
def test_masks_that_lie_deeper_in_the_arguments(form, source):
    ids, make = DEEPER[form]
    batches = [make(batch) for batch in padded()]
    expected = brute_force(Ids(), zero_padded(), STACKED, lambda ids, name: ids != 0)
    options = {"data_loader": batches, "collect_func": lambda batch: (batch,)}
    if source == "forward_loop":
        options = {"forward_loop": lambda model: [model(batch) for batch in batches]}
    assert_stats(collected(Ids(ids), STACKED, sequential="none", **options), expected)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(**options) -> nn.Module:
    torch.manual_seed(0)
    return hf.BertModel(hf.BertConfig(**{**SMALL, "num_hidden_layers": 2}, vocab_size=VOCAB, **options)).eval()


class IdsOfTransformers(Ids):
    """Blocks as those of transformers' audio models, whose padding_mask is 1 at a real token."""

    class Block(Ids.Block, GradientCheckpointingLayer):
        pass


def told(mask, name: str = "attention_mask", kind: type[Ids] = Ids):
    """Blocks are called with a mask that is made of the tokens."""
    return lambda: kind(given=lambda ids: {name: mask(ids)})


class Holding(nn.Module):
    """Holds a model of transformers."""

    def __init__(self, build=bert) -> None:
        super().__init__()
        self.model = build()


class Lightning(Holding):
    """And makes its mask."""

    config = SimpleNamespace(is_encoder_decoder=True)  # of what it holds, as some wrappers have it

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state


class OfTorch(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in self.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)  # layers start as copies of one

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if not self.encoder.layers[0].self_attn.batch_first:
            x = x.transpose(0, 1)
        return self.encoder(x, src_key_padding_mask=ids == 0)


MADE_INSIDE = {
    "of a model of transformers": (Lightning, ["model.encoder.layer.0", "model.encoder.layer.1"]),
    "of nn.TransformerEncoder": (lambda: OfTorch(batch_first=True), ["encoder.layers.0", "encoder.layers.1"]),
    "tokens before the batch": (lambda: OfTorch(batch_first=False), ["encoder.layers.0", "encoder.layers.1"]),
    "of blocks, True = padding": (told(lambda ids: ids == 0, "padding_mask"), STACKED),
    "of blocks of transformers": (told(lambda ids: ids != 0, "padding_mask", IdsOfTransformers), STACKED),
    "of blocks, 1 = a token": (told(lambda ids: (ids != 0).long()), STACKED),
    "of blocks, to broadcast": (told(lambda ids: (ids != 0).long()[:, None, None]), STACKED),
    "of blocks, to multiply with": (told(lambda ids: (ids != 0).float()[..., None]), STACKED),
    "of blocks, added to scores": (told(lambda ids: (ids == 0)[:, None, None] * -1e4), STACKED),
}


FULL = torch.arange(1, 11).view(2, 5)  # tokens without padding


@pytest.mark.parametrize("sequential", ["none", "block"])
@pytest.mark.parametrize("form", MADE_INSIDE)
def test_masks_that_the_model_makes_of_its_tokens(form, sequential):
    build, blocks = MADE_INSIDE[form]
    found = collected(build().eval(), blocks, data_loader=zero_padded(), sequential=sequential)
    assert {stats.tokens for stats in found.values()} == {PADDED_ROWS}
    if sequential == "none":

        def real(ids, name):
            return (ids != 0).T if form == "tokens before the batch" else ids != 0

        assert_stats(found, brute_force(build().eval(), zero_padded(), blocks, real))


class Wrapped(Holding):
    """Around an encoder-decoder of transformers, whose decoder has no padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask, decoder_input_ids).logits


class OneForTwo(Holding):
    """One model of transformers for text with a mask, and for other rows without."""

    def forward(self, query: dict[str, Tensor], image: Tensor) -> Tensor:
        return self.model(**query).pooler_output @ self.model(inputs_embeds=image).pooler_output.T


class TwoMasks(Holding):
    """Both calls of the one model inside are told of their own padding."""

    def forward(self, query, answer) -> Tensor:
        return self.model(**query).pooler_output @ self.model(**answer).pooler_output.T


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = OfTorch(batch_first=True), OfTorch(batch_first=True).encoder

    def forward(self, ids: Tensor, attention_mask: Tensor, image: Tensor) -> Tensor:
        return self.text(ids).mean(1) @ self.image(image).mean(1).T


IMAGE, REAL = torch.randn(3, 12, 16), FIRST["attention_mask"]
QUERY, TOWERS = {"query": FIRST, "image": IMAGE}, {"ids": zero_padded()[0], "attention_mask": REAL, "image": IMAGE}
DECODED = FIRST | {"decoder_input_ids": torch.ones(3, 12, dtype=torch.long)}
# (model, batch, a layer of the part that is called without a mask, its rows, the class that a note names)
OF_EACH_CALL = [
    (lambda: Wrapped(tiny_t5), DECODED, "model.decoder.block.0.layer.2.DenseReluDense.wo", 3 * 12, None),
    (OneForTwo, QUERY, "model.encoder.layer.0.intermediate.dense", int(REAL.sum()) + 3 * 12, "BertModel"),
    (TwoTowers, TOWERS, "image.layers.0.linear1", 3 * 12, "TransformerEncoder"),
    (TwoMasks, dict(zip(("query", "answer"), padded())), "model.encoder.layer.0.output.dense", PADDED_ROWS, None),
]


@pytest.mark.parametrize(("build", "batch", "layer", "rows", "noted"), OF_EACH_CALL)
def test_each_call_has_its_own_mask_or_none(build, batch, layer, rows, noted):
    """Though there are as many tokens as in the padded call."""
    tokens, notes = counted(build().eval(), batch, include=["*.0.*"])
    assert tokens[layer] == rows
    notes = [note for note in notes if "without a mask" in note]
    assert [note.split()[0] for note in notes] == [noted] * (noted is not None)


@pytest.mark.parametrize("states_mask", [MASK, None], ids=["masked", "without"])
def test_a_decoder_takes_the_mask_of_the_states_that_it_is_given(states_mask):
    """Though the text is as long, and its mask another."""
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "attention_mask": MASK.flip(0) & torch.tensor([True, True, True, False]),
        "encoder_hidden_states": torch.randn(2, 4, 16),
        "encoder_attention_mask": states_mask,
    }
    rows, _ = counted(bert(is_decoder=True, add_cross_attention=True), batch)
    assert rows["encoder.layer.1.attention.self.key"] == rows["encoder.layer.1.crossattention.self.query"] == 5
    assert rows["encoder.layer.1.crossattention.self.key"] == (6 if states_mask is not None else 8)


class NormedMemory(CrossModel):
    """Whose attention reads something that is made of the memory."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + (self.q(x) @ self.k(self.norm(memory)).mT).softmax(-1) @ memory

    kind = Block

    def forward(self, tgt, memory, tgt_key_padding_mask, memory_key_padding_mask) -> Tensor:
        return super().forward(tgt, memory)


@pytest.mark.parametrize("length", [3, 4], ids=["longer than the queries", "as long as the queries"])
def test_what_is_made_of_an_encoders_states_is_known_by_its_length_or_noted(length):
    real = torch.arange(length) < torch.tensor([[1], [length]])
    batch = {"tgt": torch.randn(2, length, 16), "memory": torch.randn(2, 4, 16)}
    batch |= {"tgt_key_padding_mask": ~real, "memory_key_padding_mask": ~MASK}
    rows, notes = counted(NormedMemory(), batch)
    assert (rows["blocks.1.q"], rows["blocks.1.k"]) == (real.sum(), MASK.sum() if length == 3 else real.sum())
    assert sum(note.startswith("Block is given two inputs of one length") for note in notes) == (length == 4)


def test_patches_of_images_have_a_mask():
    model = hf.Siglip2VisionModel(hf.Siglip2VisionConfig(patch_size=4, num_patches=16, **SMALL)).eval()
    batch = {"pixel_values": torch.randn(2, 4, 48), "spatial_shapes": torch.tensor([[2, 2], [1, 2]])}
    rows, _ = counted(model, batch | {"pixel_attention_mask": MASK.long()})
    assert {*rows.values()} == {6}


def test_a_mask_of_pixels_is_noted_where_there_is_padding():
    class Image(Stacked):
        def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> Tensor:
            return super().forward(pixel_values.flatten(2).mT)

    for real, noted in ((torch.ones(2, 3, 3), False), (torch.ones(2, 3, 3).tril(), True)):
        rows, notes = counted(Image(), {"pixel_values": torch.randn(2, 16, 3, 3), "pixel_mask": real})
        assert sum("'pixel_mask' of Image is of pixels: all rows" in note for note in notes) == noted
        assert {*rows.values()} == {18}


def test_the_choices_of_a_question_are_texts_of_a_batch():
    model = hf.BertForMultipleChoice(hf.BertConfig(vocab_size=VOCAB, **SMALL)).eval()
    rows, _ = counted(model, {name: rows[None] for name, rows in FIRST.items()})
    assert {*rows.values()} == {int(REAL.sum())}


def generated(model: nn.Module) -> None:
    for batch in padded("left"):
        model.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)


class SelfCalling(Ids):
    """Takes batches in a list one by one."""

    def forward(self, batch, attention_mask: Tensor | None = None) -> Tensor | list[Tensor]:
        if isinstance(batch, list):
            return [self(ids, attention_mask=ids != 0) for ids in batch]
        return super().forward(batch)


def of_inner(model: nn.Module) -> None:
    for batch in padded():
        model.model(**batch)


LOOPS = {  # that call parts of the model, or a model that calls itself -> the layer whose rows are the tokens
    "a model inside": (Lightning, of_inner, "model.encoder.layer.0.output.dense"),
    "parts of a model of transformers": (tiny_llama, of_inner, "model.layers.0.mlp.up_proj"),
    "generate": (ARCHITECTURES["t5"].build, generated, "encoder.block.0.layer.1.DenseReluDense.wo"),
    "itself": (SelfCalling, lambda model: model(zero_padded()), "blocks.0.up"),
}


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
def test_a_mask_begins_with_the_tokens_in_the_cache():
    """Three new tokens of each of the 5 texts, the first of which comes from the padded call itself."""
    rows, _ = counted(tiny_llama(), forward_loop=generated)
    assert {*rows.values()} == {PADDED_ROWS + 2 * 5}


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_may_call_parts_of_the_model(case):
    build, loop, name = LOOPS[case]
    rows, _ = counted(build().eval(), forward_loop=loop)
    assert rows[name] == PADDED_ROWS


@pytest.mark.filterwarnings("ignore:.* is calibrated through the whole model")
def test_what_a_loop_calls_by_itself_has_no_mask_of_the_call_before():
    """A block, which says nothing of padding; the input is as long as the padded batch."""

    def loop(model: nn.Module) -> None:
        model(**FIRST)
        model.encoder.layer[0](torch.ones(3, 12, 16))

    rows, _ = counted(bert(), forward_loop=loop)
    assert rows["encoder.layer.0.intermediate.dense"] == int(REAL.sum()) + 3 * 12


def test_a_model_that_calls_itself_is_told_by_each_of_its_calls():
    found = collected(SelfCalling(), STACKED, data_loader=[zero_padded()], collect_func=lambda batch: (batch,))
    assert {stats.tokens for stats in found.values()} == {PADDED_ROWS}


def test_labels_of_an_encoder_decoder_go_for_a_decoder_that_is_called_without_a_mask():
    decoder = hf.BertConfig(vocab_size=VOCAB, is_decoder=True, add_cross_attention=True, **SMALL)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(image_size=8, patch_size=4, **SMALL), decoder, pad_token_id=0, decoder_start_token_id=1
    )
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])}
    rows, _ = counted(hf.VisionEncoderDecoderModel(config).eval(), batch, include=["decoder.*.intermediate.*"])
    assert [*rows.values()] == [5]


@pytest.mark.parametrize("batches", [[zero_padded()[0], FULL], [FULL]], ids=["one of two", "none"])
def test_a_mask_that_is_added_to_scores_is_all_zeros_in_a_batch_without_padding(batches):
    rows, _ = counted(told(lambda ids: (ids == 0)[:, None, None] * -1e4)(), data_loader=batches)
    assert {*rows.values()} == {int(sum((ids != 0).sum() for ids in batches))}


def test_padding_alone_is_no_data():
    batch = dict.fromkeys(("input_ids", "attention_mask"), torch.zeros(2, 5, dtype=torch.long))
    given = {"data_loader": [batch, batch], "match": "all tokens of the data are padding"}
    refused(mts.sparsify, tiny_llama(), **given)
    refused(mts.shrink, tiny_llama(), mlp=0.25, **given)
    refused(mts.evaluate, tiny_llama(), [batch], reference=tiny_llama(), match=given["match"])


def test_batches_of_padding_alone_judge_nothing():
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in token_batches()]
    padding = {name: torch.zeros_like(x) for name, x in batches[0].items()}
    options = {"mlp": 0.25, "progress": False}
    models = [mts.shrink(tiny_llama(), data_loader=data, **options) for data in (batches, [*batches, padding])]
    assert_same_state(models[1], state_of(models[0]))
    whole, left_out = map(mts.report, models)
    assert whole.shrunk.kl == left_out.shrunk.kl
    assert left_out.notes == [*whole.notes, "batches of nothing but padding are left out: 1"]


UNCLEAR = {
    "of two dimensions": ("mask", lambda ids: ids == 0),
    "to broadcast": ("mask", lambda ids: (ids != 0)[:, None, None]),
    "to multiply with": ("mask", lambda ids: (ids != 0)[..., None]),
    "True = not attended to, as in torch": ("attention_mask", lambda ids: (ids == 0)[:, None]),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_mask_of_which_nothing_says_what_true_means_is_noted(case):
    name, mask = UNCLEAR[case]
    rows, (note,) = counted(told(mask, name)(), data_loader=zero_padded())
    assert note.startswith(f"{name!r} of Block does not say whether True is padding: all rows are counted")
    assert {*rows.values()} == {3 * 12 + 2 * 9}


def test_a_mask_of_pairs_of_tokens_is_none_of_padding():
    """12 texts of 12 tokens, so that the shapes agree."""
    causal = torch.ones(12, 12).tril()
    model = Ids(given=lambda ids: {"attention_mask": causal, "mask": causal == 0})
    rows, notes = counted(model, data_loader=[torch.randint(1, 20, (12, 12)) for _ in range(2)])
    assert ({*rows.values()}, notes) == ({2 * 144}, [])


def test_blocks_are_tuned_without_the_padding_that_they_are_told_of():
    """What stands at padding changes nothing."""
    models = [told(lambda ids: ids == 0, "padding_mask")() for _ in range(2)]
    for model, padding in zip(models, (0.0, 50.0)):
        model.embedding.weight.data[0] = padding
        mts.sparsify(model, pattern="2:4", quality="balanced", data_loader=zero_padded(), progress=False)
    assert_same_state(models[0].blocks, state_of(models[1].blocks))


@pytest.mark.parametrize("rows", [5, 4])
def test_a_batch_that_could_be_turned_around_is_noted(rows):
    """As XLNet turns it: what stands for texts in its mask are tokens in its layers."""
    ids, mask = ragged(rows, 5, "right", seed=0)
    _, notes = counted(tiny_llama(), {"input_ids": ids, "attention_mask": mask})
    assert any("as many texts as tokens" in note for note in notes) == (rows == 5)
