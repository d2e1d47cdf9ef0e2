"""Fewer MLP channels, experts and blocks: `shrink`. The model stays a plain one of its class, and is repaired.

All is chosen before anything is cut: which blocks go, by the divergence without each; which channels stay, and how the
rest makes up for them, in one pass over what is left. Then each block is cut, and tuned against the dense one.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from modelopt_sparse.accuracy.distill import Teacher, distill_from, distillable
from modelopt_sparse.accuracy.fisher import with_metrics
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.dense import blocks_in_call_order, run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import run_eagerly
from modelopt_sparse.plan.options import Reconstruct
from modelopt_sparse.plan.plan import common_to_processes
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import Report, attach_report, attached_report
from modelopt_sparse.reports.values import Shrunk, in_words
from modelopt_sparse.run import InMemory, Run, calibrating
from modelopt_sparse.shrinking import experts as mixtures
from modelopt_sparse.shrinking import importance
from modelopt_sparse.shrinking.cutting import Choice, Cutting, skipped
from modelopt_sparse.shrinking.importance import Judge
from modelopt_sparse.shrinking.plan import STALE, checked, settings_of_run, shrink_config
from modelopt_sparse.shrinking.sizes import ShrinkRequest, TargetSizes, costs, decided

LITTLE = 0.25  # an error from which on a block had no channels to spare
TRIAL_EPOCHS = 1  # epochs of reconstruction that sizes within a budget are compared after
WORSE = 2  # so many sizes in a row that are worse than the best end the search


def shrink(
    model: nn.Module,
    *,
    mlp: float | int | str | None = None,
    blocks: float | int | str | Sequence[int] | None = None,
    experts: float | int | str | None = None,
    to: Mapping[str, int] | None = None,
    budget: Any = None,
    criterion: str | None = None,
    refit: bool | None = None,
    blocks_by: str = "kl",
    multiple_of: int | str = "auto",
    tensor_parallel: int = 1,
    kept: Any = None,
    **options: Any,
) -> nn.Module:
    """Make a model of transformers smaller, in place, and return it: a plain model, which `save_pretrained` writes.

    What goes:
      mlp: MLP channels of every block, as a share (0.25, "25%") or a number.
      blocks: how many blocks, or which: ``[17, 18]``.
      experts: of every mixture, as a share (rounded down) or a number. A token is worked on by as many as before.
      to: sizes by the config's own names instead: ``{"intermediate_size": 10752, "num_hidden_layers": 28}``.
      budget: what the model may cost: "70% params", "75% flops" of a call on 1024 tokens, "12GB bytes". For each number
        of blocks the widest MLPs are tried on a copy: least KL after refit and one epoch of reconstruction.
      kept: what stays, chosen by an earlier run: ``mts.report(model).shrunk``, or that section of sparsity.json. Of
        experts also a mapping of mixtures to those that stay, such as llm-compressor's REAP writes to a file.
    How:
      criterion: of channels: "gram" (default), "norm" or "minitron"; of experts: "reap" (default), "reap_sum" or
        "frequency". docs/shrink.md says what each is.
      blocks_by: "kl", one by one, by the KL divergence without each; "influence": how little they turn hidden states.
      refit: values of the layers that take channels, and of the last matrices of experts, in closed form; None: not of
        experts whose blocks are reconstructed, which does as well.
      multiple_of: a share of the channels is rounded to a multiple of this; "auto": the largest of 256, 128, 64 and 32
        that moves the width by no more than 2 % of it, else 8.
      tensor_parallel: on how many devices each MLP will be split: the part of each is such a multiple.
    ``options`` are those of `sparsify` that concern calibration data, quality, reconstruct, distill and the run. All
    matrices of a block are tuned.

    Parameters that change are new ones: an optimizer that was made before does not know them. The config in memory has
    the new numbers. Raises ValueError or TypeError with the model untouched for what cannot work. A repair that is
    broken off leaves a whole smaller model, and a note in its report.

    >>> model = mts.shrink(model, mlp=0.25, blocks=1, data_loader=batches, quality="balanced")
    >>> model.save_pretrained("smaller")
    """
    config = shrink_config(options)
    plain = checked(model)
    with Processes.of(config.distributed) as processes, run_eagerly(model):
        plan = plan_for(plain, Magnitude(), config)
        what_goes = mlp, blocks, experts, to, budget, kept, multiple_of, tensor_parallel
        request, sizes = decided(plain, plan, ShrinkRequest(*what_goes, criterion, refit, blocks_by), config)
        if processes.size > 1:
            facts = common_to_processes(plain, plan, config)
            facts |= {"the sizes": "; ".join(map(str, sizes)), "how it is chosen what goes": str(request)}
            processes.check_same(facts, "give all of them the same model and the same options")
        report = Report.begin((), [STALE], settings_of_run(config, request))
        shrink_to_one(Run(plain, plan, config, InMemory(), processes, report), sizes, request)
        processes.barrier()
    return model


def shrink_to_one(
    run: Run, sizes: Sequence[TargetSizes], request: ShrinkRequest, calls: list[Call] | None = None
) -> None:
    """The run behind `shrink` and `shrink_checkpoint`: shrink to the best of the sizes that a budget leaves, or to the
    only ones. ``calls`` are those of the calibration data, if it has been read before."""
    with calibrating(run.model):
        with run.part("calibration data"):
            data = CalibrationData.load(run, calls)
        if run.config.distill is not None:
            data = distillable(data, Magnitude())
        with run.part("budget"):
            best = sizes[0] if request.budget is None else _best(data, sizes, request)
        _shrink(data, best, request)


def _best(data: CalibrationData, tried: Sequence[TargetSizes], request: ShrinkRequest) -> TargetSizes:
    """Shrink a copy of the model to each of the sizes, with a short repair -> those with the least divergence."""
    run = data.run
    data.counted(data.output_of(0)[0] if data.calls else None)  # refused before any work
    options = run.config.reconstruct or Reconstruct()
    config = replace(run.config, reconstruct=replace(options, epochs=TRIAL_EPOCHS), distill=None)
    divergences: list[float] = []
    for sizes in tried:
        model: Any = copy.deepcopy(run.model)
        plan = plan_for(model, Magnitude(), config)
        trial = replace(run, model=model, plan=plan, config=config, report=Report.begin((), (), {}), fixed_orders=set())
        divergences.append(_shrink(replace(data, run=trial), sizes, request).kl["reconstructed"])
        if len(divergences) - divergences.index(min(divergences)) > WORSE:
            break
    measured = "; ".join(f"{sizes}: {kl:.4f}" for sizes, kl in zip(tried, divergences))
    measure, _ = in_words(run.report.settings.get("divergence"))
    trials = f"{measure} after {TRIAL_EPOCHS} epoch of reconstruction: {measured}"
    run.report.notes.append(f"budget {request.budget}: {trials}")
    return tried[divergences.index(min(divergences))]


def _shrink(data: CalibrationData, sizes: TargetSizes, request: ShrinkRequest) -> Shrunk:
    """The run on one screen."""
    run, report = data.run, data.run.report
    model: Any = run.model
    assert data.calls is not None
    batches = BatchNumbers.of_calls(data)
    if batches.tuned_on < 1:
        raise ValueError("shrink needs at least two calibration batches, one of which judges: give smaller batches")
    data, before = run_dense(data), costs(model)
    if (recalled := run.storage.choice) is not None:
        request = request._replace(kept=recalled["kept"])
        if sizes.depth is not None:
            sizes = replace(sizes, stay=recalled["kept"]["blocks"][sizes.depth.stack], named=True)
    cutting = Cutting.tried(data, sizes)
    with run.part("metrics"):
        data = with_metrics(data)
    with run.part("dense predictions"):
        # streamed, each call would read all weights
        judge = Judge(Teacher.of(data) if run.storage.resident else None, batches)
    shrunk = Shrunk({name: [*pair] for name, pair in sizes.changes.items()}, request.criterion)
    with run.part("choice of blocks"):
        cutting = _drop_blocks(cutting, data, judge, request, shrunk)
    with run.part(f"choice of {'experts' if sizes.experts else 'channels'}"), skipped(model, cutting.gone):
        choose = mixtures.experts if sizes.experts else importance.channels
        chosen = choose(data, cutting, batches, request) if cutting.groups else {}
        cutting = replace(cutting, choices=chosen)
        _measure(cutting, judge, request, run, shrunk)
    if recalled is None:
        run.storage.save_choice(asdict(shrunk))
    else:
        shrunk = Shrunk(**recalled)
    run.storage.block_names = cutting.names(run.plan)
    try:
        with run.part("blocks"):
            _repair(cutting, data)
        _complete(cutting, run, shrunk, before)
    except BaseException as error:
        if run.storage.resident:  # else another run goes on
            done = f"{len(report.blocks)} blocks repaired"
            report.notes.append(f"stopped by {type(error).__name__}: it is smaller, with {done}")
            _complete(cutting, run, shrunk, before)
        raise
    run = replace(run, plan=plan_for(model, Magnitude(), run.config))
    if run.config.reconstruct is not None:
        judge.measure("reconstructed", shrunk)
    if run.config.distill is not None:
        assert judge.teacher is not None  # `distillable` leaves distillation out where the model is streamed
        with run.part("distillation"):
            distill_from(replace(judge.teacher, data=replace(judge.teacher.data, run=run)), run)
        judge.measure("distilled", shrunk)
    return shrunk


def _drop_blocks(
    cutting: Cutting, data: CalibrationData, judge: Judge, request: ShrinkRequest, shrunk: Shrunk
) -> Cutting:
    """Choose the blocks that go, and try it."""
    depth, stay = cutting.sizes.depth, cutting.sizes.stay
    if depth is None:
        return cutting
    gone = len(depth.blocks) - len(stay)
    if not cutting.sizes.named and request.blocks_by == "influence":
        stay = importance.blocks_by_influence(data, judge.batches, depth, gone, shrunk)
    elif not cutting.sizes.named:
        stay = importance.blocks(judge, depth, gone, data.run, shrunk)
    if not cutting.sizes.named and not any(value for tried in shrunk.tried for value in tried.values()):
        problem = f"no block of {depth.stack!r} changes anything: the calibration data does not reach them"
        raise ValueError(f"{problem}: give data that does, or the blocks that stay by kept=")
    shrunk.kept["blocks"] = {depth.stack: [*stay]}
    return cutting.with_blocks(data, stay)


def _measure(cutting: Cutting, judge: Judge, request: ShrinkRequest, run: Run, shrunk: Shrunk) -> None:
    """Note what stays of channels or experts, and the divergence that it costs."""
    for choice in cutting.chosen:
        _note(choice, shrunk, run.report)
    for step in ("as is", "refit") if cutting.choices and request.refit else ("as is",):
        with cutting.in_calls(run.model, values=step == "refit"):
            judge.measure(step, shrunk)


def _note(choice: Choice, shrunk: Shrunk, report: Report) -> None:
    """Note what stays of one layer's channels, or of a mixture's experts, in the report."""
    name, tokens = choice.group.consumer.name, choice.tokens
    shrunk.kept.setdefault("mlp" if tokens is None else "experts", {})[name] = choice.stay.tolist()
    shrunk.scores[name] = [float(f"{score:.4g}") for score in choice.scores.tolist()]
    if choice.errors:
        shrunk.errors[name] = [*choice.errors]
    if tokens is not None:
        shrunk.tokens[name] = [int(count) for count in tokens.tolist()]
        if silent := (tokens == 0).nonzero().flatten().tolist():
            problem = f"no token reached experts {silent}: the data does not tell what they are for"
            report.notes.append(f"{name!r}: {problem}")
    elif choice.errors[1] > LITTLE:
        report.notes.append(f"{name!r} had little to spare: {choice.errors[1]:.1%} of its output is lost")


def _complete(cutting: Cutting, run: Run, shrunk: Shrunk, before: Mapping[str, int]) -> None:
    """Cut the rest, which needs no data, and leave the report. After a stop within it is called once more."""
    model: Any = run.model
    cutting.everything(model)
    both = {name: [before[name], new] for name, new in costs(model).items()}
    run.report.shrunk = replace(shrunk, costs=both, divergence=run.report.settings.get("divergence"))
    if (earlier := attached_report(model)) is not None and earlier.shrunk is not None:
        run.report.notes.append(f"the time before: {earlier.shrunk.summary()}")
    attach_report(model, run.report)


def _repair(cutting: Cutting, data: CalibrationData) -> None:
    """Cut each block, and tune it against the dense one. Blocks that go put out what they get from then on."""
    run, changed = data.run, False
    if run.config.reconstruct is None:
        for name, block in run.plan.named_blocks.items():
            with run.storage.open(block, run.report):
                cutting.block(block, name)
        return
    with ExitStack() as ending:
        tasks = blocks_in_call_order(run, data)
        with run.bar("reconstruct", "block", len(tasks)) as bar:
            for task in tasks:
                bar.say(task.name, *run.so_far())
                inputs, goes = task.inputs(), task.name in cutting.gone
                with run.storage.open(task.block, run.report) as write_sparse, inputs.on_device():
                    tuned = dense_goals(task, inputs, run)
                    if goes:
                        ending.enter_context(skipped(run.model, [task.name]))
                    if task.block is not None:
                        cutting.block(task.block, task.name)
                    changed |= goes or task.name in cutting.choices
                    if write_sparse is not None:  # by a run that was stopped
                        write_sparse()
                    elif tuned is not None and changed and not goes:
                        masks = dict.fromkeys(layer_plan.layer.parameter for layer_plan in task.layer_plans)
                        reconstruct(task, tuned, masks, {}, inputs, run)
                    inputs.advance()
                bar.update()
