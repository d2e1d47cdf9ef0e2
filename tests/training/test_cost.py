"""What sparse weights cost, against numbers counted by hand."""

import pytest
import torch
from torch import nn

from modelopt_sparse import training
from tests.helpers import tiny_llama, token_batches
from tests.training.cases import Zoo, batch


def test_two_layers_by_hand():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    training.Static(0.75, include="0.weight").apply(model)
    cost = training.cost(model, torch.randn(3, 10))
    assert cost.dense.weights == 10 * 20 + 20 + 20 * 5 + 5
    assert cost.sparse.weights == cost.dense.weights - 150
    assert cost.dense.inference == 2 * 3 * (200 + 100)
    assert cost.sparse.inference == 2 * 3 * (50 + 100)
    assert cost.dense.training == 3 * cost.dense.inference
    assert cost.sparse.training == 3 * cost.sparse.inference
    assert cost.dense.bytes == 200 * 4
    assert cost.sparse.bytes == 50 * (4 + 4) + 21 * 4, "values and columns, and where rows begin"
    with_rigl = training.cost(model, torch.randn(3, 10), dense_every=100)
    sparse, dense = cost.sparse.inference, cost.dense.inference
    assert with_rigl.sparse.training == pytest.approx((3 * sparse * 99 + 2 * sparse + dense) / 100)
    text = str(cost)
    assert "products stay dense" in text
    assert "50.0%" in text


def test_a_language_model_counts_attention_and_head_as_dense():
    model = tiny_llama()
    ids = token_batches(1)[0]
    before = training.cost(model, input_ids=ids)
    assert before.sparse.inference == before.dense.inference
    training.Static(0.5, include="blocks").apply(model)
    after = training.cost(model, input_ids=ids)
    blocks = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    assert after.dense.inference == before.dense.inference
    assert before.dense.inference - after.sparse.inference == 2 * ids.numel() * blocks // 2
    assert after.dense.weights - after.sparse.weights == blocks // 2


def test_experts_are_counted_by_both_of_their_weights():
    """Of fused experts two weights lie in one module, and torch counts its FLOPs as one."""
    model, tokens = Zoo(), batch(0)
    dense = training.cost(model, tokens).dense.inference
    training.Static(0.5, include="experts.experts.*").apply(model)
    cost = training.cost(model, tokens)
    experts = 2 * 2 * tokens.numel() * (16 * 8 + 8 * 8)
    assert cost.dense.inference == dense
    assert dense - cost.sparse.inference == experts // 2


def test_convolutions_and_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    model.append(nn.Conv2d(4, 4, 3, padding=1))
    model[2].weight = model[1].weight
    training.Static(0.5, include="1.weight").apply(model)
    cost = training.cost(model, torch.randn(2, 3, 8, 8))
    per_layer = 2 * 2 * 64 * 4 * 4 * 9
    assert cost.dense.inference == 2 * 2 * 64 * 3 * 4 * 9 + 2 * per_layer
    assert cost.dense.inference - cost.sparse.inference == per_layer
    assert cost.dense.weights - cost.sparse.weights == 72
