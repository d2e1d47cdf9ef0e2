"""What dense runs of a model show before any weight changes: what calls what, in which order, and whether the data
reaches all layers and is finite there; and the record that the walk begins with."""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from modelopt_sparse.calibration.forward import Runner
from modelopt_sparse.calibration.hooks import LayerInputs, input_key
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.recorder import Recorder
from modelopt_sparse.calibration.storage import Turns
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.stacks import Stack
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.report import Report


@dataclass
class Survey:
    """``recorders`` hold the record of each stack whose dense inputs will be used as they are; those of later stacks
    are empty."""

    recorders: dict[Stack, Recorder]
    order: dict[str, int] = field(default_factory=dict)  # layer name -> position of its first call
    stage_of: dict[str, str] = field(default_factory=dict)  # layer name -> first layer with the same input
    finite: dict[str, Tensor] = field(default_factory=dict)


def take_survey(
    plan: Plan,
    runner: Runner,
    turns: Turns,
    report: Report,
    block_of: Mapping[str, str | None],
    bar: tqdm,
    *,
    whole: bool = False,
) -> Survey:
    """Run the dense model over the data. ``block_of``: layer name -> name of the one block that it is in, or None.

    Of calls that are like an earlier one, only what is in front of the blocks is run, unless ``whole`` is set or a
    layer has seen no data up to then. Raises ValueError for layers that no data reaches, or none that is finite.
    """

    def complete() -> None:
        if stops and not any(recorder.waiting for recorder in survey.recorders.values()):
            nonlocal stopped
            stopped = True
            runner.stop()

    stops, stopped = runner.may_stop and not whole, False
    survey = Survey({stack: Recorder(stack, complete, turns.keep) for stack in plan.stacks})
    leaders: dict[str | None, dict[tuple, str]] = {}  # by block: input -> the first layer that it was given to
    first_call: dict[str, int] = {}
    alive: dict[str | None, list[Any]] = {}  # these inputs, so that no id is taken twice
    begun = 0

    def see(layer: Layer, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        if not (inputs[0].numel() if keep is None else keep.any()):
            return  # no token is no data
        if begun == 1:
            block = block_of[layer.name]
            if block is not None and block not in leaders:  # inputs of the blocks before it are not wanted any more
                for other in leaders.keys() - {None}:
                    del leaders[other], alive[other]
            alive.setdefault(block, []).append(inputs)
            leads = leaders.setdefault(block, {}).setdefault(input_key(layer, inputs), layer.name)
            survey.stage_of.setdefault(layer.name, leads)
        survey.stage_of.setdefault(layer.name, layer.name)
        survey.order.setdefault(layer.name, len(survey.order))
        first_call.setdefault(layer.name, begun)
        for x in inputs:
            finite = torch.isfinite((x if keep is None else x[keep]).detach().float().sum())
            survey.finite[layer.name] = survey.finite.get(layer.name, finite) & finite

    inputs = LayerInputs(plan.layers, runner.side_of, runner.blocks, see)

    def begin(masks: TokenMasks) -> None:
        nonlocal begun
        begun += 1
        alive.clear()
        if begun == 1:
            bar.reset(total=None if runner.calls is None else len(runner.calls))
        else:
            bar.update()
        if begun == 2:
            _forget_later_stacks(survey, runner, turns, block_of)
        for recorder in survey.recorders.values():
            recorder.begin(masks)
        inputs.begin(masks)

    with ExitStack() as hooks:
        for recorder in survey.recorders.values():
            recorder.start()
            hooks.callback(recorder.stop)
        digest = hashlib.sha256()
        runner.run_model(begin, inputs=inputs, digest=digest if runner.sha256 is None else None)
    bar.update()
    report.calibration.update(calls=begun, sha256=runner.sha256 or digest.hexdigest())
    if begun == 0:
        raise ValueError("forward_loop did not call the model; it must run model(...) on the calibration data")
    if runner.team.size > 1:
        stopped = _agree(survey, runner, first_call, stopped, report)
    if stopped and any(item.calibrated and item.name not in survey.order for item in plan.layers):
        return take_survey(plan, runner, turns, report, block_of, bar, whole=True)
    _forget_later_stacks(survey, runner, turns, block_of)
    _check(survey, plan)
    return survey


def _agree(survey: Survey, runner: Runner, first_call: Mapping[str, int], stopped: bool, report: Report) -> bool:
    """What the data of all processes show together, as one process would see it that goes over the batches in their
    order. -> whether any process has stopped its calls early."""
    team = runner.team
    seen = {name: (first_call[name] * team.size + team.rank, place) for name, place in survey.order.items()}
    finite = {name: bool(value) for name, value in survey.finite.items()}
    found = team.meet("the survey", (seen, survey.stage_of, finite, stopped, report.calibration))
    firsts: dict[str, tuple[int, int]] = {}
    for theirs, _, _, _, _ in found:
        for name, place in theirs.items():
            firsts[name] = min(place, firsts.get(name, place))
    survey.order = {name: number for number, name in enumerate(sorted(firsts, key=firsts.__getitem__))}
    _, first_stages, _, _, _ = found[0]  # rank 0 has the first batch
    survey.stage_of = {name: first_stages.get(name, name) for name in survey.order}
    survey.finite = {
        name: torch.tensor(all(values.get(name, True) for _, _, values, _, _ in found)) for name in survey.order
    }
    calibrations = [calibration for *_, calibration in found]
    report.calibration["calls"] = sum(calibration["calls"] for calibration in calibrations)
    if runner.sha256 is None:  # each process has data of its own
        together = "".join(calibration["sha256"] for calibration in calibrations)
        report.calibration["sha256"] = hashlib.sha256(together.encode()).hexdigest()
    return any(early for _, _, _, early, _ in found)


def whole_runs_because(model: nn.Module, stack: Stack, problem: str) -> str:
    """Why a stack is not run block by block, as the beginning of a sentence."""
    return f"stack {stack.name or type(model).__name__!r} is calibrated through the whole model, because {problem}"


def _forget_later_stacks(survey: Survey, runner: Runner, turns: Turns, block_of: Mapping[str, str | None]) -> None:
    """Only the stack that comes first sees dense inputs; the others are recorded when their turn comes."""
    if runner.config.sequential == "none" or not survey.order:
        return
    first = block_of[next(iter(survey.order))]
    for stack, recorder in survey.recorders.items():
        if first is None or first not in stack.names:
            if recorder.problem is not None:
                turns.check_whole_runs(whole_runs_because(runner.model, stack, recorder.problem))
            recorder.forget()


def _check(survey: Survey, plan: Plan) -> None:
    """Raise ValueError for layers without data; layers that need none come last in the order."""
    unseen = [item.name for item in plan.layers if item.name not in survey.order]
    fellows = {item.layer.mixture for item in plan.layers if item.name in survey.order}
    needing = [
        item.name
        for item in plan.layers
        if item.name in unseen
        and item.needs != "nothing"
        and (item.layer.mixture is None or item.layer.mixture not in fellows)
    ]
    if needing:
        raise ValueError(
            f"{len(needing)} layers saw no calibration data: {', '.join(needing[:8])}"
            f"{', ...' if len(needing) > 8 else ''}; give data that reaches them, or exclude them. (A layer whose "
            "parent reads its weight without calling it sees none either.)"
        )
    for name in unseen:
        survey.order[name] = len(survey.order)
        survey.stage_of[name] = name
    for name, finite in survey.finite.items():
        if not finite:
            raise ValueError(
                f"layer {name!r}: its input holds NaN or inf on the calibration data; check the data, or run the "
                "model in bfloat16 or float32"
            )
