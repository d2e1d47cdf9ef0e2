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

from modelopt_sparse.accuracy import choose
from modelopt_sparse.accuracy.choose import Choice, Criterion, Judge, skipped, with_channels
from modelopt_sparse.accuracy.distill import Teacher, distill, logits_of
from modelopt_sparse.accuracy.fisher import with_metrics
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.blocks import blocks_in_call_order
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.run import InMemory, Run, calibrating
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import flat_tensors, input_device
from modelopt_sparse.model.hf import longest_window, writes_text
from modelopt_sparse.model.resize import Depth, Pool, clone, cut, pools, twin_of, write_config
from modelopt_sparse.model.wrappers import run_eagerly
from modelopt_sparse.plan.plan import common_to_processes
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.plan.shrinking import (
    CRITERIA,
    STALE,
    Asked,
    Sizes,
    checked,
    costs,
    kept_in,
    layers_by_block,
    shrink_config,
    sizes_for,
)
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.reports.report import Report, Shrunk, attach_report
from modelopt_sparse.values import check_choice, check_flag

LITTLE = 0.25  # an error from which on a block had no channels to spare
SAME = 0.1  # what cutting may change by rounding, as a share of what zeros in place of what goes change
CALLS = {"seconds of 1 x 128 tokens": 128, "seconds of one token": 1}
TIMES, LONG = 5, 0.5  # the least of so many is reported, or of more until they took so long


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
    check_choice("criterion", criterion, CRITERIA)
    check_flag("refit", refit)
    config = shrink_config(options)
    if config.data is None and config.data_loader is None:
        raise ValueError("shrink needs calibration data: give data_loader=, or data= with tokenizer=")
    plain = checked(model)
    choice = {} if kept is None else kept_in(kept)
    with Processes.of(config.distributed) as processes, run_eagerly(model):
        config = config if processes.rank == 0 else replace(config, progress=False)
        plan = plan_for(plain, Magnitude(), config)
        sizes = sizes_for(plain, plan, Asked(mlp, blocks, to, kept, multiple_of))
        if processes.size > 1:
            facts = common_to_processes(plain, plan, config) | {"the sizes": str((sizes.width, sizes.go))}
            processes.check_same(facts, "give all of them the same model and the same options")
        settings = {**config.settings(), "multiple_of": multiple_of, "refit": refit}
        run = Run(plain, plan, config, InMemory(), processes, Report.begin((), [STALE], settings))
        with calibrating(model):
            _shrink(run, sizes, Criterion("given" if choice else criterion, refit, choice.get("mlp", {})))
    return model


def _shrink(run: Run, sizes: Sizes, how: Criterion) -> None:
    """The run on one screen."""
    report, model = run.report, run.model
    with report.timed("calibration data"):
        data = CalibrationData.load(run)
    assert data.calls is not None
    batches = BatchNumbers.of(run.processes, len(data.calls), data.own_among(range(len(data.calls))))
    if batches.tuned_on < 1:
        raise ValueError("shrink needs at least two calibration batches, one of which judges: give smaller batches")
    cutting = _Cutting.tried(data, sizes)
    with report.timed("metrics"):
        data = with_metrics(data)
    with report.timed("dense predictions"):
        judge = Judge(Teacher.of(data) if _has_logits(data) or run.config.distill else None, batches)
    old = {name: [*pair] for name, pair in sizes.width.items()}
    shrunk, before = Shrunk(old, how.name), _costs(data)
    with report.timed("choice of blocks"):
        cutting = cutting.without_blocks(data, sizes, judge, shrunk)
    with report.timed("choice of channels"), skipped(cutting.gone):
        cutting.choices = choose.channels(data, cutting.pools, judge, how) if cutting.pools else {}
        chosen = [choice for of_block in cutting.choices.values() for choice in of_block]
        _note(chosen, shrunk, report)
        for step in ("as is", "refit") if chosen and how.refit else ("as is",):
            with with_channels(chosen, refitted=step == "refit"):
                judge.measure(step, shrunk)
    try:
        with report.timed("blocks"):
            _repair(cutting, data)
    except BaseException as error:
        report.notes.append(
            f"stopped by {type(error).__name__}: it is smaller, with {len(report.blocks)} blocks repaired"
        )
        raise
    finally:
        cutting.finish(model)
        report.shrunk = shrunk
        attach_report(model, report)
    run = replace(run, plan=plan_for(model, Magnitude(), run.config))
    data = replace(data, run=run)
    if run.config.reconstruct is not None:
        judge.measure("reconstructed", shrunk)
    now = _costs(data)
    shrunk.costs.update({what: [old, now[what]] for what, old in before.items()})
    if run.config.distill is not None and judge.teacher is not None:
        with report.timed("distillation"):
            distill(replace(judge.teacher, data=data), run)
        judge.measure("distilled", shrunk)
    run.processes.barrier()


