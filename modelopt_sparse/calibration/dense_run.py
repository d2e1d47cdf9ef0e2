"""The run of the dense model over the data, before any weight changes.

It shows which layers get the same input and in which order layers are called, and whether the data reaches all layers
and is finite there. It also records what the blocks of each stack are called with.
"""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.between import look_between
from modelopt_sparse.calibration.forward import CalibrationData, input_key, stop_call
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.recorder import StackRecorder
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.layers import Layer, Stack
from modelopt_sparse.reports.progress import Progress


class SeenInputs:
    """What the inputs of layers show. ``block_of``: layer name -> the one block that it is in, or None.

    order: layer name -> position of its first call.
    input_of: layer name -> the first layer of its block that got the same input.
    first_call: layer name -> the first call of the model that reached it, counted from 1.
    """

    def __init__(self, block_of: Mapping[str, str | None]) -> None:
        self.order: dict[str, int] = {}
        self.input_of: dict[str, str] = {}
        self.first_call: dict[str, int] = {}
        self.finite: dict[str, Tensor] = {}
        self.calls = 0
        self.block_of = block_of
        # of the first call, by block: input -> the first layer that got it, and the tensors, so that no id is reused
        self._leaders: dict[str | None, dict[tuple, tuple[str, tuple[Tensor, ...]]]] = {}

    def begin(self) -> None:
        """A call of the model starts."""
        self.calls += 1
        self.let_go()

    def let_go(self) -> None:
        """The inputs of the call before are not held any more."""
        self._leaders.clear()

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        if not (inputs[0].numel() if token_mask is None else token_mask.any()):
            return  # no token is no data
        if self.calls == 1:
            self.input_of.setdefault(layer.name, self._leader(layer, inputs))
        self.input_of.setdefault(layer.name, layer.name)
        self.order.setdefault(layer.name, len(self.order))
        self.first_call.setdefault(layer.name, self.calls)
        for x in inputs:
            finite = torch.isfinite((x if token_mask is None else x[token_mask]).detach().float().sum())
            self.finite[layer.name] = self.finite.get(layer.name, finite) & finite

    def _leader(self, layer: Layer, inputs: tuple[Tensor, ...]) -> str:
        block = self.block_of[layer.name]
        if block is not None and block not in self._leaders:  # inputs of the blocks before it are not wanted any more
            for other in self._leaders.keys() - {None}:
                del self._leaders[other]
        leaders = self._leaders.setdefault(block, {})
        return leaders.setdefault(input_key(layer, inputs), (layer.name, inputs))[0]


class DenseRun:
    """``recorders`` hold the record of each stack whose dense inputs will be used as they are; those of later stacks
    are empty."""

    def __init__(self, data: CalibrationData, block_of: Mapping[str, str | None], *, whole: bool) -> None:
        run = data.run
        self.data = data
        self.recorders = {
            stack: StackRecorder(stack, self._complete, run.storage.hold_activations) for stack in run.plan.stacks
        }
        self.seen = SeenInputs(block_of)
        self.stopped = False  # whether calls were ended early
        self._may_stop = data.may_stop and not whole

    def _complete(self) -> None:
        if self._may_stop and not any(recorder.waiting for recorder in self.recorders.values()):
            self.stopped = True
            stop_call()

    def go(self, bar: Progress) -> None:
        """Run the model over the data."""
        data, seen = self.data, self.seen
        run = data.run
        hooks = data.input_hooks(run.plan.layers, run.plan.blocks, seen.see)

        def begin(masks: TokenMasks) -> None:
            seen.begin()
            if seen.calls == 1:
                bar.begin(None if data.calls is None else len(data.calls))
            else:
                bar.update()
            if seen.calls == 2:
                self.forget_later_stacks()
            for recorder in self.recorders.values():
                recorder.begin(masks)
            hooks.begin(masks)

        with ExitStack() as contexts:
            for recorder in self.recorders.values():
                recorder.start()
                contexts.callback(recorder.stop)
            digest = hashlib.sha256()
            data.run_model(begin, hooks, digest=digest if data.sha256 is None else None)
        seen.let_go()
        bar.update()
        run.report.calibration.update(calls=seen.calls, sha256=data.sha256 or digest.hexdigest())
        if seen.calls == 0:
            raise ValueError("forward_loop did not call the model; it must run model(...) on the calibration data")

    def look_between_blocks(self) -> None:
        """Stacks whose blocks do not take the output of the block before are recorded again if it is known why."""
        for recorder in self.recorders.values():
            look_between(self.data, recorder)

    def forget_later_stacks(self) -> None:
        """Only the stack that comes first sees dense inputs; the others are recorded when their turn comes."""
        run, seen = self.data.run, self.seen
        if run.config.sequential == "none" or not seen.order:
            return
        first = seen.block_of[next(iter(seen.order))]
        for stack, recorder in self.recorders.items():
            if first is None or first not in stack.names:
                if recorder.problem is not None and recorder.problem.unlinked is None:
                    run.storage.check_whole_runs(whole_runs_because(run.model, stack, recorder.problem.why))
                recorder.forget()


