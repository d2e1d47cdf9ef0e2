"""Reconstruction: better values for what a block has left, against the dense block's output; masks are frozen, or move.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned by Adam on
the squared error of the block's output, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the transformer matching of
3BASiL (arXiv 2603.01376). Learning rates are relative to the size of what they change, so that one value serves models
whose weights have other scales.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.moving import Movable, moves, shrunk
from modelopt_sparse.calibration.data import judging
from modelopt_sparse.calibration.forward import forward_context
from modelopt_sparse.calibration.inputs import Inputs, Replay
from modelopt_sparse.calibration.order import BlockTask
from modelopt_sparse.calibration.padding import PaddingError
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import written
from modelopt_sparse.model.masking import let_gradients_through
from modelopt_sparse.model.zeros import dense_gradient
from modelopt_sparse.plan.config import Reconstruct
from modelopt_sparse.reports.report import BlockReport

BETAS = (0.9, 0.95)
EPSILON = 1e-12  # far below any gradient of a block: the steps do not depend on the scale of the loss
WARMUP_STEPS = 10

Masks = Mapping[nn.Parameter, Tensor | None]  # of what is tuned; None: all of it


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
    if not isinstance(inputs, Replay):
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
    assert isinstance(inputs, Replay)
    outputs = {plan.layer.parameter: plan.size // plan.shape[-1] for plan in block.layer_plans}
    with forward_context(run):
        batches = _Batches(inputs, _token_masks(block, inputs, tuned[-1].goals), run.processes)
        rest = dict(_tunable(run.model, inputs.block, masks, options))
        try:
            for part in tuned:
                inside = set(part.module.parameters())
                chosen = {parameter: rest.pop(parameter) for parameter in list(rest) if parameter in inside}
                if chosen:
                    weights = _Weights(chosen, [outputs.get(parameter, 0) for parameter in chosen], movable, options)
                    with _only_these_require_grad(inputs.block, chosen, through=bool(movable)):
                        tuned_part = _tune(part, batches, weights, options, run.config.seed)
                    run.report.reconstructed(tuned_part, {plan.name for plan in block.layer_plans})
        except BaseException:
            run.report.notes.append(
                f"{tuned[-1].name!r}: its reconstruction was broken off; it has the best values up to then"
            )
            raise


def _token_masks(block: BlockTask, inputs: Replay, goals: list[Tensor]) -> list[Tensor | None]:
    """Which tokens of a block's outputs are real, on each batch; None: all."""
    side = inputs.data.side_of(inputs.block)
    masks = [getattr(masks, side) for masks in inputs.replay.masks]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            raise PaddingError(
                f"block {block.name!r} has an output of shape {list(goal.shape)}, and the token mask has shape "
                f"{list(mask.shape)}: which of its rows are padding cannot be told; give batches without padding, or "
                "set count_padding=True to let padding in"
            )
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]


class _Batches:
    """The calibration batches of all processes, by number: the first of every rank, the second of every rank, and so
    on. Text that the model has written stands first. The last ones, which are the user's, are held back to judge by."""

    def __init__(self, inputs: Replay, token_masks: list[Tensor | None], processes: Processes) -> None:
        self._inputs, self._token_masks, self.processes = inputs, token_masks, processes
        counts = processes.all_gather("the batches to tune by", len(token_masks))
        places = [(rank, i) for i in range(max(counts)) for rank, count in enumerate(counts) if i < count]
        self.rank_of = [rank for rank, _ in places]
        self.own = {number: place for number, (rank, place) in enumerate(places) if rank == processes.rank}
        count = len(places)
        self.held_back = range(count - judging(count - inputs.data.own), count)

    def error(self, part: TunedModule, number: int) -> Tensor:
        """The squared error of a batch of this process."""
        place = self.own[number]
        output = self._inputs.outputs_of([part.module], place)[0]
        return self._squared(output.float() - part.goals[place].float(), part, place)

    def energies(self, part: TunedModule) -> dict[int, float]:
        """The squared norm of the goals of all batches."""
        return self._of_all(
            part, {number: float(self._squared(part.goals[i].float(), part, i)) for number, i in self.own.items()}
        )

    def judge(self, part: TunedModule, energies: Mapping[int, float]) -> float:
        """The relative squared error on the batches held back."""
        own = {number: float(self.error(part, number)) for number in self.held_back if number in self.own}
        errors = self._of_all(part, own)
        least = torch.finfo(torch.float32).tiny
        return sum(errors[i] for i in self.held_back) / max(sum(energies[i] for i in self.held_back), least)

    def _squared(self, values: Tensor, part: TunedModule, place: int) -> Tensor:
        """The squared norm of the values of real tokens, in the metric of a module."""
        token_mask = self._token_masks[place]
        real = values if token_mask is None else values[token_mask]
        return (real if part.metric is None else real @ part.metric.to(real.device)).square().sum()

    def _of_all(self, part: TunedModule, own: dict[int, float]) -> dict[int, float]:
        of_ranks = self.processes.all_gather(f"batches of {part.name!r}", own)
        return {number: value for of_rank in of_ranks for number, value in of_rank.items()}


