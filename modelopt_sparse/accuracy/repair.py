"""Repair of what is sparse, or smaller: better values for what is left, tuned by Adam; masks are frozen, or move.

Reconstruction goes block by block. After the layers of a block are solved, their kept weights, and the norms and biases
around them, are tuned on the squared error of the block's output against the dense block's, as in EBFT (Guo et al.
2024, arXiv 2402.12419) and the transformer matching of 3BASiL (arXiv 2603.01376).

Distillation is the last step: the whole sparse model learns to put out what the dense one did, with masks frozen. No
second model is held. What the dense model's output head was called with is kept from before anything is pruned, and
goes through the head once more beside the sparse model's own (Hinton et al. 2015, arXiv 1503.02531, for the loss). Of
what is no logits of a head, the output itself is kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.accuracy.fisher import blocks_recomputed
from modelopt_sparse.accuracy.tuning import (
    BatchNumbers,
    Masks,
    Movable,
    TunedWeights,
    only_these_require_grad,
    outputs_of,
    tunable,
    tune,
)
from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.dense import BlockTask
from modelopt_sparse.calibration.forward import INSTEAD, CalibrationData, PaddingError, forward_context
from modelopt_sparse.model.hf import is_encoder_decoder
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.output import Output, in_words
from modelopt_sparse.plan.options import HELD_BACK, HELD_BACK_FOR_OUTPUTS
from modelopt_sparse.reports.rows import BlockReport, Distilled
from modelopt_sparse.reports.text import Progress
from modelopt_sparse.run import Run

# reconstruction -------------------------------------------------------------------------------------------------------


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
    if not isinstance(inputs, AtBlock) or not inputs.once:
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


RATES = (0.2, 0.1, 0.4)  # learning rates that are tried
AS_SOLVED = 0.0  # the rate that changes nothing


class Way(NamedTuple):
    """How a block is tuned: the learning rate, whether its masks move, and whether its errors are those of the Fisher
    metric."""

    rate: float
    moves: bool
    fisher: bool

    def __str__(self) -> str:
        if self.rate == AS_SOLVED:
            return "as solved"
        masks, metric = "move" if self.moves else "frozen", "fisher" if self.fisher else "plain"
        return f"rate {self.rate:g}, masks {masks}, {metric} metric"


# each weight with a copy of it, and of its mask if that moves
Copies = list[tuple[nn.Parameter, Tensor, Tensor | None]]


def reconstruct(
    block: BlockTask,
    tuned: list[TunedModule],
    masks: Masks,
    movable: Mapping[nn.Parameter, Movable],
    inputs: Inputs,
    run: Run,
    judge: Callable[[], float] | None = None,
) -> None:
    """Tune a block in place, module by module, and report it. ``masks`` are those of the weights pruned in this run
    (True = kept; None: all of it is tuned); those of ``movable`` may move.

    The first block of a stack is tuned in the ways that `Reconstruct` leaves open ("auto"), and left as it was solved,
    with one of HELD_BACK_FOR_OUTPUTS steps held back; and then, as the others of the stack, in the way that was best.
    ``judge`` says how far the model's output is from the dense model's on these, with this block as it is; where it is
    not known, the error of the block decides.

    Never worse on the batches held back, see `tune`. ``requires_grad`` and gradients are as before afterwards.
    """
    options = run.config.reconstruct
    assert options is not None
    assert isinstance(inputs, AtBlock)
    weights = dict(tunable(run.model, inputs.block, masks, vectors=options.norms_and_biases))
    left_open = _left_open(inputs, movable, tuned, proved=judge is not None)
    way, losses = Way(*(values[0] for values in left_open)), dict[Way, float]()
    solved = _copies(weights, movable) if max(map(len, left_open)) > 1 else []
    try:
        for part, values in zip(Way._fields, left_open):
            others = [way._replace(**{part: value}) for value in values if len(values) > 1 and way.rate != AS_SOLVED]
            for other in others:
                if other in losses:
                    continue
                if reports := _tuned_parts(block, tuned, weights, movable, inputs, other, HELD_BACK_FOR_OUTPUTS):
                    losses[other] = reports[-1].error_after if judge is None else judge()
                _write(solved, movable)
            way = min(losses, key=losses.__getitem__, default=way)
        reports = _tuned_parts(block, tuned, weights, movable, inputs, way, HELD_BACK)
    except BaseException:
        run.report.notes.append(
            f"{tuned[-1].name!r}: its reconstruction was broken off; it has the best values up to then"
        )
        raise
    by = "error of the block" if judge is None else "divergence of the model's output"
    notes = [f"{way}: {loss:.4g}" for way, loss in losses.items()]
    notes = [f"taken: {way}, by the {by} on the batches held back", *notes] if notes else []
    for report in reports:
        report = replace(report, way=str(way), notes=[*report.notes, *notes])
        run.report.reconstructed(report, {plan.name for plan in block.layer_plans})


def _left_open(
    inputs: AtBlock, movable: Mapping[nn.Parameter, Movable], tuned: list[TunedModule], *, proved: bool
) -> list[list[Any]]:
    """What each part of a `Way` may be by the options, or is in the way that an earlier block of the stack has taken,
    by the report. Errors in two metrics cannot be compared: unless the model's output is asked, the Fisher metric is
    taken where the block has one."""
    options = inputs.run.config.reconstruct
    assert options is not None
    rates = [*RATES, AS_SOLVED] if options.learning_rate == "auto" else [options.learning_rate]
    moves = {"frozen": [False], "move": [True], "auto": [False, True]}[options.masks] if movable else [False]
    metrics = {"plain": [False], "fisher": [True], "auto": [False, True]}[options.metric]
    metrics = [False] if tuned[-1].metric is None else metrics if proved else metrics[-1:]
    stack = inputs.again.stack_of[inputs.block]
    taken = {report.way for report in inputs.run.report.blocks if report.name.startswith(stack.names)}
    known = [way for way in map(Way._make, product(rates, moves, metrics)) if str(way) in taken]
    return [[value] for value in known[0]] if known else [rates, moves, metrics]


def _copies(weights: Masks, movable: Mapping[nn.Parameter, Movable]) -> Copies:
    """Copies of weights, and of the masks that those carry which may move."""
    copies = []
    for weight in weights:
        mask = movable[weight].carried_mask() if weight in movable else None
        copies.append((weight, weight.detach().clone(), None if mask is None else mask.clone()))
    return copies


@torch.no_grad()
def _write(copies: Copies, movable: Mapping[nn.Parameter, Movable]) -> None:
    """Copies of weights, and of their masks, back into the model."""
    for weight, value, mask in copies:
        if mask is not None:
            movable[weight].set_mask(mask)
        weight.copy_(value)


def _tuned_parts(
    block: BlockTask,
    tuned: list[TunedModule],
    weights: Masks,
    movable: Mapping[nn.Parameter, Movable],
    inputs: AtBlock,
    way: Way,
    one_of: int,
) -> list[BlockReport]:
    """Each module that is tuned together, one after the other; what the inner ones hold is not tuned again. ``one_of``
    so many steps is held back."""
    run, outputs, movable = inputs.run, outputs_of(block.layer_plans), movable if way.moves else {}
    assert run.config.reconstruct is not None
    epochs = 0 if way.rate == AS_SOLVED else run.config.reconstruct.epochs
    rest, reports = dict(weights), list[BlockReport]()
    with forward_context(run):
        token_masks = _token_masks(block, inputs, tuned[-1].goals)
        batches = BatchNumbers.of_calls(inputs.data, [call.numbered.number for call in inputs.calls], one_of)
        for part in tuned:
            part = part if way.fisher else replace(part, metric=None)
            inside = set(part.module.parameters())
            chosen = {parameter: rest.pop(parameter) for parameter in list(rest) if parameter in inside}
            if chosen:
                values = TunedWeights(chosen, outputs, way.rate, movable)
                with only_these_require_grad(inputs.block, chosen, masked=not movable):
                    reports.append(_tuned(part, inputs, token_masks, batches, values, epochs))
    return reports


def _token_masks(block: BlockTask, inputs: AtBlock, goals: list[Tensor]) -> list[Tensor | None]:
    """Which tokens of a block's outputs are real, on each batch; None: all."""
    masks = [call.numbered.masks.at(inputs.data.sides[inputs.block]) for call in inputs.calls]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            shapes = f"an output of shape {list(goal.shape)}, and the token mask has shape {list(mask.shape)}"
            raise PaddingError(f"block {block.name!r} has {shapes}: {INSTEAD}")
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]


