"""From the statistics of inputs to the solutions of layers.

A layer is solved at once, or in pieces where memory is short; by this process, or by one of several that exchange what
they have solved.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import DeferredStats, InputFacts, SharedInput, part_of
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.alps import DAMPING, Scaled, polish
from modelopt_sparse.methods.base import Solution, Stats, masked_solution, output_energy
from modelopt_sparse.methods.patterns import NM, Pattern, cut
from modelopt_sparse.methods.refine import REFINE_DAMPING, refine
from modelopt_sparse.methods.scores import GivenMask
from modelopt_sparse.model.adapters import RoutedAdapter
from modelopt_sparse.model.devices import free_what_can_be_freed, is_out_of_memory
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.report import StepReport

# errors name the layer ------------------------------------------------------------------------------------------------


# what is done for all of a layer at once
COPIED, PREPARED, JOINED, WRITTEN = (
    "while its weight was copied",
    "while its solver was prepared",
    "while its solution was put together",
    "while its solution was written into the model",
)


@contextmanager
def errors_name_layer(layer_plan: LayerPlan, *, when: str = "") -> Iterator[None]:
    """A method knows no names: say whose layer its error is about. ``when``: what is done takes memory for all of the
    layer, so that there are no smaller pieces if it runs out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer_plan.name!r}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if when and is_out_of_memory(error):
            raise no_memory(layer_plan, when, error) from error
        raise


def no_memory(layer_plan: LayerPlan, when: str, error: BaseException) -> MemoryError:
    """The error of a layer for which memory ran out ``when`` something was done, and what to do."""
    advice = []
    routed = isinstance(layer_plan.layer.adapter, RoutedAdapter)
    if layer_plan.at_once is None and routed and layer_plan.needs == "gram":
        advice.append("memory_limit=, which holds the Gram matrices of a few experts at a time")
    if layer_plan.needs == "gram" and when not in (COPIED, JOINED, WRITTEN):
        advice.append("a method without a Gram matrix (wanda, magnitude), for this layer through rules=")
    advice.append("device= with more memory, or exclude=")
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    asked = f" ({wanted[1]} more were asked for)" if wanted else ""
    return MemoryError(
        f"layer {layer_plan.name!r} {list(layer_plan.shape)}: out of memory{asked} {when}; give {'; or '.join(advice)}"
    )


# after the method: dense values back, a refined mask, polished values -------------------------------------------------
# Each part is pure. Refinement and polish leave no row worse by their own objectives; dense values may.


def follow_up(
    layer_plan: LayerPlan,
    weight: Tensor,
    solution: Solution,
    stats: Stats | None,
    scaled: Callable[[], Scaled],
    config: SparsifyConfig,
) -> tuple[Solution, list[StepReport]]:
    """The solution after the steps of the plan, and what each of them left. ``weight`` is the dense one; ``scaled``
    gives the state that polish shares with other layers of the same input."""
    reports = []
    for step in layer_plan.steps:
        began = time.perf_counter()
        if step == "dense-values":
            solution = masked_solution(weight, solution.mask, stats)
        elif step == "refine":
            assert stats is not None
            mask = refine(weight, solution.mask, stats, layer_plan.pattern, config.refine, REFINE_DAMPING)
            solution = masked_solution(weight, mask, stats)
        elif step == "polish":
            solution = polish(weight, solution, scaled(), config.polish)
        else:
            continue  # reconstruction follows when all layers of the block are solved
        reports.append(StepReport.of(step, solution.error, time.perf_counter() - began))
    return solution, reports


# pieces ---------------------------------------------------------------------------------------------------------------
# When memory runs out, the layer is solved again in smaller pieces, which give the same as all of it: of fused experts
# fewer at once; of one matrix some rows, where rows are independent and the pattern counts in a row.


# The smallest piece of a matrix with C columns has C / SMALLEST rows. What a solver holds for them is then little
# beside the state that all rows share, and fewer would not help.
SMALLEST = 64


