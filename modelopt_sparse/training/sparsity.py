"""What all sparse training has in common: masks are set on a model, held in its optimizers, and moved between steps."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.distributed import first_difference
from modelopt_sparse.model.checks import refuse_no_model
from modelopt_sparse.model.layers import refuse_packed
from modelopt_sparse.model.masking import let_gradients_through, set_mask
from modelopt_sparse.model.wrappers import refuse_wrapped_parts, unwrapped
from modelopt_sparse.reports.report import Report, attach_report, attached_report, merged_report
from modelopt_sparse.training.optimizers import Steps, checked, held_by
from modelopt_sparse.training.parameters import SparseParameter
from modelopt_sparse.training.planner import Planned, initial_masks, plan_training, zero_sentinels
from modelopt_sparse.training.record import entries, record_of, remember_step
from modelopt_sparse.training.rules import digest
from modelopt_sparse.training.weights import Filter, TrainingPlan


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
