"""Statistics of layers' inputs: sums over the rows that reach a layer, in float32 or better.

From the ground up: a Gram matrix, whether the sums are enough to go by, sums for each expert of a mixture, the
collector that sees inputs and shares sums, and sums of several processes added together.

Shape letters: T tokens, C columns, E experts.
"""

import math
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from modelopt_sparse.calibration.forward import SharingChanged, input_key
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.adapters import Route, RoutedAdapter
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import Report

# Gram matrices --------------------------------------------------------------------------------------------------------
# bfloat16 and float16 rows on a CUDA device are multiplied as they are, on tensor cores, with sums in float32. A copy
# in float32 would give the same products: they have at most 16 and 22 significant bits, and float32 has 24. Everything
# else is multiplied in the dtype of the sum.


# by device: columns from which only the upper half of the matrix is computed, and rows of it that one product makes
STRIPS = {"cuda": ((4096, 1024),), "cpu": ((1024, 256), (256, 128))}


def add_product(gram: Tensor | None, rows: Tensor) -> Tensor:
    """gram + X^T X ``[..., C, C]`` for rows X ``[..., T, C]``; in place where the shapes are equal.

    Of a large matrix what is below its strips may be missing until `completed`. Nothing waits for a CUDA device.
    """
    work = torch.promote_types(rows.dtype, torch.float32)
    add = _add_half_precision
    if not on_tensor_cores(rows.device, rows.dtype):
        rows, add = rows.to(work), _add
    square = (*rows.shape[:-2], rows.shape[-1], rows.shape[-1])
    if gram is None:
        gram = rows.new_zeros(square, dtype=work)
    if gram.dim() != rows.dim():  # one attention, called with one input for q, k and v and with several
        return gram + add_product(None, rows)
    add_upper(gram, rows, add, _strip(gram))
    return gram


def completed(gram: Tensor) -> Tensor:
    """The sum that `add_product` has made, in place, with all of its entries."""
    mirror(gram, _strip(gram))
    return gram


def on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows are multiplied as they are. Not float16 if the user lets torch sum it up in float16."""
    if device.type != "cuda":
        return False
    return dtype == torch.bfloat16 or (
        dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


def add_upper(gram: Tensor, rows: Tensor, add: Callable[[Tensor, Tensor, Tensor], None], strip: int) -> None:
    """Add X^T X to ``gram``, in strips of rows that begin at the diagonal: about half the work if they are narrow, and
    no more than a strip of it is held besides the sum. ``add(sum, left, right)`` adds a product in place."""
    columns = rows.shape[-1]
    for first in range(0, columns, strip):
        part = slice(first, first + strip)
        add(gram[..., part, first:], rows[..., part].mT, rows[..., first:])


def mirror(gram: Tensor, strip: int) -> None:
    """Copy what the strips hold to the other side of the diagonal."""
    for first in range(0, gram.shape[-1], strip):
        last = first + strip
        gram[..., last:, first:last] = gram[..., first:last, last:].mT


def _strip(gram: Tensor) -> int:
    columns = gram.shape[-1]
    strips = STRIPS["cuda" if gram.is_cuda else "cpu"]
    return next((strip for large, strip in strips if columns >= large), max(columns, 1))


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dim() == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)


def _add_half_precision(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The product in float32 of half-precision matrices on a CUDA device."""
    total.add_((torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32))


# are a layer's statistics usable: not all zero, not underflowed, from enough tokens? ----------------------------------


FEWER = "fewer than its inputs"


def says_nothing(square_sums: Tensor) -> Tensor:
    """Square sums ``[..., C]`` -> bool ``[...]``: all zero, or so small that the least numbers which their dtype has
    are no longer far below the rounding errors of the largest of them."""
    info = torch.finfo(square_sums.dtype)
    return square_sums.amax(-1) < info.tiny / info.eps


