"""What sparse weights cost, against numbers counted by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modelopt_sparse as mts
from modelopt_sparse import training
from tests.helpers import assert_same_state, state_of, tiny_llama, token_batches
from tests.models.tricky import Parts
from tests.training.cases import mixture


def test_two_layers_by_hand():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    training.Static(0.75, include="0.weight").apply(model)
    cost = training.cost(model, torch.randn(3, 10))
    weights, dense, sparse = 10 * 20 + 20 + 20 * 5 + 5, 2 * 3 * (200 + 100), 2 * 3 * (50 + 100)
    assert (cost.dense.weights, cost.dense.inference, cost.dense.training) == (weights, dense, 3 * dense)
    assert (cost.sparse.weights, cost.sparse.inference, cost.sparse.training) == (weights - 150, sparse, 3 * sparse)
    assert cost.dense.bytes == 200 * 4
    assert cost.sparse.bytes == 50 * (4 + 4) + 21 * 4, "values and columns, and where rows begin"
    with_rigl = training.cost(model, torch.randn(3, 10), dense_every=100)
    assert with_rigl.sparse.training == pytest.approx((3 * sparse * 99 + 2 * sparse + dense) / 100)
    assert "FLOPs of a forward 1,800 900 50.0%" in " ".join(str(cost).split())
    with pytest.raises(ValueError, match="dense_every=0: must be a positive whole number"):
        training.cost(model, torch.randn(3, 10), dense_every=0)


def test_a_language_model_counts_attention_and_head_as_dense():
    model, (ids,) = tiny_llama(), token_batches(1)
    before = training.cost(model, input_ids=ids)
    assert before.sparse.inference == before.dense.inference
    training.Static(0.5, include="blocks").apply(model)
    after = training.cost(model, input_ids=ids)
    blocks = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    assert after.dense.inference == before.dense.inference
    assert before.dense.inference - after.sparse.inference == 2 * ids.numel() * blocks // 2
    assert after.dense.weights - after.sparse.weights == blocks // 2


LINEAR = nn.Linear(16, 16, bias=False)


def tied_convolutions():
    model = nn.Sequential(*(nn.Conv2d(inputs, 4, 3, padding=1) for inputs in (3, 4, 4)))
    model[2].weight = model[1].weight
    return model


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 16)), nn.Parameter(torch.randn(16, 64))

    def forward(self, x):
        return F.linear(F.linear(x, self.up).relu(), self.down)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


PRODUCTS = {
    "two weights": (TwoWeights(), ["*"], (32, 16), {"up": 32 * 1024, "down": 32 * 1024}),
    "one of two": (TwoWeights(), ["up"], (32, 16), {"up": 32 * 1024, "down": 32 * 1024}),
    "batch norm": (nn.Sequential(LINEAR, nn.BatchNorm1d(16)), ["0.weight"], (32, 16), {"0.weight": 32 * 256}),
    "tied": (tied_convolutions(), ["1.weight"], (2, 3, 8, 8), {"0": 2 * 64 * 108, "1.weight": 2 * 2 * 64 * 144}),
    "attention": (
        *(Attention(32, 4, batch_first=True), ["in_proj_weight", "out_proj.weight"], (2, 16, 32)),
        {"in_proj_weight": 32 * 3 * 1024, "out_proj.weight": 32 * 1024, "": 2 * 2 * 16 * 16 * 32},
    ),
}


@pytest.mark.parametrize(("model", "include", "shape", "products"), PRODUCTS.values(), ids=list(PRODUCTS))
def test_each_weight_of_a_module_is_counted_by_itself(model, include, shape, products):
    """2 x positions x live weights, also where one module holds several products; statistics stay as they are."""
    sparsity = training.Static(0.5, include=include)
    model = sparsity.apply(copy.deepcopy(model))
    before = state_of(model)
    cost = training.cost(model, torch.randn(shape))
    assert cost.dense.inference == 2 * sum(products.values())
    sparse = [name for name in products if name in dict(mts.named_masks(model))]
    assert cost.dense.inference - cost.sparse.inference == sum(products[name] for name in sparse)
    pruned = sum(int((~sparse.mask).sum()) for sparse in sparsity.sparse_params.values())
    assert cost.dense.weights - cost.sparse.weights == pruned
    assert not cost.uncounted
    assert_same_state(model, before)
    assert model.training


@pytest.mark.filterwarnings("ignore:Static takes every parameter")
def test_a_sparse_bias_is_no_product():
    costs = []
    for include in (["*.weight"], None):
        model = nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 8, 4))
        training.Static(0.75, include=include).apply(model)
        costs.append(training.cost(model, torch.randn(8, 64)).sparse.inference)
    assert costs == [2 * 8 * (64 * 64 + 8 * 61 * 4) / 4] * 2


def test_what_is_not_counted_is_named():
    net = Parts(lambda m, ids: m.rnn(m.embed(ids))[0], embed=nn.Embedding(9, 8), rnn=nn.LSTM(8, 8))
    model = training.Static(0.5, include="embed.weight").apply(net)
    cost = training.cost(model, torch.zeros(3, 2, dtype=torch.long))
    assert cost.uncounted == ("aten.mkldnn_rnn_layer", "embed.weight")
    assert "Not counted: aten.mkldnn_rnn_layer; embed.weight" in str(cost)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_are_counted_by_both_of_their_weights_however_they_run(implementation):
    """Of fused experts two weights lie in one module, and torch counts its FLOPs as one."""
    model = training.Static(0.5, include="experts.*", scope="row").apply(mixture(16, 1.0, implementation))
    cost = training.cost(model, torch.randn(1, 8, 16))
    experts = 2 * 2 * 8 * (32 * 16 + 16 * 16)
    assert cost.dense.inference - cost.sparse.inference == experts // 2, cost
    assert cost.dense.inference == experts + 2 * 8 * 16 * 3
