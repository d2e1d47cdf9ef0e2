"""What is made sparse together, and in which order: found out by running the dense model, before any weight changes.

The dense run shows in which order layers are called and which of them get the same input, whether the data reaches all
layers and is finite there, and whether calls of the model can wait at its blocks.
"""

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelopt_sparse.calibration.data import Call, cut, digest_of
from modelopt_sparse.calibration.forward import Begin, CalibrationData, NumberedCall, input_hooks, input_key
from modelopt_sparse.calibration.inputs import Inputs, Segment, WholeModel
from modelopt_sparse.calibration.run import Run, refuse_non_finite
from modelopt_sparse.calibration.waiting import DenseCall, is_exact, print_of, try_waiting
from modelopt_sparse.model.adapters import IN_PROJ, RoutedAdapter, experts_of
from modelopt_sparse.model.devices import flat_tensors, leaves_of, map_tensors, version
from modelopt_sparse.model.layers import Layer, Stack
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.plan.planner import without_others
from modelopt_sparse.reports.text import Progress, first_few
from modelopt_sparse.values import grouped

READ = "its parent reads the weight without calling the layer, so that no data reaches it"


@dataclass(frozen=True)
class BlockTask:
    """The layers of one block, or one layer outside of every stack.

    layer_plans: in the order of their first calls. A block without any is still run through.
    input_of: layer name -> the first layer with the same input.
    block: where the layers are; None for a layer outside of the stacks.
    inputs: gives the inputs of its layers, from when the work on the block begins.
    one_pass: whether one pass over the calls gives all statistics of its layers.
    """

    name: str
    layer_plans: list[LayerPlan]
    input_of: Mapping[str, str]
    block: nn.Module | None
    inputs: Callable[[], Inputs]
    one_pass: bool = True

    def by_input(self) -> list[list[LayerPlan]]:
        """The layers by the input that they share, in call order."""
        return list(grouped(self.layer_plans, lambda each: self.input_of[each.name]).values())

    def stages(self, sequential: str) -> list[list[LayerPlan]]:
        """The layers that are solved before the inputs of the next ones are collected."""
        if sequential != "stage":
            return [self.layer_plans] if self.layer_plans else []
        # experts in a list are collected together, for one may need the tokens of the others
        return list(grouped(self.layer_plans, lambda each: each.layer.mixture or self.input_of[each.name]).values())


def blocks_in_call_order(run: Run, data: CalibrationData | None, ending: ExitStack) -> list[BlockTask]:
    """Blocks with their layers, and each layer outside of the blocks, in the order of their first calls.

    Without ``data``, which no layer wants then, in the order of the model. With ``sequential="none"``, what is
    collected through the whole model comes first, while all of it is dense. ``ending`` gets what ends calls that wait.
    """
    if data is None:
        return _without_data(run)
    dense = data.dense or run_dense(data).dense
    in_order, by_block = _in_call_order(run.plan, dense)
    whole = dense.whole
    if run.config.sequential == "none":
        in_order.sort(key=lambda start: isinstance(start, Stack) and start not in whole)

    def task(stack: Stack, block: nn.Module, inputs: Callable[[], Inputs]) -> BlockTask:
        name = stack.names[stack.blocks.index(block)]
        plans = by_block.get(name, [])
        one_pass = run.config.experts != "all_tokens" and not dense.inputs.varying & {plan.name for plan in plans}
        return BlockTask(name or type(run.model).__name__, plans, dense.inputs.input_of, block, inputs, one_pass)

    tasks: list[BlockTask] = []
    whole_model = WholeModel(data)
    for blockwise, group in groupby(in_order, lambda start: isinstance(start, Stack) and start not in whole):
        starts_of_group = list(group)
        if blockwise:
            own = [start for start in starts_of_group if isinstance(start, Stack)]
            home = {block: stack for stack in own for block in stack.blocks}
            named = {block for stack in own for name, block in zip(stack.names, stack.blocks) if by_block.get(name)}
            # blocks that no call comes to may have layers that need no data
            blocks = [block for block in dense.blocks if block in home]
            blocks += [block for block in home if block in named and block not in blocks]
            segment = Segment(data, dense.calls, blocks, dense.outputs_may_stay, dense.outputs.outputs_change)
            ending.callback(segment.close)
            tasks += [task(home[block], block, partial(segment.at, home[block], block)) for block in blocks]
            continue
        for start in starts_of_group:
            if isinstance(start, Stack):
                tasks += [task(start, block, lambda: whole_model) for block in start.blocks]
            else:
                tasks.append(BlockTask(start.name, [start], dense.inputs.input_of, None, lambda: whole_model))
    return tasks


