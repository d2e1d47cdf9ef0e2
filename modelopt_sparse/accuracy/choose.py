"""What of a model goes: blocks, by the divergence without each, and channels, by sums of what layers take in.

Nothing is changed here but for the length of a call of the model. Shape letters: R rows, C columns (channels), K those
that stay, B batch, S sequence.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.distill import Teacher
from modelopt_sparse.accuracy.refit import refit
from modelopt_sparse.accuracy.tuning import BatchNumbers, called_with
from modelopt_sparse.calibration.blocks import BlockTask, blocks_in_call_order
from modelopt_sparse.calibration.data import samples
from modelopt_sparse.calibration.forward import CalibrationData, forward_context
from modelopt_sparse.calibration.inputs import AtBlock, Inputs
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import Collector, SumsOfAllProcesses, warn_of_few_tokens, without_data
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.channels import gram_scores, largest
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.model.devices import flat_tensors
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.resize import Depth, Pool
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.reports.values import Shrunk

SAMPLES = 8  # rows of data that blocks are chosen by
JUDGING = " (held back)"  # added to a layer's name where its inputs judge
OTHER_KIND = "the others would be of another kind at their new places"


@dataclass(frozen=True)
class Judge:
    """How far the model is from what it was. ``teacher``: what it predicted then; None if it gives no logits."""

    teacher: Teacher | None
    batches: BatchNumbers

    def kl(self, numbers: range | None = None) -> float:
        """The mean KL divergence on batches of these numbers; None: those that are held back."""
        teacher = self.teacher
        if teacher is None:
            problem = "blocks are chosen by what the model predicts, and its output has no logits"
            raise ValueError(f"{problem}: name them, or give blocks_by='influence'")

        def measure(place: int) -> tuple[float, float]:
            rows = kl_divergence(*teacher.predictions(place))
            return float(rows.sum()), len(rows)

        return (self.batches if numbers is None else replace(self.batches, held_back=numbers)).judged(measure)

    def measure(self, step: str, shrunk: Shrunk) -> None:
        """Note the divergence after a step, where there is one."""
        if self.teacher is not None:
            shrunk.kl[step] = self.kl()

    def few(self) -> range:
        """Numbers of the last batches that do not judge, with about SAMPLES rows."""
        assert self.teacher is not None
        calls, end = self.teacher.data.calls or [], self.batches.tuned_on
        rows = max(samples(calls[0].args, calls[0].kwargs), 1) if calls else SAMPLES
        return range(max(0, end - math.ceil(SAMPLES / rows)), end)


# blocks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def skipped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """While entered, these blocks put out what they are called with, wherever else they are called."""

    def skip(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        # a block that is brought to a device gets there what it puts out elsewhere
        hidden = flat_tensors((args, kwargs))[0].to(flat_tensors(output)[0].device)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(skip, with_kwargs=True))
        yield


def blocks(judge: Judge, depth: Depth, gone: int, run: Run, shrunk: Shrunk) -> list[int]:
    """The places of the blocks that stay; what was tried is noted in ``shrunk``.

    One block goes after the other: each time the one without which the model's predictions change least. Blocks after
    which the others would not be what they are now are left out.
    """
    stack = depth.stack
    stay = list(range(len(stack.blocks)))
    numbers = judge.few()
    for _ in range(gone):
        divergences: dict[int, float] = {}
        with Progress("choose blocks", "block", len(stay), show=run.config.progress) as bar:
            for place in stay:
                bar.update()
                rest = [other for other in stay if other != place]
                try:
                    depth.check(rest)
                except ValueError:
                    continue
                with skipped([block for i, block in enumerate(stack.blocks) if i not in rest]):
                    divergences[place] = judge.kl(numbers)
        if not divergences:
            raise ValueError(f"no block of {stack.name!r} can go: {OTHER_KIND}")
        stay.remove(min(divergences, key=lambda place: (divergences[place], place)))
        shrunk.tried.append({stack.names[place]: divergence for place, divergence in divergences.items()})
    return stay


def blocks_by_influence(
    data: CalibrationData, batches: BatchNumbers, depth: Depth, gone: int, shrunk: Shrunk
) -> list[int]:
    """The places of the blocks that stay, by one pass over the model; the influences are noted in ``shrunk``.

    Those with the least influence go, but for blocks without which the others would not be what they are now.
    """
    stack = depth.stack
    influences: dict[int, float] = {}

    def visit(task: BlockTask, inputs: Inputs, run: Run) -> None:
        if task.block in stack.blocks:
            if not isinstance(inputs, AtBlock):
                raise ValueError(f"blocks of {stack.name!r} cannot be run by themselves: give blocks_by='kl'")
            with forward_context(run):
                influences[stack.blocks.index(task.block)] = _influence(inputs, batches)
        inputs.advance()

    visit_blocks(data, "choose blocks", visit)
    shrunk.tried.append({stack.names[place]: influence for place, influence in sorted(influences.items())})
    stay = list(range(len(stack.blocks)))
    for place in sorted(influences, key=lambda place: (influences[place], place)):
        rest = [other for other in stay if other != place]
        with suppress(ValueError):
            depth.check(rest)
            stay = rest
        if len(stay) == len(stack.blocks) - gone:
            return stay
    raise ValueError(f"{gone} blocks of {stack.name!r} cannot go one after the other: {OTHER_KIND}")


def _influence(inputs: AtBlock, batches: BatchNumbers) -> float:
    """1 - the mean cosine between the hidden states of a token before and after the block: ShortGPT's block influence
    (Men et al. 2024, arXiv 2403.03853, equation 1)."""
    own: dict[int, tuple[float, int]] = {}
    for index, call in enumerate(inputs.calls):
        (after,) = inputs.outputs_of([inputs.block], index)
        before = flat_tensors((call.args, call.kwargs))[0].to(after.device)
        cosines = torch.cosine_similarity(before.double(), after.double(), dim=-1)
        mask = getattr(call.numbered.masks, inputs.data.sides[inputs.block])
        if mask is not None and mask.shape == cosines.shape:
            cosines = cosines[mask.to(cosines.device, torch.bool)]
        own[call.numbered.number] = float((1 - cosines).sum()), cosines.numel()
    everything = replace(batches, held_back=range(len(batches.ranks)))
    return everything.judged(lambda place: own.get(place, (0.0, 0)))


# channels -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Of the channels of one layer: those that stay ``[K]``, the values ``[R, K]`` of the layer that takes them, the
    score of each, and the error of the layer's output as is and with these values."""

    pool: Pool
    stay: Tensor
    values: Tensor
    scores: Tensor
    errors: tuple[float, float]

    def full_width(self, *, refitted: bool) -> Tensor:
        """The layer's values, with zeros for the channels that go; ``refitted``: with the new values for the others."""
        old = self.pool.taker.matrix(self.pool.taker.values)
        stay = self.stay.to(old.device)
        values = self.values.to(old.device) if refitted else old[:, stay]
        return self.pool.taker.unmatrix(torch.zeros_like(old).index_copy(1, stay, values))


