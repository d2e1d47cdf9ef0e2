"""`sparsify` and `export`: orchestration only."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from modelopt_sparse.allocation import allocation_for
from modelopt_sparse.calibration.experts import KeptStats, part_of
from modelopt_sparse.calibration.run import Runner
from modelopt_sparse.calibration.turns import Turns
from modelopt_sparse.calibration.walk import Group, walk
from modelopt_sparse.channels import DenseBlock, Permuted, permute
from modelopt_sparse.config import SparsifyConfig, resolve
from modelopt_sparse.distributed import is_sharded
from modelopt_sparse.experts import RoutedKind
from modelopt_sparse.memory import COPIED, JOINED, PREPARED, WRITTEN, Cut, Known, is_out_of_memory, no_memory
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.methods.polish import DAMPING, Scaled
from modelopt_sparse.modules import named_masks, remove_masks, set_mask
from modelopt_sparse.offload import refuse_what_cannot_be_written, stored
from modelopt_sparse.parts import Part, Piece, is_whole, joined, some_of
from modelopt_sparse.plan import LayerPlan, Plan, plan_for
from modelopt_sparse.reconstruct import SolvedBlock, reconstruct
from modelopt_sparse.report import (
    LayerReport,
    Report,
    StepReport,
    attach_report,
    attached_report,
    merged_report,
)
from modelopt_sparse.steps import improved


def sparsify(
    model: nn.Module,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    *,
    turns: Turns | None = None,
    **options: Any,
) -> nn.Module:
    """Make a model sparse, in place, and return it.

    ``method`` is a name ("magnitude", "wanda", "ria", "sparsegpt", "alps"), a `Method` object, or a ModelOpt mode list;
    without one, ``masks=`` or ``quality=`` choose, else it is "sparsegpt". A named method is the published algorithm;
    what goes beyond it (polish, reconstruct and others) is asked for. ``config`` and keywords are the options of
    `SparsifyConfig` and the method's own. Everything is checked before any work. Pruned layers become sparse modules
    that hold their masks (``enforce=False``: plain modules with zeros); the Parameter objects stay the same. The model
    comes back in the mode, dtype, device and with the flags that it came with. Raises ValueError or TypeError with the
    model untouched; if something fails later (or Ctrl-C), the layers solved so far stay sparse, the rest untouched, and
    the call can be repeated. ``turns`` is what `sparsify_checkpoint` gives, whose models are not all in memory.
    """
    method, config = resolve(method, config, options)
    plan = plan_for(model, method, config)
    turns = turns or Turns()
    _check(model, plan, config, turns)
    report = Report.begin(plan, config)
    held: list[tuple[LayerPlan, Solution, LayerReport]] = []
    known: Known = {}  # the pieces that layers are solved in, once memory has run out
    # of the block that is being solved
    masks: dict[nn.Parameter, torch.Tensor] = {}
    permuted: dict[str, Permuted] = {}
    undoing: list[Callable[[], None]] = []  # a block none of whose layers was solved is left as it was
    try:
        runner = None
        if config.allocation != "uniform":
            with _calibrating(model):
                runner = Runner(model, plan, config)  # a generator can be gone over once: the walk takes what it gave
                allocation = allocation_for(model, plan, config, runner)
            plan = allocation.plan
            report.allocated(allocation.description, allocation.measure, dict(allocation.tried))
        with _calibrating(model), closing(walk(model, plan, config, report, runner, turns)) as walked:
            for item in walked:
                if isinstance(item, DenseBlock):
                    for found in permute(item):
                        permuted[found.layer] = found
                        undoing.append(found.undo)
                    continue
                if isinstance(item, SolvedBlock):
                    _reconstruct(model, item, masks, plan, config, report)
                    masks.clear()
                    continue
                parts: list[Part] = []  # a layer is one part, unless it is solved a few experts or rows at a time
                for job in _prepared(item, config, known):
                    target = job.target
                    with job.cut.attempt():  # where memory runs out, smaller pieces come next
                        with _naming(target):
                            solution = target.method.solve(job.weight, job.state, target.pattern, target.options)
                        _check_solution(target, job.weight, solution)
                        first = StepReport.of(target.method.name, solution, time.perf_counter() - job.began)
                        with _naming(target):
                            solution, later = improved(target, job.weight, solution, job.stats, job.scaled, config)
                        parts.append(Part.of(job.layer, job.piece, solution, [first, *later], job.weight, job.stats))
                    if not is_whole(job.layer, parts):
                        job = solution = None  # only the statistics of the next experts are to be alive
                        continue
                    target = job.layer
                    with _naming(target, whole=JOINED):
                        solution, steps = joined(target, parts, job.cut.note)
                        entry = LayerReport.of(target, solution, item.stats, steps, config, permuted.get(target.name))
                    parts.clear()
                    if item.hold:
                        held.append((target, solution, entry))
                    else:
                        undoing.clear()
                        _attach(model, target, solution, entry, config=config, report=report)
                    if config.reconstruct is not None:
                        masks[target.layer.parameter] = target.layer.unmatrix(solution.mask)
                    del job, solution
                del item  # the next block is collected while this frame waits: its statistics alone are to be alive
            for target, solution, entry in held:
                _attach(model, target, solution, entry, config=config, report=report)
    except BaseException as error:
        for undo in undoing:
            undo()
        done = f"{len(report.layers)} of {len(plan.layers)} layers"
        report.notes.append(f"stopped by {type(error).__name__} after {done} of the plan")
        raise
    finally:
        if report.layers:  # after a failure as well: what is sparse stands in the report
            earlier = attached_report(model)
            attach_report(model, report if earlier is None else merged_report(earlier, report))
    return model


def export(model: nn.Module) -> nn.Module:
    """Turn sparse modules back into plain ones, in place, with the zeros baked in; return the model.

    Parameters, ties, ``requires_grad`` and dtype stay as they are. Masks are no longer enforced afterwards. A model
    without sparse modules comes back as it is.
    """
    remove_masks(model)
    return model


@dataclass(frozen=True)
class _Job:
    """A layer, or a piece of one, ready to be solved: the dense weight as a matrix, and the state that its group
    shares. ``target`` is the plan of the piece, ``layer`` that of all of it."""

    target: LayerPlan
    layer: LayerPlan
    piece: Piece
    cut: Cut
    weight: torch.Tensor
    state: Any
    stats: Stats | None
    scaled: Callable[[], Scaled]
    began: float


def _prepared(group: Group, config: SparsifyConfig, known: Known) -> Iterator[_Job]:
    """The layers of one group; those with the same method and options share one prepared state. A piece in which memory
    ran out comes again in smaller ones."""
    if isinstance(group.targets[0].layer.kind, RoutedKind):
        for layer in group.targets:
            yield from _prepared_experts(layer, group.stats, config, known)
        return
    assert not isinstance(group.stats, KeptStats)  # which are of experts alone
    states: list[tuple[LayerPlan, Any]] = []
    scaled = cache(partial(Scaled.of, group.stats))
    for target in group.targets:
        began = time.perf_counter()
        with _naming(target, whole=COPIED):
            weight = _dense(target, slice(None), group.stats, config)
        shared = [state for other, state in states if (other.method, other.options) == (target.method, target.options)]
        if not shared:
            with _naming(target, whole=PREPARED):
                shared = [target.method.prepare(group.stats, target.options)]
            states.append((target, shared[0]))
        polished = partial(scaled, target.options.get("damping", DAMPING))
        piece = Piece(slice(None), slice(None))
        job = _Job(target, target, piece, Cut(target, known), weight, shared[0], group.stats, polished, began)
        yield from _some_rows(job)


def _prepared_experts(
    layer: LayerPlan, stats: Stats | KeptStats | None, config: SparsifyConfig, known: Known
) -> Iterator[_Job]:
    """A few experts at a time, each with statistics formed when their turn comes."""
    cut = Cut(layer, known)
    start, began = 0, time.perf_counter()
    while start < layer.matrices:
        piece = Piece(slice(start, min(start + cut.experts, layer.matrices)), slice(None))
        job = None
        with cut.attempt(rows=False), _naming(layer):
            own = part_of(stats, range(piece.experts.start, piece.experts.stop))
            weight = _dense(layer, piece.experts, own, config)
            state = layer.method.prepare(own, layer.options)
            scaled = partial(Scaled.of, own, layer.options.get("damping", DAMPING))
            job = _Job(layer, layer, piece, cut, weight, state, own, scaled, began)
        own = weight = state = scaled = None
        if job is not None:
            yield from _some_rows(job)
            job = None
        if not cut.again():
            start, began = piece.experts.stop, time.perf_counter()


def _some_rows(job: _Job) -> Iterator[_Job]:
    """The job of all rows, or jobs of some of them at a time; ends early where fewer experts are to be tried."""
    cut, began = job.cut, job.began
    experts, rows = cut.experts, job.weight.shape[-2]
    start = 0
    while start < rows and cut.experts == experts:
        piece = Piece(job.piece.experts, slice(start, min(start + cut.rows, rows)))
        target, weight = some_of(job.layer, piece), job.weight[..., piece.rows, :]
        yield replace(job, target=target, piece=piece, weight=weight, began=began)
        if not cut.again():
            start, began = piece.rows.stop, time.perf_counter()


def _dense(target: LayerPlan, which: slice, stats: Stats | None, config: SparsifyConfig) -> torch.Tensor:
    """The weight of a layer as a matrix, or ``which`` of its experts, where its statistics are.

    A copy: a method that writes to its input does not reach the model.
    """
    layer = target.layer
    device = config.device if stats is None else stats.square_sums.device
    values = stored(layer.owner, layer.param).detach()
    return layer.matrix(values[which].to(device, copy=True))


@contextmanager
def _naming(target: LayerPlan, *, whole: str = "") -> Iterator[None]:
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


def _reconstruct(
    model: nn.Module,
    solved: SolvedBlock,
    masks: Mapping[nn.Parameter, torch.Tensor],
    plan: Plan,
    config: SparsifyConfig,
    report: Report,
) -> None:
    assert config.reconstruct is not None
    name = solved.parts[-1].name
    inside = set(solved.block.parameters())
    layers = {target.name for target in plan.layers if target.layer.parameter in inside & masks.keys()}
    outputs = {target.layer.parameter: target.size // target.shape[-1] for target in plan.layers}
    try:
        for found in reconstruct(model, solved, masks, config.reconstruct, config.seed, outputs):
            report.reconstructed(found, layers)
    except BaseException:
        report.notes.append(f"{name!r}: its reconstruction was broken off; it has the best values up to then")
        raise


@torch.no_grad()
def _attach(
    model: nn.Module,
    target: LayerPlan,
    solution: Solution,
    entry: LayerReport,
    *,
    config: SparsifyConfig,
    report: Report,
) -> None:
    """Write a solution into the model, in place: the mask on every module that holds the weight, and the values."""
    layer = target.layer
    mask = layer.unmatrix(solution.mask)
    values = stored(layer.owner, layer.param)
    twins = [
        f"{path}.{layer.param}"
        for path, module in (model.named_modules() if layer.twins else ())
        if module in layer.twins
    ]
    # where an earlier run left a mask, it is replaced even if none is asked for now: it would prune by the old solution
    enforce = config.enforce or layer.param in dict(named_masks(layer.owner))
    with _naming(target, whole=WRITTEN), _uninterrupted():
        # what takes memory comes before the first write, so that a layer is never left half written
        new, pruned = layer.unmatrix(solution.weight), ~mask.to(values.device)
        for name in (layer.parameter_name, *twins) if enforce else ():
            set_mask(model, name, mask)
        values.copy_(new)
        values.masked_fill_(pruned, 0)
        report.layers.append(entry)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end, so that it never leaves a layer half written."""
    if threading.current_thread() is not threading.main_thread():
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


