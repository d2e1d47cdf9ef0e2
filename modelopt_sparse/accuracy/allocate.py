"""Which layer gets how much of an unstructured sparsity budget: by block, OWL, and a search on measured divergence.

All of them only move sparsity between layers: the model has as many zeros as its plan asked for, or a few more.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from modelopt_sparse.accuracy.distill import logits_of
from modelopt_sparse.accuracy.tuning import called_with
from modelopt_sparse.calibration.data import samples
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import WholeModel, with_small_inputs
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import (
    Collector,
    SumsOfAllProcesses,
    filled,
    pooled,
    without_data,
    without_silent_experts,
)
from modelopt_sparse.methods import scores as wanda
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.model.devices import flat_tensors, offloaded_after_errors
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.progress import Progress

# divergence: how far a model is from its dense self -------------------------------------------------------------------
# Layers are pruned for the moment, by Wanda's scores, which need one run over the data and no solving.


SAMPLES = 32  # measured on calls that hold so many
CHUNK = 512  # rows of an output that are converted to float64 together


@contextmanager
def masked(plan: Plan, stats: Mapping[str, Stats]) -> Iterator[None]:
    """While entered, every layer of the plan is called with its weight pruned by its pattern, scored as Wanda does."""

    def pruned(layer_plan: LayerPlan) -> Tensor:
        values = layer_plan.layer.values
        mask = layer_plan.layer.unmatrix(layer_plan.pattern_now.mask(score(layer_plan, stats))).to(values.device)
        return values.masked_fill(~mask, 0)

    with called_with({layer_plan.layer: partial(pruned, layer_plan) for layer_plan in plan.layers}):
        yield


class Divergence:
    """How far the model, with its layers masked by each of several plans, is from the dense model.

    The mean KL(dense || masked) of the predictions where the model gives logits, else the relative squared error of its
    first output; padding does not count. Where several processes work together, each measures on its own batches.
    """

    def __init__(self, data: CalibrationData, stats: Mapping[str, Stats], bar: Progress) -> None:
        self.title = ""  # what the numbers are, known after a run
        self._data, self._stats, self._bar = data, stats, bar
        self._numbers: list[int] | None = None  # of the calls that are measured on; None for those of a forward_loop
        if data.calls is not None:
            processes = data.run.processes
            own = [samples(call.args, call.kwargs) for call in data.calls]
            sizes = processes.all_gather("the sizes of batches", own)
            # batches by their number: the first of every rank, the second of every rank, and so on
            places = sorted((i, rank) for rank, of_rank in enumerate(sizes) for i in range(len(of_rank)))
            count = min(math.ceil(len(places) * SAMPLES / max(sum(map(sum, sizes)), 1)), len(places))
            chosen = [places[i * len(places) // count] for i in range(count)]  # from all over the data
            self._numbers = [i for i, rank in chosen if rank == processes.rank]

    def __call__(self, plans: Sequence[Plan]) -> list[float]:
        of_ranks = self._data.run.processes.all_gather("a divergence", self._measured(plans))
        calls = sorted(call for of_rank, _ in of_ranks for call in of_rank)  # in one order, however many processes
        problem = next((problem for _, problem in of_ranks if problem), "")
        whole = sum(scale for *_, scale in calls)
        if problem or not whole:
            raise ValueError(f"allocation='search': {problem or 'the dense model gives no number but zero'}")
        is_logits = calls[0][2]
        self.title = "mean KL from the dense model, in nats" if is_logits else "relative squared error of the output"
        self._bar.update(len(plans))
        totals = [sum(totals[index] for _, totals, *_ in calls) for index in range(len(plans))]
        return [total / whole if math.isfinite(total) else math.inf for total in totals]

    def _measured(self, plans: Sequence[Plan]) -> tuple[list[tuple], str]:
        """Of each call that is measured on: (number and rank, a total for every plan, whether they are of logits, the
        scale that totals are relative to); and what is wrong, or "".

        One run over the data serves all plans: hooks on the model, which see what a forward_loop does as well, repeat
        each call with masked layers. Of a forward_loop's calls these are the first, with ``SAMPLES`` samples.
        """
        run, numbers = self._data.run, self._numbers
        calls: list[tuple] = []
        problem, seen, repeated = "", 0, False
        token_mask: Tensor | None = None
        called: tuple[tuple, dict[str, Any]] = (), {}

        def begin(masks: TokenMasks) -> None:
            nonlocal token_mask
            token_mask = masks.decoder

        def before(model: nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal called
            if not repeated:
                called = args, kwargs

        def after(model: nn.Module, args: tuple, output: Any) -> None:
            nonlocal problem, seen, repeated
            if repeated or problem or (numbers is None and seen >= SAMPLES):
                return
            args, kwargs = called
            # logits of -inf rule tokens out, as of a padded vocabulary
            dense, is_logits = _compared(output, token_mask)
            if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
                problem = "a call with a cache, as of generate, cannot be repeated: call model(...) on whole texts"
            elif not torch.isfinite(dense.clamp_min(torch.finfo(dense.dtype).min) if is_logits else dense).all():
                problem = "the dense model's output holds NaN or inf: run it in bfloat16 or float32"
            else:
                number = len(calls) if numbers is None else numbers[len(calls)]
                scale = float(len(dense)) if is_logits else float(dense.double().square().sum())
                seen += samples(args, kwargs)
                totals: list[float] = []
                repeated = True
                try:
                    for plan in plans:
                        with masked(plan, self._stats):
                            other, _ = _compared(model(*args, **kwargs), token_mask)
                        divergence = kl_divergence(dense, other).sum() if is_logits else _squared_error(dense, other)
                        totals.append(float(divergence))
                finally:
                    repeated = False
                calls.append(((number, run.processes.rank), totals, is_logits, scale))

        with (
            # prepended: what other hooks do to the arguments they will do again
            run.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            run.model.register_forward_hook(after),
        ):
            self._data.run_model(begin, numbers=numbers)
        return calls, problem


def _compared(output: Any, token_mask: Tensor | None) -> tuple[Tensor, bool]:
    """The rows [T, C] of a model's output that are compared, without padding, and whether they are logits."""
    x = logits = logits_of(output)
    if x is None:
        x = next((x for x in flat_tensors(output) if x.is_floating_point() and x.dim()), torch.empty(0, 1))
    if token_mask is not None and token_mask.shape == x.shape[:-1]:
        return x[token_mask.to(x.device)], logits is not None
    return x.reshape(-1, x.shape[-1]), logits is not None


