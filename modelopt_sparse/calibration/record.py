"""Recording what each block of a stack is called with, and running the blocks again from the record.

A stack is chained: block i + 1 gets its hidden states from the output of block i, everything else (masks, rotary
tables, encoder states) from its own record. What comes from where is seen by identity while the whole model runs.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.blocks import Stack
from modelopt_sparse.calibration.batches import TokenMasks, map_tensors, version

CANDIDATES = 4  # stored tensors of one shape that a new one is compared with, newest first
# what a call may hold beside tensors: anything else (a cache, an iterator) may change from one run to the next
CONSTANT = (NoneType, bool, int, float, complex, str, bytes, slice, Enum, torch.dtype, torch.device, FunctionType, type)


@dataclass(frozen=True)
class _FromPrevious:
    """Stands in a recorded call for tensor number ``index`` of the previous block's output."""

    index: int


@dataclass
class _Recorded:
    """One call of the model, as seen by the blocks."""

    masks: TokenMasks
    calls: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)


class Recorder:
    """Forward hooks on the blocks of one stack, to be entered while the whole model runs.

    Afterwards ``problem`` says why the stack cannot be chained, or is None.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.records: list[_Recorded] = []
        self.problem: str | None = None
        self.first_output: list[Tensor] = []  # of the last block in the first call, for the self-check
        self._previous: list[Tensor] = []
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
        self.first_output = []

    def _end_call(self) -> None:
        if self._open and self.problem is None and len(self.records[-1].calls) != len(self.stack.blocks):
            called = len(self.records[-1].calls)
            self.problem = f"{called} of {len(self.stack.blocks)} blocks were called"
        self._open = False
        self._previous = []
        self._stored.clear()

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.problem is not None or not self._open:
            return
        calls = self.records[-1].calls
        position = len(calls)
        if position >= len(self.stack.blocks) or block is not self.stack.blocks[position]:
            self.problem = "blocks are not called once each, in order"
            self.records.clear()
            return
        for value in _leaves((args, kwargs)):
            if not isinstance(value, (Tensor, *CONSTANT)):
                kind = type(value).__name__
                self.problem = f"block {self.stack.names[position]!r} is given a {kind}, which may change as blocks run"
                self.records.clear()
                return
        links = 0

        @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass through the block
        def keep(x: Tensor) -> Any:
            nonlocal links
            for index, output in enumerate(self._previous):
                if x is output:
                    links += 1
                    return _FromPrevious(index)
            return self._store(x)

        calls.append((map_tensors(keep, args), map_tensors(keep, dict(kwargs))))
        if position > 0 and links == 0:
            self.problem = f"block {self.stack.names[position]!r} does not take the output of the block before it"
            self.records.clear()

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        del args
        if self.problem is not None or not self._open:
            return
        self._previous = flat_tensors(output)
        if block is self.stack.blocks[-1] and len(self.records) == 1:
            self.first_output = [x.detach().clone() for x in self._previous]

    def _store(self, x: Tensor) -> Tensor:
        """A copy of ``x``, or the copy already held of an equal tensor."""
        if id(x) in self._stored:
            return self._stored[id(x)][1]
        alike = self._pool.setdefault((x.shape, x.dtype, x.device, x.stride()), [])
        held = next((y for y in reversed(alike[-CANDIDATES:]) if torch.equal(x, y)), None)
        if held is None:
            held = x.detach().clone()
            alike.append(held)
        self._stored[id(x)] = (x, held)  # x itself is held so that its id stays taken
        return held


class Chain:
    """A recorded stack, run block by block. The state is the output of the last block advanced over, per call."""

    def __init__(self, recorder: Recorder) -> None:
        self.stack = recorder.stack
        self.masks = [record.masks for record in recorder.records]
        self._calls = [record.calls for record in recorder.records]
        self._state: list[list[Tensor | None]] = [[] for _ in self._calls]
        self._first_output = recorder.first_output

    def __len__(self) -> int:
        return len(self._calls)

    def copy(self) -> "Chain":
        """The same chain with a state of its own; recorded tensors are shared."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        other._state = [list(state) for state in self._state]
        return other

    def run(self, position: int, index: int) -> list[Tensor]:
        """Run block ``position`` on call ``index`` from the current state -> its output's tensors."""
        return self._run(position, index, self._state[index])

    def advance(self, position: int, index: int, output: list[Tensor]) -> None:
        """Make ``output`` of block ``position`` the state of call ``index``, and forget what only this block needed."""
        self._calls[index][position] = ((), {})
        wanted = self._linked(position + 1, index)
        self._state[index] = [x if i in wanted else None for i, x in enumerate(output)]

    def problem(self) -> str | None:
        """Why the chained blocks do not reproduce the model's own output on the first call, or None if they do."""
        recorded = [x for call in self._calls[0] for x in flat_tensors(call)]
        state: list[Tensor] = []
        for position in range(len(self.stack.blocks)):
            before = [(x, version(x)) for x in (*recorded, *state)]
            try:
                state = self._run(position, 0, state)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                return f"block {self.stack.names[position]!r} cannot be run by itself ({error})"
            if any(version(x) != was for x, was in before):
                return "blocks write to their inputs"
        same = len(state) == len(self._first_output) and all(map(_close, state, self._first_output))
        return None if same else "blocks run one by one do not give the model's own output"

    def _run(self, position: int, index: int, state: list) -> list[Tensor]:
        def resolve(value: Any) -> Any:
            if isinstance(value, _FromPrevious):
                return state[value.index]
            if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
                return type(value)(resolve(item) for item in value)
            if isinstance(value, tuple):
                return type(value)(*(resolve(item) for item in value))
            if isinstance(value, dict):
                return {key: resolve(item) for key, item in value.items()}
            return value

        args, kwargs = self._calls[index][position]
        return flat_tensors(self.stack.blocks[position](*resolve(args), **resolve(kwargs)))

    def _linked(self, position: int, index: int) -> set[int]:
        found: set[int] = set()

        def visit(value: Any) -> None:
            if isinstance(value, _FromPrevious):
                found.add(value.index)
            elif isinstance(value, (tuple, list)):
                for item in value:
                    visit(item)
            elif isinstance(value, dict):
                for item in value.values():
                    visit(item)

        if position < len(self.stack.blocks):
            visit(self._calls[index][position])
        return found


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """Whatever nested tuples, lists and mappings hold."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to a few roundings of the dtype, measured against the tensor's own scale (kernels may differ).

    Rows of padding may be NaN or inf: that is equal to itself here.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=8 * torch.finfo(a.dtype).eps * scale, equal_nan=True)
