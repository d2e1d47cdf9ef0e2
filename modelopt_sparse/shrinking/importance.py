"""What of a model goes: blocks, by the divergence without each; and channels, by sums of what layers take in.

Nothing is changed here but for the length of a call of the model. Shape letters: R rows, C columns (channels), K those
that stay, B batch, S sequence.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.distill import Teacher
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.data import batch_rows
from modelopt_sparse.calibration.dense import BlockTask, blocks_in_call_order
from modelopt_sparse.calibration.forward import CalibrationData, NumberedCall, forward_context
from modelopt_sparse.calibration.stats import Collector, groups_of, no_data_message, warn_of_few_tokens
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.devices import flat_tensors
from modelopt_sparse.model.layers import Layer, TokenMasks
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.values import Shrunk
from modelopt_sparse.run import Run
from modelopt_sparse.shrinking.cutting import Choice, Cutting, skipped
from modelopt_sparse.shrinking.least_squares import gram_scores, judging_calls, largest, least_squares
from modelopt_sparse.shrinking.resize import BlockCount, ChannelGroup
from modelopt_sparse.shrinking.sizes import ShrinkRequest

Found = TypeVar("Found")
BLOCK_ROWS = 8  # rows of data that blocks are chosen by
JUDGING = " (held back)"  # added to a layer's name where its inputs judge
OTHER_KIND = "the others would be of another kind at their new places"


@dataclass(frozen=True)
class Judge:
    """Measures how far the model is from what it was. ``teacher``: its output then; None where that is not compared."""

    teacher: Teacher | None
    batches: BatchNumbers

    def kl(self, numbers: range | None = None) -> float:
        """The mean divergence on batches of these numbers; None: those that are held back."""
        assert self.teacher is not None  # streaming refuses what asks for it
        batches = self.batches if numbers is None else replace(self.batches, held_back=numbers)
        return batches.validation_error(self.teacher.divergence)

    def measure(self, step: str, shrunk: Shrunk) -> None:
        """Note the divergence after a step, where there is one."""
        if self.teacher is not None:
            shrunk.kl[step] = self.kl()


# blocks ---------------------------------------------------------------------------------------------------------------


def blocks(judge: Judge, depth: BlockCount, gone: int, run: Run, shrunk: Shrunk) -> list[int]:
    """Indices of the blocks that stay; what was tried is noted in ``shrunk``.

    One block goes after the other: each time the one without which the model's output changes least. Blocks after which
    the others would not be what they are now are left out.
    """
    model: Any = run.model
    stay = list(range(len(depth.blocks)))
    assert judge.teacher is not None
    calls, end = judge.teacher.data.calls or [], judge.batches.tuned_on
    rows = max(batch_rows(calls[0].args, calls[0].kwargs), 1) if calls else BLOCK_ROWS
    numbers = range(max(0, end - math.ceil(BLOCK_ROWS / rows)), end)  # the last that do not judge
    for _ in range(gone):
        divergences: dict[int, float] = {}
        with run.bar("choose blocks", "block", len(stay)) as bar:
            for index in stay:
                bar.update()
                rest = [i for i in stay if i != index]
                if depth.misfit(rest, model):
                    continue
                with skipped(model, [name for i, name in enumerate(depth.blocks) if i not in rest]):
                    divergences[index] = judge.kl(numbers)
        if not divergences:
            raise ValueError(f"no block of {depth.stack!r} can go: {OTHER_KIND}")
        stay.remove(min(divergences, key=divergences.__getitem__))  # the first of equal ones
        shrunk.tried.append({depth.blocks[index]: divergence for index, divergence in divergences.items()})
    return stay


def blocks_by_influence(
    data: CalibrationData, batches: BatchNumbers, depth: BlockCount, gone: int, shrunk: Shrunk
) -> list[int]:
    """Indices of the blocks that stay, by one pass over the model; the influences are noted in ``shrunk``.

    Those with the least influence go, but for blocks without which the others would not be what they are now.
    """

    def influence(task: BlockTask, inputs: Inputs, run: Run) -> float:
        if not isinstance(inputs, AtBlock):
            raise ValueError(f"blocks of {depth.stack!r} cannot be run by themselves: give blocks_by='kl'")
        with forward_context(run):
            value = _influence(inputs, batches)
        inputs.advance()
        return value

    by_name = by_block(data, "choose blocks", depth.blocks, influence)
    influences = {index: by_name[name] for index, name in enumerate(depth.blocks) if name in by_name}
    shrunk.tried.append({depth.blocks[index]: value for index, value in influences.items()})
    model: Any = data.run.model
    stay = list(range(len(depth.blocks)))
    for index in sorted(influences, key=influences.__getitem__):
        rest = [i for i in stay if i != index]
        if not depth.misfit(rest, model):
            stay = rest
        if len(stay) == len(depth.blocks) - gone:
            return stay
    raise ValueError(f"{gone} blocks of {depth.stack!r} cannot go one after the other: {OTHER_KIND}")


def _influence(inputs: AtBlock, batches: BatchNumbers) -> float:
    """1 - the mean cosine between the hidden states of a token before and after the block: ShortGPT's block influence
    (Men et al. 2024, arXiv 2403.03853, equation 1)."""
    sums: dict[int, tuple[float, int]] = {}
    for index, call in enumerate(inputs.calls):
        states: list[Tensor] = []

        def see(module: nn.Module, args: tuple, kwargs: dict[str, Any], states: list[Tensor] = states) -> None:
            states.append(flat_tensors((args, kwargs))[0])

        with inputs.block.register_forward_pre_hook(see, with_kwargs=True):
            (after,) = inputs.outputs_of([inputs.block], index, first_alone=True)
        before = states[-1].to(after.device)
        cosines = torch.cosine_similarity(before.double(), after.double(), dim=-1)
        mask = call.masks.at(inputs.data.sides[inputs.block])
        if mask is not None and mask.shape == cosines.shape:
            cosines = cosines[mask.to(cosines.device, torch.bool)]
        sums[call.number] = float((1 - cosines).sum()), cosines.numel()
    everything = replace(batches, held_back=range(batches.held_back.stop))
    return everything.validation_error(lambda number: sums.get(number, (0.0, 0)))


# channels -------------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """Collects the sums of the inputs of layers that take a block's channels, apart for the batches that judge.

    number: of the present call of the model in this process.
    absolute: layer name -> the sum over windows of the squared mean of |x|, ``[C]``: ModelOpt's.
    """

    collector: Collector
    judging: set[int]
    number: int = 0
    absolute: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, numbered: NumberedCall) -> None:
        self.collector.end_call()
        self.number = numbered.number

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> None:
        judges = self.number in self.judging
        self.collector.see(replace(layer, name=layer.name + JUDGING) if judges else layer, inputs, token_masks)
        x_BSC = inputs[0].detach().abs().float()
        mask = token_masks[0]
        real = x_BSC.new_ones(x_BSC.shape[:-1]) if mask is None else mask.float()
        means = (x_BSC * real[..., None]).sum(-2) / real.sum(-1, keepdim=True).clamp_min(1)
        sums = means.square().view(-1, means.shape[-1]).sum(0)
        self.absolute[layer.name] = self.absolute.get(layer.name, torch.zeros_like(sums)) + sums


def channels(
    data: CalibrationData, cutting: Cutting, batches: BatchNumbers, request: ShrinkRequest
) -> dict[str, list[Choice]]:
    """Block -> what stays of each of its groups of channels. One pass over the model as it is now."""

    def choose(task: BlockTask, inputs: Inputs, run: Run) -> list[Choice]:
        by_layer = {group.consumer.name: group for group in cutting.groups[task.name]}
        consumers = [layer_plan for layer_plan in task.layer_plans if layer_plan.name in by_layer]
        sums = _sums(consumers, inputs, batches, run)
        choices = [_choice(by_layer[name], *layer_sums, request) for name, layer_sums in sums.items()]
        return [x if x.values is None else replace(x, values=run.storage.hold(x.values, weights=True)) for x in choices]

    return by_block(data, "choose channels", cutting.groups, choose)


def by_block(
    data: CalibrationData, title: str, names: Collection[str], choose: Callable[[BlockTask, Inputs, Run], Found]
) -> dict[str, Found]:
    """Call ``choose`` at each block of these ``names`` in one pass over the model -> what it returned, by name. It
    changes nothing, can read the block's weights, and lets the calls go on."""
    results: dict[str, Found] = {}
    run = replace(data.run, config=replace(data.run.config, reconstruct=None))
    tasks = blocks_in_call_order(run, replace(data, run=run))
    with run.bar(title, "block", len(tasks)) as bar:
        for task in tasks:
            bar.say(task.name, run.memory_in_use())
            inputs = task.inputs()
            if task.block is not None:
                run.storage.load(task.block)
            with inputs.on_device():
                if task.name in names:
                    results[task.name] = choose(task, inputs, run)
                else:
                    inputs.advance()
            bar.update()
    return results


