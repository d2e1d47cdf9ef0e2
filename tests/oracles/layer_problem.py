"""One layer with correlated inputs, and what is best for it by slow and exact means. All in float64."""

from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.methods.patterns import NM, Pattern, parse_pattern
from tests.helpers import correlated_inputs
from tests.oracles import reference

DAMPING = 0.01


def stats_of(inputs: Tensor) -> Stats:
    """Statistics of inputs [..., T, C], in their own precision."""
    return of_gram(inputs.mT @ inputs, inputs.shape[-2])


def of_gram(gram: Tensor, tokens: int = 1) -> Stats:
    return Stats(tokens, gram.diagonal(dim1=-2, dim2=-1).clone(), gram)


def sparsegpt(weight: Tensor, stats: Stats, pattern: Pattern, **options: Any) -> Solution:
    """What the method makes of it; in the matrix where the pattern has no scope."""
    method, options = METHODS["sparsegpt"], {**METHODS["sparsegpt"].options, **options}
    return method.solve(weight, method.prepare(stats, options), pattern.with_scope("matrix"), options)


def problem(seed: int, rows: int = 48, columns: int = 64) -> tuple[Tensor, Stats]:
    """A random weight and the statistics of correlated inputs."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weight, stats_of(correlated_inputs(4 * columns, columns, seed))


def damped(stats: Stats, damping: float = DAMPING) -> Tensor:
    assert stats.gram is not None
    return stats.gram + damping * stats.gram.diagonal().mean() * torch.eye(len(stats.gram), dtype=torch.float64)


def one_at_a_time(weight: Tensor, gram: Tensor, pattern: Pattern, block_size: int, damping: float = DAMPING) -> tuple:
    """SparseGPT by `reference.sparsegpt` -> (pruned weight, mask)."""
    if isinstance(pattern, NM):
        return reference.sparsegpt(weight, gram, nm=(pattern.n, pattern.m), damping=damping)
    choice = {"sparsity": pattern.sparsity, "scope": pattern.scope or "matrix", "block_size": block_size}
    return reference.sparsegpt(weight, gram, damping=damping, **choice)


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