def _squared_error(p: Tensor, q: Tensor) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(p.split(CHUNK), q.split(CHUNK)))


def statistics(data: CalibrationData, layer_plans: Sequence[LayerPlan]) -> dict[str, Stats]:
    """Square sums of the inputs of these layers in the dense model: one run over the data."""
    collector = Collector(needs={layer_plan.name: "square_sums" for layer_plan in layer_plans}, share=False)

    def see(layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        collector.see(layer, inputs, token_mask)
        collector.end_call()  # nothing is shared, so that no input has to stay alive

    sums = SumsOfAllProcesses(collector, data.run)
    WholeModel(data).collect(layer_plans, see, sums, go_on=False)
    wanted = [replace(layer_plan, needs="square_sums") for layer_plan in layer_plans]
    groups = with_small_inputs(wanted, WholeModel(data), sums.groups() or [], data.run)
    stats = {name: summed for (name,), summed in groups if isinstance(summed, Stats)}  # none are deferred
    for layer_plan in layer_plans:
        name = layer_plan.name
        summed = stats.get(name, Stats(0, torch.zeros(1)))
        if not summed.tokens:
            raise ValueError(f"allocation needs the inputs of all layers: {without_data(name)}")
        if not torch.isfinite(stats[name].square_sums).all():
            raise ValueError(f"layer {name!r}: its input holds NaN or inf; run the model in bfloat16 or float32")
    minimum, how = data.run.config.min_tokens, data.run.config.experts
    # what all tokens would be to an expert is not worth a run here: the pool is close
    how = "pool" if how == "all_tokens" else how
    for name, summed in stats.items():
        if summed.counts is not None:
            heard = without_silent_experts(summed)
            assert isinstance(heard, Stats)
            stats[name] = filled(heard, minimum, how, pooled(heard), None)
    return {name: summed.with_dead_channels() for name, summed in stats.items()}


def score(layer_plan: LayerPlan, stats: Mapping[str, Stats]) -> Tensor:
    """Wanda's score of a layer's weight as a matrix."""
    return wanda.score(layer_plan.layer.matrix(layer_plan.layer.values), stats[layer_plan.name].square_sums)


# allocations ----------------------------------------------------------------------------------------------------------


HIGHEST = 0.99  # no layer is pruned whole
GRID = 10_000  # sparsities have four decimals
BALANCE = 0.5  # half of the way: errors of pruned weights that are compensated differ less from layer to layer
STEPS = ((0.05, 0.5), (0.025, 0.25))  # of slope and balance, coarse to fine


@dataclass(frozen=True)
class Allocation:
    """A plan in which every layer has its own sparsity, and how it was found.

    ``tried`` holds what the search measured, the smallest won; ``measure`` says what its numbers are.
    """

    plan: Plan
    description: str
    tried: tuple[tuple[str, float], ...] = ()
    measure: str | None = None


def allocated(data: CalibrationData) -> Run:
    """The run with a plan in which every layer has its own sparsity, as ``config.allocation`` asks for; the report says
    how the zeros were shared out."""
    run = data.run
    allocation = allocation_for(data)
    run.processes.check_same({"the allocation": str(allocation.plan)}, "report this")
    run.report.allocated(allocation.description, allocation.measure, dict(allocation.tried))
    return replace(run, plan=allocation.plan)


def allocation_for(data: CalibrationData) -> Allocation:
    """Do what ``config.allocation``, "block", "owl" or "search", asks for. The model ends as it came, to the bit.

    To be called in evaluation mode, with caches off, for a plan with unstructured patterns. Raises ValueError for
    layers that see no data.
    """
    run, how = data.run, data.run.config.allocation
    plan = run.plan
    with torch.no_grad(), offloaded_after_errors(run.model):
        if how in SPARSITIES:
            stats = statistics(data, _unstructured(plan))
            return Allocation(allocate(plan, SPARSITIES[how](plan, stats)), how)
        stats = statistics(data, plan.layers)
        with Progress("search an allocation", "plan", show=run.config.progress) as bar:
            divergence = Divergence(data, stats, bar)
            return replace(search_plan(plan, stats, divergence), measure=divergence.title)


def allocate(plan: Plan, sparsities: Mapping[str, float]) -> Plan:
    """The plan with these sparsities in its unstructured layers, all shifted alike to meet the plan's own zeros.

    Each is rounded, to four decimals or less, so that together they prune no fewer weights than the patterns of
    ``plan`` do, and more by less than the finest step of a layer (one weight of each row or matrix, or 0.0001 of it).
    N:M layers stay as they are and do not count.
    """
    wanted = _on_budget(plan, sparsities)
    layers = [_Rounded(layer_plan, wanted[layer_plan.name]) for layer_plan in _unstructured(plan)]
    if sum(layer.zeros(layer.last) for layer in layers) < _budget(plan):
        raise ValueError(f"allocation prunes no layer by more than {HIGHEST:.0%}: leave it out for this plan")
    surplus = sum(layer.zeros(layer.step) for layer in layers) - _budget(plan)
    while surplus < 0:
        for layer in sorted(layers, key=_Rounded.excess):
            if layer.step < layer.last:
                surplus += layer.move(1)
    lowered = True
    while lowered:
        lowered = False
        for layer in sorted(layers, key=_Rounded.excess, reverse=True):
            if layer.step > layer.first and layer.zeros(layer.step) - layer.zeros(layer.step - 1) <= surplus:
                surplus += layer.move(-1)
                lowered = True
    patterns = {layer.layer_plan.name: layer.pattern(layer.step) for layer in layers}
    replaced = (replace(each, pattern=patterns.get(each.name, each.pattern)) for each in plan.layers)
    return replace(plan, layers=tuple(replaced))


def block_sparsities(plan: Plan, stats: Mapping[str, Stats], share: float = BALANCE) -> dict[str, float]:
    """Zeros shared out among the layers of each block: from the plan's own sparsities, ``share`` of the way to those
    that minimize the sum of the layers' relative errors."""
    even = _even_sparsities(plan, stats)
    own = {layer_plan.name: layer_plan.pattern.sparsity for layer_plan in _unstructured(plan)}
    return {name: own[name] + share * (even[name] - own[name]) for name in own}


def owl_sparsities(plan: Plan, stats: Mapping[str, Stats], m: float = 5.0, lambda_: float = 0.08) -> dict[str, float]:
    """OWL (Yin et al. 2024, arXiv 2310.05175): blocks with more outliers stay denser.

    The outlier share of a block is the fraction of the scores |w| * ||x|| of all its layers that exceed ``m`` times
    their common mean, as in the authors' code. Shares are scaled to [0, 2 lambda_] and taken off the sparsity, alike
    for all layers of a block. A layer outside of the blocks counts as one.
    """
    share: dict[str, float] = {}
    for unit, layer_plans in _units(plan).items():
        size = sum(layer_plan.size for layer_plan in layer_plans)
        mean = sum(float(score(layer_plan, stats).sum(dtype=torch.float64)) for layer_plan in layer_plans) / size
        share[unit] = sum(int((score(layer_plan, stats) > m * mean).sum()) for layer_plan in layer_plans) / size
    least = min(share.values())
    spread = max(share.values()) - least
    wanted: dict[str, float] = {}
    for unit, layer_plans in _units(plan).items():
        denser = 2 * lambda_ * (share[unit] - least) / spread if spread else 0.0
        wanted.update({layer_plan.name: layer_plan.pattern.sparsity - denser for layer_plan in layer_plans})
    return _on_budget(plan, wanted)


SPARSITIES: dict[str, Callable[[Plan, Mapping[str, Stats]], dict[str, float]]] = {
    "block": block_sparsities,
    "owl": owl_sparsities,
}


def search_plan(
    plan: Plan, stats: Mapping[str, Stats], divergence: Callable[[Sequence[Plan]], Sequence[float]]
) -> Allocation:
    """The plan of smallest ``divergence`` that a walk through a family of two coordinates finds, from (0, 0) on.

    sparsity = own + slope * (2 * depth - 1) + balance * (even - own), where own is the plan's; depth in [0, 1] is the
    position of the layer's block (an arithmetic progression over depth: Huang et al. 2025, arXiv 2502.14770); even is
    the layer's sparsity where the layers of its block share the block's zeros so that the sum of their relative errors
    is smallest.
    """
    blocks = [name for stack in plan.stacks for name in stack.names]
    tilt: dict[str | None, float] = {name: 2 * i / max(len(blocks) - 1, 1) - 1 for i, name in enumerate(blocks)}
    even = _even_sparsities(plan, stats)
    tried: dict[tuple[float, float], tuple[float, Plan]] = {}

    def plan_at(slope: float, balance: float) -> Plan:
        if not slope and not balance:
            return plan
        wanted = {}
        for layer_plan in _unstructured(plan):
            own = layer_plan.pattern.sparsity
            tilted = own + slope * tilt.get(layer_plan.block, 0.0)
            wanted[layer_plan.name] = tilted + balance * (even[layer_plan.name] - own)
        return allocate(plan, wanted)

    def measure(*points: tuple[float, float]) -> None:
        new = {point: plan_at(*point) for point in points if point not in tried}
        if new:
            tried.update(zip(new, zip(divergence(list(new.values())), new.values())))

    best = (0.0, 0.0)
    measure(best)
    for slope, balance in STEPS:
        for step in ((slope, 0.0), (0.0, balance)):
            while True:
                measure(*((round(best[0] + sign * step[0], 4), round(best[1] + sign * step[1], 4)) for sign in (1, -1)))
                nearest = min(tried, key=lambda point: tried[point][0])  # of equals the first: the plan as it came
                if nearest == best:
                    break
                best = nearest
    described = {point: f"slope {point[0]:g}, balance {point[1]:g}" for point in tried}
    values = tuple((described[point], value) for point, (value, _) in tried.items())
    return Allocation(tried[best][1], described[best], values)


class _Rounded:
    """A layer's sparsity as one of the steps from ``first`` to ``last``, each of which prunes more weights than the one
    before it. A layer that carries a mask has the zeros of ``first`` already."""

    def __init__(self, layer_plan: LayerPlan, wanted: float) -> None:
        assert isinstance(layer_plan.pattern, Unstructured)
        *_, rows, columns = layer_plan.shape
        self.layer_plan, self.wanted, self._pattern = layer_plan, wanted, layer_plan.pattern
        self.steps = min(columns if self._pattern.scope == "row" else rows * columns, GRID)
        self.last = int(HIGHEST * self.steps)
        self.first = math.ceil(_least(layer_plan) * self.steps)
        self.step = min(max(round(wanted * self.steps), self.first), self.last)

    def pattern(self, step: int) -> Unstructured:
        return replace(self._pattern, sparsity=round(step / self.steps, 4))

    def zeros(self, step: int) -> int:
        return self.pattern(step).zeros_in(self.layer_plan.shape)

    def excess(self) -> float:
        return self.step / self.steps - self.wanted

    def move(self, by: int) -> int:
        """Go ``by`` steps -> how many more weights are pruned."""
        self.step += by
        return self.zeros(self.step) - self.zeros(self.step - by)


def _on_budget(plan: Plan, sparsities: Mapping[str, float]) -> dict[str, float]:
    """The sparsities plus one number, clipped to [0, HIGHEST], so that they prune as much as the plan's patterns; no
    layer has fewer zeros than the mask that it carries."""
    layer_plans = _unstructured(plan)
    budget = _budget(plan)
    least = {layer_plan.name: _least(layer_plan) for layer_plan in layer_plans}

    def clipped(shift: float) -> dict[str, float]:
        return {name: max(min(sparsities[name] + shift, HIGHEST), least[name]) for name in least}

    low, high = -max(sparsities.values()), HIGHEST - min(sparsities.values())
    for _ in range(64):
        shift = (low + high) / 2
        sparsity = clipped(shift)
        if sum(layer_plan.size * sparsity[layer_plan.name] for layer_plan in layer_plans) < budget:
            low = shift
        else:
            high = shift
    return clipped(high)


def _even_sparsities(plan: Plan, stats: Mapping[str, Stats]) -> dict[str, float]:
    """Within each block, the sparsities of its layers that minimize the sum of their relative output errors, the
    inputs' channels taken as uncorrelated: the smallest (|w| ||x||)^2 / ||W X||^2 of all of them are pruned."""
    even: dict[str, float] = {}
    for layer_plans in _units(plan).values():
        device = stats[layer_plans[0].name].square_sums.device
        error: dict[str, Tensor] = {}
        for layer_plan in layer_plans:
            energy = score(layer_plan, stats).square().flatten()
            error[layer_plan.name] = (energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)).to(device)
        pruned = round(sum(layer_plan.pattern.sparsity * layer_plan.size for layer_plan in layer_plans))
        highest = torch.cat(list(error.values())).kthvalue(max(pruned, 1)).values
        even.update({name: int((values <= highest).sum()) / len(values) for name, values in error.items()})
    return even


def _unstructured(plan: Plan) -> list[LayerPlan]:
    return [layer_plan for layer_plan in plan.layers if isinstance(layer_plan.pattern, Unstructured)]


def _units(plan: Plan) -> dict[str, list[LayerPlan]]:
    """The unstructured layers by block; one outside of the blocks is by itself."""
    units: dict[str, list[LayerPlan]] = {}
    for layer_plan in _unstructured(plan):
        units.setdefault(layer_plan.name if layer_plan.block is None else layer_plan.block, []).append(layer_plan)
    return units


def _least(layer_plan: LayerPlan) -> float:
    """The sparsity that a layer has already, by the mask that it carries."""
    mask = layer_plan.pattern_now.within
    return 0.0 if mask is None else 1 - int(mask.sum()) / mask.numel()


def _budget(plan: Plan) -> int:
    """Zeros that the plan's unstructured patterns ask for."""
    return sum(layer_plan.pattern.zeros_in(layer_plan.shape) for layer_plan in _unstructured(plan))
