"""Sparse training of a model: its masks are set, held while optimizers train it, and moved between steps."""

import logging
import sys
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modelopt_sparse.distributed import first_difference
from modelopt_sparse.model.devices import count_nonzero
from modelopt_sparse.model.find import model_inside, usable
from modelopt_sparse.model.masking import MaskedParameter, named_masks, pass_pruned_gradients, remove_masks, set_mask
from modelopt_sparse.reports.report import Report, attach_report, attached_report, merged_report
from modelopt_sparse.reports.values import LayerReport
from modelopt_sparse.training.planner import Filter, SparseParameter, TrainingPlan, levels_at, plan_training
from modelopt_sparse.training.updates import digest, generator_for, initial_mask, largest_magnitudes

SETTING = "training"  # in the settings of a report
TRAINER = "trainer_step"  # in that
LOG = logging.getLogger("modelopt_sparse.training")


class Sparsity(ABC):
    """Sparse training of a model: `SparsityAlgorithm` and `Group` are the two kinds.

    >>> sparsity.apply(model)
    >>> sparsity.apply(optimizer)

    and the loop stays as it is: a hook after ``optimizer.step()`` keeps pruned weights and their optimizer state at
    zero, and moves the masks when it is time.

    sparse_params: name -> parameter that was made sparse, with its ``data`` and its ``mask``.
    step: how many steps of the optimizers are finished.
    """

    def __init__(self) -> None:
        self.sparse_params: dict[str, SparseParameter] = {}
        self.step = 0
        self._autoupdate = True
        self._model: nn.Module | None = None
        self._steps: dict[torch.optim.Optimizer, int] = {}  # how many each has made
        self._steps_to_come: list[int] = []  # of a state that was loaded, for optimizers that are applied afterwards
        self._hooks: list[RemovableHandle] = []  # of the model until there are optimizers, then of these
        self._level_hooks: OrderedDict[int, Callable[[Any, str, float, float], object]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        if self._steps:  # torch copies no hooks of optimizers, so that the copy's masks would not move
            raise TypeError(f"this {type(self).__name__} has optimizers and cannot be copied: use state_dict()")
        return vars(self)

    @abstractmethod
    def members(self) -> list[tuple[Filter, Any]]:
        """Pairs (filter, algorithm). None leaves the parameters dense; the first filter that takes one counts."""

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
        return plan_training(model_inside(model), self.members())[0]

    def apply(self, model_or_optimizer: Any) -> Any:
        """Make a model sparse, in place, or hold it sparse in an optimizer -> the model or the optimizer.

        First the model, then every optimizer that trains it. A model that is sparse already keeps as much of its masks
        as the level allows; one that this algorithm has trained before goes on where it was (see `load_state_dict`).

        Raises ValueError, with everything as it was, for what cannot be: the message says what and why.
        """
        if isinstance(model_or_optimizer, nn.Module):
            self._apply_to_model(model_or_optimizer)
        elif not hasattr(model_or_optimizer, "step"):
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
        if self.sparse_params:
            raise ValueError(f"this is applied to a {type(self._model).__name__} already: make another")
        model = usable(model, "trained sparse")
        plan, chosen = plan_training(model, self.members())
        record = self._record(model, chosen)
        masks = {} if record else first_masks(chosen)  # with a record the model has the masks of its step
        step = int(record["step"]) if record else 0
        for note in plan.notes:
            warnings.warn(note, stacklevel=3)

        # from here on the model changes
        self.release()  # of the optimizers of a model that has become plain
        for weight in chosen:
            if weight.name in masks:
                values = weight.layer.values
                values.masked_fill_(values.isnan(), 0)  # some of these places may grow again
                for name in weight.holders:
                    set_mask(model, name, masks[weight.name])
            self.sparse_params[weight.name] = weight.algorithm.sparse_params[weight.name] = weight
        self._model = model
        if any(weight.moves for weight in chosen):
            self._hooks.append(model.register_forward_pre_hook(Reminder(type(self).__name__)))
        before = attached_report(model)
        report = Report.begin(plan.skipped, plan.notes, {SETTING: {"step": step, **self._describe_members()}})
        report.layers = [_entry(weight) for weight in chosen]
        for entry in report.layers:
            LOG.debug("sparse: %s, %s, %d of %d zeros", entry.parameter, entry.recipe, entry.zeros, entry.size)
        for dense in plan.skipped:
            LOG.debug("dense: %s (%s)", dense.name, dense.reason)
        attach_report(model, report if before is None else merged_report(before, report))
        self._set_step(step)

    def _describe_members(self) -> dict[str, Any]:
        """The algorithms in plain values, by which saved states are compared."""
        described = [[str(include), None if x is None else x.describe()] for include, x in self.members()]
        return {"algorithms": described}

    def _record(self, model: nn.Module, chosen: Sequence[SparseParameter] = ()) -> dict[str, Any] | None:
        """What the model's report holds of this algorithm, among those that have trained other parameters. None if it
        has not trained the model, or if one of ``chosen`` has lost its mask."""
        report, members = attached_report(model), self._describe_members()
        if report is None or not all(weight.is_sparse for weight in chosen):
            return None
        runs = [report.settings, *(run["settings"] for run in report.earlier)]
        records = (run[SETTING] for run in runs if SETTING in run)
        return next((record for record in records if record.get("algorithms") == members["algorithms"]), None)

    # optimizers -------------------------------------------------------------------------------------------------------

    def _apply_to_optimizer(self, optimizer: Any) -> None:
        if self._model is None:
            raise ValueError(f"apply this {type(self).__name__} to the model first, then to its optimizers")
        optimizer = _torch_optimizer(optimizer)
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [weight for weight in self.sparse_params.values() if id(weight.parameter) in parameters]
        if not trained:
            problem = f"this {type(optimizer).__name__} holds no sparse parameter of the model that this is applied to"
            raise ValueError(f"{problem}: use model.parameters(), or make another {type(self).__name__} for its model")
        new = [weight for weight in trained if optimizer not in weight.optimizers]
        if not new:
            raise ValueError(f"this {type(optimizer).__name__} has this {type(self).__name__} already")
        steps, is_known = self._steps_to_come, optimizer in self._steps
        if not self._steps:
            self.release()
        for weight in new:
            weight.optimizers.append(optimizer)
            weight.zero()
        if is_known:  # it got these by `add_param_group`
            return
        self._steps[optimizer], self._steps_to_come = [*steps, self.step][0], steps[1:]
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        watched = [x.parameter for x in trained if isinstance(x.parameter, MaskedParameter)]
        for parameter in [x for x in watched if x.requires_grad][:1]:  # one is enough
            self._hooks.append(parameter.register_hook(StepReminder(parameter, optimizer, self)))
        self._let_gradients_through()

    def release(self) -> None:
        """Let go of all optimizers: masks stay, and move no more until `apply` gets an optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._steps, self._steps_to_come = [], {}, []
        for weight in self.sparse_params.values():
            weight.optimizers.clear()
        if self._model is not None:
            pass_pruned_gradients(self._model, False, self._names())

    def remove(self) -> None:
        """Make the parameters plain again, with their zeros baked in, and take all hooks away. State of optimizers
        stays, so that dense training can go on. Before `apply` it does nothing."""
        self.release()
        if self._model is not None:
            remove_masks(self._model, self._names())
        self._model = None
        for algorithm in (self, *self.algorithms()):
            algorithm.sparse_params = {}

    def _forget_plain(self) -> None:
        """Drop parameters that carry no mask any more, as after `mts.export`. Hooks stay, for torch goes through them
        in this moment, and do nothing without a parameter."""
        for member in (self, *self.algorithms()):
            member.sparse_params = {name: weight for name, weight in member.sparse_params.items() if weight.is_sparse}

    def _find_still(self) -> None:
        """Masks of parameters that no optimizer here trains do not move. The report says so, and a warning, once."""
        still = []
        for weight in self.sparse_params.values():
            is_trained = weight.optimizers and weight.parameter.requires_grad
            was, weight.still = weight.still, weight.moves and not is_trained
            if was != weight.still:
                weight.write_report()
                still += [weight.name] * weight.still
        if still:
            problem = f"{len(still)} masks do not move ({still[0]!r} first)"
            warnings.warn(f"{problem}: apply this to the optimizer that trains them", stacklevel=2)

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> list[SparseParameter]:
        return [weight for weight in self.sparse_params.values() if optimizer in weight.optimizers]

    def _names(self) -> set[str]:
        return {name for weight in self.sparse_params.values() for name in weight.holders}

    @torch.compiler.disable
    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Until `_after_step` the optimizer sees no gradients at pruned places, but those that its closure makes."""
        if not _is_inner(optimizer) and not any(map(callable, (*args[1:], *kwargs.values()))):
            for weight in self._trained_by(optimizer):
                weight.hide_faint()

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """One optimizer has made a step; with the last of them, the step is finished and masks may move."""
        if _is_inner(optimizer):
            return
        self._forget_plain()
        for weight in self._trained_by(optimizer):
            weight.show_faint()
        overflow = getattr(optimizer, "found_inf", None)  # a GradScaler tells a fused optimizer to skip its step
        if not self.sparse_params or (isinstance(overflow, Tensor) and bool(overflow.item())):
            return
        for weight in self._trained_by(optimizer):
            weight.zero()  # by the old mask, so that what grows in this step starts at 0.0
        self._steps[optimizer] += 1
        finished = min(self._steps.values())
        if finished > self.step:
            self._set_step(finished)
            self._find_still()
            due = [algorithm for algorithm in self.algorithms() if self.autoupdate and algorithm.when.fires(self.step)]
            for algorithm in due:
                algorithm.update()
            if due and (difference := first_difference(self._digests())):
                name, rank = difference
                problem = f"the mask of {name!r} is not the same in rank {rank} as here, at step {self.step}"
                raise RuntimeError(f"{problem}: use DDP or FSDP")
            self._tell_levels()

    def _set_step(self, step: int) -> None:
        for algorithm in (self, *self.algorithms()):
            algorithm.step = step
        self._let_gradients_through()
        if self._model is not None and (record := self._record(self._model)):
            record["step"] = step

    def _let_gradients_through(self) -> None:
        """Let gradients reach pruned places in the backward passes before an update that asks for it. All parameters
        here have one flag, so that a compiled model has two graphs and not more."""
        if self._model is not None:
            wanted = any(
                algorithm.needs_gradient and (not self.autoupdate or algorithm.when.fires(self.step + 1))
                for algorithm in self.algorithms()
            )
            pass_pruned_gradients(self._model, wanted, self._names())

    def algorithms(self) -> list[Any]:
        return [algorithm for _, algorithm in self.members() if algorithm is not None]

    def _digests(self) -> dict[str, int]:
        return {name: digest(weight.mask) for name, weight in self.sparse_params.items()}

    # levels -----------------------------------------------------------------------------------------------------------

    def register_target_sparsity_hook(self, hook: Callable[[Any, str, float], object]) -> RemovableHandle:
        """Call ``hook(algorithm, name, level)`` with the level that each parameter should have, after every step of the
        optimizers; ``remove()`` of the handle ends it. In a `Group`, for the parameters of all its algorithms."""
        return self._register_level_hook(lambda algorithm, name, wanted, _: hook(algorithm, name, wanted))

    def register_computed_sparsity_hook(self, hook: Callable[[Any, str, float], object]) -> RemovableHandle:
        """Call ``hook(algorithm, name, level)`` after every step with the fraction of zeros in each mask."""
        return self._register_level_hook(lambda algorithm, name, _, actual: hook(algorithm, name, actual))

    def add_summaries(self, writer: Any) -> RemovableHandle:
        """Write ``sparsity/<name>/target`` and ``sparsity/<name>/actual`` of each parameter after every step, until
        ``remove()`` of the handle.

        writer: has ``add_scalar(tag, value, step)``, as a ``SummaryWriter`` of TensorBoard, or is such a function.

        >>> sparsity.add_summaries(SummaryWriter("runs"))
        """
        write = getattr(writer, "add_scalar", writer)
        if not callable(write):
            raise TypeError(f"add_summaries takes a SummaryWriter or a function (tag, value, step), not {writer!r}")

        def hook(_: Any, name: str, wanted: float, actual: float) -> None:
            write(f"sparsity/{name}/target", wanted, self.step)
            write(f"sparsity/{name}/actual", actual, self.step)

        return self._register_level_hook(hook)

    def _register_level_hook(self, hook: Callable[[Any, str, float, float], object]) -> RemovableHandle:
        handle = RemovableHandle(self._level_hooks)
        self._level_hooks[handle.id] = hook
        return handle

    def _tell_levels(self) -> None:
        for algorithm in dict.fromkeys((self, *self.algorithms())):
            if algorithm._level_hooks:
                targets = levels_at(self.step, algorithm.sparse_params.values())
                for name, weight in algorithm.sparse_params.items():
                    actual = 1 - count_nonzero(weight.mask) / weight.mask.numel()
                    for hook in tuple(algorithm._level_hooks.values()):
                        hook(weight.algorithm, name, targets[name], actual)

    # what is saved, and shown -----------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The report of the model as it is now, which `mts.report` gives as well. Raises ValueError before `apply`."""
        self._forget_plain()
        for weight in self.sparse_params.values():
            weight.write_report()  # the masks may have been loaded since
        if self._model is None or (report := attached_report(self._model)) is None:
            raise ValueError(f"this {type(self).__name__} is applied to no model yet")
        return report

    def go_on(self, model: nn.Module, step: int, where: str) -> None:
        """Go on with the masks and the report that were read from ``where`` into the model.

        Raises ValueError, which names it, unless this algorithm wrote that report, at that step of Trainer's.
        """
        record = self._record(model, plan_training(model, self.members())[1])
        if record is None:
            raise ValueError(f"{where!r} is of another algorithm, or was trained with other options")
        finished = int(record["step"])
        if (trainer_step := record.get(TRAINER, finished)) != step:
            raise ValueError(f"{where!r} holds masks of step {trainer_step}, and weights of step {step}")
        if self._model is None:
            self.apply(model)
        self._restart(finished)

    def write_trainer_step(self, step: int) -> None:
        """Write Trainer's step, which begins at 0 in every ``train()``, into the report, where `go_on` compares it."""
        if self._model is not None and (record := self._record(self._model)):
            record[TRAINER] = step

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved beside the model's state dict, which holds the masks, and the optimizers': the step, and
        what to compare when it is loaded. Random choices come from the seed, names and the step."""
        steps = [*self._steps.values(), *self._steps_to_come]
        return {"step": self.step, "steps": steps, "algorithm": self._describe_members(), "masks": self._digests()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Load the model's state dict, with its masks, before.

        Raises ValueError if the algorithm is another one, or if the model's masks are not those of the state.
        """
        if self._model is None:
            raise ValueError(f"apply this {type(self).__name__} to the model, load the model's state dict, then this")
        if missing := {"step", "algorithm", "masks"} - state.keys():
            raise ValueError(f"it has no {min(missing)!r}: give what state_dict() of a {type(self).__name__} has given")
        if state["algorithm"] != self._describe_members():
            raise ValueError(f"make the algorithm with the options that the state was saved with: {state['algorithm']}")
        if wrong := [name for name, number in self._digests().items() if state["masks"].get(name) != number]:
            problem = f"{len(wrong)} masks of the model are not those of this state ({wrong[0]!r} first)"
            raise ValueError(f"{problem}: load its state dict of the same checkpoint first")
        self._restart(state["step"], state.get("steps", []))
        self.report()

    def _restart(self, step: int, steps: Sequence[int] = ()) -> None:
        """Go on at a step; optimizers, in the order in which they are applied, at ``steps`` of their own."""
        counts = [*steps, *[step] * (len(self._steps) - len(steps))]
        self._steps, self._steps_to_come = dict(zip(self._steps, counts)), counts[len(self._steps) :]
        self._set_step(step)


class Reminder:
    """A hook before the model's forward, until an optimizer is applied: the second forward that is trained warns."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm, self.forwards = algorithm, 0

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.forwards += 1
            if self.forwards == 2 and any(named_masks(model)):
                warnings.warn(f"masks will not move: apply this {self.algorithm} to the optimizers, too", stacklevel=2)


class StepReminder:
    """A hook on a Parameter that warns, once, if it goes on changing in training and its optimizer makes no steps."""

    def __init__(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, sparsity: Sparsity) -> None:
        self.parameter, self.optimizer, self.sparsity = parameter, optimizer, sparsity
        self.left = 0  # changes without a step, until it warns
        self.seen: tuple[int | None, int] = (None, 0)  # steps of the optimizer, and the version, at the last backward

    def __call__(self, _: Tensor) -> None:
        if not self.sparsity.sparse_params:  # the model is plain again
            return
        before, self.seen = self.seen, (self.sparsity._steps.get(self.optimizer), self.parameter._version)
        if before[0] != self.seen[0]:  # it has made a step, and others are to come if masks still move
            weights = self.sparsity.sparse_params.values()
            moves = any(self.sparsity.step < weight.algorithm.when.last for weight in weights)
            self.left = 3 * moves  # at which change it warns: loads and perturbations may change it as well
        elif before != self.seen:
            self.left -= 1
            if self.left == 0:
                owner = f"the {type(self.optimizer).__name__} that has this {type(self.sparsity).__name__}"
                problem = f"masks do not move: weights change without steps of {owner}"
                advice = "release(), then apply it to the optimizer whose step is called"
                warnings.warn(f"{problem}: {advice}", stacklevel=2)


@torch.no_grad()
def first_masks(chosen: Sequence[SparseParameter]) -> dict[str, Tensor]:
    """The masks of all chosen parameters at step 0, by name, shaped like the parameters.

    NaN in a weight marks a pruned place (docs/migrating.md). Raises ValueError for inf, and for meta tensors.
    """
    masks = {}
    levels = levels_at(0, chosen)
    for weight in chosen:
        layer, algorithm, values = weight.layer, weight.algorithm, weight.data
        if values.is_meta:
            raise ValueError(f"{weight.name!r} is on the meta device and has no values: load the model first")
        if values.isinf().any():
            raise ValueError(f"{weight.name!r} holds inf, so the weights are damaged: load them again")
        present = layer.mask
        if values.isnan().any():
            finite = layer.matrix(~values.isnan())
            present = finite if present is None else present & finite
            values = values.nan_to_num(0.0)
        matrix = layer.matrix(values)
        level, generator = levels[weight.name], generator_for(algorithm.seed, weight.name, "init")
        within: dict[str, Any] = {"scope": algorithm.scope, "pattern": algorithm.pattern}
        if algorithm.pattern is not None and algorithm.magnitude_first:
            alive = torch.ones_like(matrix, dtype=torch.bool) if present is None else present
            mask = largest_magnitudes(matrix, alive, level, generator, **within)
        else:
            mask = initial_mask(matrix, level, algorithm.init_method, generator, present=present, **within)
        masks[weight.name] = layer.unmatrix(mask).contiguous()
    return masks


def _entry(weight: SparseParameter) -> LayerReport:
    """The report's row of a parameter. ``zeros`` are those of the mask; a note tells of others in the weight."""
    zeros = int(((weight.data == 0) & weight.mask).sum())
    return LayerReport(
        name=weight.layer.name,
        parameter=weight.name,
        type=weight.type,
        shape=list(weight.empty_matrix().shape),
        recipe=type(weight.algorithm).__name__.lower(),
        options=weight.algorithm.describe(),
        size=weight.parameter.numel(),
        error=None,
        error_from="weights",
        tokens=0,
        seconds=0.0,
        notes=[f"zeros beyond those of the mask when it was set: {zeros / weight.mask.numel():.1%}"] if zeros else [],
        **weight.counted(),
    )


def _is_inner(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run in a step that another step of the optimizer has called, its subclass's with ``super()``."""
    frame, code, steps = sys._getframe(), getattr(type(optimizer).step, "__code__", None), 0
    while (frame := frame.f_back) is not None:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
    return steps > 1


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's wrapper. Raises ValueError for one that cannot train sparse models."""
    if any("deepspeed" in base.__module__ for base in type(optimizer).__mro__):
        raise ValueError("DeepSpeed has buffers of its own for weights: use DistributedDataParallel or fully_shard")
    if isinstance(optimizer, AcceleratedOptimizer):
        return _torch_optimizer(optimizer.optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ValueError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: give the optimizer that it wraps")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS calls its closure several times in a step: use SGD, Adam, AdamW, Adafactor or Muon")
    return optimizer