def _in_call_order(plan: Plan, dense: "DenseRun") -> tuple[list[Stack | LayerPlan], dict[str | None, list[LayerPlan]]]:
    """(stacks, and layers outside of all blocks; block -> its layers), in the order of their first calls."""
    order, block_of = dense.inputs.order, dense.inputs.block_of
    by_block = grouped(sorted(plan.layers, key=lambda each: order[each.name]), lambda each: block_of[each.name])
    starts: list[tuple[int, Stack | LayerPlan]] = [(order[each.name], each) for each in by_block.get(None, [])]
    for stack in plan.stacks:
        if calls := [order[layer_plan.name] for name in stack.names for layer_plan in by_block.get(name, [])]:
            starts.append((min(calls), stack))
    return [start for _, start in sorted(starts, key=lambda pair: pair[0])], by_block


def _without_data(run: Run) -> list[BlockTask]:
    no_data = WholeModel(None)
    tasks = []
    for name, layer_plans in run.plan.by_block.items():
        input_of = {layer_plan.name: layer_plan.name for layer_plan in layer_plans}
        title = layer_plans[0].name if name is None else name or type(run.model).__name__
        block = None if name is None else run.plan.named_blocks[name]
        tasks.append(BlockTask(title, layer_plans, input_of, block, lambda: no_data))
    return tasks


def _block_of_layers(plan: Plan) -> dict[str, str | None]:
    """Layer name -> the block that it is used in. A tied weight that is used in several blocks sees all of its inputs
    in the whole model alone: None."""
    home = {module: name for name, block in plan.named_blocks.items() for module in block.modules()}
    block_of: dict[str, str | None] = {}
    for layer_plan in plan.layers:
        used_in = {home.get(module) for module in layer_plan.layer.hooked_modules}
        block_of[layer_plan.name] = used_in.pop() if len(used_in) == 1 else None
    return block_of


# the dense run --------------------------------------------------------------------------------------------------------


class SeenInputs:
    """What the inputs of layers show. ``block_of``: layer name -> the one block that it is in, or None.

    order: layer name -> position of its first call.
    input_of: layer name -> the first layer of its block that got the same input.
    varying: layers that share an input with others at some times only.
    first_call: layer name -> the number of the first call of the model that reached it.
    """

    def __init__(self, block_of: Mapping[str, str | None]) -> None:
        self.order: dict[str, int] = {}
        self.input_of: dict[str, str] = {}
        self.varying: set[str] = set()
        self.first_call: dict[str, int] = {}
        self.finite: dict[str, Tensor] = {}
        self.block_of = block_of
        self._call = _InputsOfCall(0)

    def begin(self, number: int) -> None:
        """Call ``number`` of the model starts. Inputs of the call before are not held any more."""
        keys = self._call.keys
        self.varying |= {name for name, own in keys.items() if own != keys.get(self.input_of[name])}
        self._call = _InputsOfCall(number)

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        if not (inputs[0].numel() if token_mask is None else token_mask.any()):
            return  # no token is no data
        call, leader = self._call, self._leader(layer, inputs)
        call.keys.setdefault(layer.name, []).append(input_key(layer, inputs))
        if self.input_of.setdefault(layer.name, leader if call.number == 0 else layer.name) != leader:
            self.varying.add(layer.name)
        self.order.setdefault(layer.name, len(self.order))
        self.first_call.setdefault(layer.name, call.number)
        for x in inputs:
            finite = torch.isfinite((x if token_mask is None else x[token_mask]).detach().float().sum())
            self.finite[layer.name] = self.finite.get(layer.name, finite) & finite

    def _leader(self, layer: Layer, inputs: tuple[Tensor, ...]) -> str:
        block, leaders = self.block_of[layer.name], self._call.leaders
        if block is not None and block not in leaders:  # inputs of the blocks before it are not wanted any more
            for other in leaders.keys() - {None}:
                del leaders[other]
        return leaders.setdefault(block, {}).setdefault(input_key(layer, inputs), (layer.name, inputs))[0]


