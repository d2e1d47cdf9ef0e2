"""Fewer MLP channels, experts and blocks: `shrink`. The model stays a plain one of its class, and is repaired.

All is chosen before anything is cut: which blocks go, by the divergence without each; which channels stay, and how the
rest makes up for them, in one pass over what is left. Then each block is cut, and tuned against the dense one.
"""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.accuracy.fisher import with_metrics
from modelopt_sparse.accuracy.repair import Teacher, dense_goals, distill, reconstruct
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.blocks import blocks_in_call_order
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.dense import run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.run import InMemory, Run, calibrating
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import flat_tensors, input_device, run_eagerly
from modelopt_sparse.model.hf import longest_window, writes_text
from modelopt_sparse.model.output import in_words
from modelopt_sparse.plan.options import Reconstruct, SparsifyConfig
from modelopt_sparse.plan.plan import Plan, common_to_processes
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import Report, attach_report
from modelopt_sparse.reports.text import Progress
from modelopt_sparse.reports.values import Shrunk
from modelopt_sparse.shrinking import importance as choose
from modelopt_sparse.shrinking.importance import (
    Choice,
    Criterion,
    ExpertChoice,
    Judge,
    mixed_up,
    other_order,
    skipped,
    some_experts,
    with_channels,
)
from modelopt_sparse.shrinking.plan import (
    BLOCKS_BY,
    CRITERIA,
    EXPERT_CRITERIA,
    STALE,
    Asked,
    Sizes,
    checked,
    costs,
    kept_in,
    said_of,
    settings_of_run,
    shrink_config,
    sizes_for,
)
from modelopt_sparse.shrinking.resize import ExpertPool, Pool, clone, cut, select, write_aliases
from modelopt_sparse.values import check_choice, check_flag

LITTLE = 0.25  # an error from which on a block had no channels to spare
# what rounding may change: of channels as a share of what zeros in their place change, of experts in another order as a
# share of what matrices of other experts change
SAME = 0.1
CALLS = {"seconds of 1 x 128 tokens": 128, "seconds of one token": 1}
SHORT = 1  # epochs of reconstruction that sizes within a budget are compared after
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
    protect: Mapping[str, Sequence[int]] | None = None,
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
      protect: experts that stay whatever their scores: ``{"*.layers.3.*": [0, 7]}``, by globs of mixtures.
    How:
      criterion: of channels: "gram" (default), "norm" or "minitron"; of experts: "reap" (default), "reap_sum" or
        "frequency". docs/shrink.md and docs/experts.md say what each is.
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
        config = config if processes.rank == 0 else replace(config, progress=False)
        plan = plan_for(plain, Magnitude(), config)
        asked = Asked(mlp, blocks, experts, to, budget, kept, protect, multiple_of, tensor_parallel).in_full(plan)
        sizes = sizes_for(plain, plan, asked)
        how = criterion_of(asked, sizes[0], config, criterion=criterion, refit=refit, blocks_by=blocks_by)
        if processes.size > 1:
            facts = common_to_processes(plain, plan, config)
            facts |= {"the sizes": "; ".join(map(said_of, sizes)), "how it is chosen what goes": str(how)}
            processes.check_same(facts, "give all of them the same model and the same options")
        report = Report.begin((), [STALE], settings_of_run(config, asked, refit=how.refit))
        shrink_to_one(Run(plain, plan, config, InMemory(), processes, report), sizes, how, budget)
        processes.barrier()
    return model


def criterion_of(
    asked: Asked,
    sizes: Sizes,
    config: SparsifyConfig,
    *,
    criterion: str | None = None,
    refit: bool | None = None,
    blocks_by: str = BLOCKS_BY[0],
) -> Criterion:
    """The options of `shrink` that say how it is chosen what goes, checked."""
    criteria = EXPERT_CRITERIA if sizes.experts else CRITERIA
    criterion = criteria[0] if criterion is None else criterion
    check_choice("criterion", criterion, criteria)
    check_choice("blocks_by", blocks_by, BLOCKS_BY)
    refit = sizes.refits(config, refit)
    check_flag("refit", refit)
    choice = {} if asked.kept is None else kept_in(asked.kept)
    fixed = choice.get("mlp", {}), blocks_by, choice.get("experts", {})
    return Criterion("given" if choice else criterion, refit, *fixed)


