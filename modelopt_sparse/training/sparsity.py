"""What all sparse training has in common: masks are set on a model, held in its optimizers, and moved between steps."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from modelopt_sparse.distributed import first_difference, full
from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.layers import refuse_packed
from modelopt_sparse.model.masking import (
    apply_masks,
    dense_gradient,
    let_gradients_through,
    named_masks,
    set_mask,
    update_mask,
    zero_state,
)
from modelopt_sparse.model.wrappers import refuse_no_model, refuse_wrapped_parts, unwrapped
from modelopt_sparse.reports.report import LayerReport, Report, attach_report, attached_report, merged_report
from modelopt_sparse.training.planner import (
    Filter,
    Planned,
    TrainingPlan,
    Weight,
    initial_masks,
    plan_training,
    zero_sentinels,
)
from modelopt_sparse.training.updates import digest

# parameters -----------------------------------------------------------------------------------------------------------
# One parameter while it is trained sparse: its values, its mask, its gradient, its optimizers' state.


class SparseParameter:
    """A parameter that carries a mask. The model holds it, its mask and its gradient; nothing is held here.

    name: its first name in ``model.named_parameters()``.
    """

    def __init__(self, weight: Weight, algorithm: Any, model: nn.Module) -> None:
        self.name = weight.name
        self.weight = weight
        self._algorithm, self._model = algorithm, model  # for the report's entry
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter itself, as it is at present: `fully_shard` puts another in its place."""
        return self.weight.parameter

    @property
    def data(self) -> Tensor:
        """Its values. They share its memory, unless it is sharded: then they are gathered from all processes."""
        module, name = self.weight.holders[0]
        return full(stored(module, name).detach())

    @property
    def mask(self) -> Tensor:
        """Its mask (bool, True = kept), whole on every process. Assigning one changes it in place, in every module that
        holds the parameter, and zeroes the weight and its optimizers' state where it is False."""
        module, name = self.weight.holders[0]
        return module.get_buffer(f"{name}_mask")

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        for module, name in self.weight.holders:
            update_mask(module, name, mask)
        self.zero_states()
        self.write_report()

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient in all places, on steps that let gradients through; gathered if it is sharded."""
        gradient = self.parameter.grad
        return None if gradient is None else dense_gradient(full(gradient.detach()), self.mask)

    def write_report(self) -> None:
        """Bring its entry in the model's report up to date."""
        rewrite(self._model, self.weight, self._algorithm, self.mask)

    def zero(self) -> None:
        """Write +0.0 to pruned places of the weight and of its optimizers' state, whatever has written there."""
        for module, _ in self.weight.holders:
            apply_masks(module, recurse=False)
        self.zero_states()

    def zero_states(self) -> None:
        """The optimizers' half of `zero`."""
        for optimizer in self.optimizers:
            zero_state(optimizer, self.parameter, self.mask)


# optimizers -----------------------------------------------------------------------------------------------------------
# Optimizers that train a sparse model: which of them can, and when they have made a step.


class Steps:
    """One optimizer, the sparse parameters that it holds, and how many steps it has made."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: list[SparseParameter], count: int) -> None:
        self.optimizer, self.held, self.count = optimizer, held, count

    def was_skipped(self) -> bool:
        """Whether a GradScaler told a fused optimizer, inside of its step, that gradients overflowed."""
        overflow = getattr(self.optimizer, "found_inf", None)
        return isinstance(overflow, Tensor) and bool(overflow.item())


def checked(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of accelerate's wrapper. Raises ValueError for one that cannot train sparse models."""
    while isinstance(optimizer, AcceleratedOptimizer):
        if any(base.__name__.startswith("DeepSpeed") for base in type(optimizer).__mro__):
            break
        optimizer = optimizer.optimizer
    if any("deepspeed" in f"{base.__module__}.{base.__name__}".lower() for base in type(optimizer).__mro__):
        raise ValueError(
            "DeepSpeed keeps weights and gradients in buffers of its own, where masks do not reach them: train with "
            "DistributedDataParallel or fully_shard (FSDP2)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, so it has no hooks to hold masks with: give the "
            "optimizer that it wraps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls its closure several times in a step and mixes all parameters, pruned ones too: use SGD, Adam, "
            "AdamW, Adafactor or Muon"
        )
    return optimizer


