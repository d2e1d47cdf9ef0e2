"""From the statistics of inputs to the solutions of layers: all of a layer at once, or in pieces where memory is short;
by this process alone, or each by one of several processes, which then exchange what they have solved."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.calibration.routed import DeferredStats, part_of
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.statistics import InputFacts, SharedInput
from modelopt_sparse.methods.base import Solution, Stats, output_energy
from modelopt_sparse.methods.conjugate_gradients import Scaled
from modelopt_sparse.methods.patterns import Pattern, cut
from modelopt_sparse.methods.polish import DAMPING
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.values import StepReport
from modelopt_sparse.solving.follow_up import follow_up
from modelopt_sparse.solving.out_of_memory import COPIED, JOINED, PREPARED, errors_name_layer
from modelopt_sparse.solving.pieces import ALL_ROWS, WHOLE, Piece, PieceSizes, SolvedPiece, joined
from modelopt_sparse.solving.sharing import PieceKey, WorkShares


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