def with_channels(choices: Sequence[Choice], *, refitted: bool) -> AbstractContextManager[None]:
    """While entered, layers are called with zeros for the channels that go."""
    return called_with({choice.pool.taker: partial(choice.full_width, refitted=refitted) for choice in choices})


@dataclass(frozen=True)
class Criterion:
    """How it is chosen what goes. Channels and experts: by what score, whether the layer that takes channels gets
    better values, and ``fixed``, ``experts``: layer name -> the channels, or experts, that stay, chosen before.
    ``blocks``: what they are chosen by."""

    name: str
    refit: bool
    fixed: Mapping[str, Sequence[int]]
    blocks: str = "kl"
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class _Seen:
    """Sums of the inputs of a block's takers, apart for the batches that judge.

    absolute: layer name -> the sum over windows of the squared mean of |x|, ``[C]``: ModelOpt's.
    """

    collector: Collector
    judging: set[int]
    place: int = 0
    absolute: dict[str, Tensor] = field(default_factory=dict)

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        judges = self.place in self.judging
        self.collector.see(replace(layer, name=layer.name + JUDGING) if judges else layer, inputs, token_mask)
        x_BSC = inputs[0].detach().abs().float()
        real = torch.ones(x_BSC.shape[:-1], device=x_BSC.device) if token_mask is None else token_mask.float()
        if x_BSC.dim() == 2:
            x_BSC, real = x_BSC[None], real[None]
        means = (x_BSC * real[..., None]).sum(-2) / real.sum(-1, keepdim=True).clamp_min(1)
        sums = means.flatten(0, -2).square().sum(0)
        self.absolute[layer.name] = self.absolute.get(layer.name, torch.zeros_like(sums)) + sums


def channels(
    data: CalibrationData,
    pools: Mapping[str, Sequence[Pool]],
    judge: Judge,
    criterion: Criterion,
) -> dict[str, list[Choice]]:
    """Block -> what stays of the channels of each of its ``pools``. One pass over the model as it is now."""
    choices: dict[str, list[Choice]] = {}

    def visit(task: BlockTask, inputs: Inputs, run: Run) -> None:
        chosen = {pool.taker.name: pool for pool in pools.get(task.name, ())}
        takers = [plan for plan in task.layer_plans if plan.name in chosen]
        if not takers:
            inputs.advance()
            return
        sums = _sums(takers, inputs, judge.batches, run)
        of_block = [_choice(chosen[name], *of_layer, criterion) for name, of_layer in sums.items()]
        choices[task.name] = [replace(each, values=run.storage.hold_weights(each.values)) for each in of_block]

    visit_blocks(data, "choose channels", visit)
    return choices


