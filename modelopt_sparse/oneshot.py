"""One-shot pruning: `sparsify` and `export`."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelopt_sparse.accuracy.distill import Teacher, distill_from, distillable, refuse_to_distill
from modelopt_sparse.accuracy.fisher import with_metrics
from modelopt_sparse.budget.choose import BudgetCurve, budgeted, curve_of
from modelopt_sparse.calibration.data import Call
from modelopt_sparse.calibration.dense import blocks_in_call_order, run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.distributed import Processes, is_sharded
from modelopt_sparse.methods.base import Method
from modelopt_sparse.model.devices import (
    input_device,
    peak_bytes,
    refuse_offloaded,
    refuse_what_cannot_be_written,
    run_eagerly,
)
from modelopt_sparse.model.find import model_inside
from modelopt_sparse.model.masking import refuse_what_cannot_be_sparse, remove_masks
from modelopt_sparse.plan.memory import lacking, tight
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import Plan, common_to_processes
from modelopt_sparse.plan.planner import distributed_in, plan_for, resolve
from modelopt_sparse.reports.report import Report, attach_report, attached_report, merged_report
from modelopt_sparse.reports.values import PERMUTED, Skipped
from modelopt_sparse.run import InMemory, Run, Storage, calibrating, refuse_unusable
from modelopt_sparse.solving.solve import sparsify_block


def sparsify(
    model: nn.Module,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Make a model sparse, in place, and return it.

    ``method`` is a name ("magnitude", "wanda", "ria", "sparsegpt", "alps"), a `Method` object, or a ModelOpt mode list;
    without one, ``masks=`` or ``quality=`` choose, else it is "sparsegpt". A named method is the published algorithm;
    what goes beyond it (polish, reconstruct and others) is asked for. ``config`` and keywords are the options of
    `SparsifyConfig` and the method's own. Everything is checked before any work. Pruned layers become sparse modules
    that hold their masks (``enforce=False``: plain modules with zeros); the Parameter objects stay the same. The model
    comes back in the mode, dtype, device and with the flags that it came with. Of a model that torch.compile,
    DataParallel or DistributedDataParallel wraps, the one inside is pruned, and the wrapper returned.

    Raises ValueError or TypeError with the model untouched. If something fails later (or Ctrl-C), the layers solved so
    far stay sparse, the rest is untouched, and the call can be repeated. Under torch.distributed all processes of the
    default group call it and share the work; if one of them fails or dies, the others raise RankError.

    >>> model = mts.sparsify(model, "sparsegpt", pattern="2:4", data_loader=batches)
    >>> mts.report(model).sparsity
    0.5
    """
    inside = model_inside(model)
    with Processes.of(distributed_in(config, options)) as processes, run_eagerly(model):
        prune(inside, *resolve(method, config, options), InMemory(), processes)
        processes.barrier()
    return model


def prune(
    model: nn.Module,
    method: Method,
    config: SparsifyConfig,
    storage: Storage,
    processes: Processes,
    calls: list[Call] | None = None,
) -> Report:
    """The run behind `sparsify` and `sparsify_checkpoint`, whose ``storage`` holds one block at a time.

    ``calls`` are those of the calibration data, if it has been read before.
    """
    plan = plan_for(model, method, config)
    check_run(plan, config)
    _check(model, plan, config, storage)
    if processes.size > 1 and storage.resident:  # of others all is compared when their files are opened
        facts = common_to_processes(model, plan, config)
        processes.check_same(facts, "give all of them the same model and the same options")
    with _report(model, plan, config, processes) as report, calibrating(model):
        run = Run(model, plan, config, storage, processes, report)
        data = teacher = None
        if what_needs_data(plan, config):
            data = _calibrated(run, method, calls)
            run = data.run
            with run.part("dense predictions"):
                teacher = None if run.config.distill is None else Teacher.of(data)
        later = []
        with run.part("blocks"):
            blocks = blocks_in_call_order(run, data)
            with run.bar("sparsify", "block", len(blocks)) as bar:
                for block in blocks:
                    bar.say(block.name, *run.so_far())
                    later += sparsify_block(block, run)
                    bar.update()
            for write in later:
                write()
        if config.permute and not any(PERMUTED in layer.recipe for layer in report.layers):
            report.notes.append(f"{PERMUTED}: no layer has channels that can be reordered, or gains by it")
        del blocks, data  # what they hold is not needed any more
        if teacher is not None:
            with run.part("distillation"):
                distill_from(teacher, run)
    return report


def _calibrated(run: Run, method: Method, calls: list[Call] | None) -> CalibrationData:
    """Read the calibration data, and run the dense model over it: what it shows, what a budget chooses, metrics."""
    with run.part("calibration data"):
        data = CalibrationData.load(run, calls)
    if run.config.distill is not None:
        data = distillable(data, method)
    with run.part("dense run"):
        data = run_dense(data)
    if run.config.budget is not None:
        with run.part("budget"):
            data = budgeted(data)
    if run.config.reconstruct is not None:
        with run.part("metrics"):
            data = with_metrics(data)
    return data


