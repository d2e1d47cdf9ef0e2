"""Solving the layers that a walk yields: all of a layer at once, or in pieces where memory is short; by this process
alone, or each by one of several processes, which then give each other what they have solved."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.calibration.inputs import Group
from modelopt_sparse.calibration.routed import KeptStats, part_of
from modelopt_sparse.distributed import Team
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.methods.conjugate_gradients import Scaled
from modelopt_sparse.methods.polish import DAMPING
from modelopt_sparse.model.devices import is_out_of_memory
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.offload import stored
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import StepReport
from modelopt_sparse.solving.follow_up import improved
from modelopt_sparse.solving.out_of_memory import COPIED, JOINED, PREPARED, Cut, Known, no_memory
from modelopt_sparse.solving.pieces import WHOLE, Part, Piece, joined, some_of
from modelopt_sparse.solving.sharing import Share


@dataclass(frozen=True)
class Solved:
    """A layer with its solution and the steps that led to it; ``group`` is the one that it was solved with."""

    target: LayerPlan
    solution: Solution
    steps: list[StepReport]
    group: Group


@dataclass(frozen=True)
class Job:
    """A layer, or a ``piece`` of one, ready to be solved: the dense weight as a matrix, and the state that is prepared
    from the statistics. ``target`` is the plan of the piece, ``layer`` that of all of it.

    What `take` is given is checked, improved by the steps that were asked for, and kept; within an `attempt`, after
    which smaller pieces come if memory has run out in it.
    """

    target: LayerPlan
    layer: LayerPlan
    piece: Piece
    weight: Tensor
    state: Any
    stats: Stats | None
    scaled: Callable[[], Scaled]
    config: SparsifyConfig
    cut: Cut
    began: float
    found: list[Part]

    @contextmanager
    def attempt(self) -> Iterator[None]:
        with self.cut.attempt(), naming(self.target):
            yield

    def take(self, solution: Solution) -> None:
        target = self.target
        _check_solution(target, self.weight, solution)
        first = StepReport.of(target.method.name, solution, time.perf_counter() - self.began)
        solution, later = improved(target, self.weight, solution, self.stats, self.scaled, self.config)
        self.found.append(Part.of(self.layer, self.piece, solution, [first, *later], self.weight, self.stats))


class Solver:
    """Prepares one group after the other, and puts together what is solved of it. Errors name the layer: ValueError for
    solutions that break the method contract, MemoryError where memory runs out and no smaller pieces would help."""

    def __init__(self, config: SparsifyConfig, team: Team) -> None:
        self._config, self._team = config, team
        self._known: Known = {}  # the pieces that layers are solved in, once memory has run out
        self._stage: list[Group] = []  # groups whose layers are shared out and not yet exchanged
        self._mine: dict[Share, Part] = {}  # what this process has solved of them

    def steps(self, group: Group) -> Iterator[Job | Solved]:
        """What this process has to solve of a group, and each of its layers as soon as that is done. Where several
        processes solve, the layers come after the last group of a stage, when they exchange what they have."""
        if isinstance(group.targets[0].layer.adapter, RoutedAdapter):
            for layer in group.targets:
                yield from self._experts(layer, group)
        else:
            yield from self._sharing_an_input(group)
        if self._team.size > 1:
            self._stage.append(group)
        if self._team.size > 1 and group.last:
            stage, self._stage = self._stage, []
            for each in stage:
                for layer in each.targets:
                    yield self._exchanged(layer, each)

    # what is prepared -------------------------------------------------------------------------------------------------

    def _sharing_an_input(self, group: Group) -> Iterator[Job | Solved]:
        """Layers with the same method and options share one prepared state."""
        stats = group.stats
        assert not isinstance(stats, KeptStats)  # which are of experts alone
        states: list[tuple[LayerPlan, Any]] = []
        scaled = cache(partial(Scaled.of, stats))
        for layer in group.targets:
            if not group.shares.mine(layer, range(layer.matrices)):
                continue
            began = time.perf_counter()
            with naming(layer, whole=COPIED):
                weight = self._dense(layer, slice(None), stats)
            recipe = (layer.method, layer.options)
            shared = [state for other, state in states if (other.method, other.options) == recipe]
            if not shared:
                with naming(layer, whole=PREPARED):
                    shared = [layer.method.prepare(stats, layer.options)]
                states.append((layer, shared[0]))
            polished = partial(scaled, layer.options.get("damping", DAMPING))
            cut, found = Cut(layer, self._known), []
            job = Job(layer, layer, WHOLE, weight, shared[0], stats, polished, self._config, cut, began, found)
            del weight
            yield from _in_rows(job)
            del job
            yield from self._kept(group, layer, WHOLE, layer.shape, found, cut)

    def _experts(self, layer: LayerPlan, group: Group) -> Iterator[Job | Solved]:
        """Experts share no input with other layers. Where several processes keep routed tokens, statistics are formed
        by all of them together: each gets one turn, and then all solve."""
        shares, stats = group.shares, group.stats
        if shares.size == 1:
            yield from self._few_experts(layer, group, range(layer.matrices), partial(part_of, stats))
            return
        pieces = shares.pieces(layer)
        for first in range(0, len(pieces), shares.size):
            held: list[tuple[range, Stats | None]] = []
            for experts in pieces[first : first + shares.size]:
                own = part_of(stats, experts)
                if shares.mine(layer, experts):
                    held.append((experts, own))
                del own
            for experts, own in held:
                yield from self._few_experts(layer, group, experts, partial(_counted_from, experts.start, own))
            del held

    def _few_experts(
        self, layer: LayerPlan, group: Group, experts: range, stats_of: Callable[[range], Stats | None]
    ) -> Iterator[Job | Solved]:
        """Some experts, or all, as many at a time as there is memory for, each with statistics formed when their turn
        comes."""
        cut = Cut(layer, self._known)
        found: list[Part] = []
        start, began = experts.start, time.perf_counter()
        while start < experts.stop:
            some = slice(start, min(start + cut.experts, experts.stop))
            job = None
            with cut.attempt(rows=False), naming(layer):
                stats = stats_of(range(some.start, some.stop))
                weight = self._dense(layer, some, stats)
                state = layer.method.prepare(stats, layer.options)
                scaled = partial(Scaled.of, stats, layer.options.get("damping", DAMPING))
                piece = Piece(some, slice(None))
                job = Job(layer, layer, piece, weight, state, stats, scaled, self._config, cut, began, found)
            stats = weight = state = scaled = None
            if job is not None:
                yield from _in_rows(job)
                job = None
            if not cut.again():
                start, began = some.stop, time.perf_counter()
        piece = Piece(slice(experts.start, experts.stop), slice(None))
        yield from self._kept(group, layer, piece, (len(experts), *layer.shape[1:]), found, cut)

    def _dense(self, layer: LayerPlan, which: slice, stats: Stats | None) -> Tensor:
        """The weight of a layer as a matrix, or ``which`` of its experts, where its statistics are.

        A copy: a method that writes to its input does not reach the model.
        """
        device = self._config.device if stats is None else stats.square_sums.device
        values = stored(layer.layer.owner, layer.layer.param).detach()
        return layer.layer.matrix(values[which].to(device, copy=True))

    # what is put together ---------------------------------------------------------------------------------------------

    def _kept(
        self, group: Group, layer: LayerPlan, piece: Piece, shape: Sequence[int], found: list[Part], cut: Cut
    ) -> Iterator[Solved]:
        with naming(layer, whole=JOINED):
            part = joined(piece, shape, found, cut.note)
        if self._team.size > 1:
            self._mine[layer.name, piece.experts.start or 0] = part
        else:
            yield Solved(layer, part.solution, part.steps, group)

    def _exchanged(self, layer: LayerPlan, group: Group) -> Solved:
        home = self._config.device or stored(layer.layer.owner, layer.layer.param).device
        parts = group.shares.exchanged(layer, self._mine, self._team, home)
        self._mine = {share: part for share, part in self._mine.items() if share[0] != layer.name}
        with naming(layer, whole=JOINED):
            part = joined(WHOLE, layer.shape, parts)
        return Solved(layer, part.solution, part.steps, group)


def _in_rows(job: Job) -> Iterator[Job]:
    """The job of all rows, or jobs of some of them at a time where memory runs out; ends early where fewer experts are
    to be tried."""
    cut, began = job.cut, job.began
    experts, rows = cut.experts, job.weight.shape[-2]
    start = 0
    while start < rows and cut.experts == experts:
        piece = Piece(job.piece.experts, slice(start, min(start + cut.rows, rows)))
        target, weight = some_of(job.layer, piece), job.weight[..., piece.rows, :]
        yield replace(job, target=target, piece=piece, weight=weight, began=began)
        if not cut.again():
            start, began = piece.rows.stop, time.perf_counter()


def _counted_from(first: int, stats: Stats | None, experts: range) -> Stats | None:
    """Statistics of these experts, from those of experts ``first`` and following."""
    return part_of(stats, range(experts.start - first, experts.stop - first))


@contextmanager
def naming(target: LayerPlan, *, whole: str = "") -> Iterator[None]:
    """A method knows no names: say whose layer its error is about. ``whole``: what is done takes memory for all of the
    layer, so that there are no smaller pieces if it runs out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {target.name!r}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if whole and is_out_of_memory(error):
            raise no_memory(target, whole, error) from error
        raise


def _check_solution(target: LayerPlan, weight: Tensor, solution: Solution) -> None:
    """A method's own mistakes (a user's method above all) must not reach the model."""
    wrong = ""
    if not isinstance(solution, Solution):
        wrong = f"it is a {type(solution).__name__}, not a modelopt_sparse.Solution"
    elif solution.mask.dtype != torch.bool or solution.mask.shape != weight.shape:
        wrong = f"mask is {solution.mask.dtype} {list(solution.mask.shape)}, not torch.bool {list(weight.shape)}"
    elif solution.weight.shape != weight.shape or solution.weight.dtype != weight.dtype:
        given = f"{solution.weight.dtype} {list(solution.weight.shape)}"
        wrong = f"weight is {given}, not {weight.dtype} {list(weight.shape)}"
    elif not torch.isfinite(solution.weight).all():
        wrong = "weight holds NaN or inf"
    elif solution.weight.masked_fill(solution.mask, 0).count_nonzero():
        wrong = "weight is not zero where the mask is False"
    elif count := target.pattern.count_kept_wrong(solution.mask):
        wrong = f"mask breaks pattern {target.pattern} in {count} places"
    if wrong:
        raise ValueError(f"method {target.method.name!r} gave a bad solution: {wrong}")