def shrink_to_one(
    run: Run, sizes: Sequence[Sizes], how: Criterion, budget: Any = None, calls: list[Call] | None = None
) -> None:
    """The run behind `shrink` and `shrink_checkpoint`: to the best of the sizes that a ``budget`` leaves, or to the
    only ones. ``calls`` are those of the calibration data, if it has been read before."""
    with calibrating(run.model):
        with run.report.timed("calibration data"):
            data = CalibrationData.load(run, calls)
        with run.report.timed("budget"):
            best = sizes[0] if budget is None else _best(data, sizes, how, budget)
        _shrink(data, best, how)


def _best(data: CalibrationData, tried: Sequence[Sizes], how: Criterion, budget: Any) -> Sizes:
    """Of several sizes those with the least divergence after a short repair, each on a copy of the model."""
    run = data.run
    data.counted(_first_call(data))  # refused before any work
    options = run.config.reconstruct or Reconstruct()
    config = replace(run.config, reconstruct=replace(options, epochs=SHORT), distill=None)
    divergences: list[float] = []
    for sizes in tried:
        model: Any = copy.deepcopy(run.model)
        plan = plan_for(model, Magnitude(), config)
        trial = replace(run, model=model, plan=plan, config=config, report=Report.begin((), (), {}), known={})
        _shrink(replace(data, run=trial), sizes.of(model, plan), how)
        shrunk = trial.report.shrunk
        assert shrunk is not None
        divergences.append(shrunk.kl["reconstructed"])
        if len(divergences) - divergences.index(min(divergences)) > WORSE:
            break
    said = "; ".join(f"{said_of(sizes)}: {kl:.4f}" for sizes, kl in zip(tried, divergences))
    by, _ = in_words(run.report.settings.get("divergence"))
    run.report.notes.append(f"budget {budget}: {by} after {SHORT} epoch of reconstruction: {said}")
    return tried[divergences.index(min(divergences))]


def _shrink(data: CalibrationData, sizes: Sizes, how: Criterion) -> None:
    """The run on one screen."""
    run, report = data.run, data.run.report
    model: Any = run.model
    assert data.calls is not None
    batches = BatchNumbers.of_calls(data)
    if batches.tuned_on < 1:
        raise ValueError("shrink needs at least two calibration batches, one of which judges: give smaller batches")
    data, before = run_dense(data), costs(model)
    if (recalled := run.storage.recall()) is not None:
        kept = recalled["kept"]
        sizes, how = sizes.chosen(kept), replace(how, fixed=kept.get("mlp", {}), experts=kept.get("experts", {}))
    cutting = _Cut.tried(data, sizes)
    with report.timed("metrics"):
        data = with_metrics(data)
    with report.timed("dense predictions"):
        # streamed, each call would read all weights
        judge = Judge(Teacher.of(data) if run.storage.resident else None, batches)
    shrunk = Shrunk({name: [*pair] for name, pair in sizes.changes.items()}, how.name)
    with report.timed("choice of blocks"):
        cutting = cutting.without_blocks(data, judge, how, shrunk)
    with report.timed("choice of channels"), skipped(cutting.gone):
        cutting = replace(cutting, choices=choose.channels(data, cutting.pools, judge, how) if cutting.pools else {})
        _note(cutting.chosen, shrunk, report)
        steps = ("as is", "refit") if cutting.chosen and how.refit else ("as is",)
        for step in () if cutting.mixtures else steps:
            with with_channels(cutting.chosen, refitted=step == "refit"):
                judge.measure(step, shrunk)
    with report.timed("choice of experts"), skipped(cutting.gone):
        cutting = cutting.without_experts(data, judge, how, shrunk) if cutting.mixtures else cutting
    if recalled is None:
        run.storage.keep(asdict(shrunk))
    else:
        shrunk = Shrunk(**recalled)
    run.storage.write_as(cutting.names(run.plan))
    seconds = _seconds_of_calls(data, cutting) if run.storage.resident else {}
    try:
        with report.timed("blocks"):
            _repair(cutting, data)
    except BaseException as error:
        if run.storage.resident:  # else another run goes on
            done = f"{len(report.blocks)} blocks repaired"
            report.notes.append(f"stopped by {type(error).__name__}: it is smaller, with {done}")
            _complete(cutting, run, shrunk, before, seconds)
        raise
    _complete(cutting, run, shrunk, before, seconds)
    run = replace(run, plan=plan_for(model, Magnitude(), run.config))
    if run.config.reconstruct is not None:
        judge.measure("reconstructed", shrunk)
    if run.config.distill is not None and judge.teacher is not None:
        with report.timed("distillation"):
            distill(replace(judge.teacher, data=replace(data, run=run)), run)
        judge.measure("distilled", shrunk)


