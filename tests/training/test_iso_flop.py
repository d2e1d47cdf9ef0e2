"""Sparse-IFT: sizes and levels of models of transformers against golden values, FLOPs, what is refused; members against
layers written out, and merged into one layer again; Sparse Wide for plain modules."""

import json
from collections import OrderedDict
from functools import partial

import pytest
import torch
import transformers as hf
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.training.iso_flop.members import member_of, rebuilt, widened
from tests.helpers import TESTBED, refused, tiny_llama, token_batches
from tests.models.tricky import Parts
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


class Odd(nn.Module):
    """A model of which one part is what Sparse Wide cannot know."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        parts = {"token": nn.Parameter(torch.zeros(6)), "attention": nn.MultiheadAttention(6, 2)}
        parts |= {"unused": nn.Linear(6, 2), "norm": nn.LayerNorm((3, 6))}
        if kind in parts:
            setattr(self, kind, parts[kind])

    def forward(self, x):
        x = self.middle(self.first(x).relu())
        if self.kind == "view":
            x = x.view(-1, 3, 6).flatten(0, 1)
        return (self.last(x), x.relu()) if self.kind == "features" else self.last(x)


ODD = {
    "token": r"'Odd' \(Odd with 'token'\)",
    "attention": r"'attention' \(MultiheadAttention with 'in_proj_weight'\)",
    "unused": "the example does not reach unused",
    "norm": r"'norm' is normalized over \[3, 6\]",
    "view": "does not run when its layers are wider",
    "features": r"gives \[\(3, 4\), \(3, 12\)\] instead of \[\(3, 4\), \(3, 6\)\]",
}
ZEROS = {"example": torch.zeros(3, 4)}
ON_META = {"example": {"input_ids": torch.zeros(1, 8, dtype=torch.long)}}
GLOBS = ("nothing.*", "blocks", "default")
SEVENTHS = {"member": "doped", "rule": lambda level: training.Static(level, balance_out_groups=7)}


REFUSED = [
    *((partial(Odd, kind), 0.75, ZEROS, match) for kind, match in ODD.items()),
    (lambda: nn.Sequential(nn.Linear(4, 4)), 0.75, ZEROS, "its first layer is its last"),
    (lambda: Odd("").to("meta"), 0.75, ZEROS, "on the meta device"),
    (tiny_llama, 1.0, {}, r"sparsity=1.0: must be a number in \[0, 1\)"),
    (tiny_llama, 0.5, {"member": "wider"}, "allowed are 'wide', 'parallel', 'factorized', 'doped'"),
    (tiny_llama, 0.5, {"iso": "flops"}, "allowed are 'layers', 'model'"),
    (lambda: nn.Linear(4, 4), 0.5, {"multiple": 0, "example": torch.zeros(1, 4)}, "multiple=0: must be a positive"),
    (tiny_llama, 0.6, {"member": "parallel"}, r"levels that work are 0.5 and 0.666667"),
    *((tiny_llama, 0.5, {"member": "doped", "include": x}, f"{x} matches no layer of this Llama") for x in GLOBS),
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
    refused(training.sparse_ift, model(), level, **options, match=match)


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
    refused(widened, config, 2**0.5, match=match)
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


# members -----------------------------------------------------------------------------------------------------------

with torch.device("meta"):
    SQUARE, TALL, CONV = nn.Linear(768, 768), nn.Linear(768, 3072), nn.Conv2d(64, 64, 3)


GOLDEN_RANKS = [
    # at 0.9 the released code has one more (3841, 6145, 577): it divides by 0.0999..., and these are whole numbers
    (SQUARE, "factorized", (768, 1536, 3840)),
    (TALL, "factorized", (1229, 2458, 6144)),
    (CONV, "factorized", (116, 231, 576)),
    (SQUARE, "doped", (192, 288, 345)),
    (TALL, "doped", (307, 460, 552)),
    (CONV, "doped", (28, 43, 51)),
    (SQUARE, "parallel", (2, 4, 10)),
]


@pytest.mark.parametrize(("layer", "member", "ranks"), GOLDEN_RANKS)
def test_golden_ranks(layer, member, ranks):
    for level, rank in zip((0.5, 0.75, 0.9), ranks, strict=True):
        new, words, _, _ = member_of(layer, member, level, None)
        assert str(rank) in words.split()
        assert len(new.branches if member == "parallel" else new.first.weight) == rank


LAYERS = {
    "Linear": (lambda: nn.Linear(12, 20), (5, 12)),
    "Linear without a bias": (lambda: nn.Linear(12, 20, bias=False), (5, 12)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1, stride=2), (2, 6, 9)),
    "Conv2d": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (2, 6, 8, 8)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2, dilation=2), (1, 4, 5, 5, 5)),
}


def around(layer):
    """A layer in the middle of a model, so that it is neither the first nor the last one."""
    return nn.Sequential(OrderedDict(middle=layer))


def replaced(layer, level, member, **options):
    model = around(layer())
    ift = training.sparse_ift(model, level, member, include="middle", **options)
    assert ift.model is model
    return ift


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=list(LAYERS))
@pytest.mark.parametrize("level", [0.5, 0.75])
def test_members_compute_their_formula_at_the_same_flops(layer, shape, level):
    x = torch.randn(shape)
    dense = layer().weight.numel()
    for member in ("parallel", "factorized", "doped"):
        ift = replaced(layer, level, member)
        new = ift.model.middle
        if member == "parallel":
            theirs = sum(branch(x).relu() for branch in new.branches)
        elif member == "factorized":
            theirs = new.second(new.first(x).relu())
        else:
            theirs = new.sparse(x) + new.second(new.first(x))
        ours = new(x)
        torch.testing.assert_close(ours, theirs)
        assert ours.shape == layer()(x).shape
        grads = [torch.autograd.grad(y.square().sum(), list(new.parameters())) for y in (ours, theirs)]
        torch.testing.assert_close(*grads)
        ift.sparsity.apply(ift.model)
        masks = dict(named_masks(ift.model))
        weights = {name: p for name, p in ift.model.named_parameters() if p.dim() > 1}
        live = sum(int(masks.get(name, p != torch.inf).sum()) for name, p in weights.items())
        assert live == ift.plan.layers[0].live
        assert abs(live - dense) <= len(masks), "each mask is rounded once"
        assert all(("sparse" in name) or member != "doped" for name in masks)


def test_an_example_is_counted_where_torch_has_one_operator_for_a_whole_block():
    model = around(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    ift = training.sparse_ift(model, 0.5, "doped", include="middle.linear1", example=torch.randn(2, 5, 16))
    assert [layer.uses for layer in ift.plan.layers] == [10], "as often as there are tokens"


@pytest.mark.parametrize("member", ["parallel", "factorized", "doped"])
def test_level_zero_is_the_dense_layer(member):
    ift, x = replaced(lambda: nn.Linear(12, 20), 0.0, member), torch.randn(3, 12)
    middle = ift.model.middle
    torch.testing.assert_close(middle(x), (middle.branches[0] if member == "parallel" else middle)(x))
    assert (ift.plan.ratio, len(ift.sparsity)) == (1.0, 0)


def test_by_default_mlps_and_convolutions_are_replaced_and_attention_is_not():
    ift = training.sparse_ift(tiny_llama(), 0.5, "doped")
    names = {layer.name for layer in ift.plan.layers}
    assert names == {f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")}
    reasons = {skipped.name: skipped.reason for skipped in ift.plan.skipped}
    assert reasons["model.layers.0.self_attn.q_proj.weight"] == "a projection of attention"
    asked = training.sparse_ift(tiny_llama(), 0.5, "doped", include="*.q_proj")
    assert {layer.name for layer in asked.plan.layers} == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 3))
    ift = training.sparse_ift(plain, 0.5, "parallel")
    assert [layer.name for layer in ift.plan.layers] == ["1"]
    reasons = {skipped.name: skipped.reason for skipped in ift.plan.skipped if "weight" in skipped.name}
    outermost = dict.fromkeys(["0.weight", "3.weight"], "the first or the last layer")
    assert reasons == outermost | {"2.weight": "a grouped convolution"}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_what_is_linear_folds_into_one_layer_and_the_rest_is_named(layer, shape):
    x = torch.randn(shape)
    for member, activation in (("doped", nn.ReLU), ("parallel", None), ("factorized", None)):
        ift = replaced(layer, 0.5, member, activation=activation)
        ift.sparsity.apply(ift.model)
        assert training.fold(ift.model) == ["middle"]
        mts.export(ift.model)
        before = ift.model(x)
        assert training.fold(ift.model) == []
        assert type(ift.model.middle) is type(layer())
        torch.testing.assert_close(ift.model(x), before, rtol=1e-4, atol=1e-5)
    for member in ("parallel", "factorized"):
        assert training.fold(replaced(layer, 0.5, member).model) == ["middle"]


# Sparse Wide for plain modules --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """As for CIFAR-100: a stem of 3 x 3, four stages of two blocks, pixels averaged."""

    def __init__(self, width):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.Sequential(*(Block(*each) for each in zip(widths, widths[1:], [1, 1, 2, 1, 2, 1, 2, 1])))
        self.head = nn.Linear(8 * width, 100)

    def forward(self, x):
        return self.head(self.blocks(self.bn(self.stem(x)).relu()).mean((2, 3)))


IMAGE = torch.zeros(1, 3, 32, 32)


def test_golden_flops_of_resnet18():
    """Multiplications 555,468,800; twice as wide 1.0033 times as many, solved again 0.7508 (Sparse-IFT's own code)."""
    resnet = ResNet18(64)
    ift = training.sparse_ift(resnet, 0.75, example=IMAGE)
    assert (ift.plan.flops[0], ift.plan.ratio) == (2 * 555_468_800, 1.0)
    assert ift.plan.model_ratio == pytest.approx(1.0033, abs=5e-5)
    whole = training.sparse_ift(resnet, 0.75, example=IMAGE, iso="model")
    assert {round(layer.level, 4) for layer in whole.plan.layers} == {0.7508}
    assert whole.plan.model_ratio == pytest.approx(1.0, abs=1e-5)
    assert {row.name for row in ift.plan.skipped if row.reason == "reads what the model reads"} == {"stem.weight"}
    heads = {row.name for row in ift.plan.skipped if row.reason == "makes what the model gives"}
    assert heads == {"head.weight", "head.bias"}


@pytest.mark.parametrize("level", [0.3, 0.5, 0.75, 0.9])
def test_the_wide_model_is_the_one_that_one_would_write_down(level):
    """The same class, written for its width, has the same parameters and FLOPs by torch's counter."""
    ift = training.sparse_ift(ResNet18(4), level, example=IMAGE)
    width = ift.model.stem.out_channels
    assert 4 * (1 / (1 - level)) ** 0.5 <= width < 4 * (1 / (1 - level)) ** 0.5 + 1
    theirs = ResNet18(width)
    assert {n: p.shape for n, p in ift.model.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert {n: b.shape for n, b in ift.model.named_buffers()} == {n: b.shape for n, b in theirs.named_buffers()}
    ift.sparsity.apply(ift.model)
    masks = dict(named_masks(ift.model))
    assert set(masks) == {layer.name for layer in ift.plan.layers}
    assert live_flops(ift.model, masks, IMAGE) == pytest.approx(live_flops(ResNet18(4), masks, IMAGE), rel=5e-3)


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, group norm, a flattened image, and two heads."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm = nn.GroupNorm(3, 12)
        self.grouped = nn.Conv2d(12, 24, 1, groups=2)
        self.slope = nn.PReLU()
        self.dense = nn.Linear(24 * 16, 36)
        self.normed = nn.LayerNorm(36)
        self.left, self.right = nn.Linear(36, 5), nn.Linear(36, 2)

    def forward(self, x, scale=1.0):
        x = self.grouped(self.norm(self.depthwise(self.stem(x * 1.0))))
        x = self.normed(self.dense(self.slope(x).flatten(1))) * scale
        return {"left": self.left(x), "right": self.right(x)}


def test_groups_grow_where_they_are_channels_and_stay_where_they_are_not():
    x = torch.randn(2, 3, 4, 4)
    ift = training.sparse_ift(Mobile(), 0.5, example={"x": x, "scale": 2.0})
    wide = ift.model
    assert wide.stem.out_channels == 18, "17 / 12 would keep 12, 24, 36 whole, and 3 and 2 groups need a multiple of 6"
    assert wide.depthwise.groups == wide.depthwise.in_channels == 18
    assert (wide.norm.num_groups, wide.grouped.groups) == (3, 2)
    assert (wide.dense.in_features, wide.dense.out_features) == (24 * 16 * 1.5, 54)
    assert wide.normed.normalized_shape == (54,)
    assert (wide.left.out_features, wide.right.out_features, wide.left.in_features) == (5, 2, 54)
    assert wide(x)["right"].shape == (2, 2)
    levels = {layer.name: layer.level for layer in ift.plan.layers}
    assert levels["dense.weight"] == pytest.approx(1 - 1 / 1.5**2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.again = self.up
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.down(self.up(x).relu()))
        x = self.norm(x + self.down(self.again(x).relu()))
        return self.head(x)


def test_shared_modules_and_tied_weights_stay_shared():
    model = Tied()
    ift = training.sparse_ift(model, 0.75, multiple=4, example=torch.arange(6)[None])
    wide = ift.model
    assert wide.again is wide.up
    assert wide.head.weight is wide.embed.weight
    assert wide.embed.weight.shape == (50, 16)
    assert {layer.name for layer in ift.plan.layers} == {"up.weight", "down.weight"}
    assert ift.plan.layers[0].uses == 12, "two calls of six tokens"
    assert model.embed.weight.shape == (50, 8), "the model is left as it was"


MODULES = [
    nn.Linear(3, 4, bias=False),
    nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=2, padding_mode="reflect"),
    nn.ConvTranspose1d(4, 6, 3, output_padding=1, stride=2, bias=False),
    nn.BatchNorm2d(4, eps=1e-3, momentum=None, affine=False),
    nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    nn.LayerNorm(4, eps=1e-3, bias=False),
    nn.RMSNorm(4, eps=1e-3),
    nn.GroupNorm(2, 4, affine=False),
    nn.Embedding(5, 4, padding_idx=1, max_norm=2.0),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_a_module_is_rebuilt_with_all_of_its_settings(module):
    again = rebuilt(module.double().eval())
    assert repr(again) == repr(module)
    state, now = ({name: (x.shape, x.dtype) for name, x in each.state_dict().items()} for each in (module, again))
    assert state == now
    for name in ("eps", "momentum", "padding_idx", "output_padding", "affine", "training"):
        assert getattr(again, name, None) == getattr(module, name, None)


def u_net(m, x):
    x = m.stem(x).relu()
    return m.head(m.merge(torch.cat([m.up(m.down(x).relu()), x], 1)).relu())


def test_transposed_convolutions_count_among_the_flops():
    example = torch.randn(2, 3, 8, 8)
    convs = {"stem": nn.Conv2d(3, 8, 3, padding=1), "down": nn.Conv2d(8, 16, 3, stride=2, padding=1)}
    convs |= {"up": nn.ConvTranspose2d(16, 8, 2, stride=2), "merge": nn.Conv2d(16, 8, 1), "head": nn.Conv2d(8, 3, 1)}
    ift = training.sparse_ift(model := Parts(u_net, **convs), 0.5, iso="model", example=example)
    ift.sparsity.apply(ift.model)
    flops = training.cost(model, example).dense.inference, training.cost(ift.model, example).sparse.inference
    assert ift.plan.flops == pytest.approx(flops)
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
