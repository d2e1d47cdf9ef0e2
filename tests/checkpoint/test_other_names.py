"""Models that are stored under other names than they have in memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import modelopt_sparse as mts
from tests.checkpoint.folders import change_tensors
from tests.helpers import assert_bits, assert_same_state, refused, state_of, token_batches
from tests.models.tiny import tiny_mixtral


@pytest.fixture
def mixtral(tmp_path) -> tuple[nn.Module, Path]:
    model = mts.sparsify(tiny_mixtral(), "magnitude", pattern="2:4", include="*self_attn*")
    expert = "model.layers.1.mlp.experts.gate_up_proj"  # fused weights can carry a mask as well
    mts.set_mask(model, expert, mts.NM(2, 4).mask(model.get_parameter(expert).detach().abs()))
    mts.save(model, tmp_path / "mixtral")
    stored = set(load_file(tmp_path / "mixtral" / "model.safetensors"))
    assert stored.isdisjoint({expert})
    assert "model.layers.1.self_attn.q_proj.weight" in stored
    return model, tmp_path / "mixtral"


def test_names_that_differ_on_disk(mixtral):
    model, folder = mixtral
    restored = tiny_mixtral()
    with torch.no_grad():
        for parameter in restored.parameters():
            parameter.fill_(7)
    for again in (mts.restore(restored, folder), mts.load(folder)):
        assert_same_state(again, state_of(model))
        assert_bits(again(token_batches(1)[0]).logits, model(token_batches(1)[0]).logits)
    assert len(mts.verify(folder, "2:4").layers) == 9  # eight of the report, and the mask that was set by hand


def test_names_that_differ_on_disk_and_a_model_that_does_not_fit(mixtral):
    _, folder = mixtral
    for sizes, part in (
        ({"num_hidden_layers": 3}, "'model.layers.2.mlp.experts.down_proj' of the model is not in"),
        ({"num_hidden_layers": 1}, "mask 'model.layers.1.mlp.experts.gate_up_proj' fits no parameter"),
        ({"intermediate_size": 64}, "has shape [4, 96, 32] there and [4, 128, 32] in the model"),
    ):
        refused(mts.restore, tiny_mixtral(**sizes), folder, parts=[part])


def test_names_that_differ_on_disk_and_an_expert_that_is_missing(mixtral):
    """transformers would fill it with random values."""
    _, folder = mixtral

    def without_experts(weights: dict[str, torch.Tensor]) -> None:
        gone = [key for key in weights if key.startswith("model.layers.1.") and "experts" in key]
        assert len([weights.pop(key) for key in gone]) == 12

    change_tensors(folder / "model.safetensors", without_experts)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    refused(mts.restore, tiny_mixtral(), folder, parts=[f"'{name}' of the model is not in the folder"])
    refused(mts.load, folder, match=f"'{name}' of the model is not in the folder")