def visit_blocks(data: CalibrationData, title: str, visit: Callable[[BlockTask, Inputs, Run], None]) -> None:
    """Call ``visit`` for block by block, which lets the calls go on, and changes nothing; its weights can be read."""
    run = replace(data.run, config=replace(data.run.config, reconstruct=None))
    with ExitStack() as ending:
        tasks = blocks_in_call_order(run, replace(data, run=run), ending)
        with Progress(title, "block", len(tasks), show=run.config.progress) as bar:
            for task in tasks:
                bar.say(task.name, run.memory_in_use())
                inputs = task.inputs()
                if task.block is not None:
                    run.storage.load(task.block)
                with inputs.on_device():
                    visit(task, inputs, run)
                bar.update()


@contextmanager
def calls_counted(seen: Any, inputs: Inputs, run: Run) -> Iterator[None]:
    """While entered, ``seen.place`` is that of the present call of the model among this process's: some calls may not
    come to a block."""
    at_block = isinstance(inputs, AtBlock)
    places = iter([call.numbered.number for call in inputs.calls]) if at_block else itertools.count()

    def next_call(*_: Any) -> None:
        seen.place = next(places, 0)

    next_call()
    with (inputs.block if at_block else run.model).register_forward_hook(next_call):
        yield


def any_channels(pool: Pool) -> Choice:
    """Some of the channels, to try with."""
    stay = torch.randperm(pool.span.old, generator=torch.Generator().manual_seed(0))[: pool.span.new].sort().values
    return Choice(pool, stay, torch.empty(0), torch.empty(0), (0.0, 0.0))


def _sums(
    takers: Sequence[LayerPlan], inputs: Inputs, batches: BatchNumbers, run: Run
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer name -> (the Gram matrix of the batches that are fitted to, that of those that judge, ModelOpt's sums)."""
    names = [plan.name for plan in takers]
    collector = Collector(needs=dict.fromkeys([*names, *(name + JUDGING for name in names)], "gram"), share=False)
    judging_calls = {batches.own[number] for number in batches.held_back if number in batches.own}
    sums = SumsOfAllProcesses(collector, run)
    go_on = inputs.blockwise and not run.config.deterministic
    while True:
        seen = _Seen(collector, judging_calls)
        with calls_counted(seen, inputs, run):
            inputs.collect(takers, seen.see, sums, go_on=go_on)
        if (groups := sums.groups()) is not None:
            break
    if inputs.blockwise and not go_on:
        inputs.advance()
    stats = {name: each for of_layer, each in groups for name in of_layer if isinstance(each, Stats)}
    run.processes.all_reduce("scores", [seen.absolute[name] for name in names])
    grams = {}
    for name in names:
        fitted, judging = stats.get(name), stats.get(name + JUDGING)
        if fitted is None or judging is None or fitted.gram is None or judging.gram is None:
            raise ValueError(without_data(name))
        if not torch.isfinite(fitted.gram).all() or not torch.isfinite(judging.gram).all():
            raise ValueError(f"layer {name!r}: its input holds NaN or inf; run the model in bfloat16 or float32")
        warn_of_few_tokens(name, fitted, run.report)
        grams[name] = fitted.gram, judging.gram, seen.absolute[name]
    return grams


def _choice(pool: Pool, fitted_CC: Tensor, judging_CC: Tensor, absolute_C: Tensor, criterion: Criterion) -> Choice:
    layer, count = pool.taker, pool.span.new
    weight_RC = layer.matrix(layer.values).to(fitted_CC.device)
    gram_CC = fitted_CC + judging_CC
    if layer.name in criterion.fixed:
        scores = torch.zeros(0)
        stay = torch.tensor(list(criterion.fixed[layer.name]), device=gram_CC.device)
    elif criterion.name == "gram":
        stay, scores = gram_scores(weight_RC, gram_CC, count)
    else:
        scores = (gram_CC.diagonal() if criterion.name == "norm" else absolute_C).sqrt()
        stay = largest(scores, count)
    values, as_is, least = refit(weight_RC, stay, fitted_CC, judging_CC)
    if not criterion.refit:
        values, least = weight_RC[:, stay], as_is
    return Choice(pool, stay.cpu(), values.to(layer.values.device), scores.cpu(), (as_is, least))
