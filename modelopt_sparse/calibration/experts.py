"""Statistics of fused experts: a sum for each of them, over the rows that are routed to it; and what is done about
experts that got too few.

Shape letters: E experts, C columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.experts import Route
from modelopt_sparse.layers import Layer
from modelopt_sparse.methods.base import Stats


@dataclass
class ExpertSum:
    """A running sum for each expert, in float32, or float64 for float64 inputs: Gram matrices ``[E, C, C]`` or square
    sums ``[E, C]``."""

    counts: list[int]
    sums: Tensor

    @classmethod
    def empty(cls, layer: Layer, like: Tensor, *, gram: bool) -> "ExpertSum":
        """Zeros for the experts of a layer, on the device and in the precision of its input ``like``."""
        experts, _, columns = layer.matrix(layer.parameter).shape
        shape = (experts, columns, columns) if gram else (experts, columns)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cls([0] * experts, torch.zeros(shape, dtype=dtype, device=like.device))

    def add(self, route: Route) -> None:
        rows = route.rows.detach().to(self.sums.dtype)
        self.counts[route.expert] += len(rows)
        if self.sums.dim() == 3:
            self.sums[route.expert].addmm_(rows.mT, rows)
        else:
            self.sums[route.expert] += rows.square().sum(0)

    def stats(self) -> Stats:
        counts = torch.tensor(self.counts)
        if self.sums.dim() == 3:
            return Stats(sum(self.counts), self.sums.diagonal(dim1=-2, dim2=-1).clone(), self.sums, counts)
        return Stats(sum(self.counts), self.sums, counts=counts)


def few(stats: Stats, minimum: int) -> list[int]:
    """The experts that got fewer than ``minimum`` rows."""
    return [] if stats.counts is None else (stats.counts < minimum).nonzero().flatten().tolist()


def pooled(stats: Stats) -> Stats:
    """The sums over all experts."""
    return Stats(stats.tokens, stats.square_sums.sum(0), None if stats.gram is None else stats.gram.sum(0))


def filled(stats: Stats, minimum: int, how: str, pool: Stats, everyone: Stats | None) -> Stats:
    """Statistics of experts in which those with fewer than ``minimum`` rows have what ``how`` says; counts stay true.

    "pool": the rows that are missing are average rows of ``pool``, which are those of all experts. "all_tokens": they
    are replaced by the rows of ``everyone``. "weight_only": by ``minimum`` rows of white noise as large as the average.
    The sums of ``stats`` are written to.
    """
    assert stats.counts is not None
    square_sums, gram = stats.square_sums, stats.gram
    for expert in few(stats, minimum):
        if how == "pool":
            share = (minimum - int(stats.counts[expert])) / pool.tokens
            square_sums[expert] += share * pool.square_sums
            if gram is not None and pool.gram is not None:
                gram[expert] += share * pool.gram
        elif how == "weight_only":
            level = minimum / pool.tokens * pool.square_sums.mean()
            square_sums[expert] = level
            if gram is not None:
                gram[expert] = 0
                gram[expert].diagonal().fill_(level)
        else:
            assert everyone is not None
            square_sums[expert] = everyone.square_sums[expert]
            if gram is not None and everyone.gram is not None:
                gram[expert] = everyone.gram[expert]
    return stats