def _complete(
    cutting: "_Cut", run: Run, shrunk: Shrunk, before: Mapping[str, int], seconds: Mapping[str, list[float]]
) -> None:
    """Cut the rest, which needs no data, and leave the report."""
    model: Any = run.model
    cutting.everything(model)
    shrunk.costs.update({what: [before[what], now] for what, now in costs(model).items()})
    shrunk.costs.update(seconds)
    run.report.shrunk = shrunk
    attach_report(model, run.report)


def _repair(cutting: "_Cut", data: CalibrationData) -> None:
    """Cut each block, and tune it against the dense one. Blocks that go put out what they get from then on."""
    run, changed = data.run, False
    if run.config.reconstruct is None:
        for name, block in run.plan.named_blocks.items():
            with run.storage.open(block, run.report):
                cutting.block(block, name)
        return
    with ExitStack() as ending:
        tasks = blocks_in_call_order(run, data)
        with Progress("reconstruct", "block", len(tasks), show=run.config.progress) as bar:
            for task in tasks:
                bar.say(task.name, *run.so_far())
                inputs, goes = task.inputs(), task.block in cutting.gone
                with run.storage.open(task.block, run.report) as write_sparse, inputs.on_device():
                    tuned = dense_goals(task, inputs, run)
                    if task.block is not None and goes:
                        ending.enter_context(skipped([task.block]))
                    if task.block is not None:
                        cutting.block(task.block, task.name)
                    changed |= goes or task.name in cutting.cut_names
                    if write_sparse is not None:  # by a run that was stopped
                        write_sparse()
                    elif tuned and changed and not goes:
                        masks = dict.fromkeys(plan.layer.parameter for plan in task.layer_plans)
                        reconstruct(task, tuned, masks, {}, inputs, run)
                    inputs.advance()
                bar.update()


