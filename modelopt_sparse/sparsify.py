"""`sparsify` and `export`: orchestration only."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn

from modelopt_sparse.calibration.walk import Group, walk
from modelopt_sparse.config import SparsifyConfig, resolve_method
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.modules import remove_masks, set_mask
from modelopt_sparse.offload import refuse_what_cannot_be_written, stored
from modelopt_sparse.plan import LayerPlan, Plan, plan_for
from modelopt_sparse.report import LayerReport, Report, attach_report


def sparsify(
    model: nn.Module,
    method: Any = "sparsegpt",
    config: SparsifyConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Make a model sparse, in place, and return it.

    ``method`` is a name ("magnitude", "wanda", "ria", "sparsegpt"), a `Method` object, or a ModelOpt mode list;
    ``config`` and keywords are the options of `SparsifyConfig` and the method's own. Everything is checked before any
    work. Pruned layers become sparse modules that hold their masks (``enforce=False``: plain modules with zeros); the
    Parameter objects stay the same. The model comes back in the mode, dtype, device and with the flags that it came
    with. Raises ValueError or TypeError with the model untouched; if something fails later (or Ctrl-C), the layers
    solved so far stay sparse, the rest untouched, and the call can be repeated.
    """
    method, config = resolve_method(method, config)
    config = SparsifyConfig.make(method, config, **options)
    plan = plan_for(model, method, config)
    _check(model, plan, config)
    report = Report.begin(plan, config)
    held: list[tuple[LayerPlan, Solution, LayerReport]] = []
    try:
        with _calibrating(model), closing(walk(model, plan, config, report)) as groups:
            for group in groups:
                for solved in _solve(group, config):
                    if group.hold:
                        held.append(solved)
                    else:
                        _attach(model, *solved, config=config, report=report)
            for solved in held:
                _attach(model, *solved, config=config, report=report)
    finally:
        if report.layers:  # after a failure as well: what is sparse stands in the report
            attach_report(model, report)
    return model


def export(model: nn.Module) -> nn.Module:
    """Turn sparse modules back into plain ones, in place, with the zeros baked in; return the model.

    Parameters, ties, ``requires_grad`` and dtype stay as they are. Masks are no longer enforced afterwards. A model
    without sparse modules comes back as it is.
    """
    remove_masks(model)
    return model


def _solve(group: Group, config: SparsifyConfig) -> Iterator[tuple[LayerPlan, Solution, LayerReport]]:
    """Solve the layers of one group; those with the same method and options share one prepared state."""
    states: dict[tuple, Any] = {}
    for target in group.targets:
        began = time.perf_counter()
        method, layer = target.method, target.layer
        device = config.device if group.stats is None else group.stats.square_sums.device
        weight = layer.matrix(stored(layer.owner, layer.param).detach().to(device))
        key = (method, tuple(sorted(target.options.items())))
        try:
            if key not in states:
                states[key] = method.prepare(group.stats, target.options)
            solution = method.solve(weight, states[key], target.pattern, target.options)
        except ValueError as error:
            raise ValueError(f"layer {target.name!r}: {error}") from error
        _check_solution(target, weight, solution)
        yield target, solution, LayerReport.of(target, solution, group.stats, time.perf_counter() - began)


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
    paths = {module: path for path, module in model.named_modules()}
    with _uninterrupted():
        values.copy_(layer.unmatrix(solution.weight))
        values.masked_fill_(~mask.to(values.device), 0)
        for owner in (layer.owner, *layer.twins) if config.enforce else ():
            set_mask(model, f"{paths[owner]}.{layer.param}".removeprefix("."), mask)
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


def _check(model: nn.Module, plan: Plan, config: SparsifyConfig) -> None:
    """What only a model with values can be asked, still before any work."""
    needing = [target for target in plan.layers if target.method.needs != "nothing"]
    if needing and config.data is None and config.data_loader is None and config.forward_loop is None:
        raise ValueError(
            f"method {needing[0].method.name!r} needs calibration data: give data_loader=, forward_loop=, or data= "
            "with tokenizer="
        )
    refuse_what_cannot_be_written(model, {target.layer.parameter_name for target in plan.layers})
    for target in plan.layers:
        if not torch.isfinite(stored(target.layer.owner, target.layer.param)).all():
            raise ValueError(f"layer {target.name!r}: its weight holds NaN or inf; repair the checkpoint or exclude it")


def _check_solution(target: LayerPlan, weight: torch.Tensor, solution: Solution) -> None:
    """A method's own mistakes (a user's method above all) must not reach the model."""
    wrong = ""
    if solution.mask.dtype != torch.bool or solution.mask.shape != weight.shape:
        wrong = f"mask is {solution.mask.dtype} {list(solution.mask.shape)}, not torch.bool {list(weight.shape)}"
    elif solution.weight.shape != weight.shape or solution.weight.dtype != weight.dtype:
        wrong = f"weight is {solution.weight.dtype} {list(solution.weight.shape)}, not {weight.dtype}"
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
