"""What reconstruction and distillation share: the numbers of batches, masks that move, and values tuned by Adam."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import validation_count
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import Pattern
from modelopt_sparse.model.devices import map_tensors
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import SUFFIX, update_mask, write_zeros
from modelopt_sparse.model.output import relative
from modelopt_sparse.plan.options import HELD_BACK
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.run import Progress

Gradients = list[Tensor | None]  # of each weight; None: it has none

# batches, by numbers that all processes agree on ----------------------------------------------------------------------


@dataclass(frozen=True)
class BatchNumbers:
    """Global numbers of the calibration batches, or of the parts that steps are split into: the first of every rank,
    the second of every rank, and so on. Text that the model has written stands first.

    local: number -> the index among this process's.
    steps: the numbers of each step of the optimizer: its batches, or the parts that these are split into, one for each
      process.
    held_back: the last ones, which are the user's, and only judge.
    """

    processes: Processes
    local: dict[int, int]
    steps: list[list[int]]
    held_back: range

    @classmethod
    def of_calls(
        cls, data: CalibrationData, numbers: Sequence[int] | None = None, one_of: int = HELD_BACK
    ) -> "BatchNumbers":
        """Number this process's calls with these ``numbers``; None: all. One of ``one_of`` steps is held back."""
        calls, processes = data.calls, data.run.processes
        numbers = range(len(calls or ())) if numbers is None else numbers
        steps = [None if calls is None else calls[number].step for number in numbers]
        written = sum(n * processes.size + processes.rank < data.written for n in numbers)
        return cls.of(processes, steps, written, one_of)

    @classmethod
    def of(
        cls, processes: Processes, steps: Sequence[int | None], written: int, one_of: int = HELD_BACK
    ) -> "BatchNumbers":
        """Number what all processes have. ``steps``: the step of each batch of this process, None where it is one by
        itself; ``written``: how many of them, the first, the model has written."""
        by_rank = processes.all_gather("the batches to tune by", ([*steps], written))
        most = max(len(rank_steps) for rank_steps, _ in by_rank)
        order = [(rank, i) for i in range(most) for rank, (rank_steps, _) in enumerate(by_rank) if i < len(rank_steps)]
        local = {number: index for number, (rank, index) in enumerate(order) if rank == processes.rank}
        together: dict[Any, list[int]] = {}
        for number, (rank, index) in enumerate(order):
            step = by_rank[rank][0][index]
            together.setdefault(order[number] if step is None else step, []).append(number)
        own_text = sum(count for _, count in by_rank)
        judges = validation_count(sum(numbers[0] >= own_text for numbers in together.values()), one_of)
        *tuned, begin = [*together.values()][: len(together) - judges + 1]
        return cls(processes, local, tuned, range(begin[0], len(order)))

    @property
    def tuned_on(self) -> int:
        """The number of those that are tuned on, which come first."""
        return self.held_back.start

    def validation_error(self, measure: Callable[[int], Sequence[float]]) -> float:
        """Measure on the batches held back, in all processes. ``measure``: local index -> sums for `relative`."""
        measured = {number: measure(self.local[number]) for number in self.held_back if number in self.local}
        by_number = self.processes.gather_numbered("the batches held back", measured)
        return relative([sum(column) for column in zip(*(by_number[number] for number in self.held_back))])

    def per_step(self, local_values: Sequence[float]) -> list[float]:
        """Replace each local batch's value by the sum over all parts of its step, in all processes."""
        numbered = {n: local_values[index] for n, index in self.local.items()}
        values, sums = self.processes.gather_numbered("values of units", numbered), [*local_values]
        for numbers in self.steps:
            for number in numbers:
                if number in self.local:
                    sums[self.local[number]] = sum(values[unit] for unit in numbers)
        return sums

    def summed_gradients(
        self, numbers: Sequence[int], gradients_of: Callable[[int], Gradients], weights: "TunedWeights"
    ) -> Gradients:
        """Sum the gradients of a step's parts over all processes. None: no part reaches the weight."""
        sums: Gradients = [None] * len(weights.members)
        for number in numbers:
            if number in self.local:
                pairs = zip(sums, gradients_of(number))
                sums = [b if a is None else a if b is None else a.add_(b) for a, b in pairs]
        local = {index: gradient for index, gradient in enumerate(sums) if gradient is not None}
        totals = self.processes.sum_by_key("gradients", local, torch.device("cpu"))
        places = [weight.values.device for weight in weights.members]
        return [totals[index].to(place) if index in totals else None for index, place in enumerate(places)]