def _tuned(
    part: TunedModule,
    inputs: AtBlock,
    token_masks: list[Tensor | None],
    batches: BatchNumbers,
    weights: TunedWeights,
    epochs: int,
) -> BlockReport:
    config, began = inputs.data.run.config, time.perf_counter()

    def squared(values: Tensor, place: int) -> Tensor:
        """The squared norm of the values of real tokens, in the metric of the module."""
        token_mask = token_masks[place]
        real = values if token_mask is None else values[token_mask]
        return (real if part.metric is None else real @ part.metric.to(real.device)).square().sum()

    def error(place: int) -> Tensor:
        output = inputs.outputs_of([part.module], place)[0]
        return squared(output.float() - part.goals[place].float(), place)

    def loss(place: int) -> Tensor:
        # scaled so that neither its gradients nor those inside of the block leave float16's range
        return error(place) / max(of_step[place], 1e-30) * sizes[place] ** 0.5

    energies = [float(squared(goal.float(), place)) for place, goal in enumerate(part.goals)]
    of_step, sizes = batches.of_steps(energies), batches.of_steps([goal.numel() for goal in part.goals])
    judge = partial(batches.judged, lambda place: (float(error(place)), energies[place]))
    before = judge()
    weights.slow_down(before)
    best, epoch, notes = tune(weights, batches, epochs, config.seed, loss, judge, before)
    return BlockReport(part.name, before, best, epoch, round(time.perf_counter() - began, 3), notes)