@dataclass(frozen=True)
class _Cut:
    """What is cut of a model.

    narrow: its twin with fewer channels or experts, and all blocks. pools, mixtures: block -> channels that go
    together, and mixtures of experts. choices, experts: block -> which of them stay. stay: places of the blocks that
    do, once they are chosen.
    """

    sizes: Sizes
    narrow: PreTrainedModel
    pools: Mapping[str, list[Pool]]
    choices: Mapping[str, list[Choice]] = field(default_factory=dict)
    stay: Sequence[int] | None = None
    mixtures: Mapping[str, list[ExpertPool]] = field(default_factory=dict)
    experts: Mapping[str, list[ExpertChoice]] = field(default_factory=dict)

    @classmethod
    def tried(cls, data: CalibrationData, sizes: Sizes) -> "_Cut":
        """Try with some channels, or experts, how tensors are cut. Raises ValueError if the model computes something
        else then."""
        model: Any = data.run.model
        narrow = sizes.narrow(model)
        pools, mixtures = sizes.pools(model, data.run.plan)
        if sizes.experts:
            mixtures = {name: [sizes.guarded(pool) for pool in pools] for name, pools in mixtures.items()}
            return cls(sizes, narrow, {}, mixtures=mixtures).with_experts_tried(data)
        for interleaved in (False, True):
            pools = {name: [replace(pool, interleaved=interleaved) for pool in each] for name, each in pools.items()}
            some = {name: [choose.any_channels(pool) for pool in each] for name, each in pools.items()}
            if not pools or not cls(sizes, narrow, pools, some).differs(data):
                return cls(sizes, narrow, pools)
        raise ValueError("the model computes something else with fewer channels than with zeros: MLPs cannot be cut")

    def without_blocks(self, data: CalibrationData, judge: Judge, how: Criterion, shrunk: Shrunk) -> "_Cut":
        """Choose the blocks that go, and try it."""
        sizes, depth, stay = self.sizes, self.sizes.depth, self.sizes.stay
        model: Any = data.run.model
        if depth is None:
            return self
        gone = len(depth.stack.blocks) - len(stay)
        if not sizes.named and how.blocks == "influence":
            stay = choose.blocks_by_influence(data, judge.batches, depth, gone, shrunk)
        elif not sizes.named:
            stay = choose.blocks(judge, depth, gone, data.run, shrunk)
        shrunk.kept["blocks"] = {depth.stack.name: [*stay]}
        if _Cut(replace(sizes, width={}, experts={}), model, {}, stay=stay).differs(data):
            what = f"the model computes something else with the blocks {[*stay]} alone than with the others skipped"
            raise ValueError(f"{what}: blocks know their places, or read from others")
        gone_names = {*depth.stack.names} - {depth.stack.names[place] for place in stay}
        pools, mixtures = (
            {name: of_block for name, of_block in each.items() if name not in gone_names}
            for each in (self.pools, self.mixtures)
        )
        return replace(self, pools=pools, mixtures=mixtures, stay=stay)

    def with_experts_tried(self, data: CalibrationData) -> "_Cut":
        """Raises ValueError if the model computes something else with the same experts in another order, as experts are
        no equals then, or if it cannot be called with fewer."""
        model: Any = data.run.model
        fewer = {name: [some_experts(pool) for pool in pools] for name, pools in self.mixtures.items()}

        def reordered(order: Callable[[ExpertPool], Mapping[tuple[str, int], Tensor]]) -> Tensor:
            def change(block: nn.Module, name: str) -> None:
                for pool in self.mixtures[name]:
                    select(block, order(pool))

            with _changed_in_calls(model, self.mixtures, change):
                return _output(data)

        differs = False
        if data.calls:
            dense = _output(data)
            try:
                with replace(self, experts=fewer).in_calls(model):
                    _first_call(data)
            except (RuntimeError, IndexError) as error:
                raise ValueError(f"this {type(model).__name__} cannot be called with fewer experts: {error}") from error
            # not of what fewer experts change, which is as little as rounding in bfloat16 where one of many goes
            changed, wrong = (reordered(order) - dense for order in (other_order, mixed_up))
            differs = not float(changed.norm()) <= SAME * float(wrong.norm())
        if any(data.run.processes.all_gather("how the model is cut", differs)):
            raise ValueError("the model computes something else with its experts in another order: none of them can go")
        return self

    def without_experts(self, data: CalibrationData, judge: Judge, how: Criterion, shrunk: Shrunk) -> "_Cut":
        """Choose the experts that go, and note what that costs."""
        model, smaller = data.run.model, partial(self.smaller_block, data.run.model)
        chosen = replace(self, experts=choose.experts(data, self.mixtures, how, judge.batches, smaller))
        _note_experts(chosen, shrunk, data.run.report)
        for step in ("as is", "refit") if how.refit else ("as is",):
            with chosen.in_calls(model, values=step == "refit"):
                judge.measure(step, shrunk)
        return chosen

    @property
    def cut_names(self) -> set[str]:
        """The blocks that are cut."""
        return {*self.choices, *self.experts}

    @property
    def gone(self) -> list[nn.Module]:
        """The blocks that go."""
        blocks = () if self.stay is None or self.sizes.depth is None else self.sizes.depth.stack.blocks
        return [block for place, block in enumerate(blocks) if place not in (self.stay or ())]

    @property
    def chosen(self) -> list[Choice]:
        return [choice for of_block in self.choices.values() for choice in of_block]

    def differs(self, data: CalibrationData) -> bool:
        """Whether a model that is cut so computes something else than this one with zeros for what goes."""
        differs = False
        if data.calls:
            dense, narrow = _output(data), self.narrow_output(data)
            with skipped(self.gone), with_channels(self.chosen, refitted=False):
                wanted = _output(data)
            differs = not float((narrow - wanted).norm()) <= SAME * float((wanted - dense).norm())
        return any(data.run.processes.all_gather("how the model is cut", differs))

    def narrow_output(self, data: CalibrationData) -> Tensor:
        """What the smaller model puts out in the first call: with fewer channels, or else with fewer blocks."""
        if self.choices:
            with self.in_calls(data.run.model):
                return _output(data)
        small = self.cut_clone(data.run.model)
        run = replace(data.run, model=small, plan=plan_for(small, Magnitude(), data.run.config))
        return _output(replace(data, run=run))

    def in_calls(self, model: nn.Module, *, values: bool = False) -> AbstractContextManager[None]:
        """While entered, a block that is called runs as one with fewer channels or experts; ``values``: these with
        better ones, if they are experts."""
        return _changed_in_calls(model, self.cut_names, partial(self.block, values=values))

    def smaller_block(
        self, model: nn.Module, name: str, chosen: Sequence[ExpertChoice], look: Callable[[nn.Module], None]
    ) -> AbstractContextManager[None]:
        """While entered, one block runs as with these experts alone, and is shown to ``look`` before."""

        def change(block: nn.Module, name: str) -> None:
            replace(self, experts={name: [*chosen]}).block(block, name, values=False)
            look(block)

        return _changed_in_calls(model, [name], change)

    def names(self, plan: Plan) -> dict[str, str]:
        """Block that stays -> its name in the smaller model."""
        names: dict[str, str] = {}
        for stack in plan.stacks:
            stay = [name for name, block in zip(stack.names, stack.blocks) if block not in self.gone]
            names |= dict(zip(stay, stack.names))
        return names

    def block(self, block: nn.Module, name: str, *, values: bool = True) -> None:
        """Cut a block in place; ``values``: with better ones. Nothing happens to one that has been cut."""
        cuts: dict[tuple[str, int], Tensor] = {}
        for choice in self.choices.get(name, ()):
            cuts |= choice.pool.cuts(choice.stay)
            layer = choice.pool.taker
            if values and layer.columns(layer.values) == choice.pool.span.old:
                layer.values.copy_(choice.full_width(refitted=True))
        whole: list[ExpertChoice] = []
        for choice in self.experts.get(name, ()):
            cuts |= choice.pool.cuts(choice.stay)
            if values and len(choice.last_in(block)) == choice.pool.old:
                whole.append(choice)
        if cuts:
            cut(block, self.narrow.get_submodule(name), cuts)
        for choice in whole:
            if choice.values is not None:
                choice.last_in(block).data.copy_(choice.values)

    def everything(self, model: Any, *, values: bool = True) -> None:
        """Cut what is not cut yet, which needs no data, and write the config."""
        twin = self.sizes.narrow(model, self.stay)
        for name in sorted(self.cut_names):
            self.block(model.get_submodule(name), name, values=values)
        if self.sizes.depth is not None and self.stay is not None:
            self.sizes.depth.drop(model, self.stay)
        cut(model, twin, {})
        for name in self.sizes.experts:
            write_aliases(model.config, name)

    def cut_clone(self, model: Any) -> Any:
        """A smaller model beside this one, with the values that it has."""
        small = clone(model)
        self.everything(small, values=False)
        return small