def without_data(name: str, tokens: int, square_sums: Tensor | None, now: str = "") -> str:
    """What to say of a layer that cannot be solved from what it saw. ``now`` says when that was."""
    if square_sums is None or not tokens:
        return f"layer {name!r} saw no calibration data{now}: give more varied data, or exclude it"
    instead = f"exclude it, or choose by size alone with rules={{{name!r}: {{'method': 'magnitude'}}}}"
    dtype, info = str(square_sums.dtype).removeprefix("torch."), torch.finfo(square_sums.dtype)
    largest = float(square_sums.max())
    if largest == 0:
        lost = math.sqrt(info.tiny * info.eps)
        return (
            f"layer {name!r} saw nothing but zeros (or numbers below {lost:.0e}, whose squares are 0 in {dtype}) on "
            f"the calibration data{now}: give data that reaches it, {instead}"
        )
    return (
        f"layer {name!r}: its inputs on the calibration data are too small{now}: the squares of its largest channel "
        f"sum up to {largest:.1e}, and {dtype} holds such sums well from {info.tiny / info.eps:.0e} on; scale the data "
        f"up, convert the model to float64 (model.double()), {instead}"
    )


def warn_of_few_tokens(name: str, tokens: int, columns: int, report: Report) -> None:
    """Warn of a layer that saw fewer tokens than it has inputs, unless this report has warned of one before."""
    if tokens >= columns or any(FEWER in note for note in report.notes):
        return
    seen = "1 token" if tokens == 1 else f"{tokens} tokens"
    text = (
        f"layer {name!r} saw {seen}, {FEWER} ({columns}): almost any weights fit so little data, and errors come out "
        "too small; give more (said once, of the first such layer)"
    )
    warnings.warn(text, stacklevel=2)
    report.notes.append(text)


# fused experts --------------------------------------------------------------------------------------------------------
# A sum for each expert, over the rows that are routed to it; and what is done about experts that got too few.


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


# the collector --------------------------------------------------------------------------------------------------------


# (names of layers with one input, their statistics), in call order
Groups = list[tuple[list[str], Stats | DeferredStats]]


@dataclass(frozen=True)
class SharedInput:
    """Layers with one input, and its statistics; None where their methods need none."""

    layer_plans: list[LayerPlan]
    stats: Stats | DeferredStats | None


@dataclass(frozen=True)
class InputFacts:
    """What a report says of a layer's input: how many tokens it had in all and by expert, what the error of the layer
    is measured with (see `reports.report.ERROR_FROM`), and how many of its channels (those of all its matrices) were
    zero in all of them. ``square_sums``: ``[..., C]``, of its channels."""

    tokens: int
    expert_tokens: list[int]
    error_from: str
    channels: int = 0
    dead: int = 0
    square_sums: Tensor | None = None

    @classmethod
    def of(cls, stats: Stats | DeferredStats | None) -> "InputFacts":
        if stats is None:
            return cls(0, [], "weights")
        formed = isinstance(stats, DeferredStats) or stats.gram is not None
        counts = [] if stats.counts is None else stats.counts.tolist()
        sums = stats.filled_square_sums() if isinstance(stats, DeferredStats) else stats.square_sums
        dead = int((sums == 0).sum())
        return cls(stats.tokens, counts, "gram" if formed else "square_sums", sums.numel(), dead, sums)


@dataclass
class _CallOfModel:
    """What was seen in one call of the model. Inputs are held, so that no id is taken twice."""

    leader_of_input: dict[tuple, str] = field(default_factory=dict)
    inputs_of_layer: dict[str, list[tuple]] = field(default_factory=dict)
    alive: list[tuple[Tensor, ...]] = field(default_factory=list)