def _check(model: nn.Module, plan: Plan, config: SparsifyConfig, turns: Turns) -> None:
    """What only a model with values can be asked, still before any work."""
    needing = [f"method {target.recipe!r}" for target in plan.layers if target.calibrated]
    if config.allocation != "uniform":
        needing.append(f"allocation={config.allocation!r}")
    if needing and config.data is None and config.data_loader is None and config.forward_loop is None:
        raise ValueError(
            f"{needing[0]} needs calibration data: give data_loader=, forward_loop=, or data= with tokenizer="
        )
    refuse_what_cannot_be_written(model, {target.layer.parameter_name for target in plan.layers}, masks=config.enforce)
    for target in plan.layers:
        if is_sharded(target.layer.parameter):
            raise ValueError(
                f"layer {target.name!r} is sharded over processes (DTensor): sparsify the model first, then shard it; "
                "its masks hold"
            )
        turns.load(target.layer.owner)
        if not torch.isfinite(stored(target.layer.owner, target.layer.param)).all():
            raise ValueError(f"layer {target.name!r}: its weight holds NaN or inf; repair the checkpoint or exclude it")


def _check_solution(target: LayerPlan, weight: torch.Tensor, solution: Solution) -> None:
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
        raise ValueError(f"layer {target.name!r}: method {target.method.name!r} gave a bad solution: {wrong}")


@contextmanager
def _calibrating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no caches; everything as it was afterwards, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    caches = [(c, c.use_cache) for c in configs.values() if isinstance(getattr(c, "use_cache", None), bool)]
    try:
        model.eval()
        for module_config, _ in caches:
            module_config.use_cache = False
        with torch.no_grad():
            yield
    finally:
        for module_config, use_cache in caches:
            module_config.use_cache = use_cache
        for module, training in modes:
            module.training = training