@contextmanager
def _changed_in_calls(
    model: nn.Module, names: Iterable[str], change: Callable[[nn.Module, str], None]
) -> Iterator[None]:
    """While entered, a block of these ``names`` that is called runs as another, which ``change`` makes of a copy of it,
    and which ends with the call."""

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        other = clone(model.get_submodule(name), hooks=False)
        vars(other).pop("forward")
        change(other, name)
        return other.forward(*args, **kwargs)

    with ExitStack() as ending:
        for name in names:
            block = model.get_submodule(name)
            block.forward = partial(call, name)
            ending.callback(vars(block).pop, "forward")
        yield


def _note(chosen: Sequence[Choice], shrunk: Shrunk, report: Report) -> None:
    """What stays of the channels, for the report."""
    for choice in chosen:
        name = choice.pool.taker.name
        shrunk.kept.setdefault("mlp", {})[name] = choice.stay.tolist()
        shrunk.scores[name] = [float(f"{score:.4g}") for score in choice.scores.tolist()]
        shrunk.errors[name] = [*choice.errors]
        if choice.errors[1] > LITTLE:
            report.notes.append(f"{name!r} had little to spare: {choice.errors[1]:.1%} of its output is lost")


def _note_experts(cutting: _Cut, shrunk: Shrunk, report: Report) -> None:
    """What stays of the experts, and what is lost, for the report."""
    chosen = [choice for of_block in cutting.experts.values() for choice in of_block]
    for choice in chosen:
        name, sums = choice.pool.taker.name, choice.sums
        assert sums is not None
        shrunk.kept.setdefault("experts", {})[name] = choice.stay.tolist()
        shrunk.scores[name] = [float(f"{score:.4g}") for score in choice.scores.tolist()]
        shrunk.tokens[name] = [int(count) for count in sums.tokens.tolist()]
        shrunk.errors[name] = [*choice.errors] or [sums.error_without(choice.stay)]
        if silent := (sums.tokens == 0).nonzero().flatten().tolist():
            report.notes.append(
                f"{name!r}: no token reached experts {silent}: the data does not tell what they are for"
            )
    report.notes.append(f"{fmean(choice.gates_gone for choice in chosen):.1%} of all gates lay on the experts that go")