class Collector:
    """Sums up `Stats` for layers; those that get the same input in every call share one.

    needs: layer name -> what its method needs.
    share: False lets every layer sum for itself. The first layer to see an input leads those that share it.
    deferred: layers of experts whose Gram matrices are formed later, from their tokens.
    all_tokens: layer name -> experts that are to see all tokens, in the place of those that are routed to them.
    """

    def __init__(
        self,
        *,
        needs: Mapping[str, str],
        share: bool,
        deferred: Collection[str] = (),
        all_tokens: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._needs = needs
        self._share = share
        self._deferred = deferred
        self._all_tokens = all_tokens
        self._sums: dict[str, RunningSum | ExpertSums | RoutedTokens] = {}
        self._leader_of: dict[str, str] = {}
        self._call = _CallOfModel()

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        key = input_key(layer, inputs)
        leader = self._call.leader_of_input.setdefault(key, layer.name) if self._share else layer.name
        if self._leader_of.setdefault(layer.name, leader) != leader:
            raise SharingChanged
        self._call.inputs_of_layer.setdefault(layer.name, []).append(key)
        self._call.alive.append(inputs)
        if leader != layer.name:
            return
        if isinstance(layer.adapter, RoutedAdapter):
            self._add_routed(layer, layer.adapter, inputs, token_mask)
        else:
            total = self._sums.setdefault(leader, RunningSum())
            assert isinstance(total, RunningSum)
            for rows in layer.adapter.rows(layer.owner, inputs, token_mask):
                total.add(rows, gram="gram" in self._needs.values())

    def _add_routed(
        self, layer: Layer, adapter: RoutedAdapter, inputs: tuple[Tensor, ...], token_mask: Tensor | None
    ) -> None:
        gram = self._needs[layer.name] == "gram"
        total = self._sums.get(layer.name)
        if total is None:
            deferred = gram and layer.name in self._deferred
            total = RoutedTokens.empty(layer, inputs[0]) if deferred else ExpertSums.empty(layer, inputs[0], gram=gram)
            self._sums[layer.name] = total
        assert not isinstance(total, RunningSum)
        if isinstance(total, RoutedTokens) and token_mask is None:
            inputs = tuple(x.clone() for x in inputs)  # the model may write to its own
        if self._all_tokens is None:
            for route in adapter.routes(layer.owner, inputs, token_mask):
                total.add(route)
        else:
            for expert in self._all_tokens[layer.name]:
                total.add(Route(expert, adapter.all_tokens(layer.owner, inputs, token_mask, expert)))

    def end_call(self) -> None:
        """The model's call is over: followers must have seen what their leader saw, and tensors may be freed."""
        seen = self._call.inputs_of_layer
        if any(seen.get(name) != seen.get(leader) for name, leader in self._leader_of.items()):
            raise SharingChanged
        self._call = _CallOfModel()

    def take(self) -> Groups:
        """The statistics up to now. Sums begin anew after that."""
        members: dict[str, list[str]] = {}
        for name, leader in self._leader_of.items():
            members.setdefault(leader, []).append(name)
        sums, self._sums = self._sums, {}
        return [(names, sums[leader].stats()) for leader, names in members.items() if leader in sums]


class RunningSum:
    """A running sum in float32, or float64 for float64 inputs."""

    def __init__(self) -> None:
        self.tokens = 0
        self.square_sums: Tensor | None = None
        self.gram: Tensor | None = None

    def add(self, rows: Tensor, *, gram: bool) -> None:
        rows = rows.detach()
        self.tokens += rows.shape[-2]
        if gram:
            self.gram = add_product(self.gram, rows)
        else:
            squares = rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(-2)
            self.square_sums = squares if self.square_sums is None else self.square_sums + squares

    def stats(self) -> Stats:
        if self.gram is not None:
            gram = completed(self.gram)
            return Stats(self.tokens, gram.diagonal(dim1=-2, dim2=-1).clone(), gram)
        assert self.square_sums is not None
        return Stats(self.tokens, self.square_sums)


# several processes ----------------------------------------------------------------------------------------------------
# Two ways. Each process adds up all that it has, and then the sums are added. Or, for the bits of one process whatever
# the number: the sums of every single call of the model are added in float64, in the order of the batches.


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