def held_by(optimizer: torch.optim.Optimizer, sparse_params: Iterable[SparseParameter]) -> list[SparseParameter]:
    """Those of the sparse parameters that an optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [sparse for sparse in sparse_params if id(sparse.parameter) in held]


# record ---------------------------------------------------------------------------------------------------------------
# What a report says of sparse training: an entry for each parameter, and the step to go on from.


SETTING = "training"  # in the settings of a report


def entries(planned: Planned, masks: Mapping[str, Tensor], step: int) -> Report:
    """A report of all parameters that an algorithm has made sparse. ``masks``: theirs, by name."""
    settings = {SETTING: {"step": step, **planned.description}}
    report = Report.begin(planned.plan.skipped, planned.plan.notes, settings)
    report.layers = [_entry(weight, algorithm, masks[weight.name]) for weight, algorithm in planned.chosen]
    return report


def _entry(weight: Weight, algorithm: Any, mask: Tensor) -> LayerReport:
    return LayerReport(
        name=weight.layer.name,
        parameter=weight.name,
        type=weight.type,
        shape=list(weight.layer.matrix(mask).shape),
        recipe=type(algorithm).__name__.lower(),
        options=algorithm.describe(),
        size=mask.numel(),
        error=None,
        error_from="weights",
        tokens=0,
        seconds=0.0,
        notes=[],
        **counted(weight, algorithm, mask),
    )


def counted(weight: Weight, algorithm: Any, mask: Tensor) -> dict[str, Any]:
    """The zeros of a mask, and the pattern that it can be held to: N:M, or the level that all rows or matrices have."""
    matrix = weight.layer.matrix(mask)
    zeros = int((~mask).sum())
    if algorithm.pattern is not None and not algorithm.pattern.count_nonzero_wrong(matrix):
        return {"zeros": zeros, "pattern": str(NM(algorithm.pattern.n, algorithm.pattern.m))}
    scope = "row" if algorithm.scope.kind == "row" else "matrix"
    scopes = matrix if scope == "row" else matrix.flatten(-2)
    fewest, size = int((~scopes).sum(-1).min()), scopes.shape[-1]
    return {"zeros": zeros, "pattern": str(Unstructured(min(fewest / size, 1 - 2**-40), scope))}


def rewrite(model: nn.Module, weight: Weight, algorithm: Any, mask: Tensor) -> None:
    """Bring the entry of one parameter in the model's report up to date."""
    report = attached_report(model)
    if report is not None:
        now = counted(weight, algorithm, mask)
        layers = [replace(layer, **now) if layer.parameter == weight.name else layer for layer in report.layers]
        attach_report(model, replace(report, layers=layers))


def remember_step(model: nn.Module, step: int) -> None:
    """Write the number of finished steps into the model's report."""
    report = attached_report(model)
    if report is not None and SETTING in report.settings:
        report.settings[SETTING]["step"] = step


def record_of(model: nn.Module, planned: Planned) -> int | None:
    """The step to go on from, if the same algorithm has trained the model before; else None."""
    report = attached_report(model)
    record = None if report is None else report.settings.get(SETTING)
    if not record or {key: record.get(key) for key in planned.description} != planned.description:
        return None
    masked = dict(named_masks(model))
    return int(record["step"]) if all(weight.name in masked for weight, _ in planned.chosen) else None


# sparsity -------------------------------------------------------------------------------------------------------------


