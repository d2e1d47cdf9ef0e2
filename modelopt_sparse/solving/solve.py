"""From the statistics of inputs to the solutions of layers; one block, from top to bottom; and how a solution is
written into the model.

A layer is solved at once, or in pieces where memory is short; by this process, or by one of several (share.py).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.permute import permute
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import TrainableMask
from modelopt_sparse.calibration.calls import WholeModel
from modelopt_sparse.calibration.dense import BlockTask
from modelopt_sparse.calibration.stats import DeferredStats, SharedInput, collect
from modelopt_sparse.methods.alps import DAMPING, Scaled, polish
from modelopt_sparse.methods.base import Solution, Stats, masked_solution, output_energy
from modelopt_sparse.methods.patterns import NM, sub_pattern
from modelopt_sparse.methods.scores import GivenMask
from modelopt_sparse.model.devices import count_nonzero, free_what_can_be_freed, is_out_of_memory, version
from modelopt_sparse.model.masking import set_mask
from modelopt_sparse.plan.options import TOKENS_TO_MOVE, SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.values import PERMUTED, LayerReport, StepReport
from modelopt_sparse.run import Run, refuse_unusable
from modelopt_sparse.solving.share import InputStats, SolvedPiece, assign_owners, exchanged, own_work


@contextmanager
def errors_name_layer(layer_plan: LayerPlan, when: str) -> Iterator[None]:
    """A method knows no names: say whose layer its error is about, and ``when`` memory ran out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer_plan.name!r}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"layer {layer_plan.name!r} {list(layer_plan.shape)}: out of memory {when}; give device= with more memory, "
            "memory_limit= for experts, a method without a Gram matrix (wanda, magnitude), or exclude="
        ) from error


# a piece --------------------------------------------------------------------------------------------------------------
# When memory runs out, the layer is solved again in smaller pieces, which give the same as all of it: of fused experts
# fewer at once; of one matrix some rows, where rows are independent and the pattern counts in a row.


class Prepared:
    """The statistics of one input, and the states that methods prepare from them, one for each set of options."""

    def __init__(self, stats: Stats | None) -> None:
        self.stats = stats
        self._prepared: list[tuple[LayerPlan, Any]] = []
        self.scaled = cache(partial(Scaled.of, stats))  # damping -> what polish shares

    def of(self, layer_plan: LayerPlan) -> Any:
        for known_plan, state in self._prepared:
            if (known_plan.method, known_plan.options) == (layer_plan.method, layer_plan.options):
                return state
        state = layer_plan.method.prepare(self.stats, layer_plan.options)
        self._prepared.append((layer_plan, state))
        return state


@dataclass(frozen=True)
class LayerTask:
    """A layer, or some of its experts, ready to be solved.

    layer_plan: its pattern lies within the mask that stays.
    weight: the dense weight as a matrix.
    prepared: what is shared with other layers of this input. state: what the method has prepared.
    """

    layer_plan: LayerPlan
    weight: Tensor
    prepared: Prepared
    state: Any

    @classmethod
    def of(cls, layer_plan: LayerPlan, experts: range, prepared: Prepared, stats: InputStats, run: Run) -> "LayerTask":
        """Copy the weight, so that a method that writes to its input does not reach the model."""
        where = slice(experts.start, experts.stop) if layer_plan.routed else slice(None)
        prepared = Prepared(stats and stats.part(experts)) if layer_plan.routed else prepared
        device = run.config.device if prepared.stats is None else prepared.stats.square_sums.device
        weight = layer_plan.layer.matrix(layer_plan.layer.values[where].to(device, copy=True))
        pattern, method = layer_plan.pattern_now, layer_plan.method
        if pattern.within is not None:
            pattern = replace(pattern, within=pattern.within[where].to(weight.device))
        if isinstance(method, GivenMask):
            method = method.part(where)
        return cls(replace(layer_plan, pattern=pattern, method=method), weight, prepared, prepared.of(layer_plan))


