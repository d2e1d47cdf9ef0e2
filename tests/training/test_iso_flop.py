"""Sparse-IFT of models of transformers: sizes and levels against golden values, FLOPs, what is refused."""

import json

import pytest
import torch
import transformers as hf
from torch import nn

from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.training.iso_flop.members import widened
from tests.helpers import TESTBED, tiny_llama, token_batches
from tests.training.cases import applied, live_flops, take_step


def gpt2():
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config())
    model.tie_weights()  # older versions of transformers do not do so on the meta device
    return model


def trained_size():
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(TESTBED / "tiny-llama"))


def level_of(ift):
    (level,) = {layer.level for layer in ift.plan.layers}
    return level


# wide: golden sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "level", "width", "of_layers", "of_model"),
    [(gpt2, 0.5, 1092, 0.5054, 0.6002), (gpt2, 0.75, 1536, 0.75, 0.8636), (trained_size, 0.75, 256, 0.75, 0.8056)],
)
def test_golden_sizes_and_levels(make, level, width, of_layers, of_model):
    ift = training.sparse_ift(make(), level)
    assert ift.model.config.hidden_size == width
    if make is gpt2:
        assert ift.model.transformer.h[0].mlp.c_fc.weight.shape == (width, 4 * width)
    assert level_of(ift) == pytest.approx(of_layers, abs=5e-5)
    assert level_of(training.sparse_ift(make(), level, iso="model")) == pytest.approx(of_model, abs=5e-5)


QWEN3 = hf.Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128)
BASIC = hf.ResNetConfig(hidden_sizes=[5, 15], depths=[1, 1], layer_type="basic")
CONFIGS = {  # config, level -> sizes that come out
    "llama": (hf.LlamaConfig(), 0.5, {"hidden_size": 5824, "head_dim": 182, "intermediate_size": 15652}),
    "qwen3": (QWEN3, 0.75, {"hidden_size": 2048, "head_dim": 256}),
    "opt": (hf.OPTConfig(), 0.5, {"hidden_size": 1092, "ffn_dim": 4368, "word_embed_proj_dim": 1092}),
    "bert": (hf.BertConfig(), 0.5, {"hidden_size": 1092, "intermediate_size": 4368}),
    "t5": (hf.T5Config(), 0.75, {"d_model": 1024, "d_kv": 128, "d_ff": 4096}),
    "vit": (hf.ViTConfig(), 0.75, {"hidden_size": 1536, "intermediate_size": 6144}),
    "resnet": (hf.ResNetConfig(), 0.75, {"embedding_size": 128, "hidden_sizes": [512, 1024, 2048, 4096]}),
    "resnet without bottlenecks": (BASIC, 8 / 9, {"hidden_sizes": [15, 45]}),
    "swin": (hf.SwinConfig(), 0.5, {"embed_dim": 138, "hidden_size": 1104}),
}


@pytest.mark.parametrize(("config", "level", "sizes"), CONFIGS.values(), ids=list(CONFIGS))
def test_sizes_of_other_models(config, level, sizes):
    wide = widened(config, (1 / (1 - level)) ** 0.5)
    assert {name: getattr(wide, name) for name in sizes} == sizes
    assert type(wide) is type(config)


def test_hardware_multiples():
    assert widened(hf.GPT2Config(), 2**0.5, 64).n_embd == 1152
    assert widened(hf.LlamaConfig(), 2**0.5, 128).intermediate_size % 128 == 0


def tiny(config, **sizes):
    return hf.AutoModelForCausalLM.from_config(config(vocab_size=97, **sizes))