def _sums(
    consumers: Sequence[LayerPlan], inputs: Inputs, batches: BatchNumbers, run: Run
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer name -> (the Gram matrix of the batches that are fitted to, that of those that judge, ModelOpt's sums)."""
    names = [layer_plan.name for layer_plan in consumers]
    collector = Collector(needs=dict.fromkeys([*names, *(name + JUDGING for name in names)], "gram"), share=False)
    seen = _Seen(collector, judging_calls(batches))
    inputs.collect(consumers, seen.see, seen.begin, go_on=True)
    groups = groups_of(collector, run) or []  # layers that share no input
    stats = {name: sums for layer_names, sums in groups for name in layer_names if isinstance(sums, Stats)}
    grams = {}
    for name in names:
        fitted, judging = stats.get(name), stats.get(name + JUDGING)
        if fitted is None or judging is None or fitted.gram is None or judging.gram is None:
            raise ValueError(no_data_message(name))
        if not torch.isfinite(fitted.gram).all() or not torch.isfinite(judging.gram).all():
            raise ValueError(f"layer {name!r}: its input holds NaN or inf; run the model in bfloat16 or float32")
        warn_of_few_tokens(name, fitted, run.report)
        grams[name] = fitted.gram, judging.gram, seen.absolute.get(name, torch.zeros_like(fitted.gram[0]).float())
    run.processes.all_reduce("scores", [absolute_C for *_, absolute_C in grams.values()])
    return grams


def _choice(
    group: ChannelGroup, fitted_CC: Tensor, judging_CC: Tensor, absolute_C: Tensor, request: ShrinkRequest
) -> Choice:
    layer, count = group.consumer, group.span.new
    weight_RC = layer.matrix(layer.values).to(fitted_CC.device)
    gram_CC = fitted_CC + judging_CC
    if (fixed := request.fixed.get(layer.name)) is not None:
        scores, stay = torch.zeros(0), torch.tensor(list(fixed), device=gram_CC.device)
    elif request.criterion == "gram":
        stay, scores = gram_scores(weight_RC, gram_CC, count)
    else:
        scores = (gram_CC.diagonal() if request.criterion == "norm" else absolute_C).sqrt()
        stay = largest(scores, count)
    new_RK, as_is, least = least_squares(weight_RC, stay, fitted_CC, judging_CC)
    values = layer.unmatrix(new_RK).to(layer.values.device) if request.refit else None
    return Choice(group, stay.cpu(), scores.cpu(), values, (as_is, least if request.refit else as_is))
