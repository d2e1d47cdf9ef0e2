"""Which layer gets how much of an unstructured sparsity budget: by block, OWL, and a search on measured divergence.

All of them only move sparsity between layers: the model has as many zeros as its plan asked for, or a few more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.accuracy.divergence import Divergence, score, statistics
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.model.offload import offloaded_after_errors
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.progress import Progress

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
    own = {layer_plan.name: _sparsity(layer_plan) for layer_plan in _unstructured(plan)}
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
        wanted.update({layer_plan.name: _sparsity(layer_plan) - denser for layer_plan in layer_plans})
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
        for layer_plan in _unstructured(plan):
            own = _sparsity(layer_plan)
            tilted = own + slope * tilt.get(layer_plan.block, 0.0)
            wanted[layer_plan.name] = tilted + balance * (even[layer_plan.name] - own)
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


class _Rounded:
    """A layer's sparsity as one of the steps from ``first`` to ``last``, each of which prunes more weights than the one
    before it. A layer that carries a mask has the zeros of ``first`` already."""

    def __init__(self, layer_plan: LayerPlan, wanted: float) -> None:
        self.layer_plan, self.wanted = layer_plan, wanted
        self.scope = _scope_size(layer_plan)
        self.steps = min(self.scope, GRID)
        self.last = int(HIGHEST * self.steps)
        self.first = math.ceil(_least(layer_plan) * self.steps)
        self.step = min(max(round(wanted * self.steps), self.first), self.last)

    def pattern(self, step: int) -> Unstructured:
        assert isinstance(self.layer_plan.pattern, Unstructured)
        return replace(self.layer_plan.pattern, sparsity=round(step / self.steps, 4))

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
    if sparsities.keys() != {layer_plan.name for layer_plan in layer_plans}:
        wrong = sorted(sparsities.keys() ^ {layer_plan.name for layer_plan in layer_plans})
        raise ValueError(f"sparsities are needed for just the plan's unstructured layers, which differs in {wrong[:8]}")
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
        pruned = round(sum(_sparsity(layer_plan) * layer_plan.size for layer_plan in layer_plans))
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


def _sparsity(layer_plan: LayerPlan) -> float:
    return layer_plan.pattern.sparsity


def _least(layer_plan: LayerPlan) -> float:
    """The sparsity that a layer has already, by the mask that it carries."""
    mask = layer_plan.pattern_now.within
    return 0.0 if mask is None else 1 - int(mask.sum()) / mask.numel()


def _scope_size(layer_plan: LayerPlan) -> int:
    """How many weights a scope of the layer's pattern has."""
    assert isinstance(layer_plan.pattern, Unstructured)
    *_, rows, columns = layer_plan.shape
    return columns if layer_plan.pattern.scope == "row" else rows * columns


def _budget(plan: Plan) -> int:
    """Zeros that the plan's unstructured patterns ask for."""
    return sum(layer_plan.pattern.zeros_in(layer_plan.shape) for layer_plan in _unstructured(plan))
