"""Which layer gets how much of an unstructured sparsity budget: by block, OWL, and a search on measured divergence.

All of them only move sparsity between layers: the model has as many zeros as its plan asked for, or a few more.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Cache

from modelopt_sparse.calibration.batches import Call, TokenMasks
from modelopt_sparse.calibration.experts import filled, pooled
from modelopt_sparse.calibration.record import flat_tensors
from modelopt_sparse.calibration.run import Runner
from modelopt_sparse.calibration.stats import Collector, LayerInputs
from modelopt_sparse.config import SparsifyConfig
from modelopt_sparse.layers import Layer
from modelopt_sparse.methods import wanda
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.offload import offloaded_after_errors, stored
from modelopt_sparse.patterns import Unstructured, count_zeros
from modelopt_sparse.plan import LayerPlan, Plan

HIGHEST = 0.99  # no layer is pruned whole
GRID = 10_000  # sparsities have four decimals
BALANCE = 0.5  # half of the way: errors of pruned weights that are compensated differ less from layer to layer
SAMPLES = 32  # the search measures on calls that hold so many
STEPS = ((0.05, 0.5), (0.025, 0.25))  # of slope and balance, coarse to fine
CHUNK = 512  # predictions whose divergence is computed together: times a vocabulary they are large


@dataclass(frozen=True)
class Allocation:
    """A plan in which every layer has its own sparsity, and how it was found.

    ``tried`` holds what the search measured, the smallest won; ``measure`` says what its numbers are.
    """

    plan: Plan
    description: str
    tried: tuple[tuple[str, float], ...] = ()
    measure: str | None = None


def allocation_for(model: nn.Module, plan: Plan, config: SparsifyConfig, runner: Runner | None = None) -> Allocation:
    """Do what ``config.allocation``, "block", "owl" or "search", asks for. The model ends as it came, to the bit.

    To be called in evaluation mode, with caches off, for a plan with unstructured patterns. Raises ValueError for
    layers that see no data. ``runner``: one that has loaded the data already.
    """
    runner = runner or Runner(model, plan, config)
    with torch.no_grad(), offloaded_after_errors(model):
        if config.allocation in SPARSITIES:
            stats = _statistics(runner, _unstructured(plan))
            return Allocation(allocate(plan, SPARSITIES[config.allocation](plan, stats)), config.allocation)
        stats = _statistics(runner, plan.layers)
        hide = None if config.progress is None else not config.progress
        with tqdm(desc="search an allocation", unit="plan", disable=hide) as bar:
            divergence = _Divergence(runner, stats, bar)
            return replace(search_plan(plan, stats, divergence), measure=divergence.title)


def allocate(plan: Plan, sparsities: Mapping[str, float]) -> Plan:
    """The plan with these sparsities in its unstructured layers, all shifted alike to meet the plan's own zeros.

    Each is rounded, to four decimals or less, so that together they prune no fewer weights than the patterns of
    ``plan`` do, and more by less than the finest step of a layer (one weight of each row or matrix, or 0.0001 of it).
    N:M layers stay as they are and do not count.
    """
    wanted = _on_budget(plan, sparsities)
    layers = [_Rounded(item, wanted[item.name]) for item in _unstructured(plan)]
    if sum(layer.zeros(layer.last) for layer in layers) < _budget(plan):
        raise ValueError(
            f"allocation prunes no layer by more than {HIGHEST:.0%}, and this plan prunes more: leave it out"
        )
    surplus = sum(layer.zeros(layer.step) for layer in layers) - _budget(plan)
    while surplus < 0:
        for layer in sorted(layers, key=_Rounded.excess):
            if layer.step < layer.last:
                surplus += layer.move(1)
    lowered = True
    while lowered:
        lowered = False
        for layer in sorted(layers, key=_Rounded.excess, reverse=True):
            if layer.step > 0 and layer.zeros(layer.step) - layer.zeros(layer.step - 1) <= surplus:
                surplus += layer.move(-1)
                lowered = True
    found = {layer.item.name: layer.pattern(layer.step) for layer in layers}
    items = (replace(item, pattern=found.get(item.name, item.pattern)) for item in plan.layers)
    return replace(plan, layers=tuple(items))


def block_sparsities(plan: Plan, stats: Mapping[str, Stats], share: float = BALANCE) -> dict[str, float]:
    """Zeros shared out among the layers of each block: from the plan's own sparsities, ``share`` of the way to those
    that minimize the sum of the layers' relative errors."""
    even = _even_sparsities(plan, stats)
    own = {item.name: _sparsity(item) for item in _unstructured(plan)}
    return {name: own[name] + share * (even[name] - own[name]) for name in own}