def solve_piece(task: LayerTask, rows: slice, began: float, run: Run) -> SolvedPiece:
    """Solve some rows by the method, and take the steps that follow it; time counts from ``began``.

    Polish leaves no row worse by its own objective; dense values may.
    """
    layer_plan, weight, stats, config = task.layer_plan, task.weight[..., rows, :], task.prepared.stats, run.config
    method, pattern = layer_plan.method, sub_pattern(layer_plan.pattern, rows)
    if isinstance(method, GivenMask):
        method = method.part((..., rows, slice(None)))
    before = version(weight)
    solution = method.solve(weight, task.state, pattern, layer_plan.options)
    _check_solution(replace(layer_plan, pattern=pattern), weight, solution, written=version(weight) != before)
    steps = [StepReport.of(method.name, solution.error, time.perf_counter() - began)]
    for step in layer_plan.steps:
        began = time.perf_counter()
        if step == "dense-values":
            solution = masked_solution(weight, solution.mask, stats)
        elif step == "polish":
            scaled = task.prepared.scaled(layer_plan.options.get("damping", DAMPING))
            solution = polish(weight, solution, scaled, config.polish)
        else:
            continue  # reconstruction follows when all layers of the block are solved
        steps.append(StepReport.of(step, solution.error, time.perf_counter() - began))
    energy = 1.0 if weight.numel() == layer_plan.size else output_energy(weight, stats)
    return SolvedPiece(solution, steps, energy)


def _check_solution(layer_plan: LayerPlan, weight: Tensor, solution: Solution, *, written: bool) -> None:
    """A method's own mistakes (a user's method above all) must not reach the model, nor the steps that follow it."""
    wrong = ""
    if not isinstance(solution, Solution):
        wrong = f"it is a {type(solution).__name__}, not a modelopt_sparse.Solution"
    elif solution.mask.dtype != torch.bool or solution.mask.shape != weight.shape:
        wrong = f"mask is {solution.mask.dtype} {list(solution.mask.shape)}, not torch.bool {list(weight.shape)}"
    elif solution.weight.shape != weight.shape or solution.weight.dtype != weight.dtype:
        form = f"{solution.weight.dtype} {list(solution.weight.shape)}"
        wrong = f"weight is {form}, not {weight.dtype} {list(weight.shape)}"
    elif not torch.isfinite(solution.weight).all():
        wrong = "weight holds NaN or inf"
    elif solution.weight.masked_fill(solution.mask, 0).any():
        wrong = "weight is not zero where the mask is False"
    elif count := layer_plan.pattern.count_regrown(solution.mask):
        wrong = f"mask keeps {count} weights that the layer's present mask prunes (replace=True drops that mask)"
    elif (count := layer_plan.pattern.count_kept_wrong(solution.mask)) and not isinstance(layer_plan.method, GivenMask):
        wrong = f"mask breaks pattern {layer_plan.pattern} in {count} places"
    elif written:
        wrong = "it was written to the dense weight, which the steps after it need: clone that first"
    if wrong:
        raise ValueError(f"method {layer_plan.method.name!r} gave a bad solution: {wrong}")


def joined(layer_plan: LayerPlan, pieces: Sequence[SolvedPiece], notes: Sequence[str] = ()) -> SolvedPiece:
    """Put consecutive pieces of a layer together, with errors relative to all of it. ``notes`` are added to theirs."""
    if len(pieces) == 1 and not notes:
        return pieces[0]
    total = sum(part.energy for part in pieces)

    def error(errors: Iterable[float | None]) -> float:
        known = (math.nan if value is None else value for value in errors)
        return sum(part.energy * value for part, value in zip(pieces, known)) / total if total > 0 else 0.0

    def together(tensors: list[Tensor]) -> Tensor:
        if not layer_plan.routed:
            return torch.cat(tensors, -2)
        return torch.cat([x.flatten(0, -2) for x in tensors]).view(-1, *layer_plan.shape[-2:])

    with errors_name_layer(layer_plan, "while its solution was put together"):
        weight = together([part.solution.weight for part in pieces])
        mask = together([part.solution.mask for part in pieces])
    steps = [
        StepReport.of(same[0].step, error(step.error for step in same), sum(step.seconds for step in same))
        for same in zip(*(part.steps for part in pieces))
    ]
    piece_notes = dict.fromkeys(note for part in pieces for note in part.solution.notes)
    solution = Solution(weight, mask, error(part.solution.error for part in pieces), (*piece_notes, *notes))
    return SolvedPiece(solution, steps, total)