TINY = {
    "llama": tiny_llama,
    "qwen3": lambda: tiny(
        hf.Qwen3Config, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    ),
    "gpt2": lambda: tiny(hf.GPT2Config, n_embd=24, n_head=3, n_layer=2, n_positions=32),
    "opt": lambda: tiny(
        hf.OPTConfig, hidden_size=24, ffn_dim=40, num_attention_heads=3, num_hidden_layers=2, word_embed_proj_dim=24,
        max_position_embeddings=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("level", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("name", list(TINY))
def test_flops_of_sparse_layers_are_those_of_the_dense_ones(name, level):
    """By torch's counter of each module, times the live share of its weight."""
    dense = TINY[name]()
    ift = training.sparse_ift(dense, level)
    ift.sparsity.apply(ift.model)
    names = [layer.name for layer in ift.plan.layers]
    before, after = (live_flops(model, names, input_ids=token_batches(1)[0]) for model in (dense, ift.model))
    assert after == pytest.approx(before, rel=5e-3)
    assert ift.plan.ratio == pytest.approx(1.0, abs=5e-3)
    assert ift.plan.model_ratio > 1, "the head is wider, and dense"
    assert training.sparse_ift(dense, level, iso="model").plan.model_ratio == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize(
    ("model", "example"),
    [(tiny_llama(), None), (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(1, 4))],
)
def test_level_zero_is_the_dense_model(model, example):
    ift = training.sparse_ift(model, 0.0, example=example)
    assert str(ift.model) == str(model)
    assert (level_of(ift), len(ift.sparsity), ift.plan.model_ratio) == (0.0, 0, 1.0)


RULES = {  # rule -> how many steps it takes to its level
    "static": (training.Static, 0),
    "row": (lambda level: training.Static(level, scope="row"), 0),
    "column groups": (lambda level: training.SET(level, balance_in_groups=2), 0),
    "row groups": (lambda level: training.RigL(level, balance_out_groups=2), 0),
    "pattern": (lambda level: training.Static(pattern="1:2"), 0),
    "erk": (lambda level: training.Static(level, distribution="erk"), 0),
    "left out": (lambda level: training.Static(level, exclude=["*.0.*gate_proj*"]), 0),
    "gradual": (lambda level: training.GMP(training.Cubic(0, level, 0, 2), scope="row", update=1), 3),
}


@pytest.mark.filterwarnings("ignore:.*takes every parameter")
@pytest.mark.parametrize("member", ["wide", "parallel", "factorized", "doped"])
@pytest.mark.parametrize(("rule", "steps"), RULES.values(), ids=list(RULES))
def test_what_is_printed_are_the_live_weights_of_the_model(member, rule, steps):
    """In each layer, and in all, whatever the rule rounds by."""
    dense = tiny_llama()
    before = {name: parameter.numel() for name, parameter in dense.named_parameters()}
    level = 0.75 if member == "factorized" else 0.5  # ranks of 86, which two groups share, and not of 43
    ift = training.sparse_ift(dense, level, member, rule=rule)
    optimizer = applied(ift.sparsity, ift.model, lr=0.0)
    for ids in token_batches(steps):
        take_step(ift.model(input_ids=ids, labels=ids).loss, optimizer)
    masks = dict(named_masks(ift.model))
    live = {name: int(masks.get(name, p != torch.inf).sum()) for name, p in ift.model.named_parameters() if p.dim() > 1}
    counted = {
        layer.name: sum(n for name, n in live.items() if f"{name}.".startswith(f"{layer.name}."))
        for layer in ift.plan.layers
    }
    assert {layer.name: layer.live for layer in ift.plan.layers} == counted
    names = [name for name in before if any(f"{name}.".startswith(f"{layer}.") for layer in counted)]
    ratio = sum(counted.values()) / sum(before[name] for name in names)
    assert f"sparse layers {ratio:.4f} times dense" in str(ift.plan)


# what is refused ----------------------------------------------------------------------------------------------------


ON_META = {"example": {"input_ids": torch.zeros(1, 8, dtype=torch.long)}}
SEVENTHS = {"member": "doped", "rule": lambda level: training.Static(level, balance_out_groups=7)}


REFUSED = [
    (tiny_llama, 1.0, {}, r"sparsity=1.0: must be a number in \[0, 1\)"),
    (tiny_llama, 0.5, {"member": "wider"}, "allowed are 'wide', 'parallel', 'factorized', 'doped'"),
    (tiny_llama, 0.5, {"iso": "flops"}, "allowed are 'layers', 'model'"),
    (lambda: nn.Linear(4, 4), 0.5, {"multiple": 0, "example": torch.zeros(1, 4)}, "multiple=0: must be a positive"),
    (tiny_llama, 0.6, {"member": "parallel"}, r"levels that work are 0.5 and 0.666667"),
    (tiny_llama, 0.5, {"member": "doped", "include": "*.nothing"}, "matches no layer"),
    (tiny_llama, 0.5, {"include": "*.mlp.*"}, "Sparse Wide widens the whole model"),
    (tiny_llama, 0.5, {"member": "doped", "iso": "model"}, "are for 'wide'"),
    (tiny_llama, 0.5, {"member": "parallel", "activation": "ReLU"}, "activation='ReLU': give a class such as"),
    (tiny_llama, 0.5, SEVENTHS, "cannot be divided into 7 equal groups"),
    (tiny_llama, 0.5, {"rule": training.Static(0.5)}, "rule is a function of the level: rule=lambda level: Static"),
    (lambda: tiny_llama().to("meta"), 0.5, ON_META, r"run on the meta device.*leave example out"),
    (lambda: tiny_llama(vocab_size=4000), 0.9, {"iso": "model"}, "cost more than the model did"),  # of a large head
    (lambda: nn.Linear(4, 4), 0.5, {}, r"no model of transformers.*: give example="),
    (hf.LlamaConfig, 0.5, {"member": "doped"}, "build it from the config first"),
    (hf.LlamaConfig, 0.5, {}, "'llama' names no model class"),
    (lambda: nn.Sequential(nn.LayerNorm(4)), 0.5, {"member": "doped"}, "nothing to prune|no layer of this"),
]


@pytest.mark.parametrize(("model", "level", "options", "match"), REFUSED)
def test_what_is_refused(model, level, options, match):
    """And the model is left as it was."""
    model = model()
    before = str(model)
    with pytest.raises(ValueError, match=match):
        training.sparse_ift(model, level, **options)
    assert str(model) == before


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
ROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LAMA = type("Lama", (hf.LlamaConfig,), {"model_type": "lama"})
LISTED = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128, "rope_parameters": ROPE}


NO_FIT = [
    (LAMA(), "the sizes of 'lama' are not known, did you mean 'llama'"),
    (hf.GPT2Config(n_embd=100, n_head=12), r"n_embd=100 is no multiple of n_head=12, as 108 would be"),
    (hf.Phi3Config(**LISTED), r"holds a list, which does not fit heads of \d+: choose another member"),
]


@pytest.mark.parametrize(("config", "match"), NO_FIT)
def test_sizes_that_no_level_fits_are_refused(config, match):
    with pytest.raises(ValueError, match=match):
        widened(config, 2**0.5)
    assert widened(hf.Phi3Config(**LISTED), 1.0).hidden_size == 64


def test_a_plan_goes_into_json():
    plan = training.sparse_ift(gpt2(), 0.5).plan
    values = json.loads(plan.to_json())
    assert values["parameters"] == 124439808
    pruned = sum(layer["new_weights"] - layer["live"] for layer in values["layers"])
    assert values["live_parameters"] == plan.new_parameters - pruned
    assert values["flops"] == [2 * sum(x["weights"] for x in values["layers"]) + 2 * plan.other, plan.flops[1]]


def test_the_stem_of_a_resnet_stays_as_wide_as_its_first_stage():
    model = hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]))
    wide = training.sparse_ift(model, 0.5, example={"pixel_values": torch.randn(1, 3, 32, 32)}).model
    assert [name for name, _ in wide.named_parameters()] == [name for name, _ in model.named_parameters()]