# values that are others during a call ---------------------------------------------------------------------------------


@contextmanager
def called_with(made: Mapping[Layer, Callable[[], Tensor]]) -> Iterator[None]:
    """While entered, every layer is called with other values, which are ``made`` anew for each call.

    They are written in place when its module is called, and put back after the call, so that one layer at a time is
    held twice. Whatever happens, the weights end as they were.
    """
    before: dict[str, Tensor] = {}

    def change(layer: Layer, *_: Any) -> None:
        if layer.name not in before:  # else changed already, in a call that has not ended, or failed and was repeated
            values, old = made[layer](), layer.values.clone()
            before[layer.name] = old
            layer.values.copy_(values)

    def put_back(layer: Layer, *_: Any) -> None:
        if layer.name in before:
            layer.values.copy_(before[layer.name])
            del before[layer.name]

    with ExitStack() as hooks:
        for layer in made:
            hooks.callback(put_back, layer)
            for module in layer.hooked_modules:
                hooks.enter_context(module.register_forward_pre_hook(partial(change, layer)))
                hooks.enter_context(module.register_forward_hook(partial(put_back, layer)))
        yield


# masks that move: SR-STE (Zhou et al. 2021, arXiv 2102.04010), from a solution on -------------------------------------
# Every weight, pruned or not, has a value that Adam tunes; the block runs with those that count most, by the pattern.
# Gradients reach pruned values as if they were in place (straight through). Pruned values shrink a little with each
# step. Some way before the end the masks stay, so that the values settle.


MOVING = 0.6  # of all steps; after them masks stay
DECAY = 0.02  # share that a pruned value loses in a step at the full learning rate
BELOW = 0.95  # pruned values begin with at most this share of the score of the least kept one in their group


@dataclass(frozen=True)
class TrainableMask:
    """A weight whose mask moves.

    norms: ``[..., 1, C]``, the size of each input channel. dense: the values from before it was pruned,
    shaped like the parameter.
    """

    layer: Layer
    pattern: Pattern
    norms: Tensor
    dense: Tensor

    @classmethod
    def of(cls, layer: Layer, pattern: Pattern, square_sums: Tensor) -> "TrainableMask":
        """Prepare a layer that is not yet solved: its dense values are copied, and the mask that the pattern is
        ``within``. A channel that was zero in all data counts as much as the least of the others."""
        norms = Stats(0, square_sums.float()).with_dead_channels().square_sums.sqrt()
        if pattern.within is not None:  # the layer's own, which moves
            pattern = replace(pattern, within=pattern.within.clone())
        return cls(layer, pattern, norms.unsqueeze(-2), layer.values.clone())

    def initial_values(self, values: Tensor, mask: Tensor) -> Tensor:
        """Solved ``values`` where the mask keeps them; elsewhere dense ones, clamped so that `mask` gives the mask."""
        norms, pattern = self.norms.to(values.device), self.pattern
        scores = self.layer.matrix(values).abs() * norms
        scores = scores.masked_fill(~self.layer.matrix(mask), torch.inf)
        scopes = pattern.by_scope(scores)
        least = scopes.amin(-1, keepdim=True).expand_as(scopes).reshape(scores.shape)
        limit = self.layer.unmatrix(BELOW * least / norms)
        return torch.where(mask, values, self.dense.to(values).clamp(-limit, limit))

    def mask(self, values: Tensor) -> Tensor:
        """Choose the mask of ``values``, shaped like the parameter: by the pattern, with scores ``|w| * norm``."""
        scores = self.layer.matrix(values) * self.norms.to(values.device)
        return self.layer.unmatrix(self.pattern.mask(scores.abs_()))

    def set_mask(self, mask: Tensor) -> None:
        """Write the mask to every module that holds the weight and carries one."""
        for module in (self.layer.owner, *self.layer.tied_modules):
            if hasattr(module, self.layer.param + SUFFIX):
                update_mask(module, self.layer.param, mask)


def masks_move(step: int, steps: int) -> bool:
    """Whether masks may change after this step (0, 1, ...) of so many."""
    return step + 1 < MOVING * steps


def decay_pruned(values: Tensor, mask: Tensor, schedule: float) -> Tensor:
    """Shrink pruned values a little. ``schedule``: the factor of the learning rate, from 1 to 0."""
    return values * (~mask).to(values.dtype).mul_(-DECAY * schedule).add_(1)  # on a CPU `where` takes six times as long


