"""Sparse training must find what matters: 16 of 256 inputs do, and only 2 % of the first layer may be live."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelopt_sparse import training
from tests.training.cases import take_step

pytestmark = pytest.mark.slow
INPUTS, TRUE, HIDDEN, LEVEL, STEPS = 256, 16, 64, 0.98, 800


class Task:
    """y = tanh(x A) B of 16 of the inputs; fresh batches; the error is relative to the variance of y."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.true = torch.randperm(INPUTS, generator=generator)[:TRUE]
        self.a = torch.randn(TRUE, 32, generator=generator) / 4
        self.b = torch.randn(32, 8, generator=generator) / 5.6
        self.generator = generator

    def batch(self, size: int):
        x = torch.randn(size, INPUTS, generator=self.generator)
        return x, (x[:, self.true] @ self.a).tanh() @ self.b

    def error(self, model: nn.Module) -> float:
        x, y = self.batch(4096)
        with torch.no_grad():
            return float(F.mse_loss(model(x), y) / y.var())


def trained(build, hidden: int = HIDDEN):
    """-> the error, and the share of live weights that lie on true inputs."""
    torch.manual_seed(0)
    task = Task()
    model = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    if build is not None:
        sparsity = build()
        sparsity.apply(model)
        sparsity.apply(optimizer)
    for _ in range(STEPS):
        x, y = task.batch(64)
        take_step(F.mse_loss(model(x), y), optimizer)
    live = model[0].weight != 0
    return task.error(model), float(live[:, task.true].sum() / live.sum())


OPTIONS = {"include": "0.weight", "update": {"freq": 10, "stop": 600}, "drop_fraction": training.Cosine(0.3, 600)}
LIVE = INPUTS * HIDDEN - round(LEVEL * INPUTS * HIDDEN)
SMALL = math.ceil(LIVE / INPUTS)  # a dense model of this many hidden units has at least as many weights


def test_planted_support():
    static, by_chance = trained(lambda: training.Static(LEVEL, include="0.weight"))
    evolved, _ = trained(lambda: training.SET(LEVEL, **OPTIONS))
    rigged, on_true = trained(lambda: training.RigL(LEVEL, **OPTIONS))
    small, _ = trained(None, hidden=SMALL)
    assert by_chance <= 0.12
    assert rigged <= 0.4 * static
    assert evolved <= 0.5 * static
    assert on_true >= 0.6
    assert rigged < small
