"""Recording what each block of a stack is called with, while the whole dense model runs.

Block i + 1 gets its hidden states from the output of block i, and everything else (masks, rotary tables, encoder
states) from its own record. What comes from where is seen by the identity of tensors. Branches side by side, which take
nothing of each other, are blocks as well: all that such a block gets lies in memory that the first block was given.
Identity does not show what a model adds to an output before the next block gets it: between.py finds that out.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.templates import (
    Addend,
    Between,
    CallTemplate,
    FromPrevious,
    RecordedCall,
    TensorIds,
    kinds_of,
    previous_output,
    template_of,
)
from modelopt_sparse.model.devices import flat_tensors, leaves_of, map_leaves, version
from modelopt_sparse.model.layers import Stack

CANDIDATES = 4  # stored tensors of one shape that a new one is compared with, newest first
# what a call may hold beside tensors: anything else (a cache, an iterator) may change from one run to the next
NUMBERS = (bool, int, float, complex, torch.Size)
CONSTANT = (NoneType, *NUMBERS, str, bytes, slice, Enum, torch.dtype, torch.device, FunctionType, type)


@dataclass
class Recording:
    """What the blocks of a stack were called with. ``calls[i][k]``: the arguments of block k in call i of the model;
    ``first_outputs``: position -> output in the first call, of the blocks whose output no other block takes, by which a
    replay is checked; ``between``: what is known to stand between the blocks."""

    stack: Stack
    between: Between = field(default_factory=dict)
    calls: list[list[RecordedCall]] = field(default_factory=list)
    masks: list[TokenMasks] = field(default_factory=list)
    first_outputs: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """Why a stack cannot be replayed. ``unlinked``: the number of the call in which a block did not take the output of
    the block before it, as long as nobody knows what stands between them."""

    why: str
    unlinked: int | None = None


@dataclass
class _CallOfModel:
    """The call that runs now. ``tensor_ids``: of what each of its blocks was called with; None once a template has
    completed the call. ``previous``: the output of the block before, and ``of_first_block``: what the first was called
    with; both with their versions. ``values``: a copy of that output, where the model adds something to it."""

    calls: list[RecordedCall]
    tensor_ids: list[TensorIds] | None = field(default_factory=list)
    previous: list[tuple[Tensor, int]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    of_first_block: list[tuple[Tensor, int]] = field(default_factory=list)

    def held_before(self, x: Tensor) -> bool:
        """Whether ``x`` has held its values since before the first block ran: it lies in memory that this block was
        given, and that nothing was written to since. Inference tensors keep no count of writes."""
        memory = x.untyped_storage().data_ptr()
        return not x.is_inference() and any(
            memory == other.untyped_storage().data_ptr() and version(other) == before
            for other, before in self.of_first_block
        )


class StackRecorder:
    """Forward hooks on the blocks of one stack, between `start` and `stop`.

    ``complete`` is called when the arguments of all blocks of the current call are known, before the first block whose
    call can be left out; it may stop the model. ``hold``: where tensors are held. Afterwards ``problem`` says why the
    stack cannot be replayed, or is None.
    """

    def __init__(
        self,
        stack: Stack,
        complete: Callable[[], None],
        hold: Callable[[Tensor], Tensor],
        between: Between | None = None,
    ) -> None:
        self.recording = Recording(stack, between or {})
        self.problem: Problem | None = None
        self._complete = complete
        self._tensors = _StoredTensors(hold)
        self._templates: list[CallTemplate] = []
        self._call: _CallOfModel | None = None
        self._hooks: ExitStack | None = None  # None: stopped

    def start(self) -> None:
        self._hooks = ExitStack()
        for block in self.recording.stack.blocks:
            self._hooks.enter_context(block.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.enter_context(block.register_forward_hook(self._after))

    def begin(self, masks: TokenMasks) -> None:
        """A call of the model starts."""
        self._end_call()
        if self._hooks is None:
            return
        self.recording.masks.append(masks)
        self.recording.calls.append([])
        self._call = _CallOfModel(self.recording.calls[-1])

    def stop(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
        self._end_call()

    def forget(self) -> None:
        """Stop, and drop everything recorded: the stack will be recorded again when its turn comes."""
        self.stop()
        self.recording = Recording(self.recording.stack, self.recording.between)
        self._tensors.clear()
        self._templates.clear()

    def record_again(self, between: Between) -> None:
        """Drop what was recorded, and the problem that blocks do not take the output of the block before."""
        self.forget()
        self.problem, self.recording.between = None, between

    @property
    def waiting(self) -> bool:
        """Whether the current call has to run on for this record."""
        return self._call is not None and self.problem is None and len(self._call.calls) < self._blocks

    @property
    def _blocks(self) -> int:
        return len(self.recording.stack.blocks)

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None and self.problem is None and len(call.calls) != self._blocks:
            self.problem = Problem(f"{len(call.calls)} of {self._blocks} blocks were called")
        elif call is not None and self.problem is None and call.tensor_ids:
            self._templates.append(template_of(call.calls, call.tensor_ids))
        self._tensors.end_call()

    def _fails(self, why: str, unlinked: int | None = None) -> None:
        self.problem = Problem(why, unlinked)
        self.recording = Recording(self.recording.stack, self.recording.between)

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        call, stack = self._call, self.recording.stack
        if self.problem is not None or call is None:
            return
        position = len(call.calls)
        if call.tensor_ids is None:
            return  # already complete from a template; a later stack still needs this forward
        if position >= self._blocks or block is not stack.blocks[position]:
            self._fails("blocks are not called once each, in order")
            return
        leaves = leaves_of((args, kwargs))
        for value in leaves:
            if not isinstance(value, (Tensor, *CONSTANT)):
                kind = type(value).__name__
                self._fails(f"block {stack.names[position]!r} is given a {kind}, which may change as blocks run")
                return
        recorded = self._recorded(call, args, kwargs, self.recording.between.get(position, {}))
        call.calls.append(recorded)
        if position == 0:
            call.of_first_block = [(x, version(x)) for x in flat_tensors((args, kwargs))]
        elif not any(isinstance(leaf, FromPrevious) for leaf in leaves_of(recorded)):
            known = position in self.recording.between
            if not known and not all(call.held_before(x) for x in flat_tensors((args, kwargs))):
                why = f"block {stack.names[position]!r} does not take the output of the block before it"
                self._fails(why, len(self.recording.calls) - 1)
                return
            if len(self.recording.calls) == 1:
                self.recording.first_outputs[position - 1] = [x.detach().clone() for x, _ in call.previous]
        call.tensor_ids.append(self._tensors.ids(leaves))
        kinds = [kinds_of(recorded) for recorded in call.calls]
        template = next((template for template in self._templates if template.kinds == kinds), None)
        if template is not None:
            call.calls += template.filled(call.calls)
            call.tensor_ids = None
            self._complete()

    @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass through the block
    def _recorded(self, call: _CallOfModel, args: tuple, kwargs: dict, added: Mapping[int, int]) -> RecordedCall:
        """The arguments, with links in the place of what the block before put out. ``added``: number of an argument ->
        number of the output that it is the sum of, and of something else."""
        numbers = count()

        def link_or_store(x: Any) -> Any:
            number = next(numbers)
            if not isinstance(x, Tensor):
                return x
            if (index := previous_output(x, call.previous)) is not None:
                return FromPrevious(index)
            if number in added and (output := call.values[added[number]]).shape == x.shape:
                return FromPrevious(added[number], Addend.between(output, x, self._tensors.hold))
            return self._tensors.store(x)

        return map_leaves(link_or_store, (args, dict(kwargs)))

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        del args
        if self.problem is not None or self._call is None:
            return
        outputs = flat_tensors(output)
        self._call.previous = [(x, version(x)) for x in outputs]
        wanted = self.recording.between.get(len(self._call.calls))
        self._call.values = [x.detach().clone() for x in outputs] if wanted else []
        if block is self.recording.stack.blocks[-1] and len(self.recording.calls) == 1:
            self.recording.first_outputs[self._blocks - 1] = [x.detach().clone() for x in outputs]


class _StoredTensors:
    """Copies of the tensors that blocks were called with, each distinct one once."""

    def __init__(self, hold: Callable[[Tensor], Tensor]) -> None:
        self.hold = hold
        self._pool: dict[tuple, list[Tensor]] = {}
        self._of_call: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor, so that its id stays taken; its copy

    def store(self, x: Tensor) -> Tensor:
        """A copy of ``x``, or the copy already held of an equal tensor."""
        if id(x) in self._of_call:
            return self._of_call[id(x)][1]
        alike = self._pool.setdefault((x.shape, x.dtype, x.device, x.stride()), [])
        copy = next((y for y in reversed(alike[-CANDIDATES:]) if torch.equal(x, y)), None)
        if copy is None:
            copy = self.hold(x.detach().clone())
            alike.append(copy)
        self._of_call[id(x)] = (x, copy)
        return copy

    def ids(self, leaves: list[Any]) -> TensorIds:
        """Those of stored tensors. An output of the block before is not held, so its id may be taken again."""
        return [id(x) if id(x) in self._of_call else None for x in leaves]

    def end_call(self) -> None:
        self._of_call.clear()

    def clear(self) -> None:
        self._of_call.clear()
        self._pool.clear()
