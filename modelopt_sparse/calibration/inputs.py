"""The statistics of layers' inputs: summed up over all calls, as the layers' methods need them."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import (
    ROWS,
    Collector,
    DeferredStats,
    Groups,
    SharedInput,
    by_size,
    few,
    fill,
    filled,
    groups_of,
    pool_of,
    pooled,
    says_nothing,
    warn_of_few_tokens,
    without_data,
    without_silent_experts,
)
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.plan.plan import LayerPlan

# the statistics of layers' inputs -------------------------------------------------------------------------------------


def collect(layer_plans: Sequence[LayerPlan], inputs: Inputs, run: Run, *, one_pass: bool = True) -> list[SharedInput]:
    """The layers by shared input, each with its statistics; the same in all processes.

    With ``sequential="none"`` the calls go on through the dense block, in the same pass if it takes ``one_pass``.
    Layers that saw nothing but zeros, or what is as small, are chosen by size. Raises ValueError for a layer that no
    token has reached, or data that is not finite.
    """
    goes_on = run.config.sequential == "none" and isinstance(inputs, AtBlock)
    if all(layer_plan.needs == "nothing" for layer_plan in layer_plans) and not goes_on:
        return [SharedInput([layer_plan], None) for layer_plan in layer_plans]
    at_once = goes_on and one_pass
    groups = sum_up(layer_plans, inputs, _collector(layer_plans, share=True), run, go_on=at_once)
    reached = {name for names, stats in groups for name in names if stats.tokens}
    groups = [(names, _with_few_tokens(layer_plans, inputs, names, stats, run)) for names, stats in groups]
    if goes_on and not at_once:
        inputs.advance()
    for names, stats in groups:
        if not torch.isfinite(stats.square_sums).all():
            why = "its input holds NaN or inf, now that the layers before it are sparse"
            raise ValueError(f"layer {names[0]!r}: {why}: run the model in bfloat16 or float32")
    groups = [(names, stats) for names, stats in groups if not says_nothing(stats.square_sums).all()]
    groups = _with_listed_experts(layer_plans, groups, run)
    seen = {name for names, _ in groups for name in names}
    unseen = [layer_plan for layer_plan in layer_plans if layer_plan.name not in seen]
    for place, layer_plan in enumerate(unseen):
        if layer_plan.needs != "nothing":
            if layer_plan.name not in reached:
                raise ValueError(without_data(layer_plan.name, ", now that the layers before it are sparse"))
            unseen[place] = by_size(layer_plan, run.report)
    shared = []
    for names, stats in groups:
        own = [layer_plan for layer_plan in layer_plans if layer_plan.name in names]
        shared.append(SharedInput(own, stats))
        if any(layer_plan.needs != "nothing" for layer_plan in own):
            warn_of_few_tokens(own[0].name, stats, run.report)
    return [*shared, *(SharedInput([layer_plan], None) for layer_plan in unseen)]


def sum_up(
    layer_plans: Sequence[LayerPlan],
    inputs: Inputs,
    collector: Collector,
    run: Run,
    *,
    go_on: bool = False,
) -> Groups:
    """What the ``collector`` sums up over all calls of all processes.

    If layers share an input in some calls only, each sums for itself in another pass; raises ValueError if the calls
    ``go_on``, so that there is none.
    """
    inputs.collect(layer_plans, collector.see, collector.end_call, go_on=go_on)
    groups = groups_of(collector, run)
    if groups is None and go_on:
        what = f"layer {layer_plans[0].name!r} and others of its block share an input on some batches alone"
        raise ValueError(f"{what}, which sequential='none' cannot sum up: give sequential='block'")
    if groups is None:
        apart = Collector(needs=collector.needs, share=False)
        inputs.collect(layer_plans, apart.see, apart.end_call, go_on=False)
        groups = groups_of(apart, run)
        assert groups is not None, "layers that share no input"
    place = {layer_plan.name: number for number, layer_plan in enumerate(layer_plans)}
    return sorted(groups, key=lambda group: place[group[0][0]])


def _collector(layer_plans: Sequence[LayerPlan], *, share: bool, all_tokens: Sequence[int] = ()) -> Collector:
    needs = {
        layer_plan.name: ROWS if layer_plan.needs == "gram" and layer_plan.at_once is not None else layer_plan.needs
        for layer_plan in layer_plans
    }
    return Collector(needs=needs, share=share, all_tokens=all_tokens)


def _with_few_tokens(
    layer_plans: Sequence[LayerPlan], inputs: Inputs, names: list[str], stats: Stats | DeferredStats, run: Run
) -> Stats | DeferredStats:
    """Statistics in which experts with few tokens have what the options say; "all_tokens" takes one more pass."""
    config, stats = run.config, without_silent_experts(stats)
    if not stats.tokens or not (experts := few(stats, config.min_tokens)):
        return stats
    everyone = None
    if config.experts == "all_tokens":
        own = [layer_plan for layer_plan in layer_plans if layer_plan.name in names]
        ((_, everyone),) = sum_up(own, inputs, _collector(own, share=False, all_tokens=experts), run)
    if isinstance(stats, DeferredStats):
        assert not isinstance(everyone, Stats)
        pool = pool_of(stats, run)
        return replace(stats, minimum=config.min_tokens, how=config.experts, pool=pool, everyone=everyone)
    assert not isinstance(everyone, DeferredStats)
    return filled(stats, config.min_tokens, config.experts, pooled(stats), everyone)


def _with_listed_experts(layer_plans: Sequence[LayerPlan], groups: Groups, run: Run) -> Groups:
    """The same for experts that are modules in a list, which come last.

    Layers with few rows, or that are in none of the ``groups`` because they got none, are filled up from the rows of
    their whole mixture. A layer whose mixture got nothing at all is left out.
    """
    minimum, how = run.config.min_tokens, run.config.experts
    mixture_of = {
        layer_plan.name: (layer_plan.layer.mixture, layer_plan.shape)
        for layer_plan in layer_plans
        if layer_plan.layer.mixture is not None and layer_plan.needs != "nothing"
    }
    pools: dict[Any, Stats] = {}
    unheard = dict(mixture_of)
    for names, stats in groups:
        for name in names:
            if (mixture := unheard.pop(name, None)) is not None and isinstance(stats, Stats):
                pools[mixture] = pools[mixture] + stats if mixture in pools else stats
    result = sorted(groups, key=lambda group: not mixture_of.keys().isdisjoint(group[0]))
    for name, mixture in unheard.items():
        if mixture in pools:
            pool = pools[mixture]
            gram = None if pool.gram is None else torch.zeros_like(pool.gram)
            result.append(([name], Stats(0, torch.zeros_like(pool.square_sums), gram)))
    for place, (names, stats) in enumerate(result):
        mixture = next((mixture_of[name] for name in names if name in mixture_of), None)
        if mixture is not None and isinstance(stats, Stats) and stats.tokens < minimum:
            own = deepcopy(stats)  # a pool may be the same object
            fill(own, minimum, how, pools[mixture], None)
            result[place] = (names, own)
    return result
