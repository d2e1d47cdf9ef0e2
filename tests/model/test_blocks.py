"""Where a model's layer stacks are found."""

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn

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


def on_meta(kind: type, config: hf.PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


def blocks(*kinds: type) -> nn.ModuleList:
    return nn.ModuleList(kind() for kind in kinds)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "vocab_size": 20}
    return on_meta(hf.T5ForConditionalGeneration, hf.T5Config(num_layers=2, num_decoder_layers=3, **sizes))


def resnet() -> nn.Module:
    config = hf.ResNetConfig(hidden_sizes=[8, 16], depths=[2, 3], embedding_size=8, layer_type="basic")
    return on_meta(hf.ResNetForImageClassification, config)


def swin() -> nn.Module:
    """Its stages end in a projection of their own, which must not be left out of the walk."""
    return on_meta(hf.SwinForImageClassification, hf.SwinConfig(embed_dim=8, depths=[2, 2], num_heads=[2, 2]))


def mixtral() -> nn.Module:
    """Fused experts do not change what a block is."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return on_meta(
        hf.MixtralForCausalLM, hf.MixtralConfig(num_hidden_layers=2, vocab_size=20, num_local_experts=2, **sizes)
    )


def beside_lists_of_single_layers() -> nn.Module:
    stem = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))
    heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return nn.ModuleDict({"stem": stem, "layers": blocks(Block, Block), "heads": heads})


def with_experts() -> nn.Module:
    """A list of experts inside of a block is no stack of its own."""
    return nn.ModuleDict({"layers": nn.ModuleList(Block(Block(), Block(), Block()) for _ in range(2))})


def with_a_norm() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.LayerNorm(8), Block()])})


def nested() -> nn.Module:
    return nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))})


# case -> (model, stack -> how many blocks it has, or their names)
STACKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int | list[str]]]] = {
    "llama": (lambda: tiny_llama(num_hidden_layers=3), {"model.layers": 3}),
    "a single layer": (lambda: tiny_llama(num_hidden_layers=1), {"model.layers": 1}),
    "encoder and decoder": (t5, {"encoder.block": 2, "decoder.block": 3}),
    "stages of residual blocks": (resnet, {f"resnet.encoder.stages.{i}.layers": 2 + i for i in range(2)}),
    "stages that hold more than blocks": (swin, {"swin.encoder.layers": 2}),
    "fused experts": (mixtral, {"model.layers": 2}),
    "a list of experts": (with_experts, {"layers": 2}),
    "nested lists that hold everything": (nested, {"stages.0": 2, "stages.1": 2}),
    "a plain MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), {"": [""]}),
    "a sequence of blocks": (lambda: nn.Sequential(Block(), Block()), {"": ["0", "1"]}),
    "lists of single layers": (beside_lists_of_single_layers, {"layers": 2}),
    "blocks of two kinds": (lambda: nn.ModuleDict({"layers": blocks(Block, OtherBlock, Block)}), {"layers": 3}),
    "a block and a layer": (lambda: nn.ModuleDict({"layers": nn.ModuleList([Block(), nn.Linear(8, 8)])}), {"": [""]}),
    "what is no block between": (with_a_norm, {"layers": ["layers.0", "layers.2"]}),
    # that its parent reads
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        {"layers": 2},
    ),
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), {}),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacks_are_found(case):
    build, expected = STACKS[case]
    names = {stack: numbered(stack, size) if isinstance(size, int) else size for stack, size in expected.items()}
    assert stacks_of(build()) == names
