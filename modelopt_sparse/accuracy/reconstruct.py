"""Reconstruction: better values for what a block has left, against the dense block's output; masks are frozen, or move.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned by Adam on
the squared error of the block's output, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the transformer matching of
3BASiL (arXiv 2603.01376).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.tuning import BatchNumbers, Movable, TunedWeights, only_these_require_grad, tunable
from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.forward import forward_context
from modelopt_sparse.calibration.inputs import AtBlock, Inputs
from modelopt_sparse.calibration.padding import PaddingError
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.distributed import Processes
from modelopt_sparse.plan.options import Reconstruct
from modelopt_sparse.reports.report import BlockReport


@dataclass(frozen=True)
class TunedModule:
    """What is tuned together: the output of ``module`` (the block itself, or a child of it) should come close to
    ``goals``, one for each calibration batch of this process. ``metric``: R, errors are those of outputs times R."""

    name: str
    module: nn.Module
    goals: list[Tensor]
    metric: Tensor | None = None


def dense_goals(block: BlockTask, inputs: Inputs, run: Run) -> list[TunedModule]:
    """What of a block is tuned, with the dense block's outputs; asked for while the block is dense. Nothing for a block
    that cannot be run by itself; the report says so."""
    options = run.config.reconstruct
    assert options is not None
    if not isinstance(inputs, AtBlock):
        return []
    modules = {block.name: inputs.block} if block.layer_plans else {}
    if options.parts == "children":
        holding = {
            name: child
            for layer_plan in block.layer_plans
            for name, child in inputs.block.named_children()
            if layer_plan.layer.owner in set(child.modules())
        }
        modules = {f"{block.name}.{name}": child for name, child in list(holding.items())[:-1]} | modules
    goals = inputs.dense_outputs(list(modules.values()))
    metrics = inputs.data.metrics
    return [
        TunedModule(name, module, of_module, metrics.get(module))
        for (name, module), of_module in zip(modules.items(), goals)
    ]


def reconstruct(
    block: BlockTask,
    tuned: list[TunedModule],
    masks: Mapping[nn.Parameter, Tensor],
    movable: Mapping[nn.Parameter, Movable],
    inputs: Inputs,
    run: Run,
) -> None:
    """Tune a block in place, module by module, and report it. ``masks`` are those of the weights pruned in this run
    (True = kept); those of ``movable`` move.

    Never worse on the batches held back: the values from before count as an epoch. ``requires_grad`` and gradients are
    as before afterwards, and an interruption leaves the best values so far. Where several processes work together, each
    batch's gradient comes from the one that has the batch, and all take the same step.
    """
    options = run.config.reconstruct
    assert options is not None
    assert isinstance(inputs, AtBlock)
    outputs = {plan.layer.parameter: plan.size // plan.shape[-1] for plan in block.layer_plans}
    with forward_context(run):
        batches = _Batches(inputs, _token_masks(block, inputs, tuned[-1].goals), run.processes)
        rest = dict(tunable(run.model, inputs.block, masks, vectors=options.norms_and_biases))
        try:
            for part in tuned:
                inside = set(part.module.parameters())
                chosen = {parameter: rest.pop(parameter) for parameter in list(rest) if parameter in inside}
                if chosen:
                    of_each = [outputs.get(parameter, 0) for parameter in chosen]
                    weights = TunedWeights(chosen, of_each, options.learning_rate, movable)
                    with only_these_require_grad(inputs.block, chosen, through=bool(movable)):
                        tuned_part = _tune(part, batches, weights, options, run.config.seed)
                    run.report.reconstructed(tuned_part, {plan.name for plan in block.layer_plans})
        except BaseException:
            run.report.notes.append(
                f"{tuned[-1].name!r}: its reconstruction was broken off; it has the best values up to then"
            )
            raise


def _token_masks(block: BlockTask, inputs: AtBlock, goals: list[Tensor]) -> list[Tensor | None]:
    """Which tokens of a block's outputs are real, on each batch; None: all."""
    side = inputs.data.sides[inputs.block]
    masks = [getattr(masks, side) for masks in inputs.masks]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            raise PaddingError(
                f"block {block.name!r} has an output of shape {list(goal.shape)}, and the token mask has shape "
                f"{list(mask.shape)}: which of its rows are padding cannot be told; give batches without padding, or "
                "set count_padding=True to let padding in"
            )
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]