def _rows_of_a_matrix(layer: Layer, inputs: tuple[Tensor, ...]) -> Fraction:
    """The mean over the matrices of a layer. Convolutions have a row for each place of their output; of experts those
    count that have weights here, as often as the router chose them."""
    adapter, owner = layer.adapter, layer.owner
    if isinstance(adapter, RoutedAdapter):
        return Fraction(int((inputs[1] < experts_of(owner)).sum()), len(layer.parameter))
    shapes = tuple(x.to("meta") for x in inputs)
    apart = [(x,) for x in shapes] if adapter is IN_PROJ else [shapes]  # keys may be longer than queries
    return Fraction(sum(rows.shape[-2] for each in apart for rows in adapter.rows(owner, each, None)), len(apart))


def _units_of(call: Call) -> int:
    """The tokens of a call, or, if its first tensor holds no token ids, its samples; of one without tensors 1."""
    for x in flat_tensors((call.args, call.kwargs)):
        return x.numel() if x.dim() == 2 and not x.is_floating_point() else [*x.shape, 1][0]
    return 1


@dataclass
class _InputsOfCall:
    """Of call ``number``. leaders: by block, input -> the first layer that got it, and the tensors, so that no id is
    reused. keys: layer name -> its inputs."""

    number: int
    leaders: dict[str | None, dict[tuple, tuple[str, tuple[Tensor, ...]]]] = field(default_factory=dict)
    keys: dict[str, list[tuple]] = field(default_factory=dict)


@dataclass
class SeenBlocks:
    """The calls of the dense model that were run, whole or their first row, and what their blocks put out.

    exact: see `is_exact`. tried: the calls that waiting is tried with, in the order in which they go.
    outputs_change: whether the model writes to what a block has put out.
    rows: layer name -> how many rows each of its matrices was multiplied with, on average, padding included; once all
      processes have agreed, for each token of the calls, or for each sample of calls that do not begin with token ids.
    """

    exact: bool
    calls: list[DenseCall] = field(default_factory=list)
    tried: list[NumberedCall] = field(default_factory=list)
    outputs_change: bool = False
    rows: dict[str, Fraction] = field(default_factory=dict)
    _output: list[tuple[Tensor, int]] = field(default_factory=list)  # of the block before, and its versions

    def begin(self, numbered: NumberedCall) -> None:
        self.look_at_output()
        self.calls.append(DenseCall(numbered, torch.get_rng_state(), {}, set()))

    def after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self.calls:  # a forward_loop calls a part of the model
            return
        call = self.calls[-1]
        call.again.update({block} & call.prints.keys())
        call.prints[block] = print_of(output, exact=self.exact)
        self.look_at_output()
        self._output = [(x, version(x)) for x in flat_tensors(output)]

    def look_at_output(self) -> None:
        """See whether the model has written to the last output. Inference tensors count no writes."""
        self.outputs_change |= any(x.is_inference() or version(x) != before for x, before in self._output)
        self._output.clear()