class Sparsity(ABC):
    """Sparse training of a model: `SparsityAlgorithm` and `Group` are the two kinds.

    >>> sparsity.apply(model)
    >>> sparsity.apply(optimizer)

    and the loop stays as it is: a hook after ``optimizer.step()`` keeps pruned weights and their optimizer state at
    zero, and moves the masks when it is time.

    sparse_params: name -> `SparseParameter`, of every parameter that was made sparse.
    step: how many steps of the optimizers are finished.
    """

    def __init__(self) -> None:
        self.sparse_params: dict[str, SparseParameter] = {}
        self.step = 0
        self._autoupdate = True
        self._model: nn.Module | None = None
        self._steps: list[Steps] = []
        self._planned: Planned | None = None

    @abstractmethod
    def members(self) -> list[tuple[Filter, Any]]:
        """(which parameters, the algorithm for them or None: they stay dense); the first that fits counts."""

    @abstractmethod
    def update(self) -> None:
        """Move the masks now."""

    @property
    def autoupdate(self) -> bool:
        """Whether masks move by themselves after optimizer steps; if False, `update` moves them."""
        return self._autoupdate

    @autoupdate.setter
    def autoupdate(self, value: bool) -> None:
        self._autoupdate = value
        self._let_gradients_through()

    # a model ----------------------------------------------------------------------------------------------------------

    def plan(self, model: nn.Module) -> TrainingPlan:
        """What `apply` would make sparse, and why the rest stays dense. The model is not changed, and may be on meta.

        Raises ValueError for what `apply` refuses.
        """
        refuse_no_model(model)
        return plan_training(unwrapped(model), self.members()).plan

    def apply(self, model_or_optimizer: Any) -> Any:
        """Make a model sparse, in place, or hold it sparse in an optimizer -> the model or the optimizer.

        First the model, then every optimizer that trains it. A model that is sparse already keeps as much of its masks
        as the level allows; one that this algorithm has trained before goes on where it was (see `load_state_dict`).

        Raises ValueError, with everything as it was, for what cannot be: the message says what and why.
        """
        if isinstance(model_or_optimizer, nn.Module):
            self._apply_to_model(model_or_optimizer)
        elif isinstance(model_or_optimizer, (str, bytes)) or not hasattr(model_or_optimizer, "step"):
            raise TypeError(f"apply takes a model or an optimizer, and this is {type(model_or_optimizer).__name__}")
        else:
            self._apply_to_optimizer(model_or_optimizer)
        return model_or_optimizer

    def __call__(self, module: nn.Module) -> None:
        """``model.apply(sparsity)``: torch calls this for every submodule, and for the model itself last."""
        caller = sys._getframe(1).f_back  # the frame that called nn.Module.apply, which is the frame that called this
        if caller is None or caller.f_code is not nn.Module.apply.__code__:
            self.apply(module)

    def _apply_to_model(self, model: nn.Module) -> None:
        if self._model is not None:
            raise ValueError(
                f"this {type(self).__name__} is applied to a {type(self._model).__name__} already: make another one"
            )
        refuse_no_model(model)
        model = unwrapped(model)
        refuse_packed(model, "trained sparse")
        refuse_wrapped_parts(model, "trained sparse")
        planned = plan_training(model, self.members())
        step = record_of(model, planned)
        masks = initial_masks(planned) if step is None else {}  # else the model has the masks of that step
        for note in planned.plan.notes:
            warnings.warn(note, stacklevel=3)

        # from here on the model changes
        for weight, algorithm in planned.chosen:
            if weight.name in masks:
                zero_sentinels(weight)
                for name in weight.names:
                    set_mask(model, name, masks[weight.name])
            sparse = SparseParameter(weight, algorithm, model)
            self.sparse_params[weight.name] = algorithm.sparse_params[weight.name] = sparse
        self._model, self._planned = model, planned
        before, own = attached_report(model), entries(planned, self._masks(), step or 0)
        attach_report(model, own if before is None else merged_report(before, own))
        self._set_step(step or 0)

    # optimizers -------------------------------------------------------------------------------------------------------

    def _apply_to_optimizer(self, optimizer: Any) -> None:
        if self._model is None:
            raise ValueError(f"apply this {type(self).__name__} to the model first, then to its optimizers")
        optimizer = checked(optimizer)
        if any(steps.optimizer is optimizer for steps in self._steps):
            raise ValueError(f"this {type(optimizer).__name__} has this {type(self).__name__} already")
        held = held_by(optimizer, self.sparse_params.values())
        if not held:
            raise ValueError(
                f"this {type(optimizer).__name__} holds none of the {len(self.sparse_params)} sparse parameters of the "
                f"{type(self._model).__name__}: build it from model.parameters() of the model that was made sparse"
            )
        steps = Steps(optimizer, held, self.step)
        self._steps.append(steps)
        for sparse in held:
            sparse.optimizers.append(optimizer)
            sparse.zero()

        def after_step(*_: Any) -> None:
            if not steps.was_skipped():
                self._after_step(steps)

        optimizer.register_step_post_hook(after_step)
        self._let_gradients_through()

    def _after_step(self, steps: Steps) -> None:
        """One optimizer has made a step; with the last of them, the step is finished and masks may move."""
        steps.count += 1
        finished = min(each.count for each in self._steps)
        if finished > self.step:
            self._set_step(finished)
            if self.autoupdate:
                self._update_what_is_due()
        for sparse in steps.held:
            sparse.zero()

    def _update_what_is_due(self) -> None:
        due = [algorithm for algorithm in self._algorithms() if algorithm.is_due(self.step)]
        for algorithm in due:
            algorithm.update()
        if due:
            self.check_processes()

    def _set_step(self, step: int) -> None:
        for each in (self, *self._algorithms()):
            each.step = step
        self._let_gradients_through()
        if self._model is not None:
            remember_step(self._model, step)

    def _let_gradients_through(self) -> None:
        """In the backward passes before an update that asks for it, gradients reach pruned places. The whole model has
        one flag, so that a compiled model has two graphs and not more."""
        if self._model is not None:
            wanted = any(
                algorithm.needs_gradient and (not self.autoupdate or algorithm.is_due(self.step + 1))
                for algorithm in self._algorithms()
            )
            let_gradients_through(self._model, wanted)

    def _algorithms(self) -> Iterator[Any]:
        yield from (algorithm for _, algorithm in self.members() if algorithm is not None)

    def check_processes(self) -> None:
        """Raise RuntimeError unless all processes of the default group have the same masks. All of them call this."""
        if difference := first_difference(self._digests()):
            name, rank = difference
            raise RuntimeError(
                f"the mask of {name!r} is not the same in rank {rank} as here, at step {self.step}: processes must "
                "start from the same weights and see reduced gradients (DistributedDataParallel or fully_shard)"
            )

    def _digests(self) -> dict[str, int]:
        return {name: digest(mask) for name, mask in self._masks().items()}

    def _masks(self) -> dict[str, Tensor]:
        return {name: sparse.mask for name, sparse in self.sparse_params.items()}

    # what is saved, and shown -----------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The report of the model as it is now, which `mts.report` gives as well. Raises ValueError before `apply`."""
        if self._model is None:
            raise ValueError(f"this {type(self).__name__} is applied to no model yet")
        for sparse in self.sparse_params.values():
            sparse.write_report()  # the masks may have been loaded since
        report = attached_report(self._model)
        assert report is not None
        return report

    def go_on(self, model: nn.Module, step: int, where: str) -> None:
        """Go on at a step, with the masks and the report that were read from ``where`` into the model.

        Raises ValueError, which names it, unless this algorithm wrote that report, at that step.
        """
        record = record_of(model, plan_training(model, self.members()))
        if record != step:
            raise ValueError(
                f"{where!r} is of another algorithm, or was trained with other options: make the algorithm as it was"
                if record is None
                else f"{where!r} holds masks of step {record}, and weights of step {step}"
            )
        if self._model is None:
            self.apply(model)
        for steps in self._steps:
            steps.count = step
        self._set_step(step)

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved beside the model's state dict, which holds the masks, and the optimizers': the step, and
        what to compare when it is loaded. Random choices come from the seed, names and the step."""
        return {
            "step": self.step,
            "algorithm": None if self._planned is None else self._planned.description,
            "masks": self._digests(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load the model's state dict, with its masks, before.

        Raises ValueError if the algorithm is another one, or if the model's masks are not those of the state.
        """
        if self._planned is None:
            raise ValueError(f"apply this {type(self).__name__} to the model, load the model's state dict, then this")
        if state["algorithm"] != self._planned.description:
            raise ValueError(
                f"this state is of {state['algorithm']}, and this is {self._planned.description}: make the algorithm "
                "with the options that it was saved with"
            )
        wrong = [name for name, number in self._digests().items() if state["masks"].get(name) != number]
        if wrong:
            raise ValueError(
                f"{len(wrong)} masks of the model are not those that this state was saved with, {wrong[0]!r} among "
                "them: load the model's state dict of the same checkpoint first"
            )
        for steps in self._steps:
            steps.count = state["step"]
        self._set_step(state["step"])
        self.report()
