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
from modelopt_sparse.calibration.routed import DeferredStats, RoutedTokens
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.statistics import Collector, Groups
from modelopt_sparse.methods.base import Stats

EXCHANGE = "statistics"
SHARING_CHANGED = "the layers that share an input are others"


@dataclass(frozen=True)
class _Header:
    """What the other processes have to know of one group's statistics before these are sent."""

    names: tuple[str, ...]
    tokens: int
    counts: list[int] | None
    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, names: Sequence[str], stats: Stats | DeferredStats) -> "_Header":
        form = "deferred" if isinstance(stats, DeferredStats) else "square_sums" if stats.gram is None else "gram"
        counts, sums = None if stats.counts is None else stats.counts.tolist(), _sums(stats)
        return cls(tuple(names), stats.tokens, counts, form, tuple(sums.shape), sums.dtype)

    def __add__(self, other: "_Header") -> "_Header":
        """An attention may be called with one input for q, k and v in one call, and with several in another."""
        counts = None
        if self.counts is not None and other.counts is not None:
            counts = [a + b for a, b in zip(self.counts, other.counts)]
        shape = torch.broadcast_shapes(self.shape, other.shape)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return _Header(self.names, self.tokens + other.tokens, counts, self.form, tuple(shape), dtype)

    def stats(self, sums: Tensor) -> Stats:
        counts = None if self.counts is None else torch.tensor(self.counts)
        if self.form == "gram":
            return Stats(self.tokens, sums.diagonal(dim1=-2, dim2=-1).clone(), sums, counts)
        return Stats(self.tokens, sums, None, counts)


class SumsOfAllProcesses:
    """The sums of a ``collector`` over all processes of a run. `end_call` ends each call of the model.

    With ``deterministic``, calls are added one by one in the order of the batches: the first one of every rank, then
    the second one of every rank, and so on. Besides the collector's sums this holds the totals in float64, and one
    call's sums of another process.
    """

    def __init__(self, collector: Collector, run: Run) -> None:
        self._collector, self._processes = collector, run.processes
        self._deterministic = run.config.deterministic
        self._device = run.config.device or torch.device("cpu")  # of sums that this process itself has none of
        self._totals: dict[tuple[str, ...], tuple[_Header, Tensor]] = {}
        self._known = False  # to all processes: that layers share inputs in some calls only

    def end_call(self) -> None:
        self._collector.end_call()
        if self._deterministic:
            self._add(self._collector.take())

    def between(self, begin: Callable[[TokenMasks], None]) -> Callable[[TokenMasks], None]:
        """``begin``, which announces each call of the model, preceded by the end of the call before. The end of the
        last call is left to do."""
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
            self._processes.all_gather(EXCHANGE, SHARING_CHANGED)
        raise SharingChanged

    def groups(self) -> Groups:
        """(names of layers with one input, their statistics), the same in all processes.

        Raises SharingChanged, in all of them, if layers share an input in one but not in another.
        """
        if not self._deterministic:
            return self._merged(self._collector.take())
        while not self._add(None):
            pass
        return [(list(names), header.stats(total.to(header.dtype))) for names, (header, total) in self._totals.items()]

    def _merged(self, groups: Groups) -> Groups:
        processes = self._processes
        if processes.size == 1:
            return groups
        union: dict[tuple[str, ...], _Header] = {}
        for headers in self._gather_headers([_Header.of(names, stats) for names, stats in groups]):
            for header in headers or ():
                union[header.names] = union[header.names] + header if header.names in union else header
        self._check_sharing(union)
        own = {tuple(names): stats for names, stats in groups}
        device = next((_sums(stats).device for stats in own.values()), self._device)
        sums = {names: _own_part(header, own.get(names), device) for names, header in union.items()}
        processes.all_reduce(EXCHANGE, list(sums.values()))
        merged: Groups = []
        for names, header in union.items():
            stats = own.get(names)
            if header.form == "deferred":
                assert header.counts is not None
                routes = stats.rows.routes if isinstance(stats, DeferredStats) else [[] for _ in header.counts]
                rows = RoutedTokens(header.counts, sums[names], routes, processes)
                merged.append((list(names), DeferredStats(rows)))
            else:
                merged.append((list(names), header.stats(sums[names])))
        return merged

    def _add(self, groups: Groups | None) -> bool:
        """Add one call's sums of every process, by rank; None: this one has no more. -> whether none has."""
        processes = self._processes
        of_ranks = self._gather_headers(None if groups is None else [_Header.of(*group) for group in groups])
        device = next((_sums(stats).device for _, stats in groups or ()), self._device)
        for rank, headers in enumerate(of_ranks):
            if not headers:
                continue
            if rank == processes.rank:
                assert groups is not None
                sums = [_sums(stats).contiguous() for _, stats in groups]
            else:
                sums = [torch.empty(header.shape, dtype=header.dtype, device=device) for header in headers]
            processes.broadcast(EXCHANGE, sums, rank)
            for header, values in zip(headers, sums):
                self._add_to_total(header, values)
        self._check_sharing(self._totals)
        return all(headers is None for headers in of_ranks)

    def _add_to_total(self, header: _Header, values: Tensor) -> None:
        if header.names not in self._totals:
            self._totals[header.names] = (header, values.to(torch.float64, copy=True))
            return
        before, total = self._totals[header.names]
        total = total.add_(values) if total.shape == values.shape else total + values
        self._totals[header.names] = (before + header, total)

    def _gather_headers(self, own: list[_Header] | None) -> list[list[_Header] | None]:
        headers = self._processes.all_gather(EXCHANGE, own)
        if SHARING_CHANGED in headers:
            self._known = True
            raise SharingChanged
        return headers

    def _check_sharing(self, groups: Collection[tuple[str, ...]]) -> None:
        names = [name for group in groups for name in group]
        if len(set(names)) < len(names):
            self._known = True
            raise SharingChanged


def _own_part(header: _Header, stats: Stats | DeferredStats | None, device: torch.device) -> Tensor:
    if stats is None:
        return torch.zeros(header.shape, dtype=header.dtype, device=device)
    return _sums(stats).to(header.dtype).expand(header.shape).contiguous()


def _sums(stats: Stats | DeferredStats) -> Tensor:
    """What of the statistics is summed up, and gives the rest."""
    gram = None if isinstance(stats, DeferredStats) else stats.gram
    return stats.square_sums if gram is None else gram
