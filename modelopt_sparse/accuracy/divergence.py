"""How far a model is from its dense self while layers are pruned for the moment: what the search of `allocation` takes.

The layers are pruned by Wanda's scores, which need one run over the data and no solving.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from modelopt_sparse.calibration.enough import says_nothing, without_data
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.reduce import SumsOfAllProcesses
from modelopt_sparse.calibration.routed import filled, pooled, without_silent_experts
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.statistics import Collector
from modelopt_sparse.methods import wanda
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.nested import flat_tensors
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.progress import Progress

SAMPLES = 32  # measured on calls that hold so many
CHUNK = 512  # rows of an output that are converted to float64 together


@contextmanager
def masked(plan: Plan, stats: Mapping[str, Stats]) -> Iterator[None]:
    """While entered, every layer of the plan is called with its weight pruned by its pattern, scored as Wanda does.

    A weight is pruned in place when its module is called, and put back after the call, so that one layer at a time is
    held twice. Whatever happens, the weights end as they were.
    """
    dense: dict[str, Tensor] = {}

    def before(layer_plan: LayerPlan, *_: Any) -> None:
        if layer_plan.name in dense:
            return  # pruned already, in a call that has not ended, or that failed and was gone over
        values = layer_plan.layer.values
        mask = layer_plan.layer.unmatrix(layer_plan.pattern_now.mask(score(layer_plan, stats))).to(values.device)
        dense[layer_plan.name] = values.clone()
        values.masked_fill_(~mask, 0)

    def after(layer_plan: LayerPlan, *_: Any) -> None:
        if layer_plan.name in dense:
            layer_plan.layer.values.copy_(dense[layer_plan.name])
            del dense[layer_plan.name]

    with ExitStack() as hooks:
        for layer_plan in plan.layers:
            hooks.callback(after, layer_plan)
            for module in layer_plan.layer.hooked_modules:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, layer_plan)))
                hooks.enter_context(module.register_forward_hook(partial(after, layer_plan)))
        yield


class Divergence:
    """How far the model, with its layers masked by each of several plans, is from the dense model.

    The mean KL(dense || masked) of the predictions where the model gives logits, else the relative squared error of its
    first output; padding does not count. One run over the data serves all plans: hooks on the model, which see what a
    forward_loop does as well, repeat each call with masked layers until ``SAMPLES`` samples have been seen (of a
    forward_loop's calls: in each process). Where several processes work together, each measures on its own batches.
    """

    def __init__(self, data: CalibrationData, stats: Mapping[str, Stats], bar: Progress) -> None:
        self.title = ""  # what the numbers are, known after a run
        self._data, self._stats, self._bar = data, stats, bar
        self._numbers: list[int] | None = None  # of the calls that are measured on, among those of all processes
        if data.calls is not None:
            processes = data.run.processes
            own = [_samples(call.args, call.kwargs) for call in data.calls]
            sizes = processes.all_gather("the sizes of batches", own)
            places = [(i, rank) for rank, of_rank in enumerate(sizes) for i in range(len(of_rank))]
            places.sort()  # batches by their number: the first of every rank, the second of every rank, and so on
            chosen = _spread_out([sizes[rank][i] for i, rank in places])
            self._numbers = [number for number in chosen if places[number][1] == processes.rank]
            self._data = replace(data, calls=[data.calls[places[number][0]] for number in self._numbers])

    def __call__(self, plans: Sequence[Plan]) -> list[float]:
        run = self._data.run
        measured = _Measurement(plans, self._stats, self._numbers, run)
        with (
            # prepended: what other hooks do to the arguments they will do again
            run.model.register_forward_pre_hook(measured.before, prepend=True, with_kwargs=True),
            run.model.register_forward_hook(measured.after),
        ):
            self._data.run_model(measured.begin)
        of_ranks = run.processes.all_gather("a divergence", measured.outcome)
        calls = sorted(call for outcome in of_ranks for call in outcome.calls)
        problem = next((outcome.problem for outcome in of_ranks if outcome.problem), "")
        self.title = next((outcome.title for outcome in of_ranks if outcome.title), "")
        scale = sum(scale for _, _, scale in calls)
        if problem or not scale:
            raise ValueError(f"allocation='search': {problem or 'the dense model gives no number but zero'}")
        self._bar.update(len(plans))
        totals = [sum(totals[index] for _, totals, _ in calls) for index in range(len(plans))]
        return [total / scale if math.isfinite(total) else math.inf for total in totals]


@dataclass
class _Outcome:
    """What was measured. ``calls``: of each its number, a total for every plan, and the scale that totals are relative
    to; ``samples``: how many the calls hold."""

    calls: list[tuple[int, list[float], float]] = field(default_factory=list)
    samples: int = 0
    problem: str = ""
    title: str = ""


@dataclass
class _CallOfModel:
    """The call that runs now: which of its tokens are real, and its arguments. ``repeated``: with masked layers."""

    token_mask: Tensor | None = None
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    repeated: bool = False


class _Measurement:
    """Hooks that repeat calls of the model with masked layers. ``numbers``: of the calls among those of all processes;
    None if they are not known beforehand."""

    def __init__(
        self, plans: Sequence[Plan], stats: Mapping[str, Stats], numbers: Sequence[int] | None, run: Run
    ) -> None:
        self._plans, self._stats, self._numbers, self._run = plans, stats, numbers, run
        self._call = _CallOfModel()
        self.outcome = _Outcome()

    def begin(self, masks: TokenMasks) -> None:
        self._call.token_mask = masks.decoder

    def before(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        del model
        if not self._call.repeated:
            self._call.args, self._call.kwargs = args, kwargs

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        call, outcome = self._call, self.outcome
        enough = self._numbers is None and outcome.samples >= SAMPLES
        if call.repeated or outcome.problem or enough:
            return
        args, kwargs = call.args, call.kwargs
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            outcome.problem = (
                "a call with a cache, as generate makes it, cannot be repeated: call model(...) on whole texts"
            )
            return
        dense, is_logits = _compared(output, call.token_mask)
        if not torch.isfinite(dense).all():
            outcome.problem = "the dense model's output holds NaN or inf: run it in bfloat16 or float32"
            return
        outcome.title = "mean KL from the dense model, in nats" if is_logits else "relative squared error of the output"
        outcome.samples += _samples(args, kwargs)
        scale = float(len(dense)) if is_logits else float(dense.double().square().sum())
        index, processes = len(outcome.calls), self._run.processes
        number = index * processes.size + processes.rank if self._numbers is None else self._numbers[index]
        totals = [0.0] * len(self._plans)
        call.repeated = True
        try:
            for i, plan in enumerate(self._plans):
                with masked(plan, self._stats):
                    other, _ = _compared(model(*args, **kwargs), call.token_mask)
                totals[i] = float(kl_divergence(dense, other).sum()) if is_logits else _squared_error(dense, other)
        finally:
            call.repeated = False
        outcome.calls.append((number, totals, scale))


def _compared(output: Any, token_mask: Tensor | None) -> tuple[Tensor, bool]:
    """The rows [T, C] of a model's output that are compared, without padding, and whether they are logits."""
    x = getattr(output, "logits", None)
    is_logits = isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[-1] > 1
    if not is_logits:
        x = next((x for x in flat_tensors(output) if x.is_floating_point() and x.dim()), None)
    if x is None:
        return torch.empty(0, 0), False
    if token_mask is not None and token_mask.shape == x.shape[:-1]:
        return x[token_mask.to(x.device)], is_logits
    return x.reshape(-1, x.shape[-1]), is_logits


def _squared_error(p: Tensor, q: Tensor) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(p.split(CHUNK), q.split(CHUNK)))


