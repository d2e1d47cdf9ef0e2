"""Members of Sparse-IFT against layers written out; which layers they replace; merged into one layer again."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.training.iso_flop.members import member_of
from tests.helpers import refused, tiny_llama

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


@pytest.mark.parametrize("include", ["blocks", "default"])
def test_include_takes_globs_alone(include):
    words = f"{include} matches no layer of this LlamaForCausalLM"
    refused(training.sparse_ift, tiny_llama(), 0.75, "doped", include=include, match=words)
