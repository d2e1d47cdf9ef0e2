"""Statistics that several processes have summed up, each over its own batches, added together.

Two ways: each process adds up all it has, and then the sums are added; or, to get the bits of one process, whatever
their number, the sums of every single call of the model are added in float64, in the order of the batches.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.calibration.hooks import SharingChanged
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.routed import KeptRows, KeptStats
from modelopt_sparse.calibration.statistics import Collector
from modelopt_sparse.distributed import Team
from modelopt_sparse.methods.base import Stats

Groups = list[tuple[list[str], Stats | KeptStats]]
WHAT = "statistics"
CHANGED = "the layers that share an input are others"


@dataclass(frozen=True)
class _Described:
    """What the others have to know of one group's statistics before these are sent."""

    names: tuple[str, ...]
    tokens: int
    counts: list[int] | None
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, names: Sequence[str], stats: Stats | KeptStats) -> "_Described":
        kind = "kept" if isinstance(stats, KeptStats) else "square_sums" if stats.gram is None else "gram"
        counts, sums = None if stats.counts is None else stats.counts.tolist(), _sums(stats)
        return cls(tuple(names), stats.tokens, counts, kind, tuple(sums.shape), sums.dtype)

    def __add__(self, other: "_Described") -> "_Described":
        """An attention may be called with one input for q, k and v in one call, and with several in another."""
        counts = None
        if self.counts is not None and other.counts is not None:
            counts = [a + b for a, b in zip(self.counts, other.counts)]
        shape = torch.broadcast_shapes(self.shape, other.shape)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return _Described(self.names, self.tokens + other.tokens, counts, self.kind, tuple(shape), dtype)

    def stats(self, sums: Tensor) -> Stats:
        counts = None if self.counts is None else torch.tensor(self.counts)
        if self.kind == "gram":
            return Stats(self.tokens, sums.diagonal(dim1=-2, dim2=-1).clone(), sums, counts)
        return Stats(self.tokens, sums, None, counts)


class Sums:
    """The sums of a ``collector`` over all processes of a team. Each call of the model is to be ended by `end_call`.

    ``deterministic``: of each call by itself, in the order of the batches: the first one of every rank, then the second
    one of every rank, and so on. Besides the collector's sums this holds the totals in float64, and one call's sums of
    another process. ``device``: where sums are put that this process itself has none of.
    """

    def __init__(self, collector: Collector, team: Team, *, deterministic: bool, device: torch.device | None) -> None:
        self._collector, self._team = collector, team
        self._deterministic = deterministic
        self._device = device or torch.device("cpu")
        self._totals: dict[tuple[str, ...], tuple[_Described, Tensor]] = {}
        self._known = False  # to all processes: that layers share inputs in some calls only

    def end_call(self) -> None:
        self._collector.end_call()
        if self._deterministic:
            self._add(self._collector.take())

    def between(self, begin: Callable[[TokenMasks], None]) -> Callable[[TokenMasks], None]:
        """``begin``, which is told of each call of the model, preceded by the end of the call before; that of the last
        one is left to do."""
        begun = False

        def with_end(masks: TokenMasks) -> None:
            nonlocal begun
            if begun:
                self.end_call()
            begun = True
            begin(masks)

        return with_end

    def changed(self) -> None:
        """Tell the others that layers which shared an input in one call did not in another. Raises SharingChanged."""
        if not self._known:
            self._team.meet(WHAT, CHANGED)
        raise SharingChanged

    def groups(self) -> Groups:
        """(names of layers with one input, their statistics), the same in all processes.

        Raises SharingChanged, in all of them, if layers share an input in one but not in another.
        """
        if not self._deterministic:
            return self._merged(self._collector.take())
        while not self._add(None):
            pass
        return [(list(names), found.stats(total.to(found.dtype))) for names, (found, total) in self._totals.items()]

    def _merged(self, groups: Groups) -> Groups:
        team = self._team
        if team.size == 1:
            return groups
        union: dict[tuple[str, ...], _Described] = {}
        for given in self._met([_Described.of(names, stats) for names, stats in groups]):
            for item in given or ():
                union[item.names] = union[item.names] + item if item.names in union else item
        self._check_sharing(union)
        own = {tuple(names): stats for names, stats in groups}
        device = next((_sums(stats).device for stats in own.values()), self._device)
        sums = {names: self._own_part(item, own.get(names), device) for names, item in union.items()}
        team.add_up(WHAT, list(sums.values()))
        merged: Groups = []
        for names, item in union.items():
            stats = own.get(names)
            if item.kind == "kept":
                assert item.counts is not None
                routes = stats.rows.routes if isinstance(stats, KeptStats) else [[] for _ in item.counts]
                merged.append((list(names), KeptStats(KeptRows(item.counts, sums[names], routes, team))))
            else:
                merged.append((list(names), item.stats(sums[names])))
        return merged

    def _own_part(self, item: _Described, stats: Stats | KeptStats | None, device: torch.device) -> Tensor:
        if stats is None:
            return torch.zeros(item.shape, dtype=item.dtype, device=device)
        return _sums(stats).to(item.dtype).expand(item.shape).contiguous()

    def _add(self, groups: Groups | None) -> bool:
        """Add one call's sums of every process, by rank; None: this one has no more. -> whether none has."""
        team = self._team
        found = self._met(None if groups is None else [_Described.of(names, stats) for names, stats in groups])
        device = next((_sums(stats).device for _, stats in groups or ()), self._device)
        for rank, given in enumerate(found):
            if not given:
                continue
            if rank == team.rank:
                assert groups is not None
                sums = [_sums(stats).contiguous() for _, stats in groups]
            else:
                sums = [torch.empty(item.shape, dtype=item.dtype, device=device) for item in given]
            team.give(WHAT, sums, rank)
            for item, values in zip(given, sums):
                self._take(item, values)
        self._check_sharing(self._totals)
        return all(given is None for given in found)

    def _take(self, item: _Described, values: Tensor) -> None:
        if item.names not in self._totals:
            self._totals[item.names] = (item, values.to(torch.float64, copy=True))
            return
        before, total = self._totals[item.names]
        total = total.add_(values) if total.shape == values.shape else total + values
        self._totals[item.names] = (before + item, total)

    def _met(self, mine: list[_Described] | None) -> list[list[_Described] | None]:
        found = self._team.meet(WHAT, mine)
        if CHANGED in found:
            self._known = True
            raise SharingChanged
        return found

    def _check_sharing(self, groups: Collection[tuple[str, ...]]) -> None:
        names = [name for group in groups for name in group]
        if len(set(names)) < len(names):
            self._known = True
            raise SharingChanged


def _sums(stats: Stats | KeptStats) -> Tensor:
    """What of the statistics is summed up, and gives the rest."""
    gram = None if isinstance(stats, KeptStats) else stats.gram
    return stats.square_sums if gram is None else gram
