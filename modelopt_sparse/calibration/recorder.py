"""Recording what each block of a stack is called with, and running the blocks again from the record.

A stack is chained: block i + 1 gets its hidden states from the output of block i, everything else (masks, rotary
tables, encoder states) from its own record. What comes from where is seen by identity while the whole model runs.

Where the later blocks of a call were given nothing but what the first ones were given too, further calls like it need
not run through the stack: they are recorded up to there (mostly: up to the first block), and the rest is filled in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.templates import CallTemplate, FromPrevious, RecordedCall, kinds_of, template_of
from modelopt_sparse.model.nested import flat_tensors, leaves_of, map_tensors, version
from modelopt_sparse.model.stacks import Stack

CANDIDATES = 4  # stored tensors of one shape that a new one is compared with, newest first
# what a call may hold beside tensors: anything else (a cache, an iterator) may change from one run to the next
CONSTANT = (NoneType, bool, int, float, complex, str, bytes, slice, Enum, torch.dtype, torch.device, FunctionType, type)


@dataclass
class _Recorded:
    """One call of the model, as seen by the blocks."""

    masks: TokenMasks
    calls: list[RecordedCall] = field(default_factory=list)


class Recorder:
    """Forward hooks on the blocks of one stack, to be entered while the whole model runs.

    ``complete`` is called when all that the blocks of the current call are given is known, before the first block
    whose call can be left out; it may stop the model. Afterwards ``problem`` says why the stack cannot be chained, or
    is None. ``keep`` says where what is recorded is held.
    """

    def __init__(
        self, stack: Stack, complete: Callable[[], None] = lambda: None, keep: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self.stack = stack
        self._complete = complete
        self.keep = keep
        self._templates: list[CallTemplate] = []
        # for each block of the current call, the ids of the tensors that it was given; None for anything else
        self._given: list[list[int | None]] = []
        self.records: list[_Recorded] = []
        self.problem: str | None = None
        self.first_output: list[Tensor] = []  # of the last block in the first call, for the self-check
        self._previous: list[tuple[Tensor, int]] = []  # what the block before gave, and its versions
        self._pool: dict[tuple, list[Tensor]] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._handles: list[Any] = []
        self._open = False

    def begin(self, masks: TokenMasks) -> None:
        """A call of the model starts."""
        self._end_call()
        if not self._handles:
            return
        self.records.append(_Recorded(masks))
        self._open = True

    def start(self) -> None:
        for block in self.stack.blocks:
            self._handles.append(block.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._after))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_call()

    def forget(self) -> None:
        """Stop, and drop everything recorded: the stack will be recorded again when its turn comes."""
        self.stop()
        self.records.clear()
        self._pool.clear()
        self._templates.clear()
        self.first_output = []

    def _end_call(self) -> None:
        if self._open and self.problem is None and len(self.records[-1].calls) != len(self.stack.blocks):
            called = len(self.records[-1].calls)
            self.problem = f"{called} of {len(self.stack.blocks)} blocks were called"
        elif self._open and self.problem is None and self._given:
            self._templates.append(template_of(self.records[-1].calls, self._given))
        self._open = False
        self._previous = []
        self._given = []
        self._stored.clear()

    @property
    def waiting(self) -> bool:
        """Whether the current call has to run on for this record."""
        return self._open and self.problem is None and len(self.records[-1].calls) < len(self.stack.blocks)

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.problem is not None or not self._open:
            return
        calls = self.records[-1].calls
        position = len(calls)
        if position >= len(self.stack.blocks) and not self._given:
            return  # filled in, but something else lets the model run on
        if position >= len(self.stack.blocks) or block is not self.stack.blocks[position]:
            self.problem = "blocks are not called once each, in order"
            self.records.clear()
            return
        leaves = leaves_of((args, kwargs))
        for value in leaves:
            if not isinstance(value, (Tensor, *CONSTANT)):
                kind = type(value).__name__
                self.problem = f"block {self.stack.names[position]!r} is given a {kind}, which may change as blocks run"
                self.records.clear()
                return
        links = 0

        @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass through the block
        def keep(x: Tensor) -> Any:
            nonlocal links
            for index, (output, was) in enumerate(self._previous):
                if x is output and version(x) == was:
                    links += 1
                    return FromPrevious(index)
            return self._store(x)

        calls.append((map_tensors(keep, args), map_tensors(keep, dict(kwargs))))
        if position > 0 and links == 0:
            self.problem = f"block {self.stack.names[position]!r} does not take the output of the block before it"
            self.records.clear()
            return
        # an output of the block before is not held, so its id may be taken again
        self._given.append([id(x) if id(x) in self._stored else None for x in leaves])
        kinds = [kinds_of(call) for call in calls]
        template = next((item for item in self._templates if item.kinds == kinds), None)
        if template is not None:
            calls += template.filled(calls)
            self._given = []
            self._complete()

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        del args
        if self.problem is not None or not self._open:
            return
        outputs = flat_tensors(output)
        self._previous = [(x, version(x)) for x in outputs]
        if block is self.stack.blocks[-1] and len(self.records) == 1:
            self.first_output = [x.detach().clone() for x in outputs]

    def _store(self, x: Tensor) -> Tensor:
        """A copy of ``x``, or the copy already held of an equal tensor."""
        if id(x) in self._stored:
            return self._stored[id(x)][1]
        alike = self._pool.setdefault((x.shape, x.dtype, x.device, x.stride()), [])
        held = next((y for y in reversed(alike[-CANDIDATES:]) if torch.equal(x, y)), None)
        if held is None:
            held = self.keep(x.detach().clone())
            alike.append(held)
        self._stored[id(x)] = (x, held)  # x itself is held so that its id stays taken
        return held
