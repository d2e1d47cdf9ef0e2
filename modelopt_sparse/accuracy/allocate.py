"""Which layer gets how much of a number of unstructured zeros: by OWL, or by sparsities that are given.

Both only move sparsity between layers: the model has as many zeros as was asked for, or a few more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import WholeModel, with_small_inputs
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
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.model.devices import offloaded_after_errors
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan, Plan

# statistics -----------------------------------------------------------------------------------------------------------


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


def allocated(data: CalibrationData) -> Run:
    """The run with a plan in which every layer has its own sparsity, by OWL. The model stays as it is.

    To be called in evaluation mode, with caches off, for a plan with unstructured patterns. Raises ValueError for
    layers that see no data.
    """
    run = data.run
    with torch.no_grad(), offloaded_after_errors(run.model):
        stats = statistics(data, _unstructured(run.plan))
        plan = allocate(run.plan, owl_sparsities(run.plan, stats), _budget(run.plan))
    run.processes.check_same({"the allocation": str(plan)}, "report this")
    run.report.notes.append(f"zeros shared out over the layers by {run.config.allocation}")
    return replace(run, plan=plan)


def allocate(plan: Plan, sparsities: Mapping[str, float], zeros: int) -> Plan:
    """The plan with these sparsities in its unstructured layers, all shifted alike to have so many zeros.

    Each is rounded, to four decimals or less, so that together they prune no fewer weights, and more by less than the finest step of a layer (one weight of each row or matrix, or 0.0001 of it).
    N:M layers stay as they are and do not count.
    """
    wanted = _on_budget(plan, sparsities, zeros)
    layers = [_Rounded(layer_plan, wanted[layer_plan.name]) for layer_plan in _unstructured(plan)]
    if sum(layer.zeros(layer.last) for layer in layers) < zeros:
        raise ValueError(f"allocation prunes no layer by more than {HIGHEST:.0%}: leave it out for this plan")
    surplus = sum(layer.zeros(layer.step) for layer in layers) - zeros
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
    return _on_budget(plan, wanted, _budget(plan))


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


def _on_budget(plan: Plan, sparsities: Mapping[str, float], zeros: int) -> dict[str, float]:
    """The sparsities plus one number, clipped to [0, HIGHEST], so that they prune so many weights; no layer has fewer zeros than the mask that it carries."""
    layer_plans = _unstructured(plan)
    least = {layer_plan.name: _least(layer_plan) for layer_plan in layer_plans}

    def clipped(shift: float) -> dict[str, float]:
        return {name: max(min(sparsities[name] + shift, HIGHEST), least[name]) for name in least}

    low, high = -max(sparsities.values()), HIGHEST - min(sparsities.values())
    for _ in range(64):
        shift = (low + high) / 2
        sparsity = clipped(shift)
        if sum(layer_plan.size * sparsity[layer_plan.name] for layer_plan in layer_plans) < zeros:
            low = shift
        else:
            high = shift
    return clipped(high)


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
