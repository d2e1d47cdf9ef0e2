"""Reconstruction: better values for what a block has left, its masks frozen, against the dense block's output.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned by Adam on
the squared error of the block's output, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the transformer matching of
3BASiL (arXiv 2603.01376). Learning rates are relative to the size of what they change, so that one value serves models
whose weights have other scales.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelopt_sparse.distributed import Team
from modelopt_sparse.methods.base import written
from modelopt_sparse.plan.config import Reconstruct
from modelopt_sparse.reports.report import BlockReport

BETAS = (0.9, 0.95)
EPSILON = 1e-12  # far below any gradient of a block: the steps do not depend on the scale of the loss
WARMUP_STEPS = 10
HELD_BACK = 16  # one of so many calibration batches, at least one, only judges


@dataclass(frozen=True)
class Part:
    """What is tuned together: the output of ``module`` (the block itself, or a child) should come close to ``goals``,
    one for each calibration batch."""

    name: str
    module: nn.Module
    goals: list[Tensor]


@dataclass(frozen=True)
class SolvedBlock:
    """A block whose layers are all sparse, and what it takes to tune it.

    ``run(part, i)`` is the output of the part's module in a forward of the block on calibration batch i; ``keep[i]`` is
    the mask of its real tokens, or None if all are. ``places`` says of each batch of all processes, in their order,
    which rank has it, and as which of its own.
    """

    block: nn.Module
    parts: list[Part]
    keep: list[Tensor | None]
    run: Callable[[Part, int], Tensor]
    places: list[tuple[int, int]]


def reconstruct(
    model: nn.Module,
    solved: SolvedBlock,
    masks: Mapping[nn.Parameter, Tensor],
    options: Reconstruct,
    seed: int,
    outputs: Mapping[nn.Parameter, int],
    team: Team,
) -> Iterator[BlockReport]:
    """Tune a block in place, part by part. ``masks`` are those of the weights pruned in this run (True = kept);
    ``outputs`` says how many outputs each of these weights has (of all of its experts, if it has experts).

    Never worse on the batches held back: the values from before count as an epoch. ``requires_grad`` and gradients are
    as before afterwards, and an interruption leaves the best values so far. Where several processes work together, each
    batch's gradient comes from the one that has the batch, and all take the same step.
    """
    rest = dict(_tunable(model, solved.block, masks, options))
    for part in solved.parts:
        inside = set(part.module.parameters())
        chosen = {parameter: rest.pop(parameter) for parameter in list(rest) if parameter in inside}
        if chosen:
            with _only_these_require_grad(solved.block, chosen):
                yield _tune(part, solved, chosen, options, seed, outputs, team)


def _tune(
    part: Part,
    solved: SolvedBlock,
    masks: Mapping[nn.Parameter, Tensor | None],
    options: Reconstruct,
    seed: int,
    outputs: Mapping[nn.Parameter, int],
    team: Team,
) -> BlockReport:
    began = time.perf_counter()
    count = len(solved.places)
    held_back = range(count - max(1, count // HELD_BACK), count)
    own = {number: place for number, (rank, place) in enumerate(solved.places) if rank == team.rank}

    def of_all(found: dict[int, float]) -> dict[int, float]:
        """A number of each batch, from the processes that have them."""
        return {
            number: value
            for theirs in team.meet(f"batches of {part.name!r}", found)
            for number, value in theirs.items()
        }

    def error_of(place: int) -> Tensor:
        return _squared_error(solved.run(part, place), part.goals[place], solved.keep[place])

    energies = of_all({number: _energy(part.goals[place], solved.keep[place]) for number, place in own.items()})

    def judge() -> float:
        errors = of_all({number: float(error_of(own[number])) for number in held_back if number in own})
        least = torch.finfo(torch.float32).tiny
        return sum(errors[i] for i in held_back) / max(sum(energies[i] for i in held_back), least)

    before = best = judge()
    # the optimizer works on copies in float32: a step smaller than bfloat16 can hold is not lost
    masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in masks]
    kept, epoch, notes = [master.clone() for master in masters], 0, []
    counts = [outputs.get(parameter, 0) for parameter in masks]
    optimizer = _optimizer(masters, list(masks.values()), counts, options.learning_rate)
    order = torch.Generator().manual_seed(seed)
    step, steps = 0, options.epochs * held_back.start
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for number in range(1, options.epochs + 1):
            for i in torch.randperm(held_back.start, generator=order).tolist():
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * _schedule(step, steps)
                if i in own:
                    with torch.enable_grad():
                        # scaled so that neither its gradients nor those inside of the block leave float16's range
                        scale = part.goals[own[i]].numel() ** 0.5
                        (error_of(own[i]) / max(energies[i], 1e-30) * scale).backward()
                taken = [_taken_gradient(parameter, master) for parameter, master in zip(masks, masters)]
                for master, gradient in zip(masters, _gradients_of(solved.places[i][0], taken, masters, team)):
                    master.grad = gradient  # Adam is elementwise; `_write` leaves pruned places zero
                optimizer.step()
                _write(masks, masters)
                step += 1
            now = judge()
            if not math.isfinite(now):
                notes.append(f"stopped in epoch {number}: its output was no longer finite")
                break
            if now < best:
                best, epoch, kept = now, number, [master.clone() for master in masters]
    finally:
        _write(masks, kept)
    return BlockReport(part.name, before, best, epoch, round(time.perf_counter() - began, 3), notes)


def _optimizer(
    masters: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    outputs: Sequence[int],
    learning_rate: float,
) -> torch.optim.Adam:
    """Adam with a learning rate for each tensor: ``learning_rate`` times the root mean square of its kept values,
    divided by the root of how many of them meet in one of its ``outputs`` (0: it is no matrix).

    A step of Adam moves all of these the same way at worst, and then changes the output by as much as the learning
    rate says, relative to a sum of values that are not aligned, whatever the width and the sparsity. Vectors take the
    mean of the matrices' divisors; one that is all zeros (a fresh bias) says nothing of its own scale, and takes the
    smallest rate of the others.
    """
    kept = [master if mask is None else master[mask] for master, mask in zip(masters, masks)]
    sizes = [float(values.square().mean().sqrt()) if values.numel() else 0.0 for values in kept]
    meeting = [values.numel() / count if count else 0.0 for values, count in zip(kept, outputs)]
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


def _taken_gradient(parameter: nn.Parameter, like: Tensor) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    return None if gradient is None else gradient.to(like.dtype)


def _gradients_of(rank: int, taken: list[Tensor | None], masters: Sequence[Tensor], team: Team) -> list[Tensor | None]:
    """The gradients that one rank has taken, in all processes."""
    if team.size == 1:
        return taken
    there = team.meet("a gradient", [gradient is not None for gradient in taken])[rank]
    if rank != team.rank:
        taken = [torch.empty_like(master) if has else None for master, has in zip(masters, there)]
    found = [None if gradient is None else gradient.contiguous() for gradient in taken]
    team.give("a gradient", [gradient for gradient in found if gradient is not None], rank)
    return found


@torch.no_grad()
def _write(masks: Mapping[nn.Parameter, Tensor | None], values: Sequence[Tensor]) -> None:
    for (parameter, mask), value in zip(masks.items(), values):
        everywhere = torch.ones_like(parameter, dtype=torch.bool) if mask is None else mask
        parameter.copy_(written(value, everywhere, parameter.dtype))


def _squared_error(output: Tensor, goal: Tensor, keep: Tensor | None) -> Tensor:
    delta = output.float() - goal.float()
    return (delta if keep is None else delta[keep]).square().sum()


def _energy(goal: Tensor, keep: Tensor | None) -> float:
    return float((goal if keep is None else goal[keep]).float().square().sum())


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
def _only_these_require_grad(block: nn.Module, chosen: Mapping[nn.Parameter, object]) -> Iterator[None]:
    before = [(p, p.requires_grad, p.grad) for p in block.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(parameter in chosen)
            parameter.grad = None
        yield
    finally:
        for parameter, requires_grad, gradient in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