# a layer --------------------------------------------------------------------------------------------------------------


# The smallest piece of a matrix with C columns has C / SMALLEST rows. What a solver holds for them is then little
# beside the state that all rows share, and fewer would not help.
SMALLEST = 64


class PieceSizes:
    """How much of a layer is solved at once: all of it, or as many experts as a memory limit leaves room for; and half
    of that, as often as memory runs out.

    The run remembers what layers of one shape, method and pattern came to; the next such layer starts there.
    """

    def __init__(self, layer_plan: LayerPlan, run: Run) -> None:
        self._layer_plan, self._known = layer_plan, run.piece_sizes
        self._whole = layer_plan.at_once or layer_plan.matrices, layer_plan.shape[-2]
        # all that decides whether and how a layer can be cut
        self._key = layer_plan.type, layer_plan.shape, id(layer_plan.method), layer_plan.pattern, layer_plan.steps
        self.experts, self.rows = self._known.get(self._key, self._whole)

    def halve(self, *, rows: bool) -> bool:
        """Make pieces smaller, if they can be; ``rows``: whether fewer rows would help."""
        layer_plan, pattern = self._layer_plan, self._layer_plan.pattern
        by_row = layer_plan.method.rows_independent and (isinstance(pattern, NM) or pattern.scope == "row")
        if layer_plan.routed and self.experts > 1:
            self.experts = -(-self.experts // 2)
        elif rows and by_row and self.rows > max(layer_plan.shape[-1] // SMALLEST, 1):
            self.rows = -(-self.rows // 2)
        else:
            return False
        self._known[self._key] = self.experts, self.rows
        return True

    @property
    def notes(self) -> list[str]:
        """The report's note on pieces that memory has forced."""
        limits = {"expert": (self.experts, self._whole[0]), "row": (self.rows, self._whole[1])}
        sizes = [f"one {unit}" if n == 1 else f"{n} {unit}s" for unit, (n, whole) in limits.items() if n < whole]
        return [f"solved {', '.join(f'{size} at a time' for size in sizes)}, because memory ran out"] if sizes else []


def solve_layer(layer_plan: LayerPlan, experts: range, prepared: Prepared, stats: InputStats, run: Run) -> SolvedPiece:
    """Solve all of a layer, or some of its experts, in as few pieces as there is memory for. Layers with one input
    share ``prepared``; each expert has an input of its own, a part of ``stats``."""
    sizes, done = PieceSizes(layer_plan, run), []
    task: LayerTask | None = None
    start, row, began = experts.start, 0, time.perf_counter()
    while start < experts.stop:
        some = range(start, min(start + sizes.experts, experts.stop))
        rows = slice(row, min(row + sizes.rows, layer_plan.shape[-2]))
        try:
            with errors_name_layer(layer_plan, "while it was solved"):
                task = task or LayerTask.of(layer_plan, some, prepared, stats, run)
                done.append(solve_piece(task, rows, began, run))
        except MemoryError:
            if not sizes.halve(rows=task is not None):
                raise
        else:
            row, began = rows.stop, time.perf_counter()
            if row == layer_plan.shape[-2]:
                task, start, row = None, some.stop, 0
            continue
        if sizes.experts < len(some):
            task = None
        free_what_can_be_freed()  # what the attempt held: its error is gone by now, and the frames that it kept alive
    return joined(layer_plan, done, sizes.notes)


# the layers of some inputs -------------------------------------------------------------------------------------------


def solve_layers(shared_inputs: Sequence[SharedInput], run: Run) -> Iterator[tuple[LayerPlan, SolvedPiece, InputStats]]:
    """Solve the layers of some inputs, one after the other; each comes with the statistics of its input. Of several
    processes each solves some of them, and the layers come when all have been solved.

    Errors name the layer: ValueError for solutions that break the method contract, MemoryError where memory runs out
    and no smaller pieces would help.
    """
    several, local = run.processes.size > 1, dict[tuple[str, range], SolvedPiece]()
    layer_plans = [layer_plan for shared in shared_inputs for layer_plan in shared.layer_plans]
    owners = assign_owners(layer_plans, run) if several else {}
    for shared in shared_inputs:
        prepared = Prepared(None if isinstance(shared.stats, DeferredStats) else shared.stats)
        for layer_plan in shared.layer_plans:
            if several:
                for experts, stats in own_work(owners[layer_plan.name], shared.stats, run):
                    local[layer_plan.name, experts] = solve_layer(layer_plan, experts, prepared, stats, run)
                    del stats  # not held while the next layer is solved
                continue
            solved = solve_layer(layer_plan, range(layer_plan.matrices), prepared, shared.stats, run)
            yield layer_plan, solved, shared.stats
            del solved
    for shared in shared_inputs if several else ():
        for layer_plan in shared.layer_plans:
            solved = joined(layer_plan, exchanged(layer_plan, owners[layer_plan.name], local, run))
            yield layer_plan, solved, shared.stats


# one block, from top to bottom ---------------------------------------------------------------------------------------


def sparsify_block(block: BlockTask, run: Run) -> list[Callable[[], object]]:
    """Make a block sparse: permute, collect, solve, attach, reconstruct, advance.

    Returns what must be written only when the inputs of all blocks have been collected (``sequential="none"``, where
    they come through the whole model); otherwise nothing. A block that fails before its first layer is written is left
    as it was.
    """
    inputs, config = block.inputs(), run.config
    dense_goes_on = config.sequential == "none" and bool(block.layer_plans)  # `collect` sends the dense outputs on
    stays_dense = dense_goes_on and isinstance(inputs, WholeModel) and inputs.data is not None
    masks: dict[nn.Parameter, Tensor] = {}
    movable: dict[nn.Parameter, TrainableMask] = {}
    later: list[Callable[[], object]] = []
    with run.storage.open(block.block, run.report) as write_sparse, inputs.on_device(), ExitStack() as undo:
        with run.part("permutation"):
            permuted = permute(block, inputs, run, undo) if config.permute else {}
        goals = dense_goals(block, inputs, run) if config.reconstruct else None
        if write_sparse is not None:  # only what the block puts out is needed
            if dense_goes_on:
                inputs.advance()
            write_sparse()
        elif not run.storage.resident:
            for layer_plan in block.layer_plans:
                refuse_unusable(layer_plan.layer)
        for stage in block.stages(config.sequential) if write_sparse is None else ():
            for layer_plan, solved, stats in solve_layers(collect(stage, inputs, run, one_pass=block.one_pass), run):
                movable |= _movable(layer_plan, stats, config)
                report = layer_report(layer_plan, solved, stats, permuted.get(layer_plan.name), config)
                write = partial(attach, layer_plan, solved.solution, report, run)  # without the statistics
                if stays_dense:
                    later.append(write)
                else:
                    masks |= write()
                    undo.pop_all()  # there is no way back once a layer is written
                del solved, stats, write  # not held while the next layer is solved
        undo.pop_all()
        if masks and goals is not None:
            reconstruct(block, goals, masks, movable, inputs, run)
        if not dense_goes_on:
            inputs.advance()
    return later


def _movable(layer_plan: LayerPlan, stats: InputStats, config: SparsifyConfig) -> dict[nn.Parameter, TrainableMask]:
    """The weight of a solved layer as a `TrainableMask`, if its mask is to move while the block is tuned."""
    if config.reconstruct is None or config.reconstruct.masks == "frozen" or config.masks is not None or stats is None:
        return {}
    half = layer_plan.layer.parameter.dtype == torch.float16  # "move" is refused for these
    enough = TOKENS_TO_MOVE * layer_plan.shape[-1] * (layer_plan.matrices if layer_plan.routed else 1)
    if config.reconstruct.masks == "auto" and (half or stats.tokens < enough):
        return {}
    moved = TrainableMask.of(layer_plan.layer, layer_plan.pattern_now, stats.square_sums)
    return {layer_plan.layer.parameter: moved}


# writing a solution into the model ------------------------------------------------------------------------------------


# what became of experts with fewer tokens than min_tokens, by the option ``experts``
FEW_TOKENS = {
    "pool": "were filled up to {} from the tokens of all experts",
    "all_tokens": "were solved as if every token were routed to them",
    "weight_only": "were solved by their weights alone",
}


@torch.no_grad()
def attach(layer_plan: LayerPlan, solution: Solution, report: LayerReport, run: Run) -> dict[nn.Parameter, Tensor]:
    """Write a layer's solution, in place, and add its report -> if reconstruction follows, the parameter's mask.

    A layer is written whole or not at all, whatever fails: Ctrl-C waits.
    """
    layer, config = layer_plan.layer, run.config
    mask, values = layer.unmatrix(solution.mask), layer.values
    # where an earlier run left a mask, it is replaced even if none is asked for now: it would prune by the old solution
    enforce = config.enforce or layer.mask is not None
    with errors_name_layer(layer_plan, "while its solution was written into the model"), _uninterrupted():
        # what takes memory comes before the first write, so that a layer is never left half written
        new, pruned = layer.unmatrix(solution.weight), ~mask.to(values.device)
        for name in layer.parameter_names if enforce else ():
            set_mask(run.model, name, mask)
        values.copy_(new)
        values.masked_fill_(pruned, 0)
        run.report.layers.append(report)
    return {} if config.reconstruct is None else {layer.parameter: mask}


def layer_report(
    layer_plan: LayerPlan, solved: SolvedPiece, stats: InputStats, permuted: str | None, config: SparsifyConfig
) -> LayerReport:
    solution, steps = solved.solution, solved.steps
    notes = [*solution.notes, *([permuted] if permuted else [])]
    error_from, tokens, expert_tokens = "weights", 0, []
    if stats is not None:
        error_from = "gram" if isinstance(stats, DeferredStats) or stats.gram is not None else "square_sums"
        tokens, expert_tokens = stats.tokens, [] if stats.counts is None else stats.counts.tolist()
        notes += _few_tokens(layer_plan, tokens, expert_tokens, config)
        if dead := int((stats.square_sums == 0).sum()):
            notes.append(
                f"{dead} of {stats.square_sums.numel()} input channels were zero on all calibration data (dead)"
            )
    return LayerReport(
        name=layer_plan.name,
        parameter=layer_plan.layer.parameter_name,
        type=layer_plan.type,
        shape=list(layer_plan.shape),
        recipe="+".join([*([PERMUTED] if permuted else []), *(step.step for step in steps)]),
        pattern=str(layer_plan.pattern),
        options=dict(layer_plan.options),
        zeros=solution.mask.numel() - count_nonzero(solution.mask),
        size=solution.mask.numel(),
        error=steps[-1].error,
        error_from=error_from,
        tokens=tokens,
        seconds=round(sum(step.seconds for step in steps), 4),
        notes=notes,
        steps=steps,
        expert_tokens=expert_tokens,
    )


def _few_tokens(layer_plan: LayerPlan, tokens: int, expert_tokens: Sequence[int], config: SparsifyConfig) -> list[str]:
    """Note the experts that got fewer tokens than `min_tokens`, and what was done about them."""
    label = f"experts with fewer than {config.min_tokens} tokens {FEW_TOKENS[config.experts].format(config.min_tokens)}"
    few = [f"{expert} ({count})" for expert, count in enumerate(expert_tokens) if count < config.min_tokens]
    notes = [f"{label}: {', '.join(few)}"] if few else []
    if layer_plan.layer.mixture is not None and tokens < config.min_tokens:
        notes.append(f"{label}: this one ({tokens})")
    return notes


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end, so that it never leaves a layer half written."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is None:  # a handler in C could not be put back
        yield
        return
    pressed: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])
