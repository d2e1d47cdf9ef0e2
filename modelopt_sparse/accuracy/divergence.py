"""How far a model is from its dense self while layers are pruned for the moment: what the search of `allocation` takes.

The layers are pruned by Wanda's scores, which need one run over the data and no solving.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Cache

from modelopt_sparse.calibration.forward import Runner
from modelopt_sparse.calibration.hooks import LayerInputs
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.reduce import Sums
from modelopt_sparse.calibration.routed import filled, pooled
from modelopt_sparse.calibration.statistics import Collector
from modelopt_sparse.methods import wanda
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.nested import flat_tensors
from modelopt_sparse.model.offload import stored
from modelopt_sparse.plan.plan import LayerPlan, Plan

SAMPLES = 32  # measured on calls that hold so many
CHUNK = 512  # predictions whose divergence is computed together: times a vocabulary they are large


@contextmanager
def masked(plan: Plan, stats: Mapping[str, Stats]) -> Iterator[None]:
    """While entered, every layer of the plan is called with its weight pruned by its pattern, scored as Wanda does.

    A weight is pruned in place when its module is called, and put back after the call, so that one layer at a time is
    held twice. Whatever happens, the weights end as they were.
    """
    dense: dict[str, Tensor] = {}

    def before(item: LayerPlan, *_: Any) -> None:
        if item.name in dense:
            return  # pruned already, in a call that has not ended, or that failed and was gone over
        values = _values(item.layer)
        mask = item.layer.unmatrix(item.pattern.mask(score(item, stats))).to(values.device)
        dense[item.name] = values.clone()
        values.masked_fill_(~mask, 0)

    def after(item: LayerPlan, *_: Any) -> None:
        if item.name in dense:
            _values(item.layer).copy_(dense[item.name])
            del dense[item.name]

    with ExitStack() as hooks:
        for item in plan.layers:
            hooks.callback(after, item)
            for module in item.layer.hooked_modules:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, item)))
                hooks.enter_context(module.register_forward_hook(partial(after, item)))
        yield


class Divergence:
    """How far the model, with its layers masked by each of several plans, is from the dense model.

    The mean KL(dense || masked) of the predictions where the model gives logits, else the relative squared error of its
    first output; padding does not count. One run over the data serves all plans: hooks on the model, which see what a
    forward_loop does as well, repeat each call with masked layers until ``SAMPLES`` samples have been seen (of a
    forward_loop's calls: in each process). Where several processes work together, each measures on its own batches.
    """

    def __init__(self, runner: Runner, stats: Mapping[str, Stats], bar: tqdm) -> None:
        self.title = ""  # what the numbers are, known after a run
        self._runner, self._stats, self._bar = runner, stats, bar
        self._team = runner.team
        self._numbers: list[int] | None = None  # of the calls that are measured on, among those of all processes
        if runner.calls is not None:
            sizes = self._team.meet("the sizes of batches", [_samples(call.args, call.kwargs) for call in runner.calls])
            places = [(i, rank) for rank, theirs in enumerate(sizes) for i in range(len(theirs))]
            places.sort()  # batches by their number: the first of every rank, the second of every rank, and so on
            chosen = _spread_out([sizes[rank][i] for i, rank in places])
            self._numbers = [number for number in chosen if places[number][1] == self._team.rank]
            self._runner = copy(runner)
            self._runner.calls = [runner.calls[places[number][0]] for number in self._numbers]

    def __call__(self, plans: Sequence[Plan]) -> list[float]:
        self._plans = plans
        self._found: list[tuple[int, list[float], float]] = []  # of each call: its number, a total per plan, the scale
        self._samples = 0
        self._inside, self._problem = False, ""
        model = self._runner.model
        with (
            # prepended: what other hooks do to the arguments they will do again
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        ):
            self._runner.run_model(self._begin)
        everywhere = self._team.meet("a divergence", (self._found, self._problem, self.title))
        found = sorted(item for theirs, _, _ in everywhere for item in theirs)
        problem = next((text for _, text, _ in everywhere if text), "")
        self.title = next((title for _, _, title in everywhere if title), "")
        scale = sum(scale for _, _, scale in found)
        if problem or not scale:
            raise ValueError(f"allocation='search': {problem or 'the dense model gives no number but zero'}")
        self._bar.update(len(plans))
        totals = [sum(totals[index] for _, totals, _ in found) for index in range(len(plans))]
        return [total / scale if math.isfinite(total) else math.inf for total in totals]

    def _begin(self, masks: TokenMasks) -> None:
        self._keep = masks.decoder

    def _before(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        del model
        if not self._inside:
            self._call = (args, kwargs)

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        enough = self._numbers is None and self._samples >= SAMPLES
        if self._inside or self._problem or enough:
            return
        args, kwargs = self._call
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            self._problem = (
                "a call with a cache, as generate makes it, cannot be repeated: call model(...) on whole texts"
            )
            return
        dense, is_logits = _compared(output, self._keep)
        if not torch.isfinite(dense).all():
            self._problem = "the dense model's output holds NaN or inf: run it in bfloat16 or float32"
            return
        self.title = "mean KL from the dense model, in nats" if is_logits else "relative squared error of the output"
        self._samples += _samples(args, kwargs)
        scale = float(len(dense)) if is_logits else float(dense.double().square().sum())
        totals, seen = [0.0] * len(self._plans), len(self._found)
        number = seen * self._team.size + self._team.rank if self._numbers is None else self._numbers[seen]
        self._inside = True
        try:
            for index, plan in enumerate(self._plans):
                with masked(plan, self._stats):
                    other, _ = _compared(model(*args, **kwargs), self._keep)
                totals[index] = sum(
                    _kl(p, q) if is_logits else float((p - q).double().square().sum())
                    for p, q in zip(dense.split(CHUNK), other.split(CHUNK))
                )
        finally:
            self._inside = False
        self._found.append((number, totals, scale))


def _compared(output: Any, keep: Tensor | None) -> tuple[Tensor, bool]:
    """The rows [T, C] of a model's output that are compared, without padding, and whether they are logits."""
    x = getattr(output, "logits", None)
    is_logits = isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[-1] > 1
    if not is_logits:
        x = next((x for x in flat_tensors(output) if x.is_floating_point() and x.dim()), None)
    if x is None:
        return torch.empty(0, 0), False
    if keep is not None and keep.shape == x.shape[:-1]:
        return x[keep.to(x.device)], is_logits
    return x.reshape(-1, x.shape[-1]), is_logits


def _kl(logits_p: Tensor, logits_q: Tensor) -> float:
    """The sum over rows of KL(p || q)."""
    work = torch.promote_types(logits_p.dtype, torch.float32)
    log_p, log_q = (logits.to(work).log_softmax(-1) for logits in (logits_p, logits_q))
    return float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))


