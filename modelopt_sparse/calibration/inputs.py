"""How the inputs of layers are collected: block by block, through the whole model, or not at all; and summed up, as
their methods need them."""

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.forward import (
    Begin,
    CalibrationData,
    NumberedCall,
    See,
    forward_context,
    has_room,
    input_hooks,
    on_execution_device,
    watched_outputs,
)
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import (
    ENLARGED,
    ROWS,
    Collector,
    DeferredStats,
    Groups,
    SharedInput,
    SumsOfAllProcesses,
    by_size,
    few,
    fill,
    filled,
    pool_of,
    pooled,
    says_nothing,
    warn_of_few_tokens,
    without_data,
    without_silent_experts,
)
from modelopt_sparse.calibration.waiting import WaitingCall, WaitingCalls, held_bytes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.adapters import RoutedAdapter
from modelopt_sparse.model.layers import Layer, Stack
from modelopt_sparse.plan.plan import LayerPlan


class WholeModel:
    """Each time the inputs of layers are asked for, the whole model runs over the data; None: no method asks. The same
    methods as those of `AtBlock`."""

    def __init__(self, data: CalibrationData | None) -> None:
        self._data = data

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, begin: Begin, *, go_on: bool) -> None:
        assert self._data is not None
        hooks = input_hooks(layer_plans, self._data.run.plan.blocks, self._data.sides, see)
        self._data.run_model(begin, hooks)

    def advance(self) -> None:
        """The next run goes through the block as it is then."""


@dataclass(eq=False)
class Segment:
    """Stacks that the same calls go through block by block, from when the first of them is asked for.

    blocks: those of all the stacks, in the order in which calls come to them. outputs_may_stay: what a block puts out
    may be left on the execution device for the next block. outputs_change: the model writes to what a block puts out.
    """

    data: CalibrationData
    calls: Sequence[NumberedCall]
    blocks: Sequence[nn.Module]
    outputs_may_stay: bool
    outputs_change: bool
    _sparse: WaitingCalls | None = None
    _dense: dict[Stack, WaitingCalls] = field(default_factory=dict)

    def at(self, stack: Stack, block: nn.Module) -> "AtBlock":
        run = self.data.run
        if self._sparse is None:
            self._sparse = self._started(self.blocks)
        dense = None
        if run.config.reconstruct is not None and run.config.reconstruct.target == "dense":
            # a second set of calls, which goes through the dense blocks of a stack; what lies before it is sparse
            if stack not in self._dense:
                self._dense[stack] = self._started(stack.blocks)
            dense = self._dense[stack].at(block)
        last = self._is_last(stack, block)
        stay = not last and self._outputs_stay(block)
        return AtBlock(self, block, self._sparse.at(block), dense, stay, last)

    def _is_last(self, stack: Stack, block: nn.Module) -> bool:
        """Whether no other block of its stack comes after a block."""
        return next(other for other in reversed(self.blocks) if other in stack.blocks) is block

    def leave(self, block: nn.Module) -> None:
        """The work on a block is done. After the last one of a stack its dense calls are not needed any more, after the
        last one of all no call is."""
        for stack in [stack for stack in self._dense if self._is_last(stack, block)]:
            self._dense.pop(stack).close()
        if block is self.blocks[-1]:
            self.close()

    def close(self) -> None:
        for calls in (*self._dense.values(), *([] if self._sparse is None else [self._sparse])):
            calls.close()
        self._dense.clear()

    def _started(self, blocks: Sequence[nn.Module]) -> WaitingCalls:
        calls = WaitingCalls(self.data.run, self.calls, blocks)
        try:
            calls.start()
        except BaseException:
            calls.close()
            raise
        return calls

    def _outputs_stay(self, block: nn.Module) -> bool:
        """Whether the device has room for what the blocks of a stack put out."""
        if not self.outputs_may_stay or self.data.run.storage.spills:
            return False
        assert self._sparse is not None
        return has_room(self.data.run, held_bytes(self.data.run, self._sparse.at(block)))


