"""`sparsify` and `export`: orchestration only."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.methods.polish import DAMPING, Scaled
from modelopt_sparse.modules import named_masks, remove_masks, set_mask
from modelopt_sparse.offload import refuse_what_cannot_be_written, stored
from modelopt_sparse.parts import Part, joined, some_experts
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
                parts: list[Part] = []  # a layer is one part, unless its experts are solved a few at a time
                for job in _prepared(item, config):
                    target = job.target
                    with _naming(target):
                        solution = target.method.solve(job.weight, job.state, target.pattern, target.options)
                    _check_solution(target, job.weight, solution)
                    first = StepReport.of(target.method.name, solution, time.perf_counter() - job.began)
                    with _naming(target):
                        solution, later = improved(target, job.weight, solution, job.stats, job.scaled, config)
                    parts.append(Part.of(job.layer, solution, [first, *later], job.weight, job.stats))
                    if sum(part.experts for part in parts) < job.layer.matrices:
                        del job  # only the statistics of the next experts are to be alive
                        continue
                    target, (solution, steps) = job.layer, joined(parts)
                    parts.clear()
                    entry = LayerReport.of(target, solution, item.stats, steps, config, permuted.get(target.name))
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
    """A layer, or some experts of one, ready to be solved: the dense weight as a matrix, and the state that its group
    shares. ``target`` is the plan of these experts, ``layer`` that of all of them."""

    target: LayerPlan
    layer: LayerPlan
    weight: torch.Tensor
    state: Any
    stats: Stats | None
    scaled: Callable[[], Scaled]
    began: float


def _prepared(group: Group, config: SparsifyConfig) -> Iterator[_Job]:
    """The layers of one group; those with the same method and options share one prepared state."""
    if isinstance(group.stats, KeptStats) or group.targets[0].at_once is not None:
        (layer,) = group.targets  # experts share no input with other layers
        yield from _prepared_experts(layer, group.stats, config)
        return
    states: list[tuple[LayerPlan, Any]] = []
    scaled = cache(partial(Scaled.of, group.stats))
    for target in group.targets:
        began = time.perf_counter()
        weight = _dense(target, slice(None), group.stats, config)
        shared = [state for other, state in states if (other.method, other.options) == (target.method, target.options)]
        if not shared:
            with _naming(target):
                shared = [target.method.prepare(group.stats, target.options)]
            states.append((target, shared[0]))
        damping = target.options.get("damping", DAMPING)
        yield _Job(target, target, weight, shared[0], group.stats, partial(scaled, damping), began)


def _prepared_experts(layer: LayerPlan, stats: Stats | KeptStats | None, config: SparsifyConfig) -> Iterator[_Job]:
    """A few experts at a time, each with statistics formed when their turn comes."""
    assert layer.at_once is not None
    for start in range(0, layer.matrices, layer.at_once):
        began = time.perf_counter()
        experts = range(start, min(start + layer.at_once, layer.matrices))
        target, own = some_experts(layer, experts), part_of(stats, experts)
        weight = _dense(layer, slice(experts.start, experts.stop), own, config)
        with _naming(layer):
            state = target.method.prepare(own, target.options)
        scaled = partial(Scaled.of, own, target.options.get("damping", DAMPING))
        yield _Job(target, layer, weight, state, own, scaled, began)
        del own, weight, state, scaled


def _dense(target: LayerPlan, which: slice, stats: Stats | None, config: SparsifyConfig) -> torch.Tensor:
    """The weight of a layer as a matrix, or ``which`` of its experts, where its statistics are.

    A copy: a method that writes to its input does not reach the model.
    """
    layer = target.layer
    device = config.device if stats is None else stats.square_sums.device
    values = stored(layer.owner, layer.param).detach()
    return layer.matrix(values[which].to(device, copy=True))


@contextmanager
def _naming(target: LayerPlan) -> Iterator[None]:
    """A method knows no names: say whose layer its error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {target.name!r}: {error}") from error


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
    """Write a solution into the model, in place: the values, then the mask on every module that holds the weight."""
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
    with _uninterrupted():
        values.copy_(layer.unmatrix(solution.weight))
        values.masked_fill_(~mask.to(values.device), 0)
        for name in (layer.parameter_name, *twins) if enforce else ():
            set_mask(model, name, mask)
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
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "sparsify is called under torch.autocast, which would round what solvers compute: leave it, and give "
            "autocast='bfloat16' (or 'float16') to run the model's blocks under it"
        )
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