# values in float32, and the Adam that tunes them ----------------------------------------------------------------------
# Learning rates are relative to the size of what they change, so that one value serves models of any scale.


BETAS = (0.9, 0.95)
EPSILON = 1e-12  # far below any gradient: the steps do not depend on the scale of the loss
WARMUP_STEPS = 10
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.Adam names them
FULL_RATE = 0.01  # the relative squared error from which on the whole learning rate is taken

Masks = Mapping[nn.Parameter, Tensor | None]  # of what is tuned; None: all of it
Values = list[tuple[Tensor, Tensor | None]]  # of each weight that is tuned, with its mask


class TunedWeight:
    """A parameter and its values in float32: a step smaller than bfloat16 can hold is not lost.

    mask: True = kept; None if it has none. movable: if its mask moves.
    values: all of them where there is no mask or one that moves; else only those that the mask keeps, [kept].
    moments: the dtype that Adam's two moments are held in between two steps.
    holds_places: whether `places` are held, 4 bytes for each, in place of being looked for twice in each step.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        mask: Tensor | None,
        movable: TrainableMask | None,
        rate: float,
        moments: torch.dtype | None,
        *,
        holds_places: bool = True,
    ) -> None:
        values = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        if mask is not None:
            values = values[mask] if movable is None else movable.initial_values(values, mask)
        values = values.contiguous()
        self.parameter, self.mask, self.movable, self.values, self.rate = parameter, mask, movable, values, rate
        self.moments = moments or values.dtype
        self._places: Tensor | None = None
        self._places = self.places() if holds_places else None
        self.adam = torch.optim.Adam([values], betas=BETAS, eps=EPSILON, fused=True)  # which looks at no strides

    def pop_gradient(self) -> Tensor | None:
        """Return the gradient of `values` and clear the parameter's."""
        gradient, self.parameter.grad = self.parameter.grad, None
        return None if gradient is None else self.tuned(gradient).to(self.values.dtype).contiguous()

    @torch.no_grad()
    def step(self, gradient: Tensor | None, schedule: float, *, moves: bool = False) -> None:
        """Take a step of Adam, after which a moving mask follows. ``schedule``: the factor of the rate, from 1 to 0."""
        self.adam.param_groups[0]["lr"] = self.rate * schedule
        self.values.grad = gradient
        self._hold_moments(self.values.dtype)
        self.adam.step()
        self._hold_moments(self.moments)
        self.values.grad = None
        if moves and self.movable is not None and self.mask is not None:
            self.values.copy_(decay_pruned(self.values, self.mask, schedule))
            self.mask = self.movable.mask(self.values)
        self.write(self.values, self.mask)

    def tuned(self, x: Tensor) -> Tensor:
        """The entries of a tensor like the parameter that `values` stand for."""
        places = self.places()
        return x if places is None else x.flatten().index_select(0, places)

    def places(self) -> Tensor | None:
        """Where a mask that does not move keeps values, as indices of the flat weight; None: all are tuned."""
        if self.mask is None or self.movable is not None or self._places is not None:
            return self._places
        places = self.mask.flatten().nonzero().flatten()
        return places.int() if self.mask.numel() <= torch.iinfo(torch.int32).max else places

    def _hold_moments(self, dtype: torch.dtype) -> None:
        state = self.adam.state[self.values]
        state.update({name: state[name].to(dtype) for name in MOMENTS if name in state})

    @torch.no_grad()
    def write(self, values: Tensor, mask: Tensor | None) -> None:
        """Write values and mask into the model; what the mask prunes is +0.0."""
        parameter, values = self.parameter, values.to(self.parameter.device)
        if (places := self.places()) is not None:
            whole = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            # to add to zeros takes a third of the time of `index_put_`
            values = whole.index_add_(0, places, values.to(parameter.dtype)).view(parameter.shape)
        parameter.copy_(values).add_(0.0)  # no weight is -0.0, see `written`
        if mask is not None and self.movable is not None:
            write_zeros(parameter, mask)
            self.movable.set_mask(mask)


