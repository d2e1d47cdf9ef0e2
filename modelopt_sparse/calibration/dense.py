"""The dense run: what running the dense model shows before any weight changes, and what is made sparse in which order.

It shows in which order layers are called and which of them get the same input, whether the data reaches all layers and
is finite there, to which blocks each call comes, and whether calls can be run again, block by block. The blocks follow
from it, each with its layers.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelopt_sparse.calibration.calls import AtBlock, Calls, Inputs, WholeModel
from modelopt_sparse.calibration.data import Call, copied, digest_of
from modelopt_sparse.calibration.forward import CalibrationData, NumberedCall, forward_context, input_hooks, input_key
from modelopt_sparse.calibration.padding import SIDES
from modelopt_sparse.calibration.rerun import random_states, settings_of
from modelopt_sparse.calibration.trial import (
    CHANGES,
    Tried,
    is_repeatable,
    rehearse,
    single_rows,
    truth_of,
    warn_of_repeated,
    warn_of_whole_runs,
    watching,
)
from modelopt_sparse.checks import grouped
from modelopt_sparse.model.devices import flat_tensors, map_batch, parts_within
from modelopt_sparse.model.experts import RoutedAdapter, experts_of
from modelopt_sparse.model.find import Stack
from modelopt_sparse.model.layers import IN_PROJ, Layer, TokenMasks
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.plan.planner import without_others
from modelopt_sparse.reports.text import first_few
from modelopt_sparse.run import Run, refuse_unusable

READ = "its parent reads the weight without calling the layer, so that no data reaches it"


# what is seen ---------------------------------------------------------------------------------------------------------


class SeenInputs:
    """Facts about layers' inputs in the dense run. ``block_of``: layer name -> the one block that it is in, or None.

    called: the names of layers that were called, with tokens or with padding alone.
    order: layer name -> its first call with tokens: the number of the model's call, and how many layers had one before.
    input_of: layer name -> the first layer of its block that got the same input.
    varying: layers that share an input with others at some times only.
    """

    def __init__(self, block_of: Mapping[str, str | None]) -> None:
        self.called: set[str] = set()
        self.order: dict[str, tuple[float, int]] = {}
        self.input_of: dict[str, str] = {}
        self.varying: set[str] = set()
        self.finite: dict[str, Tensor] = {}
        self.block_of = block_of
        # of the call under way: layer name -> its inputs; by block, input -> the first layer that got it, and the
        # tensors, so that no id is reused
        self._number, self._keys = 0, dict[str, list[tuple]]()
        self._leaders: dict[str | None, dict[tuple, tuple[str, tuple[Tensor, ...]]]] = {}

    def begin(self, number: int) -> None:
        """Call ``number`` of the model starts. Inputs of the call before are not held any more."""
        keys = self._keys
        self.varying |= {name for name, inputs in keys.items() if inputs != keys.get(self.input_of[name])}
        self._number, self._keys, self._leaders = number, {}, {}

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> None:
        self.called.add(layer.name)
        if not (inputs[0].numel() if token_masks[0] is None else token_masks[0].any()):
            return  # no token is no data
        leader = self._leader(layer, inputs)
        self._keys.setdefault(layer.name, []).append(input_key(layer, inputs))
        if self.input_of.setdefault(layer.name, leader if self._number == 0 else layer.name) != leader:
            self.varying.add(layer.name)
        self.order.setdefault(layer.name, (self._number, len(self.order)))
        for x, mask in zip(inputs, token_masks):
            finite = torch.isfinite((x if mask is None else x[mask]).detach().float().sum())
            self.finite[layer.name] = self.finite.get(layer.name, finite) & finite

    def first_call(self, layer_plan: LayerPlan) -> tuple[float, int]:
        """What layers are sorted by; those that no call has reached come last."""
        return self.order.get(layer_plan.name, (math.inf, 0))

    def _leader(self, layer: Layer, inputs: tuple[Tensor, ...]) -> str:
        block, leaders = self.block_of[layer.name], self._leaders
        if block is not None and block not in leaders:  # inputs of the blocks before it are not wanted any more
            for before in leaders.keys() - {None}:
                del leaders[before]
        return leaders.setdefault(block, {}).setdefault(input_key(layer, inputs), (layer.name, inputs))[0]


def _rows_of_a_matrix(layer: Layer, inputs: tuple[Tensor, ...]) -> Fraction:
    """Number of rows that a matrix of the layer is multiplied with in this call, the mean over its matrices.
    Convolutions have a row for each position of their output. Experts count where their weights are here, as often
    as the router chose them."""
    adapter, owner = layer.adapter, layer.owner
    if isinstance(adapter, RoutedAdapter):
        return Fraction(int((inputs[1] < experts_of(owner)).sum()), len(layer.parameter))
    shapes = tuple(x.to("meta") for x in inputs)
    apart = [(x,) for x in shapes] if adapter is IN_PROJ else [shapes]  # keys may be longer than queries
    with_padding = [None] * len(apart[0])
    rows = [rows.shape[-2] for group in apart for rows in adapter.rows(owner, group, with_padding)]
    return Fraction(sum(rows), len(apart))


def _units_of(call: Call) -> int:
    """The tokens of a call, or, if its first tensor holds no token ids, its samples; of one without tensors 1."""
    for x in flat_tensors((call.args, call.kwargs)):
        return x.numel() if x.dim() == 2 and not x.is_floating_point() else [*x.shape, 1][0]
    return 1


@dataclass
class DenseRun:
    """Facts from the dense forwards: call order of layers, which layers share an input, order of blocks, and whether
    calls can be run again.

    again: what runs the calls. calls: all of this process, with their ways.
    blocks: in the order in which calls come to them. repeated: those to which some call comes more than once.
    whole: whether blocks are calibrated through runs of the whole model.
    rows: under a budget, layer name -> how many rows each of its matrices was multiplied with, on average, padding
      included, in calls of so many ``units``.
    """

    data: CalibrationData
    inputs: SeenInputs
    again: Calls
    calls: list[NumberedCall] = field(default_factory=list)
    blocks: Sequence[nn.Module] = ()
    repeated: Container[nn.Module] = ()
    whole: bool = False
    rows: dict[str, Fraction] = field(default_factory=dict)
    units: int = 0

    @property
    def rows_of_a_unit(self) -> dict[str, Fraction]:
        return {name: rows / max(self.units, 1) for name, rows in self.rows.items()}

    def begin(self, numbered: NumberedCall) -> None:
        self.inputs.begin(numbered.number)
        self.units += _units_of(numbered.call)

    def walk(
        self, data: CalibrationData, blocks: Sequence[nn.Module], calls: Sequence[NumberedCall] | None = None
    ) -> AtBlock:
        """A walk of ``calls`` (None: all) through ``blocks``, from their beginning; other blocks stay as they are."""
        fresh = [replace(call, answers=[]) for call in (self.calls if calls is None else calls)]
        if data.run.config.sequential == "none":
            fresh = [call.going_on() for call in fresh]
        stay = frozenset(data.run.plan.blocks).difference(blocks)
        return AtBlock(Calls(data, self.again.shapes), fresh, blocks, self.repeated, stay)

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_masks: TokenMasks) -> None:
        if not self.data.run.storage.resident and layer.name not in self.inputs.order:
            refuse_unusable(layer)  # while its block has its weights
        self.inputs.see(layer, inputs, token_masks)
        if self.data.run.config.budget is not None:
            self.rows[layer.name] = self.rows.get(layer.name, Fraction()) + _rows_of_a_matrix(layer, inputs)


def run_dense(data: CalibrationData) -> CalibrationData:
    """Run the dense model on one call of each kind, and on all calls if a layer has seen no data up to then; see to
    which blocks each call comes, and try whether calls can be run again, block by block. The data comes back with what
    this has shown, and its plan without layers whose forwards do something else with the weight, or whose weights the
    model reads itself.

    Raises ValueError for layers that no data reaches, or none that is finite.
    """
    run = data.run
    dense = DenseRun(data, SeenInputs(_block_of_layers(run.plan)), Calls(data))
    with _compared(run.plan) as others:
        tried = _run_loop(dense) if data.calls is None else _run_calls(dense, data.calls)
    if run.processes.size > 1:
        _agree(dense)
    run = _without_others(run, others, _read_by_parents(dense))
    dense.data = replace(data, run=run)
    _check(dense.inputs, run)
    in_order, by_block = in_call_order(run.plan, dense)
    if stacks := [start for start in in_order if isinstance(start, Stack)]:
        dense.whole = _needs_whole_runs(dense, tried, stacks, by_block)
    return replace(dense.data, dense=dense)


def _block_of_layers(plan: Plan) -> dict[str, str | None]:
    """Layer name -> the block that it is used in. A weight that is used in several blocks sees all of its inputs in the
    whole model alone: None."""
    homes, block_of = plan.homes, dict[str, str | None]()
    for layer_plan in plan.layers:
        used_in = set().union(*(homes.get(module, {None}) for module in layer_plan.layer.hooked_modules))
        block_of[layer_plan.name] = used_in.pop() if len(used_in) == 1 else None
    return block_of


def in_call_order(plan: Plan, dense: DenseRun) -> tuple[list[Stack | LayerPlan], dict[str | None, list[LayerPlan]]]:
    """(stacks, and layers outside of all blocks; block -> its layers), in the order of their first calls."""
    first_call, block_of = dense.inputs.first_call, dense.inputs.block_of
    by_block = grouped(sorted(plan.layers, key=first_call), lambda layer_plan: block_of[layer_plan.name])
    starts: list[tuple[Any, Stack | LayerPlan]] = [(first_call(plan), plan) for plan in by_block.get(None, [])]
    for stack in plan.stacks:
        if calls := [first_call(layer_plan) for name in stack.names for layer_plan in by_block.get(name, [])]:
            starts.append((min(calls), stack))
    return [start for _, start in sorted(starts, key=lambda pair: pair[0])], by_block


@contextmanager
def _compared(plan: Plan) -> Iterator[dict[str, bool | None]]:
    """While entered, each layer whose class has a forward of its own is run by itself on its first input, beside
    torch's. Yields layer name -> whether it does something else with the weight; None: its input alone does not
    tell."""
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
    """The layers that were not called, though the model read their weights: looked for in a call of each kind."""
    layers = [layer_plan.layer for layer_plan in dense.data.run.plan.layers if layer_plan.needs != "nothing"]
    unseen = [layer for layer in layers if layer.name not in dense.inputs.called and layer.mixture is None]
    with _Reads() as reads:
        if unseen:
            dense.data.run_model(numbers=[call.number for call in _one_of_each_kind(dense.calls)])
    return {layer.name for layer in unseen if layer.values.untyped_storage()._cdata in reads.memory}


def _without_others(run: Run, others: Mapping[str, bool | None], read: Collection[str]) -> Run:
    """The run, with the layers dense that in some process were not seen to do what their classes say, or whose weights
    were ``read`` without a call of theirs."""
    by_rank = run.processes.all_gather("what forwards do with weights", (others, read))
    names = {name for others, _ in by_rank for name, is_other in others.items() if is_other is not False}
    layers = [layer_plan.layer for layer_plan in run.plan.layers if layer_plan.name in names]
    reasons = {layer.name: layer.why_other for layer in layers}
    reasons |= {name: READ for _, read in by_rank for name in read}
    if not reasons:
        return run
    plan = without_others(run.plan, reasons, run.model, run.config)
    run.report.skipped = plan.skipped
    return replace(run, plan=plan)


def kind_of(numbered: NumberedCall) -> list[Any]:
    """A key of the way that a call takes through the model: all that its arguments hold but the values of tensors, and
    whether there is padding."""
    parts = parts_within((numbered.call.args, numbered.call.kwargs))
    return [[(name, _without_values(part)) for name, part in parts], _all_real(numbered)]


def _without_values(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.shape, part.dtype
    return part if isinstance(part, (bool, int, float, str, Enum)) else type(part)


def _all_real(numbered: NumberedCall) -> list[bool]:
    told, model = numbered.masks.told, numbered.masks.model
    return [told.get((model, side)) is None for side in SIDES]


MAX_KINDS = 4  # of calls that are tried at most


def _run_calls(dense: DenseRun, calls: Sequence[Call]) -> Tried:
    """Run a call of each kind, and all if that is not enough -> those that running calls again is tried with."""
    data, run = dense.data, dense.data.run
    dense.calls = [NumberedCall(number, call, data.masks_of(call)) for number, call in enumerate(calls)]
    batches = sum(call.row == 0 for call in calls)
    run.report.calibration.update(calls=batches, sha256=data.sha256 or digest_of(calls))
    chosen = _one_of_each_kind(dense.calls)
    others = [call for call in dense.calls if call not in chosen]
    truth = _run_some(dense, chosen)
    wanted = {layer_plan.name for layer_plan in run.plan.layers if layer_plan.calibrated}
    unseen = wanted.difference(*run.processes.all_gather("the layers that were reached", set(dense.inputs.order)))
    if unseen and any(run.processes.all_gather("calls that were not run", bool(others))):
        _run_some(dense, others)
    beside = others[:1]
    if run.storage.resident:
        tried = {}
        for call in (*chosen[:MAX_KINDS], *beside):
            tried |= _tried(dense, call)
    else:  # each run of the model reads all weights
        tried = {call: truth.get(call) for call in chosen[:MAX_KINDS]} | dict.fromkeys(beside)
    return tried | _beside(dense, tried)


def _one_of_each_kind(calls: Sequence[NumberedCall]) -> list[NumberedCall]:
    kinds = [kind_of(call) for call in calls]
    return [call for number, call in enumerate(calls) if kinds.index(kinds[number]) == number]


def _tried(dense: DenseRun, numbered: NumberedCall) -> Tried:
    """Choose what is tried of a call: one row, padded if the call has padding; all of it if the model takes no row."""
    rows = (NumberedCall(numbered.number, row, dense.data.masks_of(row)) for row in single_rows(numbered.call))
    row = next((row for row in rows if _all_real(row) == _all_real(numbered)), numbered)
    try:
        return truth_of(dense.again, [row])
    except ValueError:
        return truth_of(dense.again, [numbered])


def _beside(dense: DenseRun, tried: Tried) -> Tried:
    """Another call to go beside an only one, whose rows are in another order, or whose columns where it has one row: by
    itself a call would not show that it takes over something of the call before. None if the model does not take it."""
    if len(tried) != 1:
        return {}
    (only,) = tried
    args, kwargs = map_batch(
        lambda x: x.roll(1, 0 if len(x) > 1 else -1) if x.dim() else x, (only.call.args, only.call.kwargs)
    )
    call = replace(only.call, args=args, kwargs=kwargs)
    with suppress(ValueError):
        return truth_of(dense.again, [NumberedCall(only.number, call, dense.data.masks_of(call), only.random)])
    return {}


def _run_some(dense: DenseRun, chosen: Sequence[NumberedCall]) -> Tried:
    """Run some calls whole; the inputs of layers are seen. Of a streamed model also what is compared later."""
    data, run, again = dense.data, dense.data.run, dense.again
    hooks = input_hooks(run.plan.layers, run.plan.blocks, data.sides, dense.see)
    with (
        run.bar("run the dense model", "batch", len(chosen)) as bar,
        nullcontext({}) if run.storage.resident else watching(again, run) as runs,
        again.watching(moved_by_hooks=True),
        hooks as padding,
        forward_context(run),
    ):
        for call in chosen:
            padding.begin(call.masks)
            dense.begin(call)
            again.run_to(call)
            bar.update()
    dense.inputs.begin(-1)  # the last call is over
    return {attempt.call: visits for attempt, visits in runs.items()}


def _run_loop(dense: DenseRun) -> Tried:
    """A forward_loop runs once, to its end. What it calls the model with is kept -> calls that are tried."""
    data, run, again = dense.data, dense.data.run, dense.again
    kinds, tried, modules = list[Any](), Tried(), [*run.model.modules()]

    @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass through a block
    def keep(numbered: NumberedCall) -> None:
        args, kwargs = numbered.call.args, numbered.call.kwargs
        call = Call(*copied(args, kwargs))
        recorded = NumberedCall(numbered.number, call, numbered.masks, random_states())
        kind = kind_of(recorded), settings_of(modules)  # the loop may change these in between
        if len(kinds) <= MAX_KINDS and (kind not in kinds or len(kinds) == len(dense.calls) == 1):
            kinds.append(kind)
            tried[recorded] = []
        dense.calls.append(recorded)
        again.follow(recorded)
        dense.begin(recorded)

    with (
        again.watching(),
        watching(again, run, tried) as runs,
        run.model.register_forward_hook(lambda *_: again.follow(None), always_call=True),
    ):
        data.run_model(keep, input_hooks(run.plan.layers, run.plan.blocks, data.sides, dense.see))
    dense.inputs.begin(-1)  # the last call is over
    sha256 = digest_of(call.call for call in dense.calls)
    run.report.calibration.update(calls=len(dense.calls), sha256=sha256)
    if not dense.inputs.order:
        raise ValueError(
            "forward_loop called no layer; it must run model(...), or parts of it, on the calibration data"
        )
    tried |= {attempt.call: visits for attempt, visits in runs.items()}
    return tried | _beside(dense, tried)


def _agree(dense: DenseRun) -> None:
    """Merge the facts of all processes into those that one process would see which goes over all batches in order."""
    seen, run = dense.inputs, dense.data.run
    facts: Any = (
        {name: (call * run.processes.size + run.processes.rank, n) for name, (call, n) in seen.order.items()},
        seen.input_of,
        {name: bool(value) for name, value in seen.finite.items()},
        seen.varying,
        run.report.calibration,
        dense.rows,
        dense.units,
    )
    by_rank = run.processes.all_gather("the dense run", facts)
    positions, inputs, finites, varying, calibrations, rows, units = zip(*by_rank)
    seen.order = {}
    for by_name in positions:
        for name, position in by_name.items():
            seen.order[name] = min(position, seen.order.get(name, position))
    seen.input_of = {name: inputs[0].get(name, name) for name in seen.order}  # rank 0 has the first batch
    seen.finite = {
        name: torch.tensor(all(by_name.get(name, True) for by_name in finites), device="cpu") for name in seen.order
    }
    seen.varying = set().union(*varying)
    dense.rows = {name: sum((rank_rows.get(name, Fraction()) for rank_rows in rows), Fraction()) for name in seen.order}
    dense.units = sum(units)
    run.report.calibration["calls"] = sum(calibration["calls"] for calibration in calibrations)
    if dense.data.sha256 is None:  # each process has data of its own
        together = "".join(calibration["sha256"] for calibration in calibrations)
        run.report.calibration["sha256"] = hashlib.sha256(together.encode()).hexdigest()


def _merged(ways: Iterable[Sequence[int]]) -> list[int]:
    """Merge ways into one order of all their stops; each way follows it, if there is such an order."""
    pairs = {pair for way in ways for pair in pairwise(dict.fromkeys(way))}
    order, left = [], [*dict.fromkeys(chain(*ways))]
    while left:
        free = (stop for stop in left if not any((earlier, stop) in pairs for earlier in left))
        order.append(next(free, left[0]))
        left.remove(order[-1])
    return order


def _check(seen: SeenInputs, run: Run) -> None:
    """Raise ValueError for layers without data that need some."""
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
        seen.input_of[layer_plan.name] = layer_plan.name
    for name, finite in seen.finite.items():
        if not finite:
            raise ValueError(
                f"layer {name!r}: its input holds NaN or inf: check the data, or run in bfloat16 or float32"
            )


# whether calls can be run again -------------------------------------------------------------------------------------


def _needs_whole_runs(
    dense: DenseRun, tried: Tried, stacks: Sequence[Stack], by_block: Mapping[str | None, Sequence[LayerPlan]]
) -> bool:
    """Whether blocks are calibrated by runs of the whole model, with a note and a warning that say why."""
    run, repeatable = dense.data.run, True
    if run.storage.resident:
        repeatable = all(run.processes.all_gather("whether calls repeat", is_repeatable(dense.again, tried)))
    if repeatable:
        _learn_ways(dense, tried)
    problem = _why_whole(dense, tried, stacks, by_block) if repeatable else CHANGES
    problems = run.processes.all_gather("whether calls can be run again", problem)
    if why := next(filter(None, problems), None):
        warn_of_whole_runs(run, why, len(by_block.keys() - {None}))
        if repeatable:
            still = run.processes.all_gather("whether calls repeat", is_repeatable(dense.again, tried))
            if not all(still):
                problem = (
                    f"{type(run.model).__name__} computes something else since a call of it was stopped, and nothing"
                )
                raise ValueError(
                    f"{problem} in its modules has changed: load it anew, and prune it by method='magnitude'"
                )
        return True
    for stack in stacks:
        if any(block in dense.repeated for block in stack.blocks):
            warn_of_repeated(run, stack)
    if run.config.reconstruct is not None:
        count = sum(run.processes.all_gather("the batches to tune by", len(dense.calls)))
        if count < 2:
            raise ValueError(f"reconstruct needs two calibration batches, one to judge, not {count}: give smaller ones")
    return False


def _learn_ways(dense: DenseRun, tried: Tried) -> None:
    """See to which blocks each call comes, and in which order all calls of all processes come to them."""
    run, blocks = dense.data.run, list(dense.data.run.plan.blocks)
    with dense.again.watching(), forward_context(run):
        for call in (*dense.calls, *tried):
            dense.again.learn_way(call)
    local_ways = list(dict.fromkeys(tuple(map(blocks.index, call.way)) for call in dense.calls))
    ways = [way for rank_ways in run.processes.all_gather("the ways of calls", local_ways) for way in rank_ways]
    dense.repeated = {blocks[index] for way in ways for index in way if way.count(index) > 1}
    dense.blocks = [blocks[index] for index in _merged(ways)]


def _why_whole(
    dense: DenseRun, tried: Tried, stacks: Sequence[Stack], by_block: Mapping[str | None, Sequence[LayerPlan]]
) -> str | None:
    """Why blocks need runs of the whole model; None if they do not."""
    blocks = [block for block in dense.blocks if any(block in stack.blocks for stack in stacks)]
    for name, block in ((name, block) for stack in stacks for name, block in zip(stack.names, stack.blocks)):
        if block in dense.again.outside:
            return "its blocks are called outside of a call of the model"
        if block in dense.again.late:
            return "layers of its blocks are called after these as well"
        if block in dense.again.leaving:
            return "its blocks leave something beside their output"
        if block not in blocks and any(layer_plan.name in dense.inputs.order for layer_plan in by_block.get(name, [])):
            return "not its blocks are called, but what is inside of them"
    for call in dense.calls if dense.data.run.config.sequential == "none" else ():
        places = [blocks.index(block) for block in call.way if block in blocks]
        if any(after <= before for before, after in pairwise(places)):  # sparse by then, it changes what others get
            return "calls come to its blocks more than once, or in another order in some of them"
    walk = dense.walk(dense.data, blocks, [*tried])
    return rehearse(walk, tried, dense.again.run) if blocks else None


# blocks with their layers, in the order of calls -------------------------------------------------------------------


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
        return list(grouped(self.layer_plans, lambda layer_plan: self.input_of[layer_plan.name]).values())

    def stages(self, sequential: str) -> list[list[LayerPlan]]:
        """The layers that are solved before the inputs of the next ones are collected."""
        if sequential != "stage":
            return [self.layer_plans] if self.layer_plans else []
        # experts in a list are collected together, for one may need the tokens of the others
        inputs = self.input_of
        return list(grouped(self.layer_plans, lambda plan: plan.layer.mixture or inputs[plan.name]).values())


def blocks_in_call_order(run: Run, data: CalibrationData | None) -> list[BlockTask]:
    """Blocks with their layers, and each layer outside of the blocks, in the order of their first calls.

    Without ``data``, which no layer wants then, in the order of the model. With ``sequential="none"``, what is
    collected through the whole model comes first, while all of it is dense.
    """
    if data is None:
        return _without_data(run)
    dense = data.dense or run_dense(data).dense
    in_order, by_block = in_call_order(run.plan, dense)
    if run.config.sequential == "none" and not dense.whole:
        in_order.sort(key=lambda start: isinstance(start, Stack))
    home = {block: stack for stack in in_order if isinstance(stack, Stack) for block in stack.blocks}
    names = {block: name for name, block in run.plan.named_blocks.items()}
    blocks = [block for block in (home if dense.whole else dense.blocks) if block in home]
    # blocks that no call comes to may have layers that need no data
    blocks += [block for block in home if by_block.get(names[block]) and block not in blocks]
    walk, whole_model, input_of = dense.walk(data, blocks), WholeModel(data), dense.inputs.input_of

    def of_block(block: nn.Module) -> BlockTask:
        plans = by_block.get(names[block], [])
        one_pass = run.config.experts != "all_tokens" and not dense.inputs.varying & {plan.name for plan in plans}
        inputs = (lambda: whole_model) if dense.whole else partial(walk.at, block)
        return BlockTask(names[block] or type(run.model).__name__, plans, input_of, block, inputs, one_pass)

    tasks: list[BlockTask] = []
    for _, starts in groupby(in_order, type):
        group = list(starts)
        outside = [start for start in group if isinstance(start, LayerPlan)]
        tasks += [BlockTask(plan.name, [plan], input_of, None, lambda: whole_model) for plan in outside]
        # of stacks that follow each other in the order in which calls come to their blocks
        tasks += [of_block(block) for block in blocks if home[block] in group]
    return tasks


def _without_data(run: Run) -> list[BlockTask]:
    no_data = WholeModel(None)
    tasks = []
    for name, layer_plans in run.plan.by_block.items():
        input_of = {layer_plan.name: layer_plan.name for layer_plan in layer_plans}
        title = layer_plans[0].name if name is None else name or type(run.model).__name__
        block = None if name is None else run.plan.named_blocks[name]
        tasks.append(BlockTask(title, layer_plans, input_of, block, lambda: no_data))
    return tasks