# distillation ---------------------------------------------------------------------------------------------------------


# the divergence before it, in nats, or in parts of the variance, from which on the whole learning rate is taken
FULL_RATE, FULL_OF_SQUARED = 1.0, 0.1
OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # arguments that only the model's own loss needs


@dataclass(frozen=True)
class Teacher:
    """What the dense model puts out on the calibration data.

    head: the model's output head, and answers: what it was called with in each call, by its number, on the host. Of
    what is no logits of a head ``answers`` are what counts of the output.
    """

    data: CalibrationData
    head: nn.Module | None
    answers: dict[int, Tensor]

    @classmethod
    def of(cls, data: CalibrationData, numbers: Sequence[int] | None = None) -> "Teacher":
        """Recorded while the model is dense: one run over the data, or over the calls of these ``numbers``.

        Raises ValueError where it is not known what counts of the output, and for a model that does more with what its
        head puts out than sample by sample.
        """
        model, answers, of_head = data.run.model, list[Tensor](), list[Tensor]()
        first: list[Output] = []
        assert data.calls is not None
        data = replace(data, calls=[_without_loss(model, call) for call in data.calls], metrics={})
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None

        def before_head(module: nn.Module, args: tuple) -> None:
            of_head[:] = [args[0]]

        def after_model(module: nn.Module, args: tuple, output: Any) -> None:
            counts = data.counted(output)
            first[:] = first or [counts]
            answer = of_head[0] if of_head and counts.is_logits else counts.values
            answers.append(answer.detach().to("cpu", copy=True))

        with ExitStack() as hooks:
            if head is not None:
                hooks.enter_context(head.register_forward_pre_hook(before_head))
            hooks.enter_context(model.register_forward_hook(after_model))
            data.run_model(numbers=numbers)
        numbers = range(len(answers)) if numbers is None else sorted(numbers)
        teacher = cls(data, head if first[0].is_logits else None, dict(zip(numbers, answers, strict=True)))
        teacher._check_itself(numbers[0], first[0].values.detach())
        return teacher

    def outputs(self, index: int) -> tuple[Output, Output]:
        """(dense, sparse) output of call ``index``."""
        return self._side_by_side(index, self.answers[index])

    def divergence(self, index: int) -> list[float]:
        """The sums of how far the sparse output of call ``index`` is from the dense one, see `Output.sums`."""
        dense, sparse = self.outputs(index)
        return dense.sums(sparse)

    def _side_by_side(self, index: int, answer: Tensor) -> tuple[Output, Output]:
        """(what an ``answer`` stands for, the output of call ``index``)."""

        def beside(module: nn.Module, args: tuple) -> tuple:
            return (torch.cat([answer.to(args[0].device), args[0]]), *args[1:])

        with nullcontext() if self.head is None else self.head.register_forward_pre_hook(beside):
            both = self.data.counted(*self.data.output_of(index))
        if self.head is None:
            return replace(both, values=answer), both
        dense, sparse = both.values.detach()[: len(answer)], both.values[len(answer) :]
        return replace(both, values=dense), replace(both, values=sparse)

    def _check_itself(self, number: int, predicted: Tensor) -> None:
        """The call of this number has to be ``predicted`` as before, beside another answer than its own if there is a
        head."""
        try:
            _, again = self._side_by_side(number, self.answers[number] / 2)
            if not _close(again.values.detach(), predicted):
                raise ValueError("predictions differ")
        except ValueError as error:
            why = f"the output head puts out something else beside other samples ({error})"
            raise ValueError(f"distill: {why}: leave distill out") from error