class TunedWeights:
    """The weights that are tuned together."""

    def __init__(
        self,
        masks: Masks,
        outputs: Mapping[nn.Parameter, int],
        learning_rate: float,
        movable: Mapping[nn.Parameter, TrainableMask] | None = None,
        moments: torch.dtype | None = None,
        *,
        holds_places: bool = True,
    ) -> None:
        """``outputs``: how many outputs a matrix has (of all of its experts). ``moments``: the dtype of Adam's; None:
        that of the values. ``holds_places``: see `TunedWeight`."""
        counts = [outputs.get(parameter, 0) for parameter in masks]
        rates = learning_rates([*masks], [*masks.values()], counts, learning_rate)
        self.members = [
            TunedWeight(parameter, mask, (movable or {}).get(parameter), rate, moments, holds_places=holds_places)
            for (parameter, mask), rate in zip(masks.items(), rates)
        ]

    def scale_rate(self, error: float, full: float = FULL_RATE) -> None:
        """Take a smaller rate where little is to be mended: ``sqrt(error / full)`` of it, below ``full``. ``error``: a
        relative squared error, or a KL divergence.

        A relative error e of the output is mended by changes of the weights of about sqrt(e). Larger steps lose more by
        noise than they gain: see examples/benchmarks/README.md for a model whose blocks have errors of 2e-4.
        """
        for weight in self.members:
            weight.rate *= min(1.0, math.sqrt(max(error, 0.0) / full))  # a KL of zero may round to less

    def step(self, gradients: Gradients, schedule: float, *, moves: bool) -> None:
        for weight, gradient in zip(self.members, gradients):
            weight.step(gradient, schedule, moves=moves)

    def copy(self) -> Values:
        """Copy what the model holds of the values to the host, with the masks as they are now."""
        return [(weight.tuned(weight.parameter.detach()).to("cpu", copy=True), weight.mask) for weight in self.members]

    def write(self, values: Values) -> None:
        for weight, (value, mask) in zip(self.members, values):
            weight.write(value, mask)

    def moved(self, values: Values, others: Values) -> float | None:
        """The fraction of kept positions that differ between two sets of masks; None if no mask may move."""
        pairs = [(a, b) for weight, (_, a), (_, b) in zip(self.members, values, others) if weight.movable is not None]
        different = sum(int((a & ~b).sum()) for a, b in pairs if a is not None and b is not None)
        count = sum(int(a.sum()) for a, _ in pairs if a is not None)
        return different / count if count else None


def tune(
    weights: TunedWeights,
    batches: BatchNumbers,
    epochs: int,
    seed: int,
    loss: Callable[[int], Tensor],
    judge: Callable[[], float],
    before: float,
    bar: Progress | None = None,
) -> tuple[float, int, list[str]]:
    """Tune on the ``loss`` of a batch or unit, by its place in this process, for some epochs -> what ``judge`` says of
    the best values, their epoch, and notes.

    Never worse on the batches held back: the values from before, with what was judged ``before``, count as an epoch. An
    interruption leaves the best values so far. Several processes add up their gradients, and each steps all weights.
    """
    best, best_epoch, notes = before, 0, []
    first = best_values = weights.copy()
    order, step, steps = torch.Generator().manual_seed(seed), 0, epochs * len(batches.steps)
    try:
        for epoch in range(1, epochs + 1):
            for index in torch.randperm(len(batches.steps), generator=order, device="cpu").tolist():
                _take_step(weights, batches, batches.steps[index], loss, step, steps)
                step += 1
                if bar is not None:
                    bar.update()
            error = judge()
            if not math.isfinite(error):
                notes.append(f"stopped in epoch {epoch}: its output was no longer finite")
                break
            if error < best:
                best, best_epoch, best_values = error, epoch, weights.copy()
    finally:
        weights.write(best_values)
    if steps and not any(weight.adam.state.get(weight.values) for weight in weights.members):
        notes.append("no gradient reaches its weights")
    if (fraction := weights.moved(best_values, first)) is not None:
        notes.append(f"{fraction:.1%} of the places that are kept are others than those of the solution")
    return best, best_epoch, notes


def _take_step(
    weights: TunedWeights,
    batches: BatchNumbers,
    numbers: Sequence[int],
    loss: Callable[[int], Tensor],
    step: int,
    steps: int,
) -> None:
    """Take one step by the sum of the gradients of its parts. In one process, for a batch that is not split, and where
    no mask moves, each weight's step is taken in the backward pass as soon as its gradient is there, which is then
    dropped: all gradients together would take as much memory as the model."""
    alone = batches.processes.size == 1

    def gradients_of(number: int) -> Gradients:
        with torch.enable_grad():
            value = loss(batches.local[number])
            if value.requires_grad:  # else the block runs without gradients, whatever it is called with
                value.backward()
        return [weight.pop_gradient() for weight in weights.members]

    early = len(numbers) == 1 and alone and all(weight.movable is None for weight in weights.members)
    with ExitStack() as hooks:
        for weight in weights.members if early else ():
            hooks.enter_context(
                weight.parameter.register_post_accumulate_grad_hook(
                    lambda _, weight=weight: weight.step(weight.pop_gradient(), schedule(step, steps))
                )
            )
        gradients = batches.summed_gradients(numbers, gradients_of, weights)
    if not early:
        weights.step(gradients, schedule(step, steps), moves=masks_move(step, steps))