@dataclass(frozen=True)
class Piece:
    """Where a part of a layer lies: its experts (all of anything else), and its rows."""

    experts: slice
    rows: slice

    def of(self, matrix: Tensor) -> Tensor:
        """A view of this piece of ``[E, R, C]``, or of ``[..., R, C]`` for all experts."""
        return matrix[self.experts][..., self.rows, :]

    def within(self, other: "Piece") -> "Piece":
        """The same place counted from the first expert of a piece with all rows that it is part of."""
        first = other.experts.start or 0
        if not first:
            return self
        return Piece(slice(self.experts.start - first, self.experts.stop - first), self.rows)

    def plan(self, layer_plan: LayerPlan) -> LayerPlan:
        """The plan of a layer as that of this piece of it."""
        shape = self.of(torch.empty(layer_plan.shape, device="meta")).shape
        method = layer_plan.method
        if isinstance(method, GivenMask) and method.mask is not None:
            method = GivenMask(self.of(method.mask))
        return replace(layer_plan, shape=tuple(shape), method=method)


ALL_ROWS = slice(None)
WHOLE = Piece(slice(None), ALL_ROWS)


@dataclass(frozen=True)
class SolvedPiece:
    """A piece, or all of a layer, solved; ``energy`` is what its errors are relative to, the squared norm of its dense
    output (1 if it is all)."""

    piece: Piece
    solution: Solution
    steps: list[StepReport]
    energy: float


def joined(piece: Piece, shape: Sequence[int], pieces: Sequence[SolvedPiece], notes: Sequence[str] = ()) -> SolvedPiece:
    """Pieces that make up ``piece``, whose weights are of ``shape``, as one. Errors are relative to the energy of all
    of them. ``notes`` are added to those of the pieces."""
    if len(pieces) == 1 and not notes:
        return pieces[0]
    total = sum(part.energy for part in pieces)

    def error(errors: Iterable[float | None]) -> float | None:
        known = [(part.energy, value) for part, value in zip(pieces, errors)]
        if any(value is None for _, value in known):
            return None
        return sum(energy * (value or 0.0) for energy, value in known) / total if total > 0 else 0.0

    steps = [
        StepReport(same[0].step, error(step.error for step in same), round(sum(step.seconds for step in same), 4))
        for same in zip(*(part.steps for part in pieces))
    ]
    first = pieces[0].solution
    weight, mask = first.weight.new_empty(shape), first.mask.new_empty(shape)
    for part in pieces:
        place = part.piece.within(piece)
        place.of(weight).copy_(part.solution.weight)
        place.of(mask).copy_(part.solution.mask)
    error_of_all = sum(part.energy * part.solution.error for part in pieces) / total if total > 0 else 0.0
    said = dict.fromkeys(note for part in pieces for note in part.solution.notes)
    return SolvedPiece(piece, Solution(weight, mask, error_of_all, (*said, *notes)), steps, total)