class _Batches:
    """The calibration batches of all processes, and what is measured on them."""

    def __init__(self, inputs: AtBlock, token_masks: list[Tensor | None], processes: Processes) -> None:
        self._inputs, self._token_masks = inputs, token_masks
        self.numbers = BatchNumbers.of(processes, len(token_masks), inputs.own)

    def error(self, part: TunedModule, number: int) -> Tensor:
        """The squared error of a batch of this process."""
        place = self.numbers.own[number]
        output = self._inputs.outputs_of([part.module], place)[0]
        return self._squared(output.float() - part.goals[place].float(), part, place)

    def energies(self, part: TunedModule) -> dict[int, float]:
        """The squared norm of the goals of all batches."""
        own = {number: float(self._squared(part.goals[i].float(), part, i)) for number, i in self.numbers.own.items()}
        return self.numbers.of_all(f"batches of {part.name!r}", own)

    def judge(self, part: TunedModule, energies: Mapping[int, float]) -> float:
        """The relative squared error on the batches held back."""
        held_back = self.numbers.held_back
        own = {number: float(self.error(part, number)) for number in held_back if number in self.numbers.own}
        errors = self.numbers.of_all(f"batches of {part.name!r}", own)
        least = torch.finfo(torch.float32).tiny
        return sum(errors[i] for i in held_back) / max(sum(energies[i] for i in held_back), least)

    def _squared(self, values: Tensor, part: TunedModule, place: int) -> Tensor:
        """The squared norm of the values of real tokens, in the metric of a module."""
        token_mask = self._token_masks[place]
        real = values if token_mask is None else values[token_mask]
        return (real if part.metric is None else real @ part.metric.to(real.device)).square().sum()


def _tune(part: TunedModule, batches: _Batches, weights: TunedWeights, options: Reconstruct, seed: int) -> BlockReport:
    began = time.perf_counter()
    energies = batches.energies(part)
    before = best = batches.judge(part, energies)
    weights.slow_down(before)
    solved = best_values = weights.copy()
    best_epoch, notes, tuned_on = 0, [], batches.numbers.tuned_on
    order, step = torch.Generator().manual_seed(seed), 0
    try:
        for epoch in range(1, options.epochs + 1):
            for number in torch.randperm(tuned_on, generator=order).tolist():
                weights.step(_gradients(part, number, batches, energies, weights), step, options.epochs * tuned_on)
                step += 1
            error = batches.judge(part, energies)
            if not math.isfinite(error):
                notes.append(f"stopped in epoch {epoch}: its output was no longer finite")
                break
            if error < best:
                best, best_epoch, best_values = error, epoch, weights.copy()
    finally:
        weights.write(best_values)
    if (share := weights.moved(best_values, solved)) is not None:
        notes.append(f"{share:.1%} of the places that are kept are others than those of the solution")
    return BlockReport(part.name, before, best, best_epoch, round(time.perf_counter() - began, 3), notes)


def _gradients(
    part: TunedModule, number: int, batches: _Batches, energies: dict[int, float], weights: TunedWeights
) -> list[Tensor | None]:
    """The gradients of one batch, in all processes."""
    if number in batches.numbers.own:
        with torch.enable_grad():
            # scaled so that neither its gradients nor those inside of the block leave float16's range
            scale = part.goals[batches.numbers.own[number]].numel() ** 0.5
            (batches.error(part, number) / max(energies[number], 1e-30) * scale).backward()
    return batches.numbers.shared(number, weights.taken_gradients(), [weight.values for weight in weights.each])
