"""One layer with correlated inputs, and what is best for it by slow and exact means. All in float64."""

import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.methods.patterns import parse_pattern
from tests.helpers import correlated_inputs

DAMPING = 0.01


def problem(seed: int, rows: int = 48, columns: int = 64) -> tuple[Tensor, Stats]:
    """A random weight and the statistics of correlated inputs."""
    x = correlated_inputs(4 * columns, columns, seed)
    gram = x.T @ x
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weight, Stats(len(x), gram.diagonal().clone(), gram)


def damped(stats: Stats, damping: float = DAMPING) -> Tensor:
    assert stats.gram is not None
    return stats.gram + damping * stats.gram.diagonal().mean() * torch.eye(len(stats.gram), dtype=torch.float64)


def exact_refit(weight: Tensor, mask: Tensor, gram: Tensor) -> Tensor:
    """The optimum on a support, row by row: q_S = H_SS^-1 (H w)_S."""
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(gram[kept][:, kept], (gram @ weight[row])[kept])
    return best


def objective(weight: Tensor, pruned: Tensor, gram: Tensor) -> Tensor:
    """The error of each row."""
    delta = weight - pruned
    return torch.einsum("rc,cd,rd->r", delta, gram, delta)


def solved(name: str, weight: Tensor, stats: Stats, pattern: str) -> Solution:
    """What a method makes of it, with its default options."""
    method = METHODS[name]
    state = method.prepare(stats, method.options)
    return method.solve(weight, state, parse_pattern(pattern).with_scope(method.scope), method.options)