def learning_rates(
    parameters: Sequence[Tensor], masks: Sequence[Tensor | None], outputs: Sequence[int], learning_rate: float
) -> list[float]:
    """A learning rate for each tensor: ``learning_rate * rms(kept weights) / sqrt(kept weights per output)``;
    ``outputs`` says how many outputs each has (0: it is no matrix).

    A step of Adam moves all of these the same way at worst, and then changes the output by as much as the learning
    rate says, relative to a sum of values that are not aligned, whatever the width and the sparsity. Vectors take the
    mean of the matrices' divisors; one that is all zeros (a fresh bias) says nothing of its own scale, and takes the
    smallest rate of the others.
    """
    sizes, meeting = [], []
    for parameter, mask, count in zip(parameters, masks, outputs):
        values = parameter.detach() if mask is None else parameter.detach()[mask]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        sizes.append(float(values.square().mean().sqrt()) if values.numel() else 0.0)
        meeting.append(values.numel() / count if count else 0.0)
    wide = [math.sqrt(max(number, 1.0)) for number in meeting if number]
    usual = sum(wide) / len(wide) if wide else 1.0
    rates = [
        learning_rate * size / (math.sqrt(max(number, 1.0)) if number else usual)
        for size, number in zip(sizes, meeting)
    ]
    least = min((rate for rate in rates if rate), default=0.0)
    return [rate or least for rate in rates]


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate at each step (0, 1, ...): a short rise, then a cosine to 0."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def outputs_of(layer_plans: Iterable[LayerPlan]) -> dict[nn.Parameter, int]:
    """Weight -> its number of outputs (rows of all of its matrices), for layers as they are now."""
    layers = [layer_plan.layer for layer_plan in layer_plans]
    matrices = {layer.parameter: layer.matrix(layer.parameter) for layer in layers}
    return {parameter: matrix.numel() // matrix.shape[-1] for parameter, matrix in matrices.items()}


def tunable(
    model: nn.Module, part: nn.Module, masks: Masks, *, vectors: bool
) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """Parameters of a part of the model that may change, with their masks: the matrices of ``masks`` (None: all of a
    matrix), and ``vectors`` of modules that hold no other matrix. What modules outside of the part hold as well is left
    alone."""
    outside = set(_elsewhere(model, part))
    for module in part.modules():
        parameters = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        stays_dense = any(p.dim() >= 2 and p not in masks for p in parameters)
        for parameter in parameters:
            if parameter in outside:
                continue
            if parameter in masks:
                mask = masks[parameter]
                yield parameter, None if mask is None else mask.to(parameter.device)
            elif vectors and not stays_dense and parameter.dim() < 2:
                yield parameter, None


def _elsewhere(module: nn.Module, part: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are reached without going through the part."""
    if module is not part:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _elsewhere(child, part)


@contextmanager
def only_these_require_grad(part: nn.Module, chosen: Mapping[nn.Parameter, object]) -> Iterator[None]:
    """While entered, only the ``chosen`` parameters of ``part`` require gradients, and no hook of the user's gets
    these: it may scale them, or take a step with them."""
    norms = [module for module in part.modules() if isinstance(module, nn.GroupNorm) and module.weight in chosen]
    names = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    before = [(p, [getattr(p, name) for name in names]) for p in part.parameters()]

    def put(values: Iterable[tuple[nn.Parameter, list[Any]]]) -> None:
        for parameter, of_parameter in values:
            for name, value in zip(names, of_parameter):
                setattr(parameter, name, value)

    with ExitStack() as ending:
        ending.callback(put, before)
        for norm in norms:
            ending.enter_context(norm.register_forward_pre_hook(_input_with_gradient, with_kwargs=True))
        put((p, [p in chosen, None, None, None]) for p, _ in before)
        yield


def _input_with_gradient(norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """On a CPU, torch 2.13 ends the process in the backward pass of a GroupNorm whose weight has a gradient and whose
    input, channels last, has none."""
    return map_tensors(lambda x: x if x.requires_grad else x.detach().requires_grad_(), (args, kwargs))