def budget_curve(
    model: nn.Module,
    method: Any = None,
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    *,
    budget: Any = "50% zeros",
    **options: Any,
) -> BudgetCurve:
    """What budgets of a model would cost: KL over zeros, bytes or flops, beside a plain plan; and the choice for one
    ``budget``. Nothing is pruned, and the model stays as it is.

    ``method``, ``config`` and keywords are those of `sparsify`. ``losses="losses.json"`` keeps what was measured for
    other budgets.
    """
    inside = model_inside(model)
    with Processes.of(distributed_in(config, options)) as processes, run_eagerly(model):
        resolved, config = resolve(method, config, {**options, "budget": budget})
        plan = plan_for(inside, resolved, config)
        check_run(plan, config)
        _check(inside, plan, config, InMemory())
        with calibrating(inside):
            run = Run(inside, plan, config, InMemory(), processes, Report.begin((), (), {}))
            data = CalibrationData.load(run)
            curve = curve_of(run_dense(data))
        processes.barrier()
    return curve


def export(model: nn.Module) -> nn.Module:
    """Turn sparse modules back into plain ones, in place, with the zeros baked in; return the model.

    Parameters, ties, ``requires_grad`` and dtype stay as they are. Masks are no longer enforced afterwards. A model
    without sparse modules comes back as it is.

    >>> model = mts.export(model)
    >>> type(model.model.layers[0].mlp.up_proj), list(mts.named_masks(model))
    (<class 'torch.nn.modules.linear.Linear'>, [])
    """
    remove_masks(model_inside(model))
    return model


@contextmanager
def _report(model: nn.Module, plan: Plan, config: SparsifyConfig, processes: Processes) -> Iterator[Report]:
    """The report of a run, which is left on the model, after a failure as well: what is sparse stands in it."""
    report = Report.begin(plan.skipped, plan.notes, config.settings())
    if processes.size > 1:
        report.settings["processes"] = processes.size
    try:
        yield report
    except BaseException as error:
        done = f"{len(report.layers)} of {len(plan.layers)} layers"
        report.notes.append(f"stopped by {type(error).__name__} after {done} of the plan")
        known = {row.name for row in (*report.layers, *report.skipped)}
        left = (Skipped(x.name, x.type, x.shape, "not reached: the run was stopped") for x in plan.layers)
        report.skipped += tuple(row for row in left if row.name not in known)
        raise
    finally:
        device = config.device or input_device(model)
        report.peak_memory = {str(device): peak_bytes(device)}
        if report.layers:
            earlier = attached_report(model)
            attach_report(model, report if earlier is None else merged_report(earlier, report))


def check_run(plan: Plan, config: SparsifyConfig) -> None:
    """Raise ValueError for options that a plan can be made with, but a run cannot be started with."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "sparsify is called under torch.autocast, which would round what solvers compute: leave it, and give "
            "autocast='bfloat16' (or 'float16') to run the model's blocks under it"
        )
    if (problem := lacking(plan, config)) is not None:
        raise ValueError(problem)
    needing = what_needs_data(plan, config)
    if needing and config.data is None and config.data_loader is None and config.forward_loop is None:
        raise ValueError(
            f"{needing[0]} needs calibration data: give data_loader=, forward_loop=, or data= with tokenizer="
        )


def what_needs_data(plan: Plan, config: SparsifyConfig) -> list[str]:
    """What of a plan needs calibration data, in words."""
    needing = [f"method {layer_plan.recipe!r}" for layer_plan in plan.layers if layer_plan.calibrated]
    if config.distill is not None:
        needing.append("distill")
    if config.budget is not None:
        needing.append(f"budget='{config.budget}'")
    return needing


def _check(model: nn.Module, plan: Plan, config: SparsifyConfig, storage: Storage) -> None:
    """Check what only a model with values can be asked, before any work."""
    if (shortage := tight(plan, config)) is not None:
        warnings.warn(shortage, stacklevel=2)
    names = {layer_plan.layer.parameter_name for layer_plan in plan.layers}
    refuse_what_cannot_be_written(model, names, masks=config.enforce)
    if config.reconstruct is not None:
        refuse_offloaded(model, plan.blocks, "reconstruct")
    if config.budget is not None and not config.budget.optional:
        refuse_offloaded(model, [model], "budget")
    if config.must_distill:
        refuse_to_distill(model, config)
    if (config.tunes or config.budget is not None) and any(x.is_inference() for x in model.parameters()):
        problem = "reconstruct, distill and budget need gradients: leave them out"
        raise ValueError(f"{problem}, or make the model outside of torch.inference_mode")
    try:
        torch.zeros(1, device=config.device or "cpu").cpu()
    except (AssertionError, RuntimeError) as error:  # torch raises the former where it is built without the device
        raise ValueError(f"device={str(config.device)!r} cannot be used here: {error}") from None
    for layer_plan in plan.layers:
        if is_sharded(layer_plan.layer.parameter):
            raise ValueError(
                f"layer {layer_plan.name!r} is sharded over processes (DTensor): sparsify the model first, whole in "
                "each process (they share the work), then shard it; its masks hold"
            )
        moves = config.reconstruct is not None and config.reconstruct.masks == "move"
        if moves and layer_plan.layer.parameter.dtype == torch.float16:
            raise ValueError(
                f"layer {layer_plan.name!r} is float16, too coarse for the gradients that masks move by: convert the "
                "model to bfloat16 or float32, or leave reconstruct's masks='move' out"
            )
        if storage.resident:  # others are looked at when a block has its weights
            refuse_unusable(layer_plan.layer)
            for name in layer_plan.layer.parameter_names if config.enforce else ():
                refuse_what_cannot_be_sparse(model, name)
