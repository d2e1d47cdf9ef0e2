"""Zeros of unstructured layers, shared out by OWL or by sparsities that are given; and the inputs of the dense model.

Allocations only move sparsity between layers: the model has as many zeros as was asked for, or a few more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from modelopt_sparse.calibration.blocks import BlockTask, blocks_in_call_order
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import collect
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import BY_SIZE, FEWER, SharedInput
from modelopt_sparse.methods import scores as wanda
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import Unstructured
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.report import Report

HIGHEST = 0.99  # no layer is pruned whole
GRID = 10_000  # sparsities have four decimals


def dense_inputs(
    data: CalibrationData, layer_plans: Sequence[LayerPlan]
) -> Iterator[tuple[BlockTask, list[SharedInput], Run]]:
    """Block by block, the statistics of these layers' inputs in the dense model, which stays as it is; and the run that
    they are collected in, whose weights of the block can be read."""
    tuned = {"reconstruct": None, "distill": None, "permute": False, "refine": 0, "polish": 0}
    config = replace(data.run.config, **tuned, sequential="none", progress=False)
    # the run itself notes what there is to say of inputs; with these notes nothing is warned of twice
    report, plan = Report(notes=[FEWER, BY_SIZE]), replace(data.run.plan, layers=tuple(layer_plans))
    run = replace(data.run, plan=plan, config=config, report=report)
    with ExitStack() as ending:
        for block in blocks_in_call_order(run, replace(data, run=run), ending):
            inputs = block.inputs()
            with inputs.on_device():
                if not block.layer_plans:
                    inputs.advance()
                    continue
                shared_inputs = collect(block.layer_plans, inputs, run, one_pass=block.one_pass)
                if block.block is not None:
                    run.storage.load(block.block)
                yield block, shared_inputs, run


def allocated(data: CalibrationData) -> CalibrationData:
    """Data whose run has a plan in which every unstructured layer has its own sparsity, by OWL. The model stays as it
    is."""
    run = data.run
    zeros = sum(each.pattern.zeros_in(each.shape) for each in _unstructured(run.plan))
    plan = allocate(run.plan, owl_sparsities(data), zeros)
    run.processes.check_same({"the allocation": str(plan)}, "report this")
    run.report.notes.append(f"zeros shared out over the layers by {run.config.allocation}")
    return replace(data, run=replace(run, plan=plan))


def owl_sparsities(data: CalibrationData, m: float = 5.0, lambda_: float = 0.08) -> dict[str, float]:
    """OWL (Yin et al. 2024, arXiv 2310.05175): blocks with more outliers stay denser.

    The outlier share of a block is the fraction of the scores |w| * ||x|| of all its layers that exceed ``m`` times
    their common mean, as in the authors' code. Shares are scaled to [0, 2 lambda_] and taken off the sparsity, alike
    for all layers of a block. A layer outside of the blocks counts as one.
    """
    share: dict[str, float] = {}
    own = {each.name: each.pattern.sparsity for each in _unstructured(data.run.plan)}
    wanted = [replace(each, needs="square_sums", steps=()) for each in _unstructured(data.run.plan)]
    for block, shared_inputs, _ in dense_inputs(data, wanted):
        scores = [score(each, shared.stats) for shared in shared_inputs for each in shared.layer_plans]
        size = sum(each.numel() for each in scores)
        mean = sum(float(each.double().sum()) for each in scores) / size
        outliers = sum(int((each > m * mean).sum()) for each in scores) / size
        share.update({each.name: outliers for each in block.layer_plans})
    least = min(share.values())
    spread = max(share.values()) - least
    return {name: own[name] - (2 * lambda_ * (share[name] - least) / spread if spread else 0.0) for name in own}


def score(layer_plan: LayerPlan, stats: object) -> Tensor:
    """Wanda's score of a layer's weight as a matrix; 0 where its inputs say nothing."""
    weight = layer_plan.layer.matrix(layer_plan.layer.values)
    if not isinstance(stats, Stats):
        return weight.abs() * 0
    return wanda.score(weight, stats.with_dead_channels().square_sums)


def allocate(plan: Plan, sparsities: Mapping[str, float], zeros: int) -> Plan:
    """The plan with these sparsities in its unstructured layers, all shifted alike to have so many zeros.

    Each is rounded, to four decimals or less, so that together they prune no fewer weights, and more by less than the
    finest step of a layer (one weight of each row or matrix, or 0.0001 of it). None is above HIGHEST, or below the
    zeros of a mask that stays. N:M layers stay as they are and do not count.
    """
    layers = _unstructured(plan)
    by_row = [isinstance(each.pattern, Unstructured) and each.pattern.scope == "row" for each in layers]
    sizes = [min(math.prod(each.shape[-1 if row else -2 :]), GRID) for each, row in zip(layers, by_row)]
    present = [each.pattern_now.within for each in layers]
    least = [0.0 if mask is None else 1 - int(mask.sum()) / mask.numel() for mask in present]
    first = [math.ceil(share * size) for share, size in zip(least, sizes)]

    def pattern(i: int, step: int) -> Unstructured:
        return replace(layers[i].pattern, sparsity=round(step / sizes[i], 4))  # type: ignore[return-value]

    def zeros_in(i: int, step: int) -> int:
        return pattern(i, step).zeros_in(layers[i].shape)

    def shifted(shift: float) -> list[int]:
        wanted = (round((sparsities[each.name] + shift) * size) for each, size in zip(layers, sizes))
        return [min(max(step, low), int(HIGHEST * size)) for step, low, size in zip(wanted, first, sizes)]

    low, high = -1.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        enough = sum(map(zeros_in, range(len(layers)), shifted(middle))) >= zeros
        low, high = (low, middle) if enough else (middle, high)
    steps = shifted(high)
    surplus = sum(map(zeros_in, range(len(layers)), steps)) - zeros
    if surplus < 0:
        raise ValueError(f"no layer is pruned by more than {HIGHEST:.0%}, which leaves more than is asked for")
    lowered = True
    while lowered:
        lowered = False
        excess = [step / size - sparsities[each.name] for each, step, size in zip(layers, steps, sizes)]
        for i in sorted(range(len(layers)), key=lambda i: -excess[i]):
            less = zeros_in(i, steps[i]) - zeros_in(i, steps[i] - 1) if steps[i] > first[i] else surplus + 1
            if less <= surplus:
                steps[i], surplus, lowered = steps[i] - 1, surplus - less, True
    patterns = {each.name: pattern(i, steps[i]) for i, each in enumerate(layers)}
    return replace(
        plan, layers=tuple(replace(each, pattern=patterns.get(each.name, each.pattern)) for each in plan.layers)
    )


def _unstructured(plan: Plan) -> list[LayerPlan]:
    return [layer_plan for layer_plan in plan.layers if isinstance(layer_plan.pattern, Unstructured)]