class _Weights:
    """What is tuned, and its values in float32: a step smaller than bfloat16 can hold is not lost.

    masks: of the parameters, None for what has none. Adam is elementwise; `write` leaves pruned places zero.
    """

    def __init__(
        self, masks: Masks, outputs: Sequence[int], movable: Mapping[nn.Parameter, Movable], options: Reconstruct
    ) -> None:
        """``outputs``: how many outputs each parameter has (of all of its experts); 0 for vectors."""
        self.parameters, self.masks = list(masks), list(masks.values())
        self._movable = [movable.get(parameter) for parameter in masks]
        self.masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in masks]
        self.optimizer = _optimizer(self.masters, self.masks, outputs, options.learning_rate)
        for master, mask, each in zip(self.masters, self.masks, self._movable):
            if each is not None and mask is not None:
                master.copy_(each.start(master, mask))
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], step: int, steps: int) -> None:
        """One step of Adam; masks that move follow."""
        schedule = _schedule(step, steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = rate * schedule
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        self.optimizer.step()
        if moves(step, steps):
            for i, (each, master, mask) in enumerate(zip(self._movable, self.masters, self.masks)):
                if each is not None and mask is not None:
                    master.copy_(shrunk(master, mask, schedule))
                    self.masks[i] = each.mask(master)
        self.write(self.masters, self.masks)

    @torch.no_grad()
    def write(self, values: Sequence[Tensor], masks: Sequence[Tensor | None]) -> None:
        """Values and masks into the model."""
        for parameter, each, mask, value in zip(self.parameters, self._movable, masks, values):
            if each is not None and mask is not None:
                each.set_mask(mask)
            everywhere = torch.ones_like(parameter, dtype=torch.bool) if mask is None else mask
            parameter.copy_(written(value, everywhere, parameter.dtype))

    def copy(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Values and masks as they are now."""
        return [master.clone() for master in self.masters], list(self.masks)

    def taken_gradients(self) -> list[Tensor | None]:
        """The gradients of the parameters, which have none afterwards; where masks move, of pruned places too."""
        gradients: list[Tensor | None] = []
        for parameter, master, mask, each in zip(self.parameters, self.masters, self.masks, self._movable):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and each is not None and mask is not None:
                gradient = dense_gradient(gradient, mask)
            gradients.append(None if gradient is None else gradient.to(master.dtype))
        return gradients

    def moved(self, masks: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float | None:
        """The share of kept places that differ between two sets of masks; None if none may move."""
        pairs = [(a, b) for a, b, each in zip(masks, others, self._movable) if each is not None]
        different = sum(int((a & ~b).sum()) for a, b in pairs if a is not None and b is not None)
        count = sum(int(a.sum()) for a, _ in pairs if a is not None)
        return different / count if count else None


def _tune(part: TunedModule, batches: _Batches, weights: _Weights, options: Reconstruct, seed: int) -> BlockReport:
    began = time.perf_counter()
    energies = batches.energies(part)
    before = best = batches.judge(part, energies)
    (best_values, best_masks), best_epoch, notes = weights.copy(), 0, []
    solved = best_masks
    order, step = torch.Generator().manual_seed(seed), 0
    steps = options.epochs * batches.held_back.start
    try:
        for epoch in range(1, options.epochs + 1):
            for number in torch.randperm(batches.held_back.start, generator=order).tolist():
                weights.step(_gradients(part, number, batches, energies, weights), step, steps)
                step += 1
            error = batches.judge(part, energies)
            if not math.isfinite(error):
                notes.append(f"stopped in epoch {epoch}: its output was no longer finite")
                break
            if error < best:
                best, best_epoch, (best_values, best_masks) = error, epoch, weights.copy()
    finally:
        weights.write(best_values, best_masks)
    if (share := weights.moved(best_masks, solved)) is not None:
        notes.append(f"{share:.1%} of the places that are kept are others than those of the solution")
    return BlockReport(part.name, before, best, best_epoch, round(time.perf_counter() - began, 3), notes)


def _gradients(
    part: TunedModule, number: int, batches: _Batches, energies: dict[int, float], weights: _Weights
) -> list[Tensor | None]:
    """The gradients of one batch, in all processes, from the one that has it."""
    if number in batches.own:
        with torch.enable_grad():
            # scaled so that neither its gradients nor those inside of the block leave float16's range
            scale = part.goals[batches.own[number]].numel() ** 0.5
            (batches.error(part, number) / max(energies[number], 1e-30) * scale).backward()
    own = weights.taken_gradients()
    processes, rank = batches.processes, batches.rank_of[number]
    if processes.size == 1:
        return own
    there = processes.all_gather("a gradient", [gradient is not None for gradient in own])[rank]
    if rank != processes.rank:
        own = [torch.empty_like(master) if has else None for master, has in zip(weights.masters, there)]
    gradients = [None if gradient is None else gradient.contiguous() for gradient in own]
    processes.broadcast("a gradient", [gradient for gradient in gradients if gradient is not None], rank)
    return gradients


def _optimizer(
    masters: Sequence[Tensor], masks: Sequence[Tensor | None], outputs: Sequence[int], learning_rate: float
) -> torch.optim.Adam:
    """Adam with a learning rate for each tensor: ``learning_rate * rms(kept weights) / sqrt(kept weights per output)``;
    ``outputs`` says how many outputs each has (0: it is no matrix).

    A step of Adam moves all of these the same way at worst, and then changes the output by as much as the learning
    rate says, relative to a sum of values that are not aligned, whatever the width and the sparsity. Vectors take the
    mean of the matrices' divisors; one that is all zeros (a fresh bias) says nothing of its own scale, and takes the
    smallest rate of the others.
    """
    unpruned = [master if mask is None else master[mask] for master, mask in zip(masters, masks)]
    sizes = [float(values.square().mean().sqrt()) if values.numel() else 0.0 for values in unpruned]
    meeting = [values.numel() / count if count else 0.0 for values, count in zip(unpruned, outputs)]
    wide = [math.sqrt(max(number, 1.0)) for number in meeting if number]
    usual = sum(wide) / len(wide) if wide else 1.0
    rates = [
        learning_rate * size / (math.sqrt(max(number, 1.0)) if number else usual)
        for size, number in zip(sizes, meeting)
    ]
    least = min((rate for rate in rates if rate), default=0.0)
    return torch.optim.Adam(
        [{"params": [m], "lr": rate or least} for m, rate in zip(masters, rates)], betas=BETAS, eps=EPSILON
    )


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _tunable(
    model: nn.Module, block: nn.Module, masks: Mapping[nn.Parameter, Tensor], options: Reconstruct
) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """Parameters of the block that may change, with their masks: the weights pruned in this run, and vectors of modules
    that hold no matrix that stays dense. What modules outside of the block hold as well is left alone."""
    outside = set(_elsewhere(model, block))
    for module in block.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        stays_dense = any(p.dim() >= 2 and p not in masks for p in own)
        for parameter in own:
            if parameter in outside:
                continue
            if parameter in masks:
                yield parameter, masks[parameter].to(parameter.device)
            elif options.norms_and_biases and not stays_dense and parameter.dim() < 2:
                yield parameter, None


def _elsewhere(module: nn.Module, block: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are reached without going through the block."""
    if module is not block:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _elsewhere(child, block)


@contextmanager
def _only_these_require_grad(
    block: nn.Module, chosen: Mapping[nn.Parameter, object], *, through: bool
) -> Iterator[None]:
    """``through``: gradients reach pruned places as well."""
    before = [(p, p.requires_grad, p.grad) for p in block.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(parameter in chosen)
            parameter.grad = None
        let_gradients_through(block, through)
        yield
    finally:
        let_gradients_through(block, False)
        for parameter, requires_grad, gradient in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