def _samples(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """The size of a call's batch: that of its first tensor."""
    sizes = [len(x) for x in flat_tensors((args, kwargs)) if x.dim()]
    return sizes[0] if sizes else 1


def _spread_out(sizes: Sequence[int]) -> list[int]:
    """The numbers of batches from all over the data that hold about ``SAMPLES`` samples; ``sizes`` are theirs."""
    count = min(math.ceil(len(sizes) * SAMPLES / max(sum(sizes), 1)), len(sizes))
    return [i * len(sizes) // count for i in range(count)]


def statistics(runner: Runner, items: Sequence[LayerPlan]) -> dict[str, Stats]:
    """Square sums of the inputs of these layers in the dense model: one run over the data."""
    collector = Collector(needs={item.name: "square_sums" for item in items}, share=False)

    def see(layer: Layer, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        collector.see(layer, inputs, keep)
        collector.end_call()  # nothing is shared, so that no input has to stay alive

    inputs = LayerInputs(items, runner.side_of, runner.blocks, see)
    config = runner.config
    sums = Sums(collector, runner.team, deterministic=config.deterministic, device=config.device)
    runner.run_model(sums.between(inputs.begin), inputs=inputs)
    sums.end_call()
    stats = {name: found for (name,), found in sums.groups() if isinstance(found, Stats)}  # nothing is kept
    for item in items:
        if item.name not in stats or not stats[item.name].tokens:
            raise ValueError(
                f"layer {item.name!r} saw no calibration data, and allocation needs its inputs: give data that reaches "
                "it, or exclude it"
            )
        if not torch.isfinite(stats[item.name].square_sums).all():
            raise ValueError(
                f"layer {item.name!r}: its input holds NaN or inf on the calibration data; check the data, or run the "
                "model in bfloat16 or float32"
            )
    minimum, how = runner.config.min_tokens, runner.config.experts
    # what all tokens would be to an expert is not worth a run here: the pool is close
    how = "pool" if how == "all_tokens" else how
    return {
        name: found if found.counts is None else filled(found, minimum, how, pooled(found), None)
        for name, found in stats.items()
    }


def score(item: LayerPlan, stats: Mapping[str, Stats]) -> Tensor:
    """Wanda's score of a layer's weight as a matrix."""
    return wanda.score(item.layer.matrix(_values(item.layer)), stats[item.name].square_sums)


def _values(layer: Layer) -> Tensor:
    return stored(layer.owner, layer.param).detach()
