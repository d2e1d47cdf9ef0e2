"""What a model does between the blocks of a stack, where a block is not given the output of the block before as it is.

That is found out by an experiment: one call of the model runs twice, and the second time the output of each block is
changed. What a block is given unchanged does not depend on the blocks before it. What changes as an output did is this
output and something that does not depend on them either: position embeddings in YOLOS, features of the image in the
first blocks of Qwen3-VL. Both can be recorded; anything else cannot.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.recorder import Problem, StackRecorder
from modelopt_sparse.calibration.replay import close
from modelopt_sparse.calibration.templates import Addend, Between, FromPrevious, previous_output
from modelopt_sparse.model.devices import flat_tensors, leaves_of, map_tensors, version
from modelopt_sparse.model.layers import Stack


def look_between(data: CalibrationData, recorder: StackRecorder) -> bool:
    """Whether the stack is to be recorded again, now that it is known what stands between its blocks, which had not
    been seen in some process. Collective."""
    unlinked = recorder.problem and recorder.problem.unlinked
    if all(call is None for call in data.run.processes.all_gather("blocks without a link", unlinked)):
        return False
    between = _found(data, recorder.recording.stack, unlinked or 0)
    if between is None:
        recorder.problem = recorder.problem and Problem(recorder.problem.why)
        return False
    recorder.record_again(between)
    return True


def _found(data: CalibrationData, stack: Stack, index: int) -> Between | None:
    """What stands between the blocks of a stack in call ``index``, by the experiments of all processes; None if it is
    more than an addition, or not known."""
    own = _experiment(data, stack, index)
    between: dict[int, dict[int, int]] = {}
    for of_rank in data.run.processes.all_gather("what stands between blocks", own):
        if of_rank is None:
            return None
        for position, added in of_rank.items():
            known = between.setdefault(position, {})
            if any(known.get(number, output) != output for number, output in added.items()):
                return None
            known.update(added)
    return between


def _experiment(data: CalibrationData, stack: Stack, index: int) -> Between | None:
    if data.calls is None:
        return None  # a user's loop cannot be asked for one call
    call = replace(data, calls=[data.calls[index]])
    plain, changed = _Watch(stack, changes_outputs=False), _Watch(stack, changes_outputs=True)
    for watch in (plain, changed):
        if not watch.run(call):
            return None
    between: dict[int, dict[int, int]] = {}
    for position, (one, other) in enumerate(zip(plain.seen, changed.seen)):
        added = _added(one, other)
        if added is None:
            return None
        linked = any(isinstance(leaf, FromPrevious) for leaf in one.leaves)
        if added or (position and not linked):
            between[position] = added
    return between


@dataclass(frozen=True)
class _Seen:
    """What a block was given: its arguments, with links in the place of outputs of the block before that came as they
    were, and copies of these outputs, if there was anything else than links and constants."""

    leaves: Sequence[Any]
    versions: Sequence[int]
    outputs: Sequence[Tensor]


def _added(one: _Seen, other: _Seen) -> dict[int, int] | None:
    """Which arguments are sums with which output, by what a block was given in both runs; None: that does not say it
    all."""
    added: dict[int, int] = {}
    if (
        len(one.leaves) != len(other.leaves)
        or [version(x) for x in one.leaves if isinstance(x, Tensor)] != one.versions
    ):
        return None
    for number, (x, y) in enumerate(zip(one.leaves, other.leaves)):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or x != y:
                return None
        elif not close(y, x):
            sums = (k for k, output in enumerate(one.outputs) if _is_sum(x, output, y, other.outputs[k]))
            if (output := next(sums, None)) is None:
                return None
            added[number] = output
    return added


def _is_sum(x: Tensor, output: Tensor, y: Tensor, changed: Tensor) -> bool:
    """Whether ``y`` follows from ``changed`` as ``x`` does from ``output``."""
    if not x.dim() or not x.is_floating_point() or not x.shape == output.shape == y.shape == changed.shape:
        return False
    if not x.dtype == output.dtype == y.dtype == changed.dtype:
        return False
    return close(y, Addend.between(output, x, lambda held: held).added_to(changed, lambda part: part))


class _Watch:
    """What the blocks of a stack are given in one call of the model. ``changes_outputs``: of each of them, by noise."""

    def __init__(self, stack: Stack, *, changes_outputs: bool) -> None:
        self.seen: list[_Seen] = []
        self._stack, self._changes = stack, changes_outputs
        self._in_order = True
        self._previous: list[tuple[Tensor, int]] = []
        self._copies: list[Tensor] = []
        self._random = torch.Generator().manual_seed(0)

    def run(self, call: CalibrationData) -> bool:
        """Whether the call went through all blocks, each once and in order."""
        with ExitStack() as hooks:
            for block in self._stack.blocks:
                hooks.enter_context(block.register_forward_pre_hook(self._before, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(self._after))
            try:
                call.run_model(lambda masks: None, stop_after=self._stack.blocks[-1])
            except ValueError:  # the model cannot go on with changed values
                return False
        return self._in_order and len(self.seen) == len(self._stack.blocks)

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        position = len(self.seen)
        self._in_order &= position < len(self._stack.blocks) and block is self._stack.blocks[position]
        arguments = leaves_of((args, kwargs)) if position else []  # the first block gets nothing of the others
        links = [previous_output(x, self._previous) if isinstance(x, Tensor) else None for x in arguments]
        leaves = [x if link is None else FromPrevious(link) for x, link in zip(arguments, links)]
        tensors = flat_tensors(leaves)
        self.seen.append(_Seen(leaves, [version(x) for x in tensors], self._copies if tensors else []))

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        del block, args
        if self._changes:
            output = map_tensors(self._changed, output)
        outputs = flat_tensors(output)
        self._previous = [(x, version(x)) for x in outputs]
        self._copies = [x.detach().clone() for x in outputs]
        return output

    def _changed(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        finite = x[x.isfinite()].float()
        scale = float(finite.abs().mean()) if finite.numel() else 0.0
        return x + (torch.randn(x.shape, generator=self._random) * (scale or 1.0)).to(x)