def distill(teacher: Teacher, run: Run) -> None:
    """Tune the kept weights, norms and biases of the whole model by Adam on the mean divergence from the dense model's
    output, and report it. Never worse on the steps held back, a quarter of them, see `tune`."""
    options, model = run.config.distill, run.model
    assert options is not None
    layers = [plan.layer for plan in run.plan.layers]
    masks = {layer.parameter: dict(named_masks(layer.owner)).get(layer.param) for layer in layers}
    outputs = outputs_of(run.plan.layers)
    chosen = dict(tunable(model, model, masks, vectors=True))
    batches = BatchNumbers.of_calls(teacher.data, one_of=HELD_BACK_FOR_OUTPUTS)
    by = run.report.settings.get("divergence")
    began = time.perf_counter()

    def loss(place: int) -> Tensor:
        # the sum: means of many small gradients would leave float16's range
        dense, sparse = teacher.outputs(place)
        return dense.apart(sparse).sum()

    def judge() -> float:
        divergence = batches.judged(teacher.divergence)
        bar.say(f"{in_words(by)[0]} {before:.4f} -> {divergence:.4f}", run.memory_in_use())
        return divergence

    with (
        only_these_require_grad(model, chosen),
        blocks_recomputed(run),
        Progress("distill", "step", options.epochs * len(batches.steps), show=run.config.progress) as bar,
    ):
        moments = torch.bfloat16 if options.moments == "bfloat16" else None
        weights = TunedWeights(chosen, outputs, options.learning_rate, None, moments)
        before = batches.judged(teacher.divergence)
        weights.slow_down(before, FULL_OF_SQUARED if by == "squared" else FULL_RATE)
        try:
            best, epoch, notes = tune(weights, batches, options.epochs, run.config.seed, loss, judge, before, bar)
        except BaseException:
            run.report.notes.append("distillation was broken off; the model has the best values up to then")
            raise
    run.report.distilled(Distilled(before, best, epoch, round(time.perf_counter() - began, 3), notes))


def _without_loss(model: nn.Module, call: Call) -> Call:
    """The call without what the model's own loss needs, whose batch would have another size."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in OF_THE_LOSS}
    labels = call.kwargs.get("labels")
    if is_encoder_decoder(model) and labels is not None and "decoder_input_ids" not in kwargs:
        kwargs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]  # models that take labels have it
    return replace(call, kwargs=kwargs)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to a few roundings of the dtype, measured against the tensor's own scale (kernels may differ).

    Rows of padding may be NaN or inf: that is equal to itself here.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=8 * torch.finfo(a.dtype).eps * scale, equal_nan=True)
