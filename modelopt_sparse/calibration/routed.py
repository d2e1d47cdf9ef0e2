"""Statistics of fused experts: a sum for each of them, over the rows that are routed to it; and what is done about
experts that got too few.

Shape letters: E experts, C columns.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from modelopt_sparse.calibration.enough import says_nothing
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.experts import Route
from modelopt_sparse.model.layers import Layer


@dataclass
class ExpertSums:
    """A running sum for each expert, in float32, or float64 for float64 inputs: Gram matrices ``[E, C, C]`` or square
    sums ``[E, C]``."""

    counts: list[int]
    sums: Tensor

    @classmethod
    def empty(cls, layer: Layer, like: Tensor, *, gram: bool) -> "ExpertSums":
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


@dataclass
class RoutedTokens:
    """The rows that are routed to each expert, held until Gram matrices are formed of a few experts at a time; and
    their square sums ``[E, C]``. Rows that experts share are held once, in the dtype that they came in."""

    counts: list[int]
    square_sums: Tensor
    routes: list[list[Route]]
    # whose rows these are a share of; counts and square sums are of all
    processes: Processes = field(default_factory=Processes)

    @classmethod
    def empty(cls, layer: Layer, like: Tensor) -> "RoutedTokens":
        sums = ExpertSums.empty(layer, like, gram=False)
        return cls(sums.counts, sums.sums, [[] for _ in sums.counts])

    def add(self, route: Route) -> None:
        rows = route.rows.detach().to(self.square_sums.dtype)
        self.counts[route.expert] += len(rows)
        self.square_sums[route.expert] += rows.square().sum(0)
        self.routes[route.expert].append(route)

    def stats(self) -> "DeferredStats":
        return DeferredStats(self)

    def gram(self, expert: int, total: Tensor) -> None:
        """Add the Gram matrix of one expert to ``total`` ``[C, C]``, of the rows that are held here."""
        for route in self.routes[expert]:
            rows = route.rows.detach().to(total.dtype)
            total.addmm_(rows.mT, rows)


def without_silent_experts(stats: "Stats | DeferredStats") -> "Stats | DeferredStats":
    """Statistics of experts in which those whose rows say nothing count as experts that got none."""
    if stats.counts is None:
        return stats
    counts = stats.counts.masked_fill(says_nothing(stats.square_sums).cpu(), 0)
    if torch.equal(counts, stats.counts):
        return stats
    if isinstance(stats, DeferredStats):
        return replace(stats, rows=replace(stats.rows, counts=counts.tolist()))
    return replace(stats, tokens=int(counts.sum()), counts=counts)


def few(stats: "Stats | DeferredStats", minimum: int) -> list[int]:
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


def filled_modules(
    groups: Sequence[tuple[list[str], Stats]], mixture_of: Mapping[str, Hashable], minimum: int, how: str
) -> list[tuple[list[str], Stats]]:
    """The same for experts that are modules of their own; ``mixture_of``: layer name -> the mixture that it is of.

    Layers with few rows, or that are in none of the ``groups`` because they got none, are filled up from the rows of
    their whole mixture. A layer whose mixture got nothing at all is left out.
    """
    stats_of = {name: stats for names, stats in groups for name in names}
    pools: dict[Hashable, Stats] = {}
    for mixture in dict.fromkeys(mixture_of.values()):
        own = [stats_of[name] for name in stats_of if mixture_of.get(name) == mixture]
        if own:
            pools[mixture] = sum(own[1:], start=own[0])
    result = []
    for names, stats in groups:
        pool = next((pools[mixture_of[name]] for name in names if name in mixture_of), None)
        result.append((names, stats if pool is None else _filled_one(stats, minimum, how, pool)))
    for name, mixture in mixture_of.items():
        if name not in stats_of and mixture in pools:
            pool = pools[mixture]
            gram = None if pool.gram is None else torch.zeros_like(pool.gram)
            nothing = Stats(0, torch.zeros_like(pool.square_sums), gram)
            result.append(([name], _filled_one(nothing, minimum, how, pool)))
    return result


def _filled_one(stats: Stats, minimum: int, how: str, pool: Stats) -> Stats:
    gram = None if stats.gram is None else stats.gram.clone()[None]
    alone = Stats(stats.tokens, stats.square_sums.clone()[None], gram, torch.tensor([stats.tokens]))
    made = filled(alone, minimum, how, pool, None)
    return Stats(stats.tokens, made.square_sums[0], None if made.gram is None else made.gram[0])


@dataclass(frozen=True)
class DeferredStats:
    """What `Stats` is for all experts at once, for a few at a time: `part` forms theirs. Experts with fewer than
    ``minimum`` rows are filled as ``how`` says, see `filled`."""

    rows: RoutedTokens
    minimum: int = 0
    how: str = "pool"
    everyone: RoutedTokens | None = None

    @property
    def tokens(self) -> int:
        return sum(self.rows.counts)

    @property
    def counts(self) -> Tensor:
        return torch.tensor(self.rows.counts)

    @property
    def square_sums(self) -> Tensor:
        """Of the rows that were routed, before experts with few of them are filled."""
        return self.rows.square_sums

    def filled_square_sums(self) -> Tensor:
        """Those of all experts, ``[E, C]``, as `part` has them."""

        def sums(rows: RoutedTokens) -> Stats:
            return Stats(sum(rows.counts), rows.square_sums.clone(), counts=torch.tensor(rows.counts))

        everyone = None if self.everyone is None else sums(self.everyone)
        own = sums(self.rows)
        return filled(own, self.minimum, self.how, pooled(own), everyone).square_sums

    def part(self, experts: range) -> Stats:
        """The statistics of these experts, with Gram matrices ``[len(experts), C, C]``."""
        stats = _formed(self.rows, experts)
        if not few(stats, self.minimum):
            return stats
        everyone = None if self.everyone is None else _formed(self.everyone, experts)
        return filled(stats, self.minimum, self.how, self._pool, everyone)

    @cached_property
    def _pool(self) -> Stats:
        columns = self.rows.square_sums.shape[-1]
        total = self.rows.square_sums.new_zeros(columns, columns)
        if self.how == "pool":  # the others need no Gram matrix of it
            for expert in range(len(self.rows.counts)):
                self.rows.gram(expert, total)
            self.rows.processes.all_reduce("the tokens of all experts", [total])
        return Stats(self.tokens, self.rows.square_sums.sum(0), total)


def _formed(rows: RoutedTokens, experts: range) -> Stats:
    columns = rows.square_sums.shape[-1]
    gram = rows.square_sums.new_zeros(len(experts), columns, columns)
    for place, expert in enumerate(experts):
        rows.gram(expert, gram[place])
    rows.processes.all_reduce(f"the tokens of experts {experts.start} to {experts.stop - 1}", [gram])
    counts = torch.tensor([rows.counts[expert] for expert in experts])
    return Stats(int(counts.sum()), gram.diagonal(dim1=-2, dim2=-1).clone(), gram, counts)


def part_of(stats: Stats | DeferredStats | None, experts: range) -> Stats | None:
    """The statistics of some experts of a layer, which follow each other."""
    if stats is None:
        return None
    if isinstance(stats, DeferredStats):
        return stats.part(experts)
    assert stats.counts is not None
    own = slice(experts.start, experts.stop)
    gram = None if stats.gram is None else stats.gram[own]
    return Stats(int(stats.counts[own].sum()), stats.square_sums[own], gram, stats.counts[own])
