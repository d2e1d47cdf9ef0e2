"""`sparsify` and `export`: orchestration only."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelopt_sparse.accuracy.allocate import allocation_for
from modelopt_sparse.accuracy.permute import DenseBlock, Permuted, permute
from modelopt_sparse.accuracy.reconstruct import SolvedBlock, reconstruct
from modelopt_sparse.calibration.forward import Runner
from modelopt_sparse.calibration.inputs import walk
from modelopt_sparse.calibration.storage import Turns
from modelopt_sparse.distributed import Team, is_sharded
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.model.masking import named_masks, remove_masks, set_mask
from modelopt_sparse.model.offload import refuse_to_tune_offloaded, refuse_what_cannot_be_written, stored
from modelopt_sparse.plan.config import SparsifyConfig, distributed_in, resolve
from modelopt_sparse.plan.identity import fingerprint
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import LayerReport, Report, attach_report, attached_report, merged_report
from modelopt_sparse.solving.cpu_matmul import fastest_products
from modelopt_sparse.solving.out_of_memory import WRITTEN
from modelopt_sparse.solving.solve import Solved, Solver, naming


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
    the call can be repeated. Under torch.distributed all processes of the default group call it and share the work; if
    one of them fails or dies, the others raise RankError. ``turns`` is what `sparsify_checkpoint` gives, whose models
    are not all in memory.
    """
    team = Team.of(distributed_in(config, options))
    with team.heard():
        method, config = resolve(method, config, options)
        config = config if team.rank == 0 else replace(config, progress=False)
        plan = plan_for(model, method, config)
        turns = turns or Turns()
        _check(model, plan, config, turns)
        if team.size > 1:
            team.same(fingerprint(model, plan, config), "give all of them the same model and the same options")
    report = Report.begin(plan, config)
    if team.size > 1:
        report.settings["processes"] = team.size
    held: list[tuple[LayerPlan, Solution, LayerReport]] = []
    solver = Solver(config, team)
    # of the block that is being solved
    masks: dict[nn.Parameter, torch.Tensor] = {}
    permuted: dict[str, Permuted] = {}
    undoing: list[Callable[[], None]] = []  # a block none of whose layers was solved is left as it was

    def finish(solved: Solved) -> None:
        target, solution, group = solved.target, solved.solution, solved.group
        entry = LayerReport.of(target, solution, group.stats, solved.steps, config, permuted.get(target.name))
        if group.hold:
            held.append((target, solution, entry))
        else:
            undoing.clear()
            _attach(model, target, solution, entry, config=config, report=report)
        if config.reconstruct is not None:
            masks[target.layer.parameter] = target.layer.unmatrix(solution.mask)

    try:
        runner = None
        if config.allocation != "uniform":
            with _calibrating(model), fastest_products(model, plan, config):
                # a generator can be gone over once: the walk takes what it gave
                runner = Runner(model, plan, config, team)
                allocation = allocation_for(model, plan, config, runner)
            plan = allocation.plan
            team.same({"the allocation": str(plan)}, "report this")
            report.allocated(allocation.description, allocation.measure, dict(allocation.tried))
        with (
            _calibrating(model),
            fastest_products(model, plan, config) as by_onednn,
            closing(walk(model, plan, config, report, runner, turns, team)) as walked,
        ):
            if by_onednn:
                report.settings["float32_products"] = "oneDNN"
            for item in walked:
                if isinstance(item, DenseBlock):
                    for found in permute(item):
                        permuted[found.layer] = found
                        undoing.append(found.undo)
                    continue
                if isinstance(item, SolvedBlock):
                    _reconstruct(model, item, masks, plan, config, report, team)
                    masks.clear()
                    continue
                for step in solver.steps(item):
                    if isinstance(step, Solved):
                        finish(step)
                    else:
                        target = step.target
                        with step.attempt():
                            step.take(target.method.solve(step.weight, step.state, target.pattern, target.options))
                    del step  # what comes next may need the memory
                del item  # the next block is collected while this frame waits: its statistics alone are to be alive
            for target, solution, entry in held:
                _attach(model, target, solution, entry, config=config, report=report)
            team.end()
    except BaseException as error:
        for undo in undoing:
            undo()
        done = f"{len(report.layers)} of {len(plan.layers)} layers"
        report.notes.append(f"stopped by {type(error).__name__} after {done} of the plan")
        team.fail(error)
        raise
    finally:
        if report.layers:  # after a failure as well: what is sparse stands in the report
            earlier = attached_report(model)
            attach_report(model, report if earlier is None else merged_report(earlier, report))
        team.close()
    return model


def export(model: nn.Module) -> nn.Module:
    """Turn sparse modules back into plain ones, in place, with the zeros baked in; return the model.

    Parameters, ties, ``requires_grad`` and dtype stay as they are. Masks are no longer enforced afterwards. A model
    without sparse modules comes back as it is.
    """
    remove_masks(model)
    return model


def _reconstruct(
    model: nn.Module,
    solved: SolvedBlock,
    masks: Mapping[nn.Parameter, torch.Tensor],
    plan: Plan,
    config: SparsifyConfig,
    report: Report,
    team: Team,
) -> None:
    assert config.reconstruct is not None
    name = solved.parts[-1].name
    inside = set(solved.block.parameters())
    layers = {target.name for target in plan.layers if target.layer.parameter in inside & masks.keys()}
    outputs = {target.layer.parameter: target.size // target.shape[-1] for target in plan.layers}
    try:
        for found in reconstruct(model, solved, masks, config.reconstruct, config.seed, outputs, team):
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
        for path, module in (model.named_modules() if layer.tied_modules else ())
        if module in layer.tied_modules
    ]
    # where an earlier run left a mask, it is replaced even if none is asked for now: it would prune by the old solution
    enforce = config.enforce or layer.param in dict(named_masks(layer.owner))
    with naming(target, whole=WRITTEN), _uninterrupted():
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
    for target in plan.layers if config.deterministic else ():
        if target.at_once is not None and target.needs == "gram":
            raise ValueError(
                f"layer {target.name!r}: memory_limit keeps tokens, to form {target.at_once} experts' Gram matrices "
                "at a time, and deterministic=True sums them up batch by batch: leave one of them out"
            )
    refuse_what_cannot_be_written(model, {target.layer.parameter_name for target in plan.layers}, masks=config.enforce)
    if config.reconstruct is not None:
        refuse_to_tune_offloaded(model, (block for stack in plan.stacks for block in stack.blocks))
    for target in plan.layers:
        if is_sharded(target.layer.parameter):
            raise ValueError(
                f"layer {target.name!r} is sharded over processes (DTensor): sparsify the model first, whole in each "
                "process (they share the work), then shard it; its masks hold"
            )
        turns.load(target.layer.owner)
        if not torch.isfinite(stored(target.layer.owner, target.layer.param)).all():
            raise ValueError(f"layer {target.name!r}: its weight holds NaN or inf; repair the checkpoint or exclude it")


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