def owl_sparsities(plan: Plan, stats: Mapping[str, Stats], m: float = 5.0, lambda_: float = 0.08) -> dict[str, float]:
    """OWL (Yin et al. 2024, arXiv 2310.05175): blocks with more outliers stay denser.

    The outlier share of a block is the fraction of the scores |w| * ||x|| of all its layers that exceed ``m`` times
    their common mean, as in the authors' code. Shares are scaled to [0, 2 lambda_] and taken off the sparsity, alike
    for all layers of a block. A layer outside of the blocks counts as one.
    """
    share: dict[str, float] = {}
    for unit, items in _units(plan).items():
        size = sum(item.size for item in items)
        mean = sum(float(_score(item, stats).sum(dtype=torch.float64)) for item in items) / size
        share[unit] = sum(int((_score(item, stats) > m * mean).sum()) for item in items) / size
    least = min(share.values())
    spread = max(share.values()) - least
    wanted: dict[str, float] = {}
    for unit, items in _units(plan).items():
        denser = 2 * lambda_ * (share[unit] - least) / spread if spread else 0.0
        wanted.update({item.name: _sparsity(item) - denser for item in items})
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
    plans: dict[tuple[float, float], Plan] = {}
    measured: dict[tuple[float, float], float] = {}

    def plan_at(slope: float, balance: float) -> Plan:
        if not slope and not balance:
            return plan
        wanted = {}
        for item in _unstructured(plan):
            own = _sparsity(item)
            wanted[item.name] = own + slope * tilt.get(item.block, 0.0) + balance * (even[item.name] - own)
        return allocate(plan, wanted)

    def measure(points: Sequence[tuple[float, float]]) -> None:
        new = {point: plan_at(*point) for point in points if point not in plans}
        plans.update(new)
        if new:
            measured.update(zip(new, divergence(list(new.values()))))

    best = (0.0, 0.0)
    measure([best])
    for slope, balance in STEPS:
        for step in ((slope, 0.0), (0.0, balance)):
            while True:
                measure([(round(best[0] + sign * step[0], 4), round(best[1] + sign * step[1], 4)) for sign in (1, -1)])
                nearest = min(measured, key=measured.__getitem__)  # of equals the first: the plan as it came
                if nearest == best:
                    break
                best = nearest
    described = {point: f"slope {point[0]:g}, balance {point[1]:g}" for point in measured}
    tried = tuple((described[point], value) for point, value in measured.items())
    return Allocation(plans[best], described[best], tried)


@contextmanager
def masked(plan: Plan, stats: Mapping[str, Stats]) -> Iterator[None]:
    """While entered, every layer of the plan is called with its weight pruned by its pattern, scored as Wanda does.

    A weight is pruned in place when its module is called, and put back after the call, so that one layer at a time is
    held twice. Whatever happens, the weights end as they were.
    """
    dense: dict[str, Tensor] = {}

    def before(item: LayerPlan, *_: Any) -> None:
        if item.name in dense:
            return  # pruned already, in a call that has not ended, or that failed and was gone over
        values = _values(item.layer)
        mask = item.layer.unmatrix(item.pattern.mask(_score(item, stats))).to(values.device)
        dense[item.name] = values.clone()
        values.masked_fill_(~mask, 0)

    def after(item: LayerPlan, *_: Any) -> None:
        if item.name in dense:
            _values(item.layer).copy_(dense[item.name])
            del dense[item.name]

    with ExitStack() as hooks:
        for item in plan.layers:
            hooks.callback(after, item)
            for module in item.layer.observed:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, item)))
                hooks.enter_context(module.register_forward_hook(partial(after, item)))
        yield