@dataclass
class DenseRun:
    """What running the dense model has shown: of the inputs of layers, and of blocks.

    calls: all calls of the model in this process. blocks: in the order in which calls come to them.
    outputs_may_stay: see `Segment`. whole: stacks at whose blocks calls cannot wait.
    """

    data: CalibrationData
    inputs: SeenInputs
    outputs: SeenBlocks
    calls: list[NumberedCall] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)
    outputs_may_stay: bool = False
    whole: set[Stack] = field(default_factory=set)

    def begin(self, numbered: NumberedCall) -> None:
        self.inputs.begin(numbered.number)
        self.outputs.begin(numbered)

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        if not self.data.run.storage.resident and layer.name not in self.inputs.order:
            refuse_non_finite(layer)  # while its block has its weights
        self.inputs.see(layer, inputs, token_mask)
        rows = self.outputs.rows
        if self.data.run.config.budget is not None:
            rows[layer.name] = rows.get(layer.name, Fraction()) + _rows_of_a_matrix(layer, inputs)

    def watch(self, data: CalibrationData, begin: Begin, numbers: Collection[int] | None = None) -> None:
        """Run the model over ``data``, or its calls with these ``numbers``; what its layers and blocks do is seen."""
        plan = data.run.plan
        with ExitStack() as hooks:
            for block in plan.blocks:
                hooks.enter_context(block.register_forward_hook(self.outputs.after_block))
            data.run_model(begin, input_hooks(plan.layers, plan.blocks, data.sides, self.see), numbers)
        self.inputs.begin(-1)  # the last call is over
        self.outputs.look_at_output()


def run_dense(data: CalibrationData) -> CalibrationData:
    """Run the dense model on one call of each kind, and on all calls if a layer has seen no data up to then; try, on a
    row of some calls, whether calls can wait at its blocks. The data comes back with what this has shown, and its plan
    without layers whose forwards do something else with the weight, or whose weights the model reads itself.

    Raises ValueError for layers that no data reaches, or none that is finite.
    """
    run = data.run
    dense = DenseRun(data, SeenInputs(_block_of_layers(run.plan)), SeenBlocks(is_exact(run)))
    with _compared(run.plan) as others:
        if data.calls is None:
            _run_loop(dense)
        else:
            _run_calls(dense, data.calls)
        _choose_tried(dense)
    _agree(dense)
    run = _without_others(run, others, _read_by_parents(dense))
    dense.data = replace(data, run=run)
    _check(dense.inputs, run)
    in_order, by_block = _in_call_order(run.plan, dense)
    dense.whole = _through_whole_model(dense, [start for start in in_order if isinstance(start, Stack)], by_block)
    return replace(dense.data, dense=dense)


