"""Where a model's layer stacks are found."""

import pytest
import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from modelopt_sparse.model.find import find_layers, find_stacks
from tests.helpers import tiny_llama

pytestmark = pytest.mark.core


def stacks_of(model: nn.Module) -> dict[str, list[str]]:
    """Stack name -> names of its blocks, which must be the modules of these names."""
    layers, _ = find_layers(model)
    stacks = find_stacks(model, {module for layer in layers for module in (layer.owner, *layer.hooked_modules)})
    for stack in stacks:
        assert [model.get_submodule(name) for name in stack.names] == list(stack.blocks)
    return {stack.name: list(stack.names) for stack in stacks}


class Block(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = nn.ModuleList(layers)


class OtherBlock(Block):
    pass


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{i}" for i in range(count)]


def test_a_llama_has_one_stack_of_its_decoder_layers():
    assert stacks_of(tiny_llama(num_hidden_layers=3)) == {"model.layers": numbered("model.layers", 3)}


def test_a_single_layer_is_a_stack_as_well():
    assert stacks_of(tiny_llama(num_hidden_layers=1)) == {"model.layers": ["model.layers.0"]}


def test_an_encoder_decoder_has_two_stacks():
    config = T5Config(num_layers=2, num_decoder_layers=3, d_model=16, d_ff=16, d_kv=8, num_heads=2, vocab_size=20)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    assert stacks_of(model) == {
        "encoder.block": numbered("encoder.block", 2),
        "decoder.block": numbered("decoder.block", 3),
    }


def test_the_stages_of_a_resnet_are_stacks_of_residual_blocks():
    config = ResNetConfig(hidden_sizes=[8, 16], depths=[2, 3], embedding_size=8, layer_type="basic")
    with torch.device("meta"):
        model = ResNetForImageClassification(config)
    assert stacks_of(model) == {
        "resnet.encoder.stages.0.layers": numbered("resnet.encoder.stages.0.layers", 2),
        "resnet.encoder.stages.1.layers": numbered("resnet.encoder.stages.1.layers", 3),
    }


def test_stages_that_hold_more_than_their_inner_blocks_are_the_blocks_themselves():
    """Swin's stages end in a projection of their own, which must not be left out of the walk."""
    with torch.device("meta"):
        model = SwinForImageClassification(SwinConfig(embed_dim=8, depths=[2, 2], num_heads=[2, 2]))
    assert stacks_of(model) == {"swin.encoder.layers": numbered("swin.encoder.layers", 2)}


def test_fused_experts_do_not_change_what_a_block_is():
    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=20, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    assert stacks_of(model) == {"model.layers": numbered("model.layers", 2)}


def test_a_list_of_experts_inside_a_block_is_no_stack_of_its_own():
    model = nn.ModuleDict({"layers": nn.ModuleList(Block(Block(), Block(), Block()) for _ in range(2))})
    assert stacks_of(model) == {"layers": ["layers.0", "layers.1"]}


def test_nested_lists_that_hold_everything_are_the_stacks():
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert stacks_of(nn.ModuleDict({"stages": stages})) == {
        "stages.0": ["stages.0.0", "stages.0.1"],
        "stages.1": ["stages.1.0", "stages.1.1"],
    }


def test_a_plain_mlp_is_one_block():
    assert stacks_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == {"": [""]}


def test_a_sequential_of_blocks_is_a_stack():
    assert stacks_of(nn.Sequential(Block(), Block())) == {"": ["0", "1"]}


def test_a_list_of_single_layers_beside_a_stack_is_no_stack():
    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3)),
            "layers": nn.ModuleList([Block(), Block()]),
            "heads": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
        }
    )
    assert stacks_of(model) == {"layers": ["layers.0", "layers.1"]}


def test_a_mixed_list_is_a_stack_if_every_child_is_a_whole_block():
    assert stacks_of(nn.ModuleDict({"layers": nn.ModuleList([Block(), OtherBlock(), Block()])})) == {
        "layers": numbered("layers", 3)
    }
    mixed_with_a_layer = nn.ModuleList([Block(), nn.Linear(8, 8)])
    assert stacks_of(nn.ModuleDict({"layers": mixed_with_a_layer})) == {"": [""]}


def test_children_without_prunable_layers_are_no_blocks():
    layers = nn.ModuleList([Block(), nn.LayerNorm(8), Block()])
    assert stacks_of(nn.ModuleDict({"layers": layers})) == {"layers": ["layers.0", "layers.2"]}


def test_attention_read_by_its_parent_makes_a_block():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert stacks_of(nn.TransformerEncoder(layer, 2)) == {"layers": ["layers.0", "layers.1"]}


def test_a_model_without_layers_has_no_stack():
    assert stacks_of(nn.Sequential(nn.ReLU(), nn.LayerNorm(4))) == {}