class _Divergence:
    """How far the model, with its layers masked by each of several plans, is from the dense model.

    The mean KL(dense || masked) of the predictions where the model gives logits, else the relative squared error of its
    first output; padding does not count. One run over the data serves all plans: hooks on the model, which see what a
    forward_loop does as well, repeat each call with masked layers until ``SAMPLES`` samples have been seen.
    """

    def __init__(self, runner: Runner, stats: Mapping[str, Stats], bar: tqdm) -> None:
        self.title = ""  # what the numbers are, known after a run
        self._runner, self._stats, self._bar = runner, stats, bar
        if runner.calls is not None:
            self._runner = copy(runner)
            self._runner.calls = _spread_out(runner.calls)

    def __call__(self, plans: Sequence[Plan]) -> list[float]:
        self._plans = plans
        self._totals, self._scale, self._samples = [0.0] * len(plans), 0.0, 0
        self._inside, self._problem = False, ""
        model = self._runner.model
        with (
            # prepended: what other hooks do to the arguments they will do again
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        ):
            self._runner.run_model(self._begin)
        if self._problem or not self._scale:
            raise ValueError(f"allocation='search': {self._problem or 'the dense model gives no number but zero'}")
        self._bar.update(len(plans))
        return [total / self._scale if math.isfinite(total) else math.inf for total in self._totals]

    def _begin(self, masks: TokenMasks) -> None:
        self._keep = masks.decoder

    def _before(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        del model
        if not self._inside:
            self._call = (args, kwargs)

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        if self._inside or self._problem or self._samples >= SAMPLES:
            return
        args, kwargs = self._call
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            self._problem = (
                "a call with a cache, as generate makes it, cannot be repeated: call model(...) on whole texts"
            )
            return
        dense, is_logits = _compared(output, self._keep)
        if not torch.isfinite(dense).all():
            self._problem = "the dense model's output holds NaN or inf: run it in bfloat16 or float32"
            return
        self.title = "mean KL from the dense model, in nats" if is_logits else "relative squared error of the output"
        self._samples += _samples(args, kwargs)
        self._scale += len(dense) if is_logits else float(dense.double().square().sum())
        self._inside = True
        try:
            for index, plan in enumerate(self._plans):
                with masked(plan, self._stats):
                    other, _ = _compared(model(*args, **kwargs), self._keep)
                self._totals[index] += sum(
                    _kl(p, q) if is_logits else float((p - q).double().square().sum())
                    for p, q in zip(dense.split(CHUNK), other.split(CHUNK))
                )
        finally:
            self._inside = False


def _compared(output: Any, keep: Tensor | None) -> tuple[Tensor, bool]:
    """The rows [T, C] of a model's output that are compared, without padding, and whether they are logits."""
    x = getattr(output, "logits", None)
    is_logits = isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[-1] > 1
    if not is_logits:
        x = next((x for x in flat_tensors(output) if x.is_floating_point() and x.dim()), None)
    if x is None:
        return torch.empty(0, 0), False
    if keep is not None and keep.shape == x.shape[:-1]:
        return x[keep.to(x.device)], is_logits
    return x.reshape(-1, x.shape[-1]), is_logits


def _kl(logits_p: Tensor, logits_q: Tensor) -> float:
    """The sum over rows of KL(p || q)."""
    work = torch.promote_types(logits_p.dtype, torch.float32)
    log_p, log_q = (logits.to(work).log_softmax(-1) for logits in (logits_p, logits_q))
    return float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))


