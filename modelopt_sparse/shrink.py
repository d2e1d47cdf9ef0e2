"""Fewer MLP channels and fewer blocks: `shrink`. The model stays a plain one of its class, and is repaired.

All is chosen before anything is cut: which blocks go, by the divergence without each; which channels stay, and how the
rest makes up for them, in one pass over what is left. Then each block is cut, and tuned against the dense one.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.accuracy.choose import (
    Choice,
    Criterion,
    Judge,
    choose_blocks,
    choose_channels,
    skipped,
    with_channels,
)
from modelopt_sparse.accuracy.distill import Teacher, distill, logits_of
from modelopt_sparse.accuracy.fisher import with_metrics
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.blocks import blocks_in_call_order
from modelopt_sparse.calibration.forward import CalibrationData, call_model
from modelopt_sparse.calibration.run import InMemory, Run, calibrating
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import flat_tensors, input_device
from modelopt_sparse.model.hf import longest_window, writes_text
from modelopt_sparse.model.resize import Depth, Pool, Trial, clone, cut, pools, twin_of, write_config
from modelopt_sparse.model.wrappers import refuse_no_model, run_eagerly
from modelopt_sparse.plan.plan import common_to_processes
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.plan.shrinking import CRITERIA, ShrinkPlan, checked, kept_in, shrink_config, sizes_for
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.reports.report import Report, Shrunk, attach_report
from modelopt_sparse.values import check_choice, check_flag

LITTLE = 0.25  # an error from which on a block had no channels to spare
CALLS = {"seconds of 1 x 128 tokens": 128, "seconds of one token": 1}
TIMES = 5  # the least of so many is reported


def shrink(
    model: nn.Module,
    *,
    mlp: float | int | str | None = None,
    blocks: float | int | str | Sequence[int] | None = None,
    to: Mapping[str, int] | None = None,
    criterion: str = "gram",
    refit: bool = True,
    multiple_of: int | str = "auto",
    kept: Any = None,
    **options: Any,
) -> nn.Module:
    """Make a model of transformers smaller, in place, and return it: a plain model, which `save_pretrained` writes.

    What goes:
      mlp: MLP channels of every block, as a share (0.25, "25%") or a number.
      blocks: how many blocks, or which: ``[17, 18]``.
      to: sizes by the config's own names instead: ``{"intermediate_size": 10752, "num_hidden_layers": 28}``.
      kept: what stays, chosen by an earlier run: ``mts.report(model).shrunk``, or that section of sparsity.json.
    How:
      criterion: of channels: "gram", whose loss is least when the others make up for them; "norm", the norm of their
        values; "minitron", ModelOpt's score. Blocks go one after the other, by the KL divergence without each.
      refit: values of the layers that take the channels, in closed form.
      multiple_of: a share of the channels is rounded to a multiple of this; "auto": the largest of 256, 128, 64 and 32
        that moves the width by no more than 2 % of it, else 8.
    ``options`` are those of `sparsify` that concern calibration data, quality, reconstruct, distill and the run. All
    matrices of a block are tuned. Distillation takes 4 epochs at a rate of 0.1 unless it is told otherwise.

    Parameters that change are new ones: an optimizer that was made before does not know them. The config in memory has
    the new numbers. Raises ValueError or TypeError with the model untouched for what cannot work. A repair that is
    broken off leaves a whole smaller model, and a note in its report.

    >>> model = mts.shrink(model, mlp=0.25, blocks=1, data_loader=batches, quality="balanced")
    >>> model.save_pretrained("smaller")
    """
    refuse_no_model(model)
    check_choice("criterion", criterion, CRITERIA)
    check_flag("refit", refit)
    config = shrink_config(options)
    if config.data is None and config.data_loader is None:
        raise ValueError("shrink needs calibration data: give data_loader=, or data= with tokenizer=")
    plain = checked(model)
    with Processes.of(config.distributed) as processes, run_eagerly(model):
        config = config if processes.rank == 0 else replace(config, progress=False)
        plan = plan_for(plain, Magnitude(), config)
        sizes = sizes_for(plain, plan, mlp, blocks, to, multiple_of, kept, (1, 1024))
        if processes.size > 1:
            facts = common_to_processes(plain, plan, config) | {"the sizes": str(sizes.sizes)}
            processes.check_same(facts, "give all of them the same model and the same options")
        settings = {**config.settings(), "multiple_of": multiple_of, "refit": refit}
        run = Run(plain, plan, config, InMemory(), processes, Report.begin((), sizes.notes[:1], settings))
        with calibrating(model):
            _shrink(plain, sizes, run, criterion, refit, {} if kept is None else kept_in(kept))
    return model


def _shrink(
    model: PreTrainedModel, sizes: ShrinkPlan, run: Run, criterion: str, refit: bool, kept: Mapping[str, Any]
) -> None:
    """The run on one screen."""
    report = run.report
    with report.timed("calibration data"):
        data = CalibrationData.load(run)
    assert data.calls is not None
    batches = BatchNumbers.of(run.processes, len(data.calls), data.own_among(range(len(data.calls))))
    if batches.tuned_on < 1:
        raise ValueError("shrink needs at least two calibration batches, one of which judges: give smaller batches")
    narrow = _Cutting.of(sizes, run, data)
    with report.timed("metrics"):
        data = with_metrics(data)
    with report.timed("dense predictions"):
        judge = Judge(Teacher.of(data) if _has_logits(run, data) or run.config.distill else None, batches)
    shrunk = Shrunk({name: [*pair] for name, pair in sizes.sizes.items()}, "given" if kept else criterion)
    before = _costs(run, data)
    with report.timed("choice of blocks"):
        cutting = narrow.without_blocks(sizes, judge, shrunk)
        cutting.try_depth(data)
    with report.timed("choice of channels"), skipped(cutting.gone):
        how = Criterion(criterion, refit, kept.get("mlp", {}))
        cutting.choices = choose_channels(data, cutting.pools, judge, how) if cutting.pools else {}
        chosen = [choice for of_block in cutting.choices.values() for choice in of_block]
        _note(chosen, shrunk, report)
        for step, refitted in {"as is": False, **({"refit": True} if chosen and refit else {})}.items():
            with with_channels(chosen, refitted=refitted):
                cutting.measure(step, judge, shrunk)
    try:
        with report.timed("blocks"):
            _repair(cutting, data)
    except BaseException as error:
        done = len(report.blocks)
        report.notes.append(f"stopped by {type(error).__name__}: all is cut, and {done} blocks are reconstructed")
        raise
    finally:
        cutting.finish()
        report.shrunk = shrunk
        attach_report(model, report)
    after = replace(run, plan=plan_for(model, Magnitude(), run.config))
    if run.config.reconstruct is not None:
        cutting.measure("reconstructed", judge, shrunk)
    now = _costs(after, data)
    shrunk.costs.update({what: [old, now[what]] for what, old in before.items()})
    if run.config.distill is not None and judge.teacher is not None:
        with report.timed("distillation"):
            distill(replace(judge.teacher, data=replace(data, run=after)), after)
        cutting.measure("distilled", judge, shrunk)
    run.processes.barrier()


def _repair(cutting: "_Cutting", data: CalibrationData) -> None:
    """Cut each block, and tune it against the dense one. Blocks that go put out what they get from then on."""
    run = data.run
    if run.config.reconstruct is None:
        return
    changed = False
    with ExitStack() as ending:
        tasks = blocks_in_call_order(run, data, ending)
        with Progress("reconstruct", "block", len(tasks), show=run.config.progress) as bar:
            for task in tasks:
                bar.say(task.name, *run.so_far())
                inputs = task.inputs()
                with run.storage.open(task.block, run.report), inputs.on_device():
                    tuned = dense_goals(task, inputs, run)
                    if task.block in cutting.gone:
                        ending.enter_context(skipped([task.block]))
                        changed = True
                    elif task.block is not None:
                        changed |= cutting.cut(task.block)
                        if tuned and changed:
                            masks = dict.fromkeys(plan.layer.parameter for plan in task.layer_plans)
                            reconstruct(task, tuned, masks, {}, inputs, run)
                    inputs.advance()
                bar.update()


@dataclass
class _Cutting:
    """What is cut, and how far that is.

    model, narrow: the model, and its twin with another width. pools: block -> channels that go together.
    interleaved: block -> how tensors with several values for each channel are cut.
    twin, kept: with all changes, and the places of the blocks that stay; known when these are chosen.
    choices, done: by block, and the blocks that are cut.
    """

    run: Run
    model: PreTrainedModel
    twin: PreTrainedModel
    pools: dict[nn.Module, list[Pool]]
    interleaved: dict[nn.Module, bool]
    depth: Depth | None = None
    kept: list[int] = field(default_factory=list)
    choices: dict[nn.Module, list[Choice]] = field(default_factory=dict)
    done: set[nn.Module] = field(default_factory=set)

    @classmethod
    def of(cls, sizes: ShrinkPlan, run: Run, data: CalibrationData) -> "_Cutting":
        """Try on the first batch how channels are cut. Raises ValueError if the model then computes something else."""
        model: Any = run.model
        twin = twin_of(model, sizes.width)
        of_blocks: dict[nn.Module, list[Pool]] = {}
        trials: dict[nn.Module, Trial] = {}
        for stack in run.plan.stacks if sizes.width else ():
            for name, block in zip(stack.names, stack.blocks):
                layers = [plan.layer for plan in run.plan.layers if plan.block == name]
                if found := pools(block, twin.get_submodule(name), layers):
                    of_blocks[block] = found
                    trials[block] = Trial(name, block, twin.get_submodule(name), found)
        with ExitStack() as hooks:
            for trial in trials.values():
                hooks.enter_context(trial.hanging())
            if trials:
                data.run_model(lambda masks: None, numbers=[0] if data.calls else [])
        own = [trial.interleaved for trial in trials.values()] if data.calls else None
        ways = next(way for way in run.processes.all_gather("how channels are cut", own) if way is not None)
        return cls(run, model, twin, of_blocks, dict(zip(of_blocks, ways)))

    def without_blocks(self, sizes: ShrinkPlan, judge: Judge, shrunk: Shrunk) -> "_Cutting":
        """Choose the blocks that go."""
        depth = sizes.depth
        if depth is None:
            return self
        if sizes.kept_blocks is not None:
            kept = list(sizes.kept_blocks)
        else:
            old, new = sizes.sizes[depth.name]
            kept, tried = choose_blocks(judge, depth, old - new, self.run)
            shrunk.tried.extend(tried)
        shrunk.kept["blocks"] = {depth.stack.name: kept}
        gone = [block for place, block in enumerate(depth.stack.blocks) if place not in kept]
        pools = {block: found for block, found in self.pools.items() if block not in gone}
        return replace(self, depth=depth, kept=kept, pools=pools, twin=depth.twin(kept, sizes.width))

    @property
    def gone(self) -> list[nn.Module]:
        blocks = () if self.depth is None else self.depth.stack.blocks
        return [block for place, block in enumerate(blocks) if place not in self.kept]

    def try_depth(self, data: CalibrationData) -> None:
        """Raise ValueError if the model computes something else without the blocks than with them skipped."""
        if self.depth is None or not data.calls:
            return
        small, twin = clone(self.model, configs=True), self.depth.twin(self.kept)
        replace(self.depth, model=small).drop(self.kept)
        cut(small, twin, {})
        write_config(small, twin)
        outputs = []
        for model, gone in ((self.model, self.gone), (small, [])):
            with skipped(gone):
                outputs.append(_output(replace(self.run, model=model), data))
        if not torch.allclose(*outputs, rtol=1e-2, atol=1e-2 * float(outputs[0].abs().mean())):
            raise ValueError(
                f"this {type(self.model).__name__} computes something else without the blocks "
                f"{[place for place in range(len(self.depth.stack.blocks)) if place not in self.kept]} than with them "
                "skipped: others read from them, or know their own place"
            )

    def measure(self, step: str, judge: Judge, shrunk: Shrunk) -> None:
        if judge.teacher is not None:
            shrunk.kl[step] = judge.kl()

    def cut(self, block: nn.Module) -> bool:
        """Cut a block in place, once -> whether anything of it was cut. May be called again after it was broken off."""
        if block in self.done or block not in self.choices:
            return False
        cuts = {}
        for choice in self.choices[block]:
            cuts |= choice.pool.cuts(choice.kept, interleaved=self.interleaved[block])
        cut(block, self._twin_of(block), cuts)
        for choice in self.choices[block]:
            layer = choice.pool.taker
            layer.values.copy_(layer.unmatrix(choice.values))
        self.done.add(block)
        return True

    def _twin_of(self, block: nn.Module) -> nn.Module:
        for stack in self.run.plan.stacks:
            if block in stack.blocks:
                place = stack.blocks.index(block)
                of_depth = self.depth is not None and self.depth.stack is stack
                place = self.kept.index(place) if of_depth else place
                return list(self.twin.get_submodule(stack.name).children())[place]
        raise AssertionError("a block is in a stack")

    def finish(self) -> None:
        """Cut what is not cut yet, which needs no data, and write the config."""
        for block in self.choices:
            self.cut(block)
        if self.depth is not None:
            self.depth.drop(self.kept)
        cut(self.model, self.twin, {})
        write_config(self.model, self.twin)


def _note(chosen: Sequence[Choice], shrunk: Shrunk, report: Report) -> None:
    """What stays of the channels, for the report."""
    for choice in chosen:
        name = choice.pool.taker.name
        shrunk.kept.setdefault("mlp", {})[name] = choice.kept.tolist()
        shrunk.scores[name] = [float(f"{score:.4g}") for score in choice.scores.tolist()]
        shrunk.errors[name] = [*choice.errors]
        if choice.errors[1] > LITTLE:
            report.notes.append(f"{name!r} had little to spare: {choice.errors[1]:.1%} of its output is lost")


def _output(run: Run, data: CalibrationData) -> Tensor:
    """What the model puts out in the first call."""
    outputs: list[Any] = []
    with run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
        call_model(run, data.calls[0], 0)  # type: ignore[index]  # there is one
    return flat_tensors(outputs[0])[0].float()


def _has_logits(run: Run, data: CalibrationData) -> bool:
    found: list[bool] = []
    with run.model.register_forward_hook(lambda module, args, output: found.append(logits_of(output) is not None)):
        data.run_model(lambda masks: None, numbers=[0] if data.calls else [])
    return any(run.processes.all_gather("whether there are logits", any(found)))


def _costs(run: Run, data: CalibrationData) -> dict[str, float]:
    """Parameters, bytes, and the seconds of a call on this machine, of text models."""
    parameters = list(run.model.parameters())
    costs: dict[str, float] = {"parameters": sum(each.numel() for each in parameters)}
    costs["bytes"] = sum(each.numel() * each.element_size() for each in parameters)
    ids = next((x for x in flat_tensors((data.calls[0].args, data.calls[0].kwargs))), None) if data.calls else None
    longest = longest_window(run.model) or max(CALLS.values())
    for what, length in CALLS.items():
        if ids is not None and length <= longest and writes_text(run.model):
            row = ids[:1].repeat(1, -(-length // ids.shape[1]))[:, :length].to(input_device(run.model))
            seconds = []
            for _ in range(TIMES):
                began = time.perf_counter()
                run.model(input_ids=row)
                seconds.append(time.perf_counter() - began)
            costs[what] = min(seconds)
    return costs