@dataclass(eq=False)
class AtBlock:
    """The ``calls`` that wait at one block.

    dense: those that go through dense blocks alone, if these are what blocks are tuned against. outputs_stay: outputs
    are held on the execution device. last_of_stack: calls come to no other block of its stack after this one.
    """

    segment: Segment
    block: nn.Module
    calls: list[WaitingCall]
    dense: list[WaitingCall] | None
    outputs_stay: bool
    last_of_stack: bool

    @property
    def data(self) -> CalibrationData:
        return self.segment.data

    def on_device(self) -> AbstractContextManager[Any]:
        """To be entered for all the work on a block: its weights go to the execution device and come back once."""
        return on_execution_device(self.data.run, self.block, outputs_stay=self.outputs_stay)

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, begin: Begin, *, go_on: bool) -> None:
        """Run what reaches the layers on all calls; ``begin`` gets each, and ``see`` sees the inputs of the layers.
        ``go_on``: the calls go on to the next block, as in `advance`."""
        last = self.block is self.segment.blocks[-1]
        with input_hooks(layer_plans, [self.block], self.data.sides, see) as padding, forward_context(self.data.run):
            for call in self.calls:
                padding.masks = call.numbered.masks
                begin(call.numbered)
                if go_on and not last:
                    call.go_on(padding.on_block)
                else:
                    call.run_block()
        if go_on:
            self.segment.leave(self.block)

    def advance(self) -> None:
        """Let the calls go on through the block, as it is now, to the next one."""
        if self.block is not self.segment.blocks[-1]:
            with forward_context(self.data.run):
                for call in self.calls:
                    call.go_on()
        self.segment.leave(self.block)

    # for permutation and reconstruction, before and after the layers of a block are solved ----------------------------

    def only(self, numbers: Container[int]) -> "AtBlock":
        """The same with the calls of these numbers alone."""
        return replace(self, calls=[call for call in self.calls if call.numbered.number in numbers])

    def outputs_of(self, modules: Sequence[nn.Module], index: int) -> list[Tensor]:
        """The first output tensor of each module in a forward of the block on call ``index``."""
        return watched_outputs(self.calls[index].run_block, modules)

    def dense_outputs(self, modules: Sequence[nn.Module]) -> list[list[Tensor]]:
        """For each module its outputs on all calls, to be asked for while the block is dense. Calls that go through
        dense blocks go on to the next one."""
        if self.dense is None and not modules:
            return []
        hold = self.data.run.storage.hold_activations
        if self.dense is not None and self.segment.outputs_change and not self.data.run.storage.spills:
            hold = torch.clone
        goals: list[list[Tensor]] = [[] for _ in modules]
        with forward_context(self.data.run):
            for call in self.calls if self.dense is None else self.dense:
                run = call.run_block if self.dense is None or self.last_of_stack else call.go_on
                for goal, output in zip(goals, watched_outputs(run, modules, hold)):
                    goal.append(output)
        return goals


Inputs = WholeModel | AtBlock  # of the layers of one block after the other


# the statistics of layers' inputs -------------------------------------------------------------------------------------


def collect(layer_plans: Sequence[LayerPlan], inputs: Inputs, run: Run, *, one_pass: bool = True) -> list[SharedInput]:
    """The layers by shared input, each with its statistics; the same in all processes.

    With ``sequential="none"`` the calls go on through the dense block, in the same pass if it takes ``one_pass``.
    Inputs that are too small for the sums are summed up again, enlarged. Layers that saw nothing but zeros are chosen
    by size. Raises ValueError for a layer that no token has reached, or data that is not finite.
    """
    goes_on = run.config.sequential == "none" and isinstance(inputs, AtBlock)
    if all(layer_plan.needs == "nothing" for layer_plan in layer_plans) and not goes_on:
        return [SharedInput([layer_plan], None) for layer_plan in layer_plans]
    at_once = goes_on and one_pass and not run.config.deterministic  # exact sums may take a second pass
    groups = sum_up(layer_plans, inputs, _collector(layer_plans, share=True), run, go_on=at_once)
    if not at_once:
        groups = with_small_inputs(layer_plans, inputs, groups, run)
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
    see: See | None = None,
) -> Groups:
    """What the ``collector`` sums up over all calls of all processes; ``see`` changes what it sees.

    If layers share an input in some calls only, each sums for itself in another pass; raises ValueError if the calls
    ``go_on``, so that there is none.
    """
    sums = SumsOfAllProcesses(collector, run)
    while True:
        inputs.collect(layer_plans, see or collector.see, sums.next_call, go_on=go_on)
        groups = sums.groups()
        if groups is not None:
            break
        if go_on:
            what = f"layer {layer_plans[0].name!r} and others of its block share an input on some batches alone"
            raise ValueError(f"{what}, which sequential='none' cannot sum up: give sequential='block'")
        if sums.sharing_changed:
            collector = Collector(needs=collector.needs, share=False)
            sums = SumsOfAllProcesses(collector, run)
    place = {layer_plan.name: number for number, layer_plan in enumerate(layer_plans)}
    return sorted(groups, key=lambda group: place[group[0][0]])


def with_small_inputs(layer_plans: Sequence[LayerPlan], inputs: Inputs, groups: Groups, run: Run) -> Groups:
    """Statistics in which inputs that were too small for the sums are enlarged, in another pass; not those of experts,
    which are filled up from others."""
    small = {
        name for names, stats in groups if stats.tokens and says_nothing(stats.square_sums).all() for name in names
    }
    again = [each for each in layer_plans if each.name in small and each.layer.mixture is each.layer.router is None]
    again = [each for each in again if not isinstance(each.layer.adapter, RoutedAdapter)]
    if not again:
        return groups
    collector = _collector(again, share=False)

    def see(layer: Layer, small_inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        larger = (x.to(torch.promote_types(x.dtype, torch.float32)) * ENLARGED for x in small_inputs)
        collector.see(layer, tuple(larger), token_mask)

    enlarged = sum_up(again, inputs, collector, run, see=see)
    names_again = {name for names, _ in enlarged for name in names}
    return [*((names, stats) for names, stats in groups if names_again.isdisjoint(names)), *enlarged]


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