@contextmanager
def _compared(plan: Plan) -> Iterator[dict[str, bool | None]]:
    """While entered, layers with forwards of their own are run alone on their first inputs -> by name, whether they do
    something else with the weight; None: the inputs of the product alone are not enough for them."""
    others: dict[str, bool | None] = {}

    def compare(layer: Layer, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if layer.name not in others:
            others[layer.name] = layer.is_other(*layer.adapter.inputs(module, args, kwargs))

    with ExitStack() as hooks:
        for layer in (layer_plan.layer for layer_plan in plan.layers):
            for module in layer.own_forwards:
                hook = partial(compare, layer)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield others


class _Reads(TorchDispatchMode):
    """Sees the memory that torch's operators read or view."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.memory |= {x.untyped_storage()._cdata for x in flat_tensors((args, kwargs))}
        return func(*args, **(kwargs or {}))


def _read_by_parents(dense: DenseRun) -> set[str]:
    """The layers that saw no data, though the model read their weights: looked for in one more call of each kind."""
    layers = [each.layer for each in dense.data.run.plan.layers if each.needs != "nothing"]
    unseen = [each for each in layers if each.name not in dense.inputs.order and each.mixture is None]
    with _Reads() as reads:
        if unseen:
            dense.data.run_model(numbers=[call.number for call in _one_of_each_kind(dense.calls)])
    return {layer.name for layer in unseen if layer.values.untyped_storage()._cdata in reads.memory}


def _without_others(run: Run, others: Mapping[str, bool | None], read: Collection[str]) -> Run:
    """The run, with the layers dense that in some process were not seen to do what their classes say, or whose weights
    were ``read`` without a call of theirs."""
    of_ranks = run.processes.all_gather("what forwards do with weights", (others, read))
    names = {name for others, _ in of_ranks for name, other in others.items() if other is not False}
    reasons = {each.name: each.layer.why_other for each in run.plan.layers if each.name in names}
    reasons |= {name: READ for _, read in of_ranks for name in read}
    plan = without_others(run.plan, reasons, run.model, run.config)
    run.report.skipped = plan.skipped
    return replace(run, plan=plan)


def kind_of(numbered: NumberedCall) -> list[Any]:
    """What two calls of the model have in common if they take the same way through it: all but the values of tensors,
    and whether there is padding."""
    call = numbered.call
    leaves: list[Any] = []
    for leaf in leaves_of((call.args, call.kwargs)):
        constant = leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)
        leaves.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else constant)
    return [len(call.args), list(call.kwargs), leaves, _all_real(numbered)]


def _all_real(numbered: NumberedCall) -> list[bool]:
    told, model = numbered.masks.told, numbered.masks.model
    return [told.get((model, side)) is None for side in ("encoder", "decoder", "image")]


def _run_calls(dense: DenseRun, calls: Sequence[Call]) -> None:
    data, run = dense.data, dense.data.run
    dense.calls = [NumberedCall(number, call, data.masks_of(call)) for number, call in enumerate(calls)]
    batches = sum(call.row == 0 for call in calls)
    run.report.calibration.update(calls=batches, sha256=data.sha256 or digest_of(calls))
    chosen = _one_of_each_kind(dense.calls)
    _run_some(dense, chosen)
    wanted = {plan.name for plan in run.plan.layers if plan.calibrated}
    unseen = wanted.difference(*run.processes.all_gather("the layers that were reached", set(dense.inputs.order)))
    if unseen and any(run.processes.all_gather("calls that were not run", len(chosen) < len(calls))):
        _run_some(dense, [numbered for numbered in dense.calls if all(numbered is not each for each in chosen)])


def _one_of_each_kind(calls: Sequence[NumberedCall]) -> list[NumberedCall]:
    kinds: list[Any] = []
    chosen = []
    for numbered in calls:
        if (kind := kind_of(numbered)) not in kinds:
            kinds.append(kind)
            chosen.append(numbered)
    return chosen


def _choose_tried(dense: DenseRun) -> None:
    """Choose what waiting is tried with, and run alone what it is compared with: a row of two calls of different kinds.
    If all of three or more are of one kind, a row of the first call, between rows of two others.

    A call comes out wrong if one that began before it, or after it, has left something in the model. Calls of one kind
    do to each other what is done to them, so that one between two others speaks for all. No call is tried beside
    itself: what waiting calls have in common they hold once, and a model that writes to it would seem to be at fault.
    """
    run, alone, beside = dense.data.run, _one_of_each_kind(dense.calls)[:2], []
    if len(alone) == 1:
        alone, beside = (dense.calls[:1], dense.calls[1:3]) if len(dense.calls) > 2 else (dense.calls, [])
    if dense.data.calls is not None:  # else all calls were run
        if run.config.device is None:  # on a device, what whole calls hold tells whether there is room for all
            beside = [_row_of(numbered, dense.data) for numbered in beside]
            if run.storage.resident:  # streamed, each run of the model reads all weights
                alone = [_row_of(numbered, dense.data) for numbered in alone]
        known = {id(call.numbered) for call in dense.outputs.calls}
        _run_some(dense, [numbered for numbered in alone if id(numbered) not in known])
    dense.outputs.tried = [*beside[:1], *alone, *beside[-1:]]


def _row_of(numbered: NumberedCall, data: CalibrationData) -> NumberedCall:
    """A row of a call, with padding if the call has some; the call itself if it cannot be cut."""
    rows = [NumberedCall(numbered.number, row, data.masks_of(row)) for row in cut(numbered.call, lambda *_: 1)]
    alike = [row for row in rows if _all_real(row) == _all_real(numbered)]
    return alike[0] if alike and len(rows) > 1 else numbered


def _run_some(dense: DenseRun, calls: Sequence[NumberedCall]) -> None:
    chosen, show = {each.number: each for each in calls}, dense.data.run.config.progress
    assert dense.data.calls is not None
    own = [chosen[n].call if n in chosen else call for n, call in enumerate(dense.data.calls)]
    with Progress("run the dense model", "batch", len(calls), show=show) as bar:

        def begin(numbered: NumberedCall) -> None:
            dense.begin(chosen[numbered.number])
            bar.update()

        dense.watch(replace(dense.data, calls=own), begin, chosen)


def _run_loop(dense: DenseRun) -> None:
    """A forward_loop runs once, to its end. What it calls the model with is kept."""
    data, run = dense.data, dense.data.run

    @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass through a block
    def keep(numbered: NumberedCall) -> None:
        args, kwargs = numbered.call.args, numbered.call.kwargs
        call = Call(*map_tensors(lambda x: x.detach().clone(), (args, dict(kwargs))))
        dense.calls.append(NumberedCall(numbered.number, call, numbered.masks))
        dense.begin(dense.calls[-1])

    dense.watch(data, keep)
    sha256 = digest_of(numbered.call for numbered in dense.calls)
    run.report.calibration.update(calls=len(dense.calls), sha256=sha256)
    if not dense.calls:
        raise ValueError("forward_loop did not call the model; it must run model(...) on the calibration data")


def _agree(dense: DenseRun) -> None:
    """What the data of all processes show together, as one process would see it that goes over the batches in their
    order."""
    seen, run = dense.inputs, dense.data.run
    blocks = list(run.plan.blocks)
    ways = [[blocks.index(block) for block in call.prints] for call in dense.outputs.calls]
    own: Any = (
        {name: (seen.first_call[name] * run.processes.size + run.processes.rank, n) for name, n in seen.order.items()},
        seen.input_of,
        {name: bool(value) for name, value in seen.finite.items()},
        seen.varying,
        ways,
        run.report.calibration,
        dense.outputs.rows,
        sum(_units_of(call.numbered.call) for call in dense.outputs.calls if dense.outputs.rows),
    )
    places, inputs, finites, varying, ways, calibrations, rows, units = zip(
        *run.processes.all_gather("the dense run", own)
    )
    firsts: dict[str, tuple[int, int]] = {}
    for of_rank in places:
        for name, place in of_rank.items():
            firsts[name] = min(place, firsts.get(name, place))
    seen.order = {name: number for number, name in enumerate(sorted(firsts, key=firsts.__getitem__))}
    seen.input_of = {name: inputs[0].get(name, name) for name in seen.order}  # rank 0 has the first batch
    seen.finite = {name: torch.tensor(all(of_rank.get(name, True) for of_rank in finites)) for name in seen.order}
    seen.varying = set().union(*varying)
    totals = {name: sum(own.get(name, 0) for own in rows) for name in seen.order}
    dense.outputs.rows = {name: Fraction(total, max(sum(units), 1)) for name, total in totals.items()}
    dense.blocks = [blocks[index] for index in _merged(way for of_rank in ways for way in of_rank)]
    run.report.calibration["calls"] = sum(calibration["calls"] for calibration in calibrations)
    if run.processes.size > 1 and dense.data.sha256 is None:  # each process has data of its own
        together = "".join(calibration["sha256"] for calibration in calibrations)
        run.report.calibration["sha256"] = hashlib.sha256(together.encode()).hexdigest()


def _merged(ways: Any) -> list[int]:
    """All that calls come to, in an order in which each of them comes to it, if there is one."""
    order: list[int] = []
    for way in ways:
        place = 0
        for stop in way:
            if stop in order:
                place = order.index(stop) + 1
            else:
                order.insert(place, stop)
                place += 1
    return order


def _check(seen: SeenInputs, run: Run) -> None:
    """Raise ValueError for layers without data; layers that need none come last in the order."""
    plan = run.plan
    unseen = [layer_plan for layer_plan in plan.layers if layer_plan.name not in seen.order]
    mixtures = {layer_plan.layer.mixture for layer_plan in plan.layers if layer_plan.name in seen.order}
    needing = [
        layer_plan.name
        for layer_plan in unseen
        if layer_plan.needs != "nothing"
        and (layer_plan.layer.mixture is None or layer_plan.layer.mixture not in mixtures)
    ]
    if needing:
        advice = "give data that reaches them (images, if they take images), or exclude them"
        raise ValueError(f"{len(needing)} layers saw no calibration data: {first_few(needing)}: {advice}")
    for layer_plan in unseen:
        seen.order[layer_plan.name] = len(seen.order)
        seen.input_of[layer_plan.name] = layer_plan.name
    for name, finite in seen.finite.items():
        if not finite:
            raise ValueError(
                f"layer {name!r}: its input holds NaN or inf: check the data, or run in bfloat16 or float32"
            )


# stacks at which calls cannot wait ------------------------------------------------------------------------------------


def _through_whole_model(
    dense: DenseRun, stacks: Sequence[Stack], by_block: Mapping[str | None, Sequence[LayerPlan]]
) -> set[Stack]:
    """The stacks whose blocks are calibrated by runs of the whole model, with a note and a warning for each."""
    run, whole = dense.data.run, set()
    while waiting := [stack for stack in stacks if stack not in whole]:
        own = _why_not(dense, waiting, by_block)
        of_ranks = run.processes.all_gather("whether calls can wait", own)
        problem = next((problem for problem in of_ranks if problem is not None), None)
        if problem is None:
            break
        name, why = problem
        (stack,) = [stack for stack in waiting if stack.name == name]
        whole.add(stack)
        pruned = sum(bool(by_block.get(name)) for name in stack.names)
        _say(
            run,
            f"stack {stack.name or type(run.model).__name__!r} is calibrated through the whole model, because {why}",
            pruned,
        )
    config = run.config
    if waiting and config.reconstruct is not None:
        count = sum(run.processes.all_gather("the batches to tune by", len(dense.calls)))
        if count < 2:
            raise ValueError(f"reconstruct needs two calibration batches, one to judge, not {count}: give smaller ones")
    return whole


def _say(run: Run, why: str, pruned: int) -> None:
    if not run.storage.resident:
        raise ValueError(f"{why}: streaming would read all of it once for each block; do it with the model in memory")
    text = f"{why}: {pruned} runs of the model over the data, one for each block, instead of two"
    asked = {"permuted": run.config.permute, "reconstructed": run.config.reconstruct is not None}
    if any(asked.values()):
        text += f"; its blocks are not {' and '.join(word for word, wanted in asked.items() if wanted)}"
    warnings.warn(text, stacklevel=2)
    run.report.notes.append(text)


def _why_not(
    dense: DenseRun, stacks: Sequence[Stack], by_block: Mapping[str | None, Sequence[LayerPlan]]
) -> tuple[str, str] | None:
    """(name of a stack, why calls cannot wait at its blocks); None if they can at those of all stacks."""
    home = {block: stack for stack in stacks for block in stack.blocks}
    for stack in stacks:
        for name, block in zip(stack.names, stack.blocks):
            reached = any(layer_plan.name in dense.inputs.first_call for layer_plan in by_block.get(name, []))
            if reached and block not in dense.blocks:
                return stack.name, "the forward of its blocks is called, not the blocks, so that no hook sees it"
    for call in dense.outputs.calls:
        if again := [block for block in call.again if block in home]:
            return home[again[0]].name, "its blocks are called more than once in a call of the model"
        places = [(dense.blocks.index(block), block) for block in call.prints if block in home]
        for (place, _), (after, block) in pairwise(places):
            if after < place:
                return home[block].name, "its blocks are called in another order in some calls than in others"
    blocks = [block for block in dense.blocks if block in home]
    run = dense.data.run
    stay = run.config.device is not None and not run.storage.spills
    alone = {id(call.numbered): call for call in dense.outputs.calls}
    tried = [(numbered, alone.get(id(numbered))) for numbered in dense.outputs.tried]
    problem, stay = try_waiting(run, tried, stacks, blocks, count=len(dense.calls), outputs_stay=stay)
    if problem is not None and stay:
        problem, stay = try_waiting(run, tried, stacks, blocks, count=len(dense.calls), outputs_stay=False)
    if problem is not None:  # an error of the data is raised here, and is no reason
        dense.data.run_model(numbers=[each.number for each, known in tried if known is None])
    dense.outputs_may_stay = stay
    return None if problem is None else (problem[0].name, problem[1])