def _samples(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """The size of a call's batch: that of its first tensor."""
    sizes = [len(x) for x in flat_tensors((args, kwargs)) if x.dim()]
    return sizes[0] if sizes else 1


def _spread_out(calls: Sequence[Call]) -> list[Call]:
    """Calls from all over the data that hold about ``SAMPLES`` samples."""
    samples = sum(_samples(call.args, call.kwargs) for call in calls)
    count = min(math.ceil(len(calls) * SAMPLES / max(samples, 1)), len(calls))
    return [calls[i * len(calls) // count] for i in range(count)]


def _statistics(runner: Runner, items: Sequence[LayerPlan]) -> dict[str, Stats]:
    """Square sums of the inputs of these layers in the dense model: one run over the data."""
    collector = Collector(needs={item.name: "square_sums" for item in items}, share=False)

    def see(layer: Layer, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        collector.see(layer, inputs, keep)
        collector.end_call()  # nothing is shared, so that no input has to stay alive

    inputs = LayerInputs(items, runner.side_of, runner.blocks, see)
    runner.run_model(inputs.begin, inputs=inputs)
    stats = {name: found for (name,), found in collector.groups() if isinstance(found, Stats)}  # nothing is kept
    for item in items:
        if item.name not in stats or not stats[item.name].tokens:
            raise ValueError(
                f"layer {item.name!r} saw no calibration data, and allocation needs its inputs: give data that reaches "
                "it, or exclude it"
            )
        if not torch.isfinite(stats[item.name].square_sums).all():
            raise ValueError(
                f"layer {item.name!r}: its input holds NaN or inf on the calibration data; check the data, or run the "
                "model in bfloat16 or float32"
            )
    minimum, how = runner.config.min_tokens, runner.config.experts
    # what all tokens would be to an expert is not worth a run here: the pool is close
    how = "pool" if how == "all_tokens" else how
    return {
        name: found if found.counts is None else filled(found, minimum, how, pooled(found), None)
        for name, found in stats.items()
    }


class _Rounded:
    """A layer's sparsity as one of ``last`` + 1 steps, each of which prunes more weights than the one before it."""

    def __init__(self, item: LayerPlan, wanted: float) -> None:
        self.item, self.wanted = item, wanted
        self.scope = _scope_size(item)
        self.steps = min(self.scope, GRID)
        self.last = int(HIGHEST * self.steps)
        self.step = min(max(round(wanted * self.steps), 0), self.last)

    def pattern(self, step: int) -> Unstructured:
        assert isinstance(self.item.pattern, Unstructured)
        return replace(self.item.pattern, sparsity=round(step / self.steps, 4))

    def zeros(self, step: int) -> int:
        return self.item.size // self.scope * count_zeros(self.pattern(step).sparsity, self.scope)

    def excess(self) -> float:
        return self.step / self.steps - self.wanted

    def move(self, by: int) -> int:
        """Go ``by`` steps -> how many more weights are pruned."""
        self.step += by
        return self.zeros(self.step) - self.zeros(self.step - by)


def _on_budget(plan: Plan, sparsities: Mapping[str, float]) -> dict[str, float]:
    """The sparsities plus one number, clipped to [0, HIGHEST], so that they prune as much as the plan's patterns."""
    items = _unstructured(plan)
    if sparsities.keys() != {item.name for item in items}:
        wrong = sorted(sparsities.keys() ^ {item.name for item in items})
        raise ValueError(f"sparsities are needed for just the plan's unstructured layers, which differs in {wrong[:8]}")
    budget = _budget(plan)

    def clipped(shift: float) -> dict[str, float]:
        return {item.name: min(max(sparsities[item.name] + shift, 0.0), HIGHEST) for item in items}

    low, high = -max(sparsities.values()), HIGHEST - min(sparsities.values())
    for _ in range(64):
        shift = (low + high) / 2
        found = clipped(shift)
        if sum(item.size * found[item.name] for item in items) < budget:
            low = shift
        else:
            high = shift
    return clipped(high)


def _even_sparsities(plan: Plan, stats: Mapping[str, Stats]) -> dict[str, float]:
    """Within each block, the sparsities of its layers that minimize the sum of their relative output errors, the
    inputs' channels taken as uncorrelated: the smallest (|w| ||x||)^2 / ||W X||^2 of all of them are pruned."""
    even: dict[str, float] = {}
    for items in _units(plan).values():
        device = stats[items[0].name].square_sums.device
        error: dict[str, Tensor] = {}
        for item in items:
            energy = _score(item, stats).square().flatten()
            error[item.name] = (energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)).to(device)
        pruned = round(sum(_sparsity(item) * item.size for item in items))
        highest = torch.cat(list(error.values())).kthvalue(max(pruned, 1)).values
        even.update({name: int((values <= highest).sum()) / len(values) for name, values in error.items()})
    return even


def _score(item: LayerPlan, stats: Mapping[str, Stats]) -> Tensor:
    return wanda.score(item.layer.matrix(_values(item.layer)), stats[item.name].square_sums)


def _values(layer: Layer) -> Tensor:
    return stored(layer.owner, layer.param).detach()


def _unstructured(plan: Plan) -> list[LayerPlan]:
    return [item for item in plan.layers if isinstance(item.pattern, Unstructured)]


def _units(plan: Plan) -> dict[str, list[LayerPlan]]:
    """The unstructured layers by block; one outside of the blocks is by itself."""
    units: dict[str, list[LayerPlan]] = {}
    for item in _unstructured(plan):
        units.setdefault(item.name if item.block is None else item.block, []).append(item)
    return units


def _sparsity(item: LayerPlan) -> float:
    return item.pattern.sparsity


def _scope_size(item: LayerPlan) -> int:
    """How many weights a scope of the layer's pattern has."""
    assert isinstance(item.pattern, Unstructured)
    *_, rows, columns = item.shape
    return columns if item.pattern.scope == "row" else rows * columns


def _budget(plan: Plan) -> int:
    """Zeros that the plan's unstructured patterns ask for."""
    return sum(
        item.size // (scope := _scope_size(item)) * count_zeros(_sparsity(item), scope) for item in _unstructured(plan)
    )