def _repair(cutting: "_Cutting", data: CalibrationData) -> None:
    """Cut each block, and tune it against the dense one. Blocks that go put out what they get from then on."""
    run, changed = data.run, False
    if run.config.reconstruct is None:
        return
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
                    elif task.name in cutting.choices:
                        cutting.cut(run.model, task.name)
                    changed |= task.block in cutting.gone or task.name in cutting.choices
                    if tuned and changed and task.block not in cutting.gone:
                        masks = dict.fromkeys(plan.layer.parameter for plan in task.layer_plans)
                        reconstruct(task, tuned, masks, {}, inputs, run)
                    inputs.advance()
                bar.update()


@dataclass
class _Cutting:
    """What is cut of a model, and how far that is.

    twin: as small as the model will be, as far as that is chosen. pools: block -> channels that go together.
    interleaved: how tensors with several values for each channel are cut.
    places: those of the blocks of ``depth`` that stay. choices, done: by block, and those that are cut.
    """

    twin: PreTrainedModel
    pools: dict[str, list[Pool]]
    interleaved: bool = False
    depth: Depth | None = None
    places: list[int] = field(default_factory=list)
    choices: dict[str, list[Choice]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    @classmethod
    def tried(cls, data: CalibrationData, sizes: Sizes) -> "_Cutting":
        """Try with some channels how tensors are cut. Raises ValueError if the model computes something else then."""
        model: Any = data.run.model
        twin = twin_of(model, sizes.narrow)
        blocks = layers_by_block(data.run.plan) if sizes.width else {}
        wide = {name: pools(block, twin.get_submodule(name), layers) for name, (block, layers) in blocks.items()}
        cutting = cls(twin, {name: of_block for name, of_block in wide.items() if of_block})
        for name, of_block in cutting.pools.items():
            cutting.choices[name] = [choose.any_channels(pool) for pool in of_block]
        if cutting.choices and cutting.differs(data):
            cutting.interleaved = True
            if cutting.differs(data):
                problem = f"this {type(model).__name__} computes something else with fewer channels"
                raise ValueError(f"{problem} than with zeros in their place: its MLPs cannot be cut")
        return replace(cutting, choices={})

    def without_blocks(self, data: CalibrationData, sizes: Sizes, judge: Judge, shrunk: Shrunk) -> "_Cutting":
        """Choose the blocks that go, and try it."""
        if sizes.depth is None:
            return self
        (places, *others), depth = sizes.choices(), sizes.depth
        if others or isinstance(sizes.go, int):
            places = choose.blocks(judge, depth, len(depth.stack.blocks) - len(places), data.run, shrunk)
        shrunk.sizes[depth.name] = [len(depth.stack.blocks), len(places)]
        shrunk.kept["blocks"] = {depth.stack.name: places}
        if _Cutting(depth.twin(places), {}, depth=depth, places=places).differs(data):
            problem = f"this {type(data.run.model).__name__} computes something else with the blocks {places} alone"
            raise ValueError(f"{problem} than with the others skipped: blocks know their places, or read from others")
        gone = [name for place, name in enumerate(depth.stack.names) if place not in places]
        left = {name: of_block for name, of_block in self.pools.items() if name not in gone}
        return replace(self, twin=depth.twin(places, sizes.narrow), pools=left, depth=depth, places=places)

    @property
    def gone(self) -> list[nn.Module]:
        """The blocks that go."""
        blocks = () if self.depth is None else self.depth.stack.blocks
        return [block for place, block in enumerate(blocks) if place not in self.places]

    def differs(self, data: CalibrationData) -> bool:
        """Whether a model that is cut so computes something else than this one with zeros for what goes."""
        chosen = [choice for of_block in self.choices.values() for choice in of_block]
        model: Any = data.run.model
        small = clone(model)
        replace(self, done=set()).finish(small, values=False)
        run = replace(data.run, model=small, plan=plan_for(small, Magnitude(), data.run.config))
        differs = False
        if data.calls:
            dense, narrow = _output(data), _output(replace(data, run=run))
            with skipped(self.gone), with_channels(chosen, refitted=False):
                wanted = _output(data)
            differs = not float((narrow - wanted).norm()) <= SAME * float((wanted - dense).norm())
        return any(data.run.processes.all_gather("how the model is cut", differs))

    def cut(self, model: PreTrainedModel | nn.Module, name: str, *, values: bool = True) -> None:
        """Cut a block in place, once; ``values``: with the new ones. May be called again after it was broken off."""
        if name in self.done:
            return
        cuts: dict[tuple[str, int], Tensor] = {}
        for choice in self.choices[name]:
            cuts |= choice.pool.cuts(choice.stay, interleaved=self.interleaved)
        new_name = name
        if self.depth is not None and name in self.depth.stack.names:
            new_name = self.depth.stack.names[self.places.index(self.depth.stack.names.index(name))]
        cut(model.get_submodule(name), self.twin.get_submodule(new_name), cuts)
        for choice in self.choices[name] if values else ():
            layer = choice.pool.taker
            layer.values.copy_(layer.unmatrix(choice.values))
        self.done.add(name)

    def finish(self, model: Any, *, values: bool = True) -> None:
        """Cut what is not cut yet, which needs no data, and write the config."""
        for name in self.choices:
            self.cut(model, name, values=values)
        if self.depth is not None:
            replace(self.depth, model=model).drop(self.places)
        cut(model, self.twin, {})
        write_config(model, self.twin)


def _note(chosen: Sequence[Choice], shrunk: Shrunk, report: Report) -> None:
    """What stays of the channels, for the report."""
    for choice in chosen:
        name = choice.pool.taker.name
        shrunk.kept.setdefault("mlp", {})[name] = choice.stay.tolist()
        shrunk.scores[name] = [float(f"{score:.4g}") for score in choice.scores.tolist()]
        shrunk.errors[name] = [*choice.errors]
        if choice.errors[1] > LITTLE:
            report.notes.append(f"{name!r} had little to spare: {choice.errors[1]:.1%} of its output is lost")


def _first_call(data: CalibrationData) -> Any:
    """What the model puts out in the first call of this process; None if it has none."""
    outputs: list[Any] = []
    with data.run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
        data.run_model(lambda masks: None, numbers=[0] if data.calls else [])
    return outputs[0] if outputs else None


def _output(data: CalibrationData) -> Tensor:
    return torch.nan_to_num(flat_tensors(_first_call(data))[0].float(), posinf=0, neginf=0)


def _has_logits(data: CalibrationData) -> bool:
    own = logits_of(_first_call(data)) is not None
    return any(data.run.processes.all_gather("whether there are logits", own))


def _costs(data: CalibrationData) -> dict[str, float]:
    """Parameters, bytes, and, of models that write text, the seconds of a call on this machine."""
    model: Any = data.run.model
    measured: dict[str, float] = {**costs(model)}
    longest = longest_window(model) or max(CALLS.values())
    for what, length in CALLS.items() if writes_text(model) else ():
        ids = next((flat_tensors((call.args, call.kwargs))[0][:1] for call in data.calls or ()), torch.empty(0))
        if length <= longest and not ids.is_floating_point():
            row = ids.repeat(1, -(-length // ids.shape[1]))[:, :length].to(input_device(model))
            seconds: list[float] = []
            while len(seconds) < TIMES or sum(seconds) < LONG:
                began = time.perf_counter()
                model(input_ids=row)
                seconds.append(time.perf_counter() - began)
            measured[what] = min(seconds)
    return measured
