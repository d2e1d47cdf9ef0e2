"""How the inputs of a block's layers are had: block by block, through the whole model, or not at all."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from modelopt_sparse.calibration.between import look_between
from modelopt_sparse.calibration.dense_run import whole_runs_because
from modelopt_sparse.calibration.early_exit import EarlyExits
from modelopt_sparse.calibration.forward import (
    CalibrationData,
    See,
    forward_context,
    has_room,
    on_execution_device,
    stop_call,
    watched_outputs,
)
from modelopt_sparse.calibration.recorder import Recording, StackRecorder
from modelopt_sparse.calibration.replay import StackReplay
from modelopt_sparse.calibration.sums import SumsOfAllProcesses
from modelopt_sparse.plan.memory import activation_copies
from modelopt_sparse.plan.plan import LayerPlan


class Inputs(ABC):
    """The inputs of the layers of one block after the other."""

    blockwise: ClassVar[bool]  # whether blocks are run by themselves

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Any]:
        """To be entered for all the work on a block: its weights go to the execution device and come back once."""

    @abstractmethod
    def collect(self, layer_plans: Sequence[LayerPlan], see: See, sums: SumsOfAllProcesses, *, hold: bool) -> None:
        """Run what reaches the layers on all calls; ``see`` sees their inputs, and each call is ended for ``sums``.
        ``hold``: what the block puts out is held, for `advance`."""

    @abstractmethod
    def advance(self, *, held: bool = False) -> None:
        """Go on to the next block with what this one puts out now, or with the outputs that were ``held``."""


class NoData(Inputs):
    """No method wants any."""

    blockwise = False

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, sums: SumsOfAllProcesses, *, hold: bool) -> None:
        raise AssertionError("there is no data to collect the inputs of layers from")

    def advance(self, *, held: bool = False) -> None:
        """Nothing is sent from block to block."""


class WholeModel(Inputs):
    """Each time the inputs of layers are asked for, the whole model runs over the data."""

    blockwise = False

    def __init__(self, data: CalibrationData) -> None:
        self._data = data

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, sums: SumsOfAllProcesses, *, hold: bool) -> None:
        del hold
        hooks = self._data.input_hooks(layer_plans, self._data.run.plan.blocks, see)
        self._data.run_model(sums.between(hooks.begin), hooks)
        sums.end_call()

    def advance(self, *, held: bool = False) -> None:
        """The next run goes through the block as it is then."""


class Replay(Inputs):
    """The blocks of a stack are run by themselves, from a record of what they were called with.

    dense: a second replay, which goes through dense blocks alone, if these are what blocks are tuned against.
    outputs_stay: outputs are held on the execution device.
    """

    blockwise = True

    def __init__(
        self, data: CalibrationData, replay: StackReplay, dense: StackReplay | None, *, outputs_stay: bool
    ) -> None:
        self.data, self.replay, self.dense = data, replay, dense
        self._outputs_stay = outputs_stay
        self._exits = EarlyExits()
        self._held: list[list[Tensor | None]] = []

    @property
    def block(self) -> nn.Module:
        return self.replay.stack.blocks[self.replay.position]

    @property
    def _is_last(self) -> bool:
        return self.replay.position == len(self.replay.stack.blocks) - 1

    def on_device(self) -> AbstractContextManager[Any]:
        return on_execution_device(self.data.run, [self.block], outputs_stay=self._outputs_stay)

    def collect(self, layer_plans: Sequence[LayerPlan], see: See, sums: SumsOfAllProcesses, *, hold: bool) -> None:
        early_exit = self._exits.of(self.block, layer_plans, allowed=not hold, will_be_checked=not self._is_last)
        hooks = self.data.input_hooks(layer_plans, [self.block], see)
        hooks.after = early_exit.after
        held: list[list[Tensor | None]] = []
        with forward_context(self.data.run), hooks:
            for index, masks in enumerate(self.replay.masks):
                hooks.begin(masks)
                output = early_exit.run(lambda i=index: self.replay.forward(i))
                sums.end_call()
                if hold:
                    held.append(self.replay.held(index, output))
        self._held = held or self._held

    def advance(self, *, held: bool = False) -> None:
        if held:
            for index, state in enumerate(self._held):
                self.replay.advance_one(index, state)
            self._held = []
        elif not self._is_last:  # nothing is sent on after the last one
            name = self.replay.stack.names[self.replay.position] or type(self.data.run.model).__name__
            problem = self._exits.check(name, self.block, self._send_on)
            if problem is not None:
                warnings.warn(problem, stacklevel=2)
                self.data.run.report.notes.append(problem)
        self._exits.next_block()
        self.replay.next_block()

    def _send_on(self) -> None:
        with forward_context(self.data.run):
            for index in range(len(self.replay)):
                self.replay.advance_one(index, self.replay.held(index, self.replay.forward(index)))

    # for permutation and reconstruction, before and after the layers of a block are solved ----------------------------

    def outputs_of(self, modules: Sequence[nn.Module], index: int) -> list[Tensor]:
        """The first output tensor of each module in a forward of the block on call ``index``."""
        return watched_outputs(lambda: self.replay.forward(index), modules)[1]

    def dense_outputs(self, modules: Sequence[nn.Module]) -> list[list[Tensor]]:
        """For each module its outputs on all calls, to be asked for while the block is dense. The dense replay, if
        there is one, goes on to the next block."""
        source, hold = self.dense or self.replay, self.data.run.storage.hold_activations
        goes_on = self.dense is not None and not self._is_last
        goals: list[list[Tensor]] = [[] for _ in modules]
        with forward_context(self.data.run):
            for index in range(len(source) if modules or goes_on else 0):
                block_output, outputs = watched_outputs(lambda i=index: source.forward(i), modules)
                for of_module, output in zip(goals, outputs):
                    of_module.append(hold(output))
                if goes_on:
                    source.advance_one(index, source.held(index, block_output))
        if self.dense is not None:
            self.dense.next_block()
        return goals


class StackInputs:
    """Called, it gives the inputs of one stack's blocks. They are recorded in the dense run, or, for a stack that comes
    later, when they are first asked for: then the parts before the stack are sparse.

    ``pruned``: how many of the blocks have layers to prune.
    """

    def __init__(self, data: CalibrationData, recorder: StackRecorder, pruned: int) -> None:
        self._data, self._stack, self._pruned = data, recorder.recording.stack, pruned
        self._between = recorder.recording.between
        self._inputs = self._from_record(recorder)
        if data.run.config.sequential == "none":
            self()  # while the whole model is dense

    def __call__(self) -> Inputs:
        if self._inputs is None:
            recorder = self._record()
            if look_between(self._data, recorder):
                self._between = recorder.recording.between
                recorder = self._record()
            self._inputs = self._from_record(recorder)
            assert self._inputs is not None
        return self._inputs

    @property
    def through_whole_model(self) -> bool:
        return isinstance(self._inputs, WholeModel)

    def _record(self) -> StackRecorder:
        data, stack = self._data, self._stack
        complete = stop_call if data.may_stop else lambda: None
        recorder = StackRecorder(stack, complete, data.run.storage.hold_activations, self._between)
        recorder.start()
        try:
            data.run_model(recorder.begin, stop_after=stack.blocks[-1])
        finally:
            recorder.stop()
        return recorder

    def _from_record(self, recorder: StackRecorder) -> Inputs | None:
        """The inputs by a record; None if there is none yet in some process."""
        run = self._data.run
        problem, recorded = self._agreed(
            "the record", recorder.problem and recorder.problem.why, bool(recorder.recording.calls)
        )
        if problem is None and not recorded:
            recorder.forget()
            return None
        if problem is not None:
            return self._through_whole_model(problem)
        recording = recorder.recording
        replay = StackReplay(recording, run.storage.hold_activations)
        with on_execution_device(run, self._stack.blocks), forward_context(run):
            problem, _ = self._agreed("the check of the record", replay.problem(recording.first_outputs))
        if problem is not None:
            return self._through_whole_model(problem)
        outputs_stay = not run.storage.spills and has_room(run, activation_copies(run.config) * replay.nbytes)
        return Replay(self._data, replay, self._dense(recording), outputs_stay=outputs_stay)

    def _dense(self, recording: Recording) -> StackReplay | None:
        """A replay through dense blocks, where blocks are tuned against what they put out."""
        run = self._data.run
        if run.config.reconstruct is None:
            return None
        if (number := sum(run.processes.all_gather("the batches to tune by", len(recording.calls)))) < 2:
            raise ValueError(
                "reconstruct needs at least two calibration batches, because one is held back to judge by, "
                f"and there is {number}: give smaller batches"
            )
        wanted = run.config.reconstruct.target == "dense"
        return StackReplay(recording, run.storage.hold_activations) if wanted else None

    def _through_whole_model(self, problem: str) -> WholeModel:
        run = self._data.run
        why = whole_runs_because(run.model, self._stack, problem)
        run.storage.check_whole_runs(why)
        text = f"{why}: {self._pruned} runs of the model over the data, one for each block, instead of two"
        asked = {"permuted": run.config.permute, "reconstructed": run.config.reconstruct is not None}
        if any(asked.values()):
            text += f"; its blocks are not {' and '.join(word for word, wanted in asked.items() if wanted)}"
        warnings.warn(text, stacklevel=2)
        run.report.notes.append(text)
        return WholeModel(self._data)

    def _agreed(self, what: str, problem: str | None, ready: bool = True) -> tuple[str | None, bool]:
        """The first problem that a process has, and whether all are ready."""
        of_ranks = self._data.run.processes.all_gather(f"{what} of a stack", (problem, ready))
        return next((text for text, _ in of_ranks if text is not None), None), all(ready for _, ready in of_ranks)