class PieceSizes:
    """How much of a layer is solved at once: all of it, or as many experts as a memory limit leaves room for; and half
    of that, as often as memory runs out in an `attempt`.

    The run remembers what layers of one shape, method and pattern came to; the next such layer starts there.
    """

    def __init__(self, layer_plan: LayerPlan, run: Run) -> None:
        self._layer_plan, self._known = layer_plan, run.piece_sizes
        self._whole = layer_plan.at_once or layer_plan.matrices, layer_plan.shape[-2]
        # all that decides whether and how a layer can be cut
        self._key = layer_plan.type, layer_plan.shape, id(layer_plan.method), layer_plan.pattern, layer_plan.steps
        self.experts, self.rows = self._known.get(self._key, self._whole)
        self.failed = False

    @contextmanager
    def attempt(self, *, fewer_rows_help: bool = True, when: str = PREPARED) -> Iterator[None]:
        """Something that takes memory for this layer. Where memory runs out, `failed` is set and smaller pieces are to
        be tried. Raises MemoryError, which says ``when`` it was, if there are none."""
        self.failed = False
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not self._halve(fewer_rows_help):
                raise no_memory(self._layer_plan, self._tried() if fewer_rows_help else when, error) from error
            self.failed = True

    def free_if_failed(self) -> bool:
        """Whether the last attempt has failed. What it held is freed then: its error is gone by now, and the frames
        that it kept alive."""
        if self.failed:
            free_what_can_be_freed()
        return self.failed

    @property
    def note(self) -> tuple[str, ...]:
        """What to say in the report about pieces that memory has forced."""
        if (self.experts, self.rows) == self._whole:
            return ()
        sizes = []
        if self.experts < self._whole[0]:
            sizes.append("one expert at a time" if self.experts == 1 else f"{self.experts} experts at a time")
        if self.rows < self._whole[1]:
            sizes.append("one row at a time" if self.rows == 1 else f"{self.rows} rows at a time")
        return (f"solved {', '.join(sizes)}, because memory ran out",)

    def _tried(self) -> str:
        layer_plan = self._layer_plan
        if (self.experts, self.rows) == (layer_plan.matrices, layer_plan.shape[-2]):
            why = _whole_because(layer_plan)
            return "while it was solved" + (f", and it cannot be solved in pieces: {why}" if why else "")
        experts = "" if layer_plan.matrices == 1 else f"{self.experts} of its {layer_plan.matrices} matrices, "
        return f"even while no more than {experts}{self.rows} rows of {layer_plan.shape[-1]} were solved at once"

    def _halve(self, fewer_rows_help: bool) -> bool:
        layer_plan = self._layer_plan
        if isinstance(layer_plan.layer.adapter, RoutedAdapter) and self.experts > 1:
            self.experts = -(-self.experts // 2)
        elif (
            fewer_rows_help and not _whole_because(layer_plan) and self.rows > max(layer_plan.shape[-1] // SMALLEST, 1)
        ):
            self.rows = -(-self.rows // 2)
        else:
            return False
        self._known[self._key] = self.experts, self.rows
        return True


def _whole_because(layer_plan: LayerPlan) -> str:
    """Why the rows of a matrix can only be solved together, or ""."""
    if not layer_plan.method.rows_independent:
        return f"method {layer_plan.method.name!r} solves the rows of a matrix together"
    pattern = layer_plan.pattern
    if not isinstance(pattern, NM) and pattern.scope != "row":
        return f"pattern {pattern} compares all weights of the matrix, and a pattern per row or an N:M would not"
    return ""


# shares ---------------------------------------------------------------------------------------------------------------
# Layers, or some of the experts of one, are dealt out to processes by what they cost.


PieceKey = tuple[str, int]  # a layer's name, and the first of its matrices that one process solves


@dataclass(frozen=True)
class WorkShares:
    """Who solves each piece of the layers that are solved now. One process by itself solves all.

    whole_layers: experts are not dealt out by themselves. Those that are solved so many at a time for want of memory
      are, in turns, because their statistics are formed by all processes together.
    """

    processes: Processes
    whole_layers: bool
    owners: Mapping[PieceKey, int]

    @classmethod
    def of(cls, groups: Sequence[Sequence[LayerPlan]], run: Run) -> "WorkShares":
        """Deal out the layers of some groups, which share an input and what is prepared from it: the costliest first,
        each to the process that would be done with it first."""
        owners: dict[PieceKey, int] = {}
        size = run.processes.size
        shares = cls(run.processes, run.config.deterministic, owners)
        load = [0.0] * size
        has: list[set[int]] = [set() for _ in load]  # the groups whose preparation a process has paid for
        waiting: list[tuple[float, float, int, PieceKey]] = []
        for number, group in enumerate(groups):
            for layer_plan in group:
                *_, rows, columns = layer_plan.shape
                for turn, experts in enumerate(shares.pieces(layer_plan)):
                    prepared, solved = len(experts) * columns**3 / 3, len(experts) * rows * columns**2
                    key = (layer_plan.name, experts.start)
                    if layer_plan.at_once is not None:
                        owners[key] = turn % size
                        load[turn % size] += prepared + solved
                    else:
                        alone = len(experts) < layer_plan.matrices  # experts share no preparation
                        waiting.append((solved, prepared, -1 - len(waiting) if alone else number, key))
        for solved, prepared, group, key in sorted(waiting, key=lambda work: -work[0]):
            ends = [now + solved + (0 if group in known else prepared) for now, known in zip(load, has)]
            owner = ends.index(min(ends))
            load[owner], owners[key] = ends[owner], owner
            has[owner].add(group)
        return shares

    def pieces(self, layer_plan: LayerPlan) -> list[range]:
        """The matrices of a layer that one process solves, for all processes."""
        step, size = layer_plan.at_once or layer_plan.matrices, self.processes.size
        if size == 1:
            step = layer_plan.matrices
        elif (
            layer_plan.at_once is None and not self.whole_layers and isinstance(layer_plan.layer.adapter, RoutedAdapter)
        ):
            step = -(-layer_plan.matrices // size)
        return [range(start, min(start + step, layer_plan.matrices)) for start in range(0, layer_plan.matrices, step)]

    def turns(self, layer_plan: LayerPlan) -> list[list[range]]:
        """The pieces by turns, in which every process has at most one of those that were dealt out in turns."""
        pieces, size = self.pieces(layer_plan), self.processes.size
        return [pieces[first : first + size] for first in range(0, len(pieces), size)]

    def is_mine(self, layer_plan: LayerPlan, experts: range) -> bool:
        """Whether this process solves these."""
        return self.owners[layer_plan.name, experts.start] == self.processes.rank

    def exchange(
        self, layer_plan: LayerPlan, own: dict[PieceKey, SolvedPiece], device: torch.device
    ) -> list[SolvedPiece]:
        """What the processes have solved of a layer, in all of them. What this one has solved is taken out of ``own``;
        the rest comes to ``device``."""
        pieces = []
        for experts in self.pieces(layer_plan):
            key = (layer_plan.name, experts.start)
            owner, part = self.owners[key], own.pop(key, None)
            whole = len(experts) == layer_plan.matrices
            piece = WHOLE if whole else Piece(slice(experts.start, experts.stop), ALL_ROWS)
            facts = None
            if part is None:
                shape = layer_plan.shape if whole else (len(experts), *layer_plan.shape[-2:])
                values = torch.empty(shape, dtype=layer_plan.layer.parameter.dtype, device=device)
                mask = torch.empty(shape, dtype=torch.bool, device=device)
            else:
                values, mask = part.solution.weight, part.solution.mask
                facts = (part.solution.error, part.solution.notes, part.steps, part.energy)
            facts = self.processes.broadcast(f"layer {layer_plan.name!r}", [values, mask], owner, facts)
            error, notes, steps, energy = facts
            pieces.append(part or SolvedPiece(piece, Solution(values, mask, error, notes), steps, energy))
        return pieces


# layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solved:
    """A layer with its solution, the steps that led to it, and what the report says of its input."""

    layer_plan: LayerPlan
    solution: Solution
    steps: list[StepReport]
    input: InputFacts


class PreparedStates:
    """What methods have prepared from the statistics of one input. Layers with the same method and options share it."""

    def __init__(self, stats: Stats | None) -> None:
        self.stats = stats
        self._states: list[tuple[LayerPlan, Any]] = []
        self.scaled = cache(partial(Scaled.of, stats))  # damping -> what polish shares

    def of(self, layer_plan: LayerPlan) -> Any:
        for other, state in self._states:
            if (other.method, other.options) == (layer_plan.method, layer_plan.options):
                return state
        state = layer_plan.method.prepare(self.stats, layer_plan.options)
        self._states.append((layer_plan, state))
        return state


@dataclass(frozen=True)
class Prepared:
    """A layer, or some of its experts, ready to be solved: the dense weight as a matrix, the pattern (within the mask
    that the layer carries, if that stays), the states of its input, and that of its method."""

    weight: Tensor
    pattern: Pattern
    states: PreparedStates
    state: Any


StatesOf = Callable[[range], PreparedStates]  # of some experts; of anything else the same for all


def solve_layers(shared_inputs: Sequence[SharedInput], run: Run) -> Iterator[Solved]:
    """Solve the layers of some inputs, one after the other. Where several processes work together, each solves its
    share, and the layers come when all of them have been solved.

    Errors name the layer: ValueError for solutions that break the method contract, MemoryError where memory runs out
    and no smaller pieces would help.
    """
    shares = WorkShares.of([shared.layer_plans for shared in shared_inputs], run)
    own: dict[PieceKey, SolvedPiece] = {}
    for shared in shared_inputs:
        states = PreparedStates(None if isinstance(shared.stats, DeferredStats) else shared.stats)
        for layer_plan in shared.layer_plans:
            for turn in shares.turns(layer_plan):
                for experts, states_of in _own_work(layer_plan, turn, shared.stats, states, shares):
                    solved = solve_layer(layer_plan, experts, states_of, run)
                    if run.processes.size == 1:
                        yield Solved(layer_plan, solved.solution, solved.steps, InputFacts.of(shared.stats))
                    else:
                        own[layer_plan.name, experts.start] = solved
                    del solved  # not held while the next layer is solved
    for shared in shared_inputs if run.processes.size > 1 else ():
        for layer_plan in shared.layer_plans:
            pieces = shares.exchange(layer_plan, own, run.config.device or layer_plan.layer.values.device)
            with errors_name_layer(layer_plan, when=JOINED):
                solved = joined(WHOLE, layer_plan.shape, pieces)
            yield Solved(layer_plan, solved.solution, solved.steps, InputFacts.of(shared.stats))


def _own_work(
    layer_plan: LayerPlan,
    turn: Sequence[range],
    stats: Stats | DeferredStats | None,
    states: PreparedStates,
    shares: WorkShares,
) -> list[tuple[range, StatesOf]]:
    """The experts (or all of a layer that has none) that this process solves in a turn, each with what gives the states
    of some of them. Layers with one input share ``states``; each expert has an input of its own."""
    if not isinstance(layer_plan.layer.adapter, RoutedAdapter):
        return [(experts, lambda _: states) for experts in turn if shares.is_mine(layer_plan, experts)]
    if shares.processes.size == 1:
        return [(experts, lambda some: PreparedStates(part_of(stats, some))) for experts in turn]
    work: list[tuple[range, StatesOf]] = []
    for experts in turn:
        formed = part_of(stats, experts)  # of tokens that were held: by all processes together
        if shares.is_mine(layer_plan, experts):
            work.append((experts, partial(_states_of_some, formed, experts.start)))
        del formed
    return work


def _states_of_some(stats: Stats | None, first: int, experts: range) -> PreparedStates:
    """States of these experts, from the statistics of experts ``first`` and following."""
    return PreparedStates(part_of(stats, range(experts.start - first, experts.stop - first)))


def solve_layer(layer_plan: LayerPlan, experts: range, states_of: StatesOf, run: Run) -> SolvedPiece:
    """All of a layer, or some of its experts, in as few pieces as there is memory for."""
    sizes, done = PieceSizes(layer_plan, run), []
    rows = layer_plan.shape[-2]
    start, began = experts.start, time.perf_counter()
    while start < experts.stop:
        some = range(start, min(start + sizes.experts, experts.stop))
        prepared = _prepared(layer_plan, some, states_of, sizes, run)
        row, experts_at_once = 0, sizes.experts
        while prepared is not None and row < rows and sizes.experts == experts_at_once:
            piece = Piece(_slice(layer_plan, some), slice(row, min(row + sizes.rows, rows)))
            with sizes.attempt(), errors_name_layer(layer_plan):
                done.append(solve_piece(layer_plan, piece, prepared, began, run))
            if not sizes.free_if_failed():
                row, began = piece.rows.stop, time.perf_counter()
        del prepared
        if not sizes.free_if_failed():
            start, began = some.stop, time.perf_counter()
    whole = len(experts) == layer_plan.matrices
    piece, shape = Piece(_slice(layer_plan, experts), ALL_ROWS), (len(experts), *layer_plan.shape[-2:])
    with errors_name_layer(layer_plan, when=JOINED):
        return joined(piece, layer_plan.shape if whole else shape, done, sizes.note)


def solve_piece(layer_plan: LayerPlan, piece: Piece, prepared: Prepared, began: float, run: Run) -> SolvedPiece:
    """The method, and the steps that follow it, on a piece of a layer; time counts from ``began``."""
    plan, weight = piece.plan(layer_plan), prepared.weight[..., piece.rows, :]
    plan = replace(plan, pattern=cut(prepared.pattern, piece.rows))
    solution = plan.method.solve(weight, prepared.state, plan.pattern, plan.options)
    _check_solution(plan, weight, solution)
    first = StepReport.of(plan.method.name, solution.error, time.perf_counter() - began)
    states = prepared.states
    scaled = partial(states.scaled, plan.options.get("damping", DAMPING))
    solution, later = follow_up(plan, weight, solution, states.stats, scaled, run.config)
    energy = 1.0 if weight.numel() == layer_plan.size else output_energy(weight, states.stats)
    return SolvedPiece(piece, solution, [first, *later], energy)


def _prepared(
    layer_plan: LayerPlan, experts: range, states_of: StatesOf, sizes: PieceSizes, run: Run
) -> Prepared | None:
    """What is needed before rows are solved; None if memory ran out and fewer experts are to be tried.

    The weight is a copy: a method that writes to its input does not reach the model.
    """
    routed = isinstance(layer_plan.layer.adapter, RoutedAdapter)
    states = weight = pattern = None
    with sizes.attempt(fewer_rows_help=False, when=PREPARED if routed else COPIED), errors_name_layer(layer_plan):
        states = states_of(experts)
        device = run.config.device if states.stats is None else states.stats.square_sums.device
        values = layer_plan.layer.values[_slice(layer_plan, experts)]
        weight = layer_plan.layer.matrix(values.to(device, copy=True))
        pattern = layer_plan.pattern_now
        if pattern.within is not None:
            pattern = replace(pattern, within=pattern.within[_slice(layer_plan, experts)].to(weight.device))
    if states is None or weight is None or pattern is None:
        return None
    with sizes.attempt(fewer_rows_help=False, when=PREPARED), errors_name_layer(layer_plan):
        return Prepared(weight, pattern, states, states.of(layer_plan))
    return None


def _slice(layer_plan: LayerPlan, experts: range) -> slice:
    """Where experts lie in a weight; all of anything else."""
    return slice(experts.start, experts.stop) if isinstance(layer_plan.layer.adapter, RoutedAdapter) else slice(None)


def _check_solution(layer_plan: LayerPlan, weight: Tensor, solution: Solution) -> None:
    """A method's own mistakes (a user's method above all) must not reach the model."""
    wrong = ""
    if not isinstance(solution, Solution):
        wrong = f"it is a {type(solution).__name__}, not a modelopt_sparse.Solution"
    elif solution.mask.dtype != torch.bool or solution.mask.shape != weight.shape:
        wrong = f"mask is {solution.mask.dtype} {list(solution.mask.shape)}, not torch.bool {list(weight.shape)}"
    elif solution.weight.shape != weight.shape or solution.weight.dtype != weight.dtype:
        there = f"{solution.weight.dtype} {list(solution.weight.shape)}"
        wrong = f"weight is {there}, not {weight.dtype} {list(weight.shape)}"
    elif not torch.isfinite(solution.weight).all():
        wrong = "weight holds NaN or inf"
    elif solution.weight.masked_fill(solution.mask, 0).count_nonzero():
        wrong = "weight is not zero where the mask is False"
    elif count := layer_plan.pattern.count_regrown(solution.mask):
        wrong = f"mask keeps {count} weights that the layer's present mask prunes (replace=True drops that mask)"
    elif count := layer_plan.pattern.count_kept_wrong(solution.mask):
        wrong = f"mask breaks pattern {layer_plan.pattern} in {count} places"
    if wrong:
        raise ValueError(f"method {layer_plan.method.name!r} gave a bad solution: {wrong}")