def _first_call(data: CalibrationData) -> Any:
    """What the model puts out in the first call of this process; None if it has none."""
    return data.output_of(0)[0] if data.calls else None


def _output(data: CalibrationData) -> Tensor:
    return torch.nan_to_num(flat_tensors(_first_call(data))[0].float(), posinf=0, neginf=0)


def _seconds_of_calls(data: CalibrationData, cutting: _Cut) -> dict[str, list[float]]:
    """Of the model and the smaller one, if they write text, of each kind of call here."""
    model: Any = data.run.model
    smaller, measured = cutting.cut_clone(model), dict[str, list[float]]()
    longest = longest_window(model) or max(CALLS.values())
    for what, length in CALLS.items() if writes_text(model) else ():
        ids = next((flat_tensors((call.args, call.kwargs))[0][:1] for call in data.calls or ()), torch.empty(0))
        if length <= longest and not ids.is_floating_point():
            row = ids.repeat(1, -(-length // ids.shape[1]))[:, :length].to(input_device(model))
            if seconds := seconds_of_call((model, smaller), row):
                measured[what] = seconds
            else:
                data.run.report.notes.append(f"{what} are not known: the machine was too busy to measure them")
    return measured


# seconds --------------------------------------------------------------------------------------------------------------


TIMES, LONG = 5, 2.0  # so many calls are timed, and more until the least three agree, or they took so many seconds
AGREE = 1.05


def seconds_of_call(
    models: Sequence[Callable[..., Any]], ids: Tensor, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The least seconds of a call of each model, in turns. Nothing where other work on the machine disturbs them: where
    three calls of the same model do not agree."""
    seconds: list[list[float]] = [[] for _ in models]
    while len(seconds[0]) < TIMES or any(sorted(each)[2] > AGREE * min(each) for each in seconds):
        if len(seconds[0]) >= TIMES and sum(map(sum, seconds)) >= LONG:
            return []
        for model, of_model in zip(models, seconds):
            began = clock()
            flat_tensors(model(input_ids=ids))[0].flatten()[0].item()  # waits for the device
            of_model.append(clock() - began)
    return [*map(min, seconds)]
