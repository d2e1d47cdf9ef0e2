"""Calibration data that does not do, and layers that see none."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import modelopt_sparse as mts
from tests.helpers import refused, tiny_llama, token_batches
from tests.models.architectures import ARCHITECTURES, texts
from tests.models.stacked import Stacked, Unused, vectors


def _used_up() -> object:
    batches = (batch for batch in token_batches())
    list(batches)
    return batches


@pytest.mark.parametrize("loader", [[], _used_up()], ids=["empty", "used up"])
def test_no_batches(loader):
    refused(
        mts.sparsify, tiny_llama(), match="data_loader gives no batch, as a generator .* used up", data_loader=loader
    )


@pytest.mark.parametrize("batch", [7, "text", None, []])
def test_a_batch_of_a_wrong_type_is_named(batch):
    kind = type(batch).__name__
    refused(
        mts.sparsify,
        tiny_llama(),
        match=f"a calibration batch is a {kind}: give tensors",
        error=TypeError,
        data_loader=[batch],
    )


@pytest.mark.parametrize("batch", [[], (), 5, "text"], ids=repr)
def test_what_collect_func_returns_is_no_arguments(batch):
    options = {"data_loader": token_batches(), "collect_func": lambda _: batch}
    match = f"a calibration batch is a {type(batch).__name__}"
    refused(mts.sparsify, tiny_llama(), match=match, error=TypeError, **options)


def test_a_forward_loop_that_never_calls_the_model():
    refused(
        mts.sparsify,
        tiny_llama(),
        match="forward_loop called no layer; it must run model",
        forward_loop=lambda model: None,
    )


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.zeros(2, 8)},  # RuntimeError: no integers
        {"input_ids": torch.full((2, 8), 999)},  # IndexError: no such token
        {"tokens": torch.zeros(2, 8, dtype=torch.long)},  # ValueError: neither input_ids nor inputs_embeds
    ],
    ids=["floats", "unknown tokens", "wrong name"],
)
def test_a_batch_the_model_cannot_take(batch):
    """The error names the model, the batch with its shapes, and what to give instead."""
    message = refused(
        mts.sparsify,
        tiny_llama(),
        match="LlamaForCausalLM cannot take calibration batch 1",
        data_loader=[{"input_ids": token_batches()[0]}, batch],
    )
    assert str(list(next(iter(batch.values())).shape)) in message
    assert "Give batches that model(**batch) takes, or a collect_func" in message


def test_images_of_a_wrong_size():
    model = ViTForImageClassification(
        ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16)
    )
    refused(
        mts.sparsify,
        model,
        match="ViTForImageClassification cannot take calibration batch 0",
        data_loader=[torch.zeros(1, 3, 8, 8)],
    )


def test_a_layer_that_sees_no_data_is_named():
    message = refused(
        mts.sparsify, Stacked(block=Unused), match="3 layers saw no calibration data", data_loader=vectors()
    )
    assert "blocks.0.spare; blocks.1.spare; blocks.2.spare" in message
    assert "give data that reaches them" in message
    mts.sparsify(Stacked(block=Unused), "wanda", data_loader=vectors(), exclude="*.spare", progress=False)


def test_a_layer_that_needs_no_data_may_see_none():
    model = Stacked(block=Unused)
    rules = {"*.spare": {"method": "magnitude"}}
    mts.sparsify(model, "wanda", data_loader=vectors(), rules=rules, progress=False)
    assert len(mts.verify(model, "2:4").layers) == 9


READS = {
    "linear": lambda x, w: F.linear(x, w),
    "transposed": lambda x, w: x @ w.T,
    "converted": lambda x, w: x @ w.to(torch.float64).float(),
    "together": lambda x, w: F.linear(x, torch.cat([w, w]))[:, :16],
}


class Reads(Unused):
    """A block that reads the weight of a layer without calling it."""

    how = "linear"

    def forward(self, x: Tensor) -> Tensor:
        return READS[self.how](super().forward(x), self.spare.weight)


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("loop", [False, True], ids=["batches", "loop"])
def test_a_layer_whose_weight_its_parent_reads_stays_dense(monkeypatch, how, loop):
    monkeypatch.setattr(Reads, "how", how)
    data = {"forward_loop": lambda model: [model(x) for x in vectors()]} if loop else {"data_loader": vectors()}
    model = mts.sparsify(Stacked(block=Reads), "wanda", progress=False, **data)
    report = mts.report(model)
    assert len(report.layers) == 6
    reasons = {each.name: each.reason for each in report.skipped}
    assert all(reasons[f"blocks.{i}.spare"].startswith("its parent reads the weight") for i in range(3))
    assert (model.blocks[0].spare.weight != 0).all()


def test_a_layer_whose_weight_its_parent_reads_cannot_be_named():
    why = "layer 'blocks.1.spare', which you name: its parent reads the weight without calling the layer"
    refused(mts.sparsify, Stacked(block=Reads), match=why, include=["blocks.1.spare"], data_loader=vectors())
    rules = {"*.spare": {"method": "magnitude"}}
    mts.sparsify(model := Stacked(block=Reads), "wanda", data_loader=vectors(), rules=rules, progress=False)
    assert len(mts.verify(model, "2:4").layers) == 9


def test_a_layer_of_whose_weight_only_the_dtype_is_read_sees_no_data():
    class Asks(Unused):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.spare.weight.dtype))

    refused(mts.sparsify, Stacked(block=Asks), match="3 layers saw no calibration data", data_loader=vectors())


def test_layers_behind_an_input_that_the_data_lacks_are_named():
    """Text alone does not reach an image encoder."""
    model, batches = ARCHITECTURES["llava"].build(), texts("right")
    message = refused(mts.sparsify, model, match="12 layers saw no calibration data", data_loader=batches)
    assert "model.vision_tower" in message
    assert "give data that reaches them (images, if they take images), or exclude them" in message
    mts.sparsify(model, "wanda", data_loader=batches, exclude="model.vision_tower.*", progress=False)
