"""The walk through a model, one block at a time: statistics of its inputs go out, the sparse block's output goes on."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from modelopt_sparse.accuracy.permute import DenseBlock, possible_folds
from modelopt_sparse.accuracy.reconstruct import Part, SolvedBlock
from modelopt_sparse.calibration.dense_run import Survey, take_survey, whole_runs_because
from modelopt_sparse.calibration.early_exit import Leaving
from modelopt_sparse.calibration.forward import Runner
from modelopt_sparse.calibration.hooks import LayerInputs, SharingChanged
from modelopt_sparse.calibration.padding import PaddingError, TokenMasks
from modelopt_sparse.calibration.recorder import Recorder
from modelopt_sparse.calibration.reduce import Sums
from modelopt_sparse.calibration.replay import Chain
from modelopt_sparse.calibration.routed import KeptStats, few, filled, filled_fellows, pooled
from modelopt_sparse.calibration.statistics import Collector
from modelopt_sparse.calibration.storage import Turn, Turns
from modelopt_sparse.distributed import Team
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.nested import flat_tensors
from modelopt_sparse.model.offload import offloaded_after_errors
from modelopt_sparse.model.stacks import Stack
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.memory import activation_copies
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.report import Report
from modelopt_sparse.solving.sharing import Shares


@dataclass(frozen=True)
class Group:
    """Layers with one input, to be solved now. ``hold``: attach the solutions only after the whole walk, because
    inputs that are still to be collected must come from the dense model. ``shares`` says which process solves what of
    several groups, of which the ``last`` one is marked: what they have solved is exchanged after it."""

    targets: list[LayerPlan]
    stats: Stats | KeptStats | None
    hold: bool = False
    shares: Shares = field(default_factory=Shares)
    last: bool = True


@dataclass
class _Unit:
    """What is collected together: the targets of one block, or layers outside of every stack."""

    name: str
    targets: list[LayerPlan]
    stack: Stack | None = None
    position: int = 0

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return () if self.stack is None else (self.stack.blocks[self.position],)


def walk(
    model: nn.Module,
    plan: Plan,
    config: SparsifyConfig,
    report: Report,
    runner: Runner | None = None,
    turns: Turns | None = None,
    team: Team | None = None,
) -> Generator[DenseBlock | Group | SolvedBlock, None, None]:
    """Yield the plan's layers group by group, with the statistics that they need; each block before its groups if
    channels are to be permuted, and after them if it is to be reconstructed.

    Layers of a group must be attached (unless ``hold``) before the next group is asked for. What did not go the
    usual way is noted in ``report``. Nothing of the model is changed; the caller restores modes and flags. Each block's
    work is one turn of ``turns``. ``runner``: one that has loaded the data already. ``team``: the processes that walk
    together.
    """
    turns, team = turns or Turns(), team or Team()
    if not any(target.calibrated for target in plan.layers):
        yield from _without_data(model, plan, config, report, turns, team)
        return
    with offloaded_after_errors(model):
        yield from _Walk(model, plan, config, report, turns, runner or Runner(model, plan, config, team)).run()


def _without_data(
    model: nn.Module, plan: Plan, config: SparsifyConfig, report: Report, turns: Turns, team: Team
) -> Iterator[Group]:
    by_block: dict[str | None, list[LayerPlan]] = {}
    for target in plan.layers:
        by_block.setdefault(target.block, []).append(target)
    with tqdm(total=len(plan.layers), desc="sparsify", unit="layer", disable=_no_bar(config)) as bar:
        for block, targets in by_block.items():
            shares = Shares.of([[target] for target in targets], team, whole_layers=config.deterministic)
            with turns.turn(None if block is None else model.get_submodule(block), report) as turn:
                for target in targets:
                    if not turn.done:
                        yield Group([target], None, shares=shares, last=target is targets[-1])
                    bar.update()


class _Walk:
    def __init__(
        self, model: nn.Module, plan: Plan, config: SparsifyConfig, report: Report, turns: Turns, runner: Runner
    ) -> None:
        self.model, self.plan, self.config, self.report, self._runner = model, plan, config, report, runner
        self._turns, self._team = turns, runner.team
        self._leaving: list[Leaving] = []  # of the block whose turn it is
        self._regular: set[type[nn.Module]] = set()  # kinds of blocks that can be left early
        self._may_leave = True
        home = {m: name for stack in plan.stacks for name, b in zip(stack.names, stack.blocks) for m in b.modules()}
        # a weight that is used in several blocks (twins) sees all of its inputs in the whole model alone
        self._block_of: dict[str, str | None] = {}
        for target in plan.layers:
            used_in = {home.get(module) for module in target.layer.hooked_modules}
            self._block_of[target.name] = used_in.pop() if len(used_in) == 1 else None

    def run(self) -> Iterator[DenseBlock | Group | SolvedBlock]:
        dense_inputs = self.config.sequential == "none"
        with tqdm(desc="run the dense model", unit="batch", disable=_no_bar(self.config)) as bar:
            survey = take_survey(self.plan, self._runner, self._turns, self.report, self._block_of, bar)
        units = self._units(survey)
        chains: dict[Stack | None, Chain | Literal["later"] | None] = {
            stack: self._chain(survey.recorders.pop(stack), units) for stack in _stacks_of(units)
        }
        dense = self._dense_chains(chains)
        if dense_inputs:
            # what is collected through the whole model comes first, while all of it is dense; solutions are held
            units.sort(key=lambda unit: chains.get(unit.stack) is not None)
        with tqdm(total=len(units), desc="sparsify", unit="block", disable=_no_bar(self.config)) as bar:
            for unit in units:
                bar.set_postfix_str(unit.name)
                chain = chains.get(unit.stack)
                if chain == "later":
                    chain = chains[unit.stack] = self._chain(self._record(unit.stack), units)
                    dense.update(self._dense_chains({unit.stack: chain}))
                assert chain != "later"
                with (
                    self._turns.turn(unit.blocks[0] if unit.blocks else None, self.report) as turn,
                    # for all of the turn, so that its weights go to the device once, and come back once
                    nullcontext() if chain is None else self._runner.resident(unit.blocks, stays=chain.stays),
                ):
                    if self.config.permute and chain is not None:
                        yield from self._dense_block(unit, survey, chain)
                    parts = self._parts(unit, survey, dense.get(unit.stack) or chain)
                    if turn.done:
                        self._make_sparse(unit, chain, turn)
                    else:
                        for stage in self._stages(unit, survey):
                            yield from self._groups(unit, stage, chain)
                        if parts and chain is not None:
                            yield from self._solved(unit, chain, parts)
                    del parts
                    if chain is not None:
                        self._propagate(unit, chain)
                if chain is not None and unit.position == len(chain.stack.blocks) - 1:
                    chains[unit.stack] = dense[unit.stack] = None  # their activations are done with
                bar.update()

    def _groups(self, unit: _Unit, stage: list[LayerPlan], chain: Chain | None) -> Iterator[Group]:
        """One stage's groups. Its own generator, so that no name still holds their statistics afterwards."""
        hold = self.config.sequential == "none" and chain is None
        groups = [
            Group([target for target in stage if target.name in names], stats, hold)
            for names, stats in self._collect(unit, stage, chain)
        ]
        whole_layers = self.config.deterministic
        shares = Shares.of([group.targets for group in groups], self._team, whole_layers=whole_layers)
        for number, group in enumerate(groups):
            yield replace(group, shares=shares, last=number == len(groups) - 1)

    def _make_sparse(self, unit: _Unit, chain: Chain | None, turn: Turn) -> None:
        """What an earlier run made of a block takes its place; in "none" the dense one's output goes on first."""
        if self.config.sequential == "none" and unit.targets and chain is not None:
            self._advance(unit, chain)
        turn.make_sparse()

    # permutation ----------------------------------------------------------------------------------------------------

    def _dense_block(self, unit: _Unit, survey: Survey, chain: Chain) -> Iterator[DenseBlock]:
        stages: dict[str, list[LayerPlan]] = {}
        for target in unit.targets:
            stages.setdefault(survey.stage_of[target.name], []).append(target)
        folds = list(possible_folds(self.model, list(stages.values())))
        if not folds:
            return
        takers = list({fold.taker.name: fold.taker for fold in folds}.values())
        collector = Collector(needs={taker.name: "square_sums" for taker in takers}, share=False)
        sums = self._sum_up(unit, takers, chain, collector)
        stats = {names[0]: found for names, found in sums if isinstance(found, Stats)}  # experts are never takers

        def run(layer: Layer) -> tuple[Tensor, Tensor]:
            taker, block = _watched(lambda: chain.run(unit.position, 0), [layer.owner, *unit.blocks])[1]
            return taker, block

        with self._runner.running():
            folds = [fold for fold in folds if fold.taker.name in stats]
            yield DenseBlock(folds, stats, run, lambda same: self._team.meet("a permutation", same)[0])

    # reconstruction -------------------------------------------------------------------------------------------------

    def _dense_chains(self, chains: "Mapping[Stack | None, Any]") -> "dict[Stack | None, Chain | None]":
        """For each chain one more that goes through dense blocks alone, if these are what blocks should reproduce."""
        options = self.config.reconstruct
        if options is None:
            return {}
        found: dict[Stack | None, Chain | None] = {}
        for stack, chain in chains.items():
            if isinstance(chain, Chain):
                if (number := sum(self._team.meet("the batches to tune by", len(chain)))) < 2:
                    raise ValueError(
                        "reconstruct needs at least two calibration batches, because one is held back to judge by, "
                        f"and there is {number}: give smaller batches"
                    )
                found[stack] = chain.copy() if options.target == "dense" else None
        return found

    def _parts(self, unit: _Unit, survey: Survey, chain: Chain | None) -> list[Part]:
        """What of a block is reconstructed together, with the dense block's outputs. Where ``chain`` is the dense one,
        it goes on."""
        options = self.config.reconstruct
        if options is None or chain is None:
            return []
        (block,) = unit.blocks
        modules = {unit.name: block}
        if options.parts == "children":
            holding = {
                name: child
                for target in sorted(unit.targets, key=lambda item: survey.order[item.name])
                for name, child in block.named_children()
                if target.layer.owner in set(child.modules())
            }
            modules = {f"{unit.name}.{name}": child for name, child in list(holding.items())[:-1]} | modules
        parts = [Part(name, module, []) for name, module in modules.items()] if unit.targets else []
        last = unit.position == len(chain.stack.blocks) - 1
        goes_on = options.target == "dense" and not last
        if parts or goes_on:
            with self._runner.running():
                for index in range(len(chain)):
                    outputs, goals = _watched(lambda i=index: chain.run(unit.position, i), [p.module for p in parts])
                    for part, goal in zip(parts, goals):
                        part.goals.append(self._turns.keep(goal))
                    if goes_on:
                        chain.advance(unit.position, index, outputs)
        return parts

    def _solved(self, unit: _Unit, chain: Chain, parts: list[Part]) -> Iterator[SolvedBlock]:
        (block,) = unit.blocks

        def run(part: Part, index: int) -> Tensor:
            return _watched(lambda: chain.run(unit.position, index), [part.module])[1][0]

        keep = [self._keep(unit, chain.masks[index], goal) for index, goal in enumerate(parts[-1].goals)]
        counts = self._team.meet("the batches to tune by", len(chain))
        places = [(rank, i) for i in range(max(counts)) for rank, count in enumerate(counts) if i < count]
        with self._runner.running():
            yield SolvedBlock(block, parts, keep, run, places)

    def _keep(self, unit: _Unit, masks: TokenMasks, goal: Tensor) -> Tensor | None:
        """Which tokens of a block's output are real."""
        mask = getattr(masks, self._runner.side_of(unit.blocks[0]))
        if mask is not None and goal.shape[:-1] != mask.shape:
            raise PaddingError(
                f"block {unit.name!r} has an output of shape {list(goal.shape)}, and the token mask has shape "
                f"{list(mask.shape)}: which of its rows are padding cannot be told; give batches without padding, or "
                "set count_padding=True to let padding in"
            )
        return None if mask is None else mask.to(goal.device, torch.bool)

    # what is collected together -------------------------------------------------------------------------------------

    def _units(self, survey: Survey) -> list[_Unit]:
        """Blocks with their targets, and each target outside of the blocks, in the order of their first calls.

        The blocks of a stack stay together, and those without targets are still run through.
        """
        by_block: dict[str | None, list[LayerPlan]] = {}
        for target in sorted(self.plan.layers, key=lambda item: survey.order[item.name]):
            by_block.setdefault(self._block_of[target.name], []).append(target)
        keyed: list[tuple[int, _Unit]] = []
        for stack in self.plan.stacks:
            calls = [survey.order[target.name] for name in stack.names for target in by_block.get(name, [])]
            for position, name in enumerate(stack.names) if calls else ():
                title = name or type(self.model).__name__
                keyed.append((min(calls), _Unit(title, by_block.get(name, []), stack, position)))
        keyed += [(survey.order[target.name], _Unit(target.name, [target])) for target in by_block.get(None, [])]
        return [unit for _, unit in sorted(keyed, key=lambda item: item[0])]  # stable: blocks keep their order

    def _stages(self, unit: _Unit, survey: Survey) -> list[list[LayerPlan]]:
        if self.config.sequential != "stage":
            return [unit.targets] if unit.targets else []
        stages: dict[str, list[LayerPlan]] = {}
        for target in unit.targets:
            # experts in a list are collected together, for one may need the tokens of the others
            stages.setdefault(target.layer.mixture or survey.stage_of[target.name], []).append(target)
        return list(stages.values())

    def _chain(self, recorder: Recorder, units: Sequence[_Unit]) -> "Chain | Literal['later'] | None":
        """A recorded stack, ready to run block by block; None if it has to go through the whole model instead."""
        problem, recorded = self._agreed("the record", recorder.problem, bool(recorder.records))
        if problem is None and not recorded:
            recorder.forget()
            return "later"
        chain = None
        if problem is None:
            chain = Chain(recorder)
            with self._runner.resident(recorder.stack.blocks), self._runner.running():
                problem, _ = self._agreed("the check of the record", chain.problem())
        if problem is None:
            assert chain is not None
            chain.stays = not self._turns.spills and self._runner.has_room(
                activation_copies(self.config) * chain.nbytes
            )
            return chain
        why = whole_runs_because(self.model, recorder.stack, problem)
        self._turns.check_whole_runs(why)
        runs = sum(bool(unit.targets) for unit in units if unit.stack == recorder.stack)
        text = f"{why}: {runs} runs of the model over the data, one for each block, instead of two"
        asked = {"permuted": self.config.permute, "reconstructed": self.config.reconstruct is not None}
        if any(asked.values()):
            text += f"; its blocks are not {' and '.join(word for word, wanted in asked.items() if wanted)}"
        warnings.warn(text, stacklevel=2)
        self.report.notes.append(text)
        return None

    def _agreed(self, what: str, problem: str | None, ready: bool = True) -> tuple[str | None, bool]:
        """The first problem that a process has, and whether all are ready."""
        found = self._team.meet(f"{what} of a stack", (problem, ready))
        return next((text for text, _ in found if text is not None), None), all(ready for _, ready in found)

    # running --------------------------------------------------------------------------------------------------------

    def _record(self, stack: Stack | None) -> Recorder:
        """The record of a later stack, now that the parts before it are sparse."""
        assert stack is not None
        recorder = Recorder(stack, self._runner.stop if self._runner.may_stop else lambda: None, self._turns.keep)
        recorder.start()
        try:
            self._runner.run_model(recorder.begin, stop_after=stack.blocks[-1])
        finally:
            recorder.stop()
        return recorder

    def _collect(
        self, unit: _Unit, targets: list[LayerPlan], chain: Chain | None
    ) -> Sequence[tuple[list[str], Stats | KeptStats | None]]:
        """Statistics of the targets' inputs, by shared input. In "none" the dense outputs go on at the same time."""
        needs = {target.name: target.needs for target in targets}
        kept = {target.name for target in targets if target.at_once is not None}
        goes_on = self.config.sequential == "none" and chain is not None
        if set(needs.values()) == {"nothing"} and not goes_on:
            return [([name], None) for name in needs]
        ahead = chain.copy() if chain is not None and goes_on else None
        try:
            groups = self._sum_up(unit, targets, chain, Collector(needs=needs, share=True, kept=kept), ahead)
        except SharingChanged:
            groups = self._sum_up(unit, targets, chain, Collector(needs=needs, share=False, kept=kept), ahead)
        groups = [(names, self._filled(unit, targets, chain, names, stats)) for names, stats in groups]
        if chain is not None and ahead is not None:
            chain.follow(ahead)
        for names, stats in groups:
            if not torch.isfinite(stats.square_sums).all():
                raise ValueError(
                    f"layer {names[0]!r}: its input holds NaN or inf on the calibration data, now that the layers "
                    "before it are sparse; run the model in bfloat16 or float32"
                )
        groups = self._with_fellows(targets, [(names, stats) for names, stats in groups if stats.tokens])
        without_data = [name for name in needs if all(name not in names for names, _ in groups)]
        for name in without_data:
            if needs[name] != "nothing":
                raise ValueError(
                    f"layer {name!r} saw no calibration data, now that the layers before it are sparse: give more "
                    "varied data, or exclude it"
                )
        return [*groups, *(([name], None) for name in without_data)]

    def _with_fellows(
        self, targets: list[LayerPlan], groups: list[tuple[list[str], Stats | KeptStats]]
    ) -> list[tuple[list[str], Stats | KeptStats]]:
        """The same for experts that are modules in a list."""
        fellows = {
            target.name: (target.layer.mixture, target.shape)
            for target in targets
            if target.layer.mixture is not None and target.needs != "nothing"
        }
        others = [(names, stats) for names, stats in groups if fellows.keys().isdisjoint(names)]
        listed = [(n, s) for n, s in groups if not fellows.keys().isdisjoint(n) and isinstance(s, Stats)]
        return [*others, *filled_fellows(listed, fellows, self.config.min_tokens, self.config.experts)]

    def _filled(
        self, unit: _Unit, targets: list[LayerPlan], chain: Chain | None, names: list[str], stats: Stats | KeptStats
    ) -> Stats | KeptStats:
        """Statistics in which experts with few tokens have what the options say; "all_tokens" takes one more run."""
        config = self.config
        if stats.counts is None or not stats.tokens or not (experts := few(stats, config.min_tokens)):
            return stats
        everyone = None
        if config.experts == "all_tokens":
            own = [target for target in targets if target.name in names]
            needs = {target.name: target.needs for target in own}
            kept = names if isinstance(stats, KeptStats) else ()
            collector = Collector(needs=needs, share=False, kept=kept, everyone=dict.fromkeys(names, experts))
            ((_, everyone),) = self._sum_up(unit, own, chain, collector)
        if isinstance(stats, KeptStats):
            rows = everyone.rows if isinstance(everyone, KeptStats) else None
            return KeptStats(stats.rows, config.min_tokens, config.experts, rows)
        assert not isinstance(everyone, KeptStats)
        return filled(stats, config.min_tokens, config.experts, pooled(stats), everyone)

    def _sum_up(
        self,
        unit: _Unit,
        targets: list[LayerPlan],
        chain: Chain | None,
        collector: Collector,
        ahead: Chain | None = None,
    ) -> list[tuple[list[str], Stats | KeptStats]]:
        """Statistics of all calls. ``ahead``: a copy of the chain that the block's outputs are sent on to."""
        inputs = LayerInputs(targets, self._runner.side_of, unit.blocks, collector.see)
        sums = Sums(collector, self._team, deterministic=self.config.deterministic, device=self.config.device)
        try:
            if chain is None:
                self._runner.run_model(sums.between(inputs.begin), inputs=inputs)
                sums.end_call()
            else:
                self._run_block(unit, targets, chain, inputs, sums, ahead)
        except SharingChanged:
            sums.changed()
        place = {target.name: number for number, target in enumerate(targets)}
        groups = sums.groups()  # of several processes: in the order in which each of them came to its layers
        return groups if self._team.size == 1 else sorted(groups, key=lambda group: place[group[0][0]])

    def _run_block(
        self,
        unit: _Unit,
        targets: list[LayerPlan],
        chain: Chain,
        inputs: LayerInputs,
        sums: Sums,
        ahead: Chain | None,
    ) -> None:
        (block,) = unit.blocks
        last = unit.position == len(chain.stack.blocks) - 1
        checked = not last or type(block) in self._regular  # nothing is sent on after the last one
        leaving = Leaving(block, targets, allowed=self._may_leave and checked and ahead is None)
        self._leaving.append(leaving)
        inputs.seen = leaving.has_input
        with self._runner.running(), inputs:
            for index in range(len(chain)):
                inputs.begin(chain.masks[index])
                output = leaving.run(lambda i=index: chain.run(unit.position, i))
                sums.end_call()
                if ahead is not None and not last:
                    ahead.advance(unit.position, index, output)

    def _propagate(self, unit: _Unit, chain: Chain) -> None:
        """Send the output of the block, sparse by now, on to the next; in "none" the dense one has gone on already."""
        last = unit.position == len(chain.stack.blocks) - 1
        if not last and not (self.config.sequential == "none" and unit.targets):
            with ExitStack() as hooks:
                watched = [hooks.enter_context(item.watched()) for item in self._leaving if item.left]
                self._advance(unit, chain)
            self._check_leaving(unit, watched)
        self._leaving.clear()

    def _check_leaving(self, unit: _Unit, watched: list[Callable[[], bool]]) -> None:
        if all(regular() for regular in watched):
            self._regular.update(type(block) for block in unit.blocks if watched)
            return
        text = (
            f"block {unit.name!r} calls its layers a number of times that depends on its input, and was left when each "
            "had been called once: their statistics lack what came later. The blocks after it are run to the end"
        )
        self._may_leave = False
        warnings.warn(text, stacklevel=2)
        self.report.notes.append(text)

    def _advance(self, unit: _Unit, chain: Chain) -> None:
        with self._runner.running():
            for index in range(len(chain)):
                chain.advance(unit.position, index, chain.run(unit.position, index))


def _watched(run: Callable[[], list[Tensor]], modules: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """What ``run`` gives, and the first output tensor of each of the modules in it."""
    found: dict[nn.Module, Tensor] = {}
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(
                module.register_forward_hook(lambda module, _, output: found.update({module: flat_tensors(output)[0]}))
            )
        outputs = run()
    return outputs, [found[module] for module in modules]


def _stacks_of(units: Sequence[_Unit]) -> list[Stack]:
    return list(dict.fromkeys(unit.stack for unit in units if unit.stack is not None))


def _no_bar(config: SparsifyConfig) -> bool | None:
    return None if config.progress is None else not config.progress