def run_dense(data: CalibrationData, block_of: Mapping[str, str | None], *, whole: bool = False) -> DenseRun:
    """Run the dense model over the data.

    Of calls that are like an earlier one, only what is in front of the blocks is run, unless ``whole`` is set or a
    layer has seen no data up to then. Raises ValueError for layers that no data reaches, or none that is finite.
    """
    run = data.run
    dense = DenseRun(data, block_of, whole=whole)
    with Progress("run the dense model", "batch", show=run.config.progress) as bar:
        dense.go(bar)
    if run.processes.size > 1:
        _agree(dense)
    if dense.stopped and any(plan.calibrated and plan.name not in dense.seen.order for plan in run.plan.layers):
        return run_dense(data, block_of, whole=True)
    dense.look_between_blocks()
    dense.forget_later_stacks()
    _check(dense.seen, run)
    return dense


def whole_runs_because(model: nn.Module, stack: Stack, problem: str) -> str:
    """Why a stack is not run block by block, as the beginning of a sentence."""
    return f"stack {stack.name or type(model).__name__!r} is calibrated through the whole model, because {problem}"


def _agree(dense: DenseRun) -> None:
    """What the data of all processes show together, as one process would see it that goes over the batches in their
    order."""
    seen, processes, report = dense.seen, dense.data.run.processes, dense.data.run.report
    own: Any = (
        {name: (seen.first_call[name] * processes.size + processes.rank, place) for name, place in seen.order.items()},
        seen.input_of,
        {name: bool(value) for name, value in seen.finite.items()},
        dense.stopped,
        report.calibration,
    )
    places, inputs, finites, stopped, calibrations = zip(*processes.all_gather("the dense run", own))
    firsts: dict[str, tuple[int, int]] = {}
    for of_rank in places:
        for name, place in of_rank.items():
            firsts[name] = min(place, firsts.get(name, place))
    seen.order = {name: number for number, name in enumerate(sorted(firsts, key=firsts.__getitem__))}
    seen.input_of = {name: inputs[0].get(name, name) for name in seen.order}  # rank 0 has the first batch
    seen.finite = {name: torch.tensor(all(of_rank.get(name, True) for of_rank in finites)) for name in seen.order}
    dense.stopped = any(stopped)
    report.calibration["calls"] = sum(calibration["calls"] for calibration in calibrations)
    if dense.data.sha256 is None:  # each process has data of its own
        together = "".join(calibration["sha256"] for calibration in calibrations)
        report.calibration["sha256"] = hashlib.sha256(together.encode()).hexdigest()


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
        raise ValueError(
            f"{len(needing)} layers saw no calibration data: {', '.join(needing[:8])}"
            f"{', ...' if len(needing) > 8 else ''}; give data that reaches them (images, if they take images), or "
            "exclude them"
        )
    for layer_plan in unseen:
        seen.order[layer_plan.name] = len(seen.order)
        seen.input_of[layer_plan.name] = layer_plan.name
    for name, finite in seen.finite.items():
        if not finite:
            raise ValueError(
                f"layer {name!r}: its input holds NaN or inf on the calibration data; check the data, or run the "
                "model in bfloat16 or float32"
            )
