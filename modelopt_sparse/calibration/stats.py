"""Statistics of layers' inputs: sums over the rows that reach a layer, in float32 or better.

From the ground up: a Gram matrix, whether the sums are enough to go by, sums for each expert of a mixture, the
collector that sees inputs and shares sums, sums of several processes added together, and `collect`, which has all
calls summed up as the layers' methods need it.

Shape letters: T tokens, C columns, E experts.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.forward import input_key
from modelopt_sparse.checks import grouped
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.experts import Route, RoutedAdapter
from modelopt_sparse.model.layers import Layer, TokenMasks
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import Report
from modelopt_sparse.run import Run

# Gram matrices --------------------------------------------------------------------------------------------------------
# bfloat16 and float16 rows on a CUDA device are multiplied as they are, on tensor cores, with sums in float32. A copy
# in float32 would give the same products: they have at most 16 and 22 significant bits, and float32 has 24. Everything
# else is multiplied in the dtype of the sum.


# by device: columns from which only the upper half of the matrix is computed, and rows of it that one product makes
STRIPS = {"cuda": ((4096, 1024),), "cpu": ((1024, 256), (256, 128))}


def add_product(gram: Tensor | None, rows: Tensor) -> Tensor:
    """gram + X^T X ``[..., C, C]`` for rows X ``[..., T, C]``; in place where the shapes are equal.

    It is made in strips of rows that begin at the diagonal: about half the work if they are narrow, and no more than a
    strip of it is held besides the sum. Of a large matrix what is below its strips may be missing until `completed`.
    Nothing waits for a CUDA device.
    """
    work = torch.promote_types(rows.dtype, torch.float32)
    add = _add_half_precision
    if not on_tensor_cores(rows.device, rows.dtype):
        rows, add = rows.to(work), _add
    columns = rows.shape[-1]
    if gram is None:
        gram = rows.new_zeros((*rows.shape[:-2], columns, columns), dtype=work)
    if (gram.dim(), gram.dtype) != (rows.dim(), work):  # one attention, called with one input for q, k and v and others
        return gram + add_product(None, rows)
    strip = _strip(gram)
    for first in range(0, columns, strip):
        part = slice(first, first + strip)
        add(gram[..., part, first:], rows[..., part].mT, rows[..., first:])
    return gram


def completed(gram: Tensor) -> Tensor:
    """The sum that `add_product` has made, in place, with all of its entries."""
    strip = _strip(gram)
    for last in range(strip, gram.shape[-1], strip):
        gram[..., last:, last - strip : last] = gram[..., last - strip : last, last:].mT
    return gram


def on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows are multiplied as they are. Not float16 if the user lets torch sum it up in float16."""
    if device.type != "cuda":
        return False
    return dtype == torch.bfloat16 or (
        dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


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


def is_underflowed(square_sums: Tensor) -> Tensor:
    """Square sums ``[..., C]`` -> bool ``[...]``: True where all are zero or underflowed, that is, the largest is below
    tiny / eps of their dtype, so that rounding noise is as large as the values."""
    info = torch.finfo(square_sums.dtype)
    return square_sums.amax(-1) < info.tiny / info.eps


def no_data_message(name: str, moment: str = "") -> str:
    """Message for a layer that no token has reached. ``moment`` says when that was."""
    return f"layer {name!r} saw no calibration data{moment}: give more varied data, or exclude it"


BY_SIZE = "its weights are chosen by size alone"


def as_magnitude_layer(layer_plan: LayerPlan, report: Report) -> LayerPlan:
    """Plan a layer whose inputs are all zero for magnitude pruning. Each gets a note, the first a warning."""
    text = f"layer {layer_plan.name!r} saw nothing but zeros on the calibration data: {BY_SIZE}"
    if not any(BY_SIZE in note for note in report.notes):
        warnings.warn(f"{text} (said once, of the first such layer)", stacklevel=2)
    report.notes.append(text)
    steps = tuple(step for step in layer_plan.steps if step in ("reconstruct", "distill"))
    changed = replace(layer_plan, needs="nothing", steps=steps)
    return changed if changed.method.needs == "nothing" else replace(changed, method=Magnitude(), options={})


def warn_of_few_tokens(name: str, stats: "Stats | DeferredStats", report: Report) -> None:
    """Warn of a layer that saw fewer tokens than it has inputs, unless this report has warned of one before."""
    tokens, columns = stats.tokens, stats.square_sums.shape[-1]
    if tokens >= columns or any(FEWER in note for note in report.notes):
        return
    text = (
        f"layer {name!r} saw {tokens} token{'s' * (tokens != 1)}, {FEWER} ({columns}): almost any weights fit so "
        "little data, and errors come out too small; give more (said once, of the first such layer)"
    )
    warnings.warn(text, stacklevel=2)
    report.notes.append(text)


# sums -----------------------------------------------------------------------------------------------------------------


ROWS = "rows"  # what a method needs, where Gram matrices of experts are formed later, from their rows


@dataclass
class RunningSum:
    """A sum over rows, in float32, or float64 for float64 inputs: a Gram matrix or square sums. Of fused experts one
    for each, ``[E, C, C]`` or ``[E, C]``, and the ``counts`` of their rows.

    routes: the rows of experts, if they are held; once where experts share them, in the dtype that they came in.
    """

    gram: bool
    sums: Tensor | None = None
    tokens: int = 0
    counts: Tensor | None = None
    routes: list[Route] | None = None

    @classmethod
    def of_experts(cls, layer: Layer, like: Tensor, need: str) -> "RunningSum":
        """Zeros for the experts of a layer, on the device and in the precision of its input ``like``."""
        experts, _, columns = layer.matrix(layer.parameter).shape
        shape = (experts, columns, columns) if need == "gram" else (experts, columns)
        sums = torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        return cls(
            need == "gram", sums, 0, torch.zeros(experts, dtype=torch.long, device="cpu"), [] if need == ROWS else None
        )

    def add(self, rows: Tensor) -> None:
        rows = rows.detach()
        self.tokens += rows.shape[-2]
        if self.gram:
            self.sums = add_product(self.sums, rows)
        else:
            squares = rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(-2)
            self.sums = squares if self.sums is None else self.sums + squares

    def add_route(self, route: Route) -> None:
        assert self.sums is not None
        assert self.counts is not None
        rows, expert_sums = route.rows.detach().to(self.sums.dtype), self.sums[route.expert]
        self.tokens += len(rows)
        self.counts[route.expert] += len(rows)
        if self.gram:
            expert_sums.addmm_(rows.mT, rows)
        else:
            expert_sums += rows.square().sum(0)
        if self.routes is not None:
            self.routes.append(route)

    def stats(self) -> "Stats | DeferredStats":
        assert self.sums is not None
        if self.routes is not None and self.counts is not None:
            return DeferredStats(self.counts, self.sums, self.routes)
        if not self.gram:
            return Stats(self.tokens, self.sums, counts=self.counts)
        gram = completed(self.sums) if self.counts is None else self.sums
        return Stats(self.tokens, gram.diagonal(dim1=-2, dim2=-1).clone(), gram, self.counts)


# fused experts --------------------------------------------------------------------------------------------------------
# What is done about experts that got too few rows.


def drop_underflowed_experts(stats: "Stats | DeferredStats") -> "Stats | DeferredStats":
    """Set the row counts of experts whose sums are zero or underflowed to 0, as if no row had reached them."""
    if stats.counts is None:
        return stats
    counts = stats.counts.masked_fill(is_underflowed(stats.square_sums).cpu(), 0)
    if isinstance(stats, DeferredStats):
        return replace(stats, counts=counts)
    return replace(stats, tokens=int(counts.sum()), counts=counts)


def experts_below(stats: "Stats | DeferredStats", minimum: int) -> list[int]:
    """The experts that got fewer than ``minimum`` rows."""
    return [] if stats.counts is None else (stats.counts < minimum).nonzero().flatten().tolist()


@dataclass(frozen=True)
class TopUp:
    """What is done about experts that got fewer than ``minimum`` rows. Their counts stay true.

    fallback: the option ``experts``. "pool": the rows that are missing are average rows of ``pool``, which are those of
      all experts. "all_tokens": all are replaced by the rows of everyone. "weight_only": by ``minimum`` rows of white
      noise as large as the average.
    """

    minimum: int
    fallback: str
    pool: Stats

    def fill(self, stats: Stats, everyone: Stats | None = None) -> Stats:
        """Top up the sums of some experts, in place; ``everyone``: those of all tokens for each of them."""
        for expert in experts_below(stats, self.minimum):
            alone = range(expert, expert + 1)
            self.fill_one(stats.part(alone), everyone and everyone.part(alone))
        return stats

    def fill_one(self, stats: Stats, everyone: Stats | None = None) -> None:
        """Top up the sums of one matrix, or of one expert, in place."""
        if self.fallback == "weight_only":
            variance = self.minimum / self.pool.tokens * self.pool.square_sums.mean()
            stats.square_sums.copy_(variance)
            if stats.gram is not None:
                stats.gram.zero_().diagonal(dim1=-2, dim2=-1).copy_(variance)
            return
        scale = (self.minimum - stats.tokens) / self.pool.tokens
        source = self.pool if self.fallback == "pool" else everyone
        assert source is not None
        for sums, source_sums in ((stats.square_sums, source.square_sums), (stats.gram, source.gram)):
            if sums is not None and source_sums is not None:
                sums.copy_(sums + scale * source_sums if self.fallback == "pool" else source_sums)


@dataclass(frozen=True)
class DeferredStats:
    """Statistics of fused experts whose Gram matrices are formed for a few at a time (`part`), from rows that are held.

    counts: of the rows that were routed, in all processes. square_sums: theirs, topped up.
    routes: the rows that this process has: those of its own calls, or see `sent_to`.
    top_up, everyone: how experts with few rows are topped up, and what of all tokens that may take.
    """

    counts: Tensor
    square_sums: Tensor
    routes: list[Route]
    top_up: TopUp | None = None
    everyone: "DeferredStats | None" = None

    gram = None  # of all experts at once

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def without_gram(self) -> Stats:
        return Stats(self.tokens, self.square_sums.clone(), counts=self.counts)

    def part(self, experts: range) -> Stats:
        """The statistics of these experts, with Gram matrices ``[len(experts), C, C]``."""
        columns = self.square_sums.shape[-1]
        gram = self.square_sums.new_zeros(len(experts), columns, columns)
        for route in self.routes:
            if route.expert in experts:
                _add_gram(gram[route.expert - experts.start], route)
        counts = self.counts[experts.start : experts.stop]
        stats = RunningSum(True, gram, int(counts.sum()), counts).stats()
        assert isinstance(stats, Stats)
        if self.top_up is None or not experts_below(stats, self.top_up.minimum):
            return stats
        return self.top_up.fill(stats, self.everyone and self.everyone.part(experts))

    def sent_to(self, owner: int, experts: range, processes: Processes) -> "DeferredStats":
        """Send the rows of ``experts`` from all processes to rank ``owner``, whose statistics hold them. Collective."""
        if processes.size == 1:
            return self
        exchange, rank = f"the tokens of experts {experts.start} to {experts.stop - 1}", processes.rank
        nothing = self.square_sums.new_empty(0)
        held = [route for route in self.routes if route.expert in experts]
        local_rows = torch.cat([route.rows.detach() for route in held]) if held else nothing
        sizes = [(route.expert, len(route.rows)) for route in held]
        heads = processes.all_gather(exchange, (sizes, local_rows.to("meta")))
        tensors = [torch.empty_like(like, device=nothing.device) if rank == owner else nothing for _, like in heads]
        tensors[rank] = local_rows
        processes.broadcast(exchange, tensors, range(processes.size), receivers=[owner] * processes.size)
        everyone = self.everyone and self.everyone.sent_to(owner, experts, processes)
        if rank != owner:
            return self
        routes = [
            Route(expert, rows)
            for (sizes, _), tensor in zip(heads, tensors)
            for (expert, _), rows in zip(sizes, tensor.split([count for _, count in sizes]))
        ]
        return replace(self, routes=routes, everyone=everyone)


def _add_gram(total: Tensor, route: Route) -> None:
    """Add the Gram matrix of the rows to ``total``. They are copied: bits may depend on where rows begin in memory."""
    rows = route.rows.detach().to(total.dtype, copy=True)
    total.addmm_(rows.mT, rows)


# the collector --------------------------------------------------------------------------------------------------------


Names = tuple[str, ...]  # of layers with one input
# (names of layers with one input, their statistics), in call order
Groups = list[tuple[list[str], Stats | DeferredStats]]


@dataclass(frozen=True)
class SharedInput:
    """Layers with one input, and its statistics; None where their methods need none."""

    layer_plans: list[LayerPlan]
    stats: Stats | DeferredStats | None


class Collector:
    """Sums up `Stats` for layers. Of those that get the same input in every call, the first to see it sums for all.

    needs: layer name -> what its method needs; ROWS for experts whose Gram matrices are formed later, from their rows.
    share: False lets every layer sum for itself.
    all_tokens: experts that are to see all tokens, in the place of those that are routed to them, and alone.
    inconsistent: layers shared an input in one call and not in another, so that the sums are wrong.
    """

    def __init__(self, *, needs: Mapping[str, str], share: bool, all_tokens: Sequence[int] = ()) -> None:
        self.needs, self._share, self._all_tokens = needs, share, all_tokens
        self.inconsistent = False
        self._sums: dict[str, RunningSum] = {}
        self._leader_of: dict[str, str] = {}
        # the inputs in this call, held so that no id is reused, and the layers that got them
        self._call: dict[tuple, tuple[tuple[Tensor, ...], list[str]]] = {}

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> None:
        if not self._leads(layer, inputs):
            return
        name, adapter = layer.name, layer.adapter
        if not isinstance(adapter, RoutedAdapter):
            gram = not {"gram", ROWS}.isdisjoint(self.needs.values())
            total = self._sums.setdefault(name, RunningSum(gram))
            for rows in adapter.rows(layer.owner, inputs, token_masks):
                total.add(rows)
            return
        if name not in self._sums:
            self._sums[name] = RunningSum.of_experts(layer, inputs[0], self.needs[name])
        total = self._sums[name]
        if total.routes is not None and token_masks[0] is None:
            inputs = tuple(x.clone() for x in inputs)  # the model may write to its own
        for expert in self._all_tokens:
            total.add_route(Route(expert, adapter.all_tokens(layer.owner, inputs, token_masks, expert)))
        for route in () if self._all_tokens else adapter.routes(layer.owner, inputs, token_masks):
            total.add_route(route)

    def _leads(self, layer: Layer, inputs: tuple[Tensor, ...]) -> bool:
        """Whether the layer leads those that see these inputs, which it is called with now."""
        _, names = self._call.setdefault(input_key(layer, inputs), (inputs, []))
        names.append(layer.name)
        leader = names[0] if self._share else layer.name
        self.inconsistent |= self._leader_of.setdefault(layer.name, leader) != leader
        return leader == layer.name

    def end_call(self, _: object = None) -> None:
        """The model's call before, if there was one, is over: followers must have seen what their leader saw, and
        tensors may be freed."""
        for _, names in self._call.values():
            counts = Counter(names)
            self.inconsistent |= any(counts[name] != counts[leader] for name, leader in self._leader_of.items())
        self._call = {}

    def take(self) -> dict[Names, RunningSum]:
        """The sums of all calls, by the names of the layers with one input, in call order."""
        shared = grouped(self._leader_of, self._leader_of.__getitem__).items()
        return {tuple(names): self._sums.pop(leader) for leader, names in shared if leader in self._sums}


# several processes ----------------------------------------------------------------------------------------------------


EXCHANGE = "statistics"


def groups_of(collector: Collector, run: Run) -> Groups | None:
    """(names of layers with one input, their statistics) once all calls are over, the same in all processes. None, in
    all of them, if layers have shared an input in one call but not in another: all calls have to be run once more, by
    layers that share no input."""
    collector.end_call()
    totals, changed = collector.take(), collector.inconsistent
    if run.processes.size > 1:
        totals, changed = _added_up(totals, changed, run)
    return None if changed else [([*names], total.stats()) for names, total in totals.items()]


def _added_up(local: dict[Names, RunningSum], changed: bool, run: Run) -> tuple[dict[Names, RunningSum], bool]:
    """Add up the sums of all processes -> (sums, whether layers share an input only in some calls or processes)."""
    device = run.config.device or torch.device("cpu")
    tensors = {names: total.sums for names, total in local.items() if total.sums is not None}
    sums = run.processes.sum_by_key(EXCHANGE, tensors, device)
    others = {names: replace(total, sums=None, routes=total.routes and []) for names, total in local.items()}
    by_rank = run.processes.all_gather(EXCHANGE, (others, changed))
    added = dict[Names, RunningSum]()
    for names, of_all in sums.items():
        ranks = [totals[names] for totals, _ in by_rank if names in totals]
        counts = None if ranks[0].counts is None else torch.stack([x.counts for x in ranks]).sum(0)
        tokens = sum(x.tokens for x in ranks)
        total = local[names] if names in local else ranks[0]
        added[names] = replace(total, sums=of_all, tokens=tokens, counts=counts)
    every = [name for names in added for name in names]
    return added, any(rank_changed for _, rank_changed in by_rank) or len(set(every)) < len(every)


# rows of experts ------------------------------------------------------------------------------------------------------


POOL = "the tokens of all experts"


def pool_of(stats: Stats | DeferredStats, run: Run) -> Stats:
    """The statistics of the rows of all experts together, in all processes."""
    gram = None if stats.gram is None else stats.gram.sum(0)
    if isinstance(stats, DeferredStats) and run.config.experts == "pool":  # the others need no Gram matrix of it
        total = stats.square_sums.new_zeros(stats.square_sums.shape[-1:] * 2)
        for route in stats.routes:
            _add_gram(total, route)
        (gram,) = run.processes.sum_by_key(POOL, {POOL: total}, total.device).values()
    return Stats(stats.tokens, stats.square_sums.sum(0), gram)


# the statistics of layers' inputs -------------------------------------------------------------------------------------


def collect(layer_plans: Sequence[LayerPlan], inputs: Inputs, run: Run, *, one_pass: bool = True) -> list[SharedInput]:
    """The layers by shared input, each with its statistics; the same in all processes.

    With ``sequential="none"`` the calls go on through the dense block, in the same pass if it takes ``one_pass``.
    Layers that saw nothing but zeros, or what is as small, are chosen by size. Raises ValueError for a layer that no
    token has reached, or data that is not finite.
    """
    goes_on = run.config.sequential == "none" and isinstance(inputs, AtBlock)
    if all(layer_plan.needs == "nothing" for layer_plan in layer_plans) and not goes_on:
        return [SharedInput([layer_plan], None) for layer_plan in layer_plans]
    at_once = goes_on and one_pass
    groups = sum_up(layer_plans, inputs, run, go_on=at_once)
    reached = {name for names, stats in groups for name in names if stats.tokens}
    groups = [(names, _with_few_tokens(layer_plans, inputs, names, stats, run)) for names, stats in groups]
    if goes_on and not at_once:
        inputs.advance()
    for names, stats in groups:
        if not torch.isfinite(stats.square_sums).all():
            why = ", now that the layers before it are sparse" if run.report.layers else ""
            advice = "check the data, or run the model in bfloat16 or float32"
            raise ValueError(f"layer {names[0]!r}: its input holds NaN or inf{why}: {advice}")
    groups = [(names, stats) for names, stats in groups if not is_underflowed(stats.square_sums).all()]
    if any(layer_plan.layer.mixture is not None for layer_plan in layer_plans):
        groups = _with_listed_experts(layer_plans, groups, run)
    seen = {name for names, _ in groups for name in names}
    unseen = [layer_plan for layer_plan in layer_plans if layer_plan.name not in seen]
    for index, layer_plan in enumerate(unseen):
        if layer_plan.needs != "nothing":
            if layer_plan.name not in reached:
                raise ValueError(no_data_message(layer_plan.name, ", now that the layers before it are sparse"))
            unseen[index] = as_magnitude_layer(layer_plan, run.report)
    shared = []
    for names, stats in groups:
        members = [layer_plan for layer_plan in layer_plans if layer_plan.name in names]
        shared.append(SharedInput(members, stats))
        if any(layer_plan.needs != "nothing" for layer_plan in members):
            warn_of_few_tokens(members[0].name, stats, run.report)
    return [*shared, *(SharedInput([layer_plan], None) for layer_plan in unseen)]


def sum_up(
    layer_plans: Sequence[LayerPlan],
    inputs: Inputs,
    run: Run,
    *,
    share: bool = True,
    all_tokens: Sequence[int] = (),
    go_on: bool = False,
) -> Groups:
    """Sum up what the layers need over all calls of all processes; ``share`` and ``all_tokens`` as for `Collector`.

    If layers share an input in some calls only, each sums for itself in another pass; raises ValueError if the calls
    ``go_on``, so that there is none.
    """
    needs = {
        layer_plan.name: ROWS if layer_plan.needs == "gram" and layer_plan.at_once is not None else layer_plan.needs
        for layer_plan in layer_plans
    }
    collector = Collector(needs=needs, share=share, all_tokens=all_tokens)
    inputs.collect(layer_plans, collector.see, collector.end_call, go_on=go_on)
    if (groups := groups_of(collector, run)) is None:
        if go_on:
            problem = f"layer {layer_plans[0].name!r} and others of its block share an input on some batches alone"
            raise ValueError(f"{problem}, which sequential='none' cannot sum up: give sequential='block'")
        return sum_up(layer_plans, inputs, run, share=False)
    position = {layer_plan.name: number for number, layer_plan in enumerate(layer_plans)}
    return sorted(groups, key=lambda group: position[group[0][0]])


def _with_few_tokens(
    layer_plans: Sequence[LayerPlan], inputs: Inputs, names: list[str], stats: Stats | DeferredStats, run: Run
) -> Stats | DeferredStats:
    """Statistics in which experts with few tokens have what the options say; "all_tokens" takes one more pass."""
    config, stats = run.config, drop_underflowed_experts(stats)
    if not stats.tokens or not (experts := experts_below(stats, config.min_tokens)):
        return stats
    everyone = None
    if config.experts == "all_tokens":
        members = [layer_plan for layer_plan in layer_plans if layer_plan.name in names]
        ((_, everyone),) = sum_up(members, inputs, run, share=False, all_tokens=experts)
    top_up = TopUp(config.min_tokens, config.experts, pool_of(stats, run))
    if isinstance(stats, DeferredStats):
        assert not isinstance(everyone, Stats)
        filled = top_up.fill(stats.without_gram(), everyone and everyone.without_gram())
        return replace(stats, square_sums=filled.square_sums, top_up=top_up, everyone=everyone)
    assert not isinstance(everyone, DeferredStats)
    return top_up.fill(stats, everyone)


def _with_listed_experts(layer_plans: Sequence[LayerPlan], groups: Groups, run: Run) -> Groups:
    """Top up the statistics of experts that are modules in a list; these come last in the result.

    Layers with few rows, or that are in none of the ``groups`` because they got none, are filled up from the rows of
    their whole mixture. A layer whose mixture got nothing at all is left out.
    """
    listed = [plan for plan in layer_plans if plan.layer.mixture is not None and plan.needs != "nothing"]
    stats_of = {name: stats for names, stats in groups for name in names if isinstance(stats, Stats)}
    top_ups: dict[str, TopUp] = {}  # of layers, from the rows of their mixture
    for members in grouped(listed, lambda plan: (plan.layer.mixture, plan.shape)).values():
        if seen := [stats_of[plan.name] for plan in members if plan.name in stats_of]:
            top_up = TopUp(run.config.min_tokens, run.config.experts, reduce(Stats.__add__, seen))
            top_ups |= dict.fromkeys((plan.name for plan in members), top_up)
    groups = sorted(groups, key=lambda group: not top_ups.keys().isdisjoint(group[0]))
    for unseen in (plan.name for plan in listed if plan.name in top_ups and plan.name not in stats_of):
        pool = top_ups[unseen].pool
        gram = None if pool.gram is None else torch.zeros_like(pool.gram)
        groups.append(([unseen], Stats(0, torch.zeros_like(pool.square_sums), gram)))
    result: Groups = []
    for names, stats in groups:
        top_up = next((top_ups[name] for name in names if name in top_ups), None)
        if top_up is not None and isinstance(stats, Stats) and stats.tokens < top_up.minimum:
            stats = deepcopy(stats)  # a pool may be the same object
            top_up.fill_one(stats)
        result.append((names, stats))
    return result