def _samples(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """The size of a call's batch: that of its first tensor."""
    sizes = [len(x) for x in flat_tensors((args, kwargs)) if x.dim()]
    return sizes[0] if sizes else 1


def _spread_out(sizes: Sequence[int]) -> list[int]:
    """The numbers of batches from all over the data that hold about ``SAMPLES`` samples; ``sizes`` are theirs."""
    count = min(math.ceil(len(sizes) * SAMPLES / max(sum(sizes), 1)), len(sizes))
    return [i * len(sizes) // count for i in range(count)]


def statistics(data: CalibrationData, layer_plans: Sequence[LayerPlan]) -> dict[str, Stats]:
    """Square sums of the inputs of these layers in the dense model: one run over the data."""
    collector = Collector(needs={layer_plan.name: "square_sums" for layer_plan in layer_plans}, share=False)

    def see(layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        collector.see(layer, inputs, token_mask)
        collector.end_call()  # nothing is shared, so that no input has to stay alive

    hooks = data.input_hooks(layer_plans, data.run.plan.blocks, see)
    sums = SumsOfAllProcesses(collector, data.run)
    data.run_model(sums.between(hooks.begin), hooks)
    sums.end_call()
    stats = {name: summed for (name,), summed in sums.groups() if isinstance(summed, Stats)}  # none are deferred
    for layer_plan in layer_plans:
        name = layer_plan.name
        summed = stats.get(name, Stats(0, torch.zeros(1)))
        if says_nothing(summed.square_sums).all():
            why = without_data(name, summed.tokens, summed.square_sums)
            raise ValueError(f"allocation needs the inputs of all layers: {why}")
        if not torch.isfinite(stats[name].square_sums).all():
            raise ValueError(
                f"layer {name!r}: its input holds NaN or inf on the calibration data; check the data, or run the "
                "model in bfloat16 or float32"
            )
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
