"""Recording what each block of a stack is called with, and running the blocks again from the record.

A stack is chained: block i + 1 gets its hidden states from the output of block i, everything else (masks, rotary
tables, encoder states) from its own record. What comes from where is seen by identity while the whole model runs.

Where the later blocks of a call were given nothing but what the first ones were given too, further calls like it need
not run through the stack: they are recorded up to there (mostly: up to the first block), and the rest is filled in.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import TokenMasks, map_leaves, map_tensors, version
from modelopt_sparse.model.stacks import Stack

CANDIDATES = 4  # stored tensors of one shape that a new one is compared with, newest first
# of a block that is given what it cannot take; not those of reading files
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
# what a call may hold beside tensors: anything else (a cache, an iterator) may change from one run to the next
CONSTANT = (NoneType, bool, int, float, complex, str, bytes, slice, Enum, torch.dtype, torch.device, FunctionType, type)


@dataclass(frozen=True)
class _FromPrevious:
    """Stands in a recorded call for tensor number ``index`` of the previous block's output."""

    index: int


_Call = tuple[tuple, dict[str, Any]]


@dataclass
class _Recorded:
    """One call of the model, as seen by the blocks."""

    masks: TokenMasks
    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True)
class _FromBlock:
    """Stands in a template for leaf number ``leaf`` of what block ``position`` was given in the same call."""

    position: int
    leaf: int


@dataclass(frozen=True)
class _Template:
    """What the blocks behind the first ones are given, in all calls in which ``kinds`` of the first ones are the same.

    ``kinds``: for each of the first blocks, the shape of every tensor and the value of everything else. A mask that is
    there in one call and None in another, or of another length, makes another template. A tensor of a later block comes
    from an earlier one if it was the same object; anything else counts as constant if the block before was given the
    same.
    """

    kinds: list[list[Any]]
    later: list[_Call]

    def filled(self, first: list[_Call]) -> list[_Call]:
        leaves = [_leaves(call) for call in first]
        return [
            map_leaves(lambda x: leaves[x.position][x.leaf] if isinstance(x, _FromBlock) else x, call)
            for call in self.later
        ]


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
        self._templates: list[_Template] = []
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
            self._templates.append(_template(self.records[-1].calls, self._given))
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
        leaves = _leaves((args, kwargs))
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
                    return _FromPrevious(index)
            return self._store(x)

        calls.append((map_tensors(keep, args), map_tensors(keep, dict(kwargs))))
        if position > 0 and links == 0:
            self.problem = f"block {self.stack.names[position]!r} does not take the output of the block before it"
            self.records.clear()
            return
        # an output of the block before is not held, so its id may be taken again
        self._given.append([id(x) if id(x) in self._stored else None for x in leaves])
        kinds = [_kinds(call) for call in calls]
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


class Chain:
    """A recorded stack, run block by block. The state is the output of the last block advanced over, per call.

    ``stays``: it is held on the execution device, where blocks give it.
    """

    stays = False

    def __init__(self, recorder: Recorder) -> None:
        self.stack = recorder.stack
        self.masks = [record.masks for record in recorder.records]
        self._calls = [record.calls for record in recorder.records]
        self._state: list[list[Tensor | None]] = [[] for _ in self._calls]
        self._first_output = recorder.first_output
        self._keep = recorder.keep

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def nbytes(self) -> int:
        """What the first block of all calls is given, which is about the size of a state."""
        given = {id(x): x for calls in self._calls for x in flat_tensors(calls[0])}
        return sum(x.nbytes for x in given.values())

    def copy(self) -> "Chain":
        """The same chain with a state of its own; recorded tensors are shared."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        other._state = [list(state) for state in self._state]
        return other

    def follow(self, other: "Chain") -> None:
        """Take the state that a copy of this chain has advanced to."""
        self._calls, self._state = other._calls, other._state

    def run(self, position: int, index: int) -> list[Tensor]:
        """Run block ``position`` on call ``index`` from the current state -> its output's tensors."""
        return self._run(position, index, self._state[index])

    def advance(self, position: int, index: int, output: list[Tensor]) -> None:
        """Make ``output`` of block ``position`` the state of call ``index``, and forget what only this block needed."""
        self._calls[index][position] = ((), {})
        wanted = self._linked(position + 1, index)
        self._state[index] = [self._keep(x) if i in wanted else None for i, x in enumerate(output)]

    def problem(self) -> str | None:
        """Why the chained blocks do not reproduce the model's own output on the first call, or None if they do.

        The last row of the batch is asked first, at a fraction of the cost: it decides where rows are independent and
        nothing was written to an output on its way to the next block, of which inference tensors keep no count.
        """
        batch = next((len(x) for x in self._first_output if x.dim()), 1)
        counted = not any(x.is_inference() for x in self._first_output)
        if batch > 1 and counted:
            last_row = self._difference(lambda x: x[-1:] if x.dim() and len(x) == batch else x)
            if last_row is None:
                return None
        return self._difference(lambda x: x)

    def _difference(self, part: Callable[[Tensor], Tensor]) -> str | None:
        """What is different from the model's own run, given ``part`` of each recorded tensor of the first call."""
        recorded = [x for call in self._calls[0] for x in flat_tensors(call)]
        state: list[Tensor] = []
        for position in range(len(self.stack.blocks)):
            before = [(x, version(x)) for x in (*recorded, *state)]
            try:
                state = self._run(position, 0, state, part)
            except FAILURES as error:
                return f"block {self.stack.names[position]!r} cannot be run by itself ({error})"
            if any(version(x) != was for x, was in before):
                return "blocks write to their inputs"
        goal = [part(x) for x in self._first_output]
        same = len(state) == len(goal) and all(map(_close, state, goal))
        return None if same else "blocks run one by one do not give the model's own output"

    def _run(self, position: int, index: int, state: list, part: Callable[[Tensor], Tensor] = lambda x: x) -> list:
        def given(leaf: Any) -> Any:
            if isinstance(leaf, _FromPrevious):
                return state[leaf.index]
            return part(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(given, self._calls[index][position])
        return flat_tensors(self.stack.blocks[position](*args, **kwargs))

    def _linked(self, position: int, index: int) -> set[int]:
        call = self._calls[index][position] if position < len(self.stack.blocks) else ()
        return {x.index for x in _leaves(call) if isinstance(x, _FromPrevious)}


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _leaves(value: Any) -> list[Any]:
    """Whatever nested tuples, lists and mappings hold, in order."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def _kinds(call: _Call) -> list[Any]:
    """What two calls of a block must have in common to be of one template: all but the values of tensors."""
    args, kwargs = call
    described = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in _leaves(call)]
    return [len(args), list(kwargs), described]


def _template(calls: list[_Call], given: list[list[int | None]]) -> _Template:
    """What further calls follow from their first blocks, from as few of them as will do."""
    depth = 1
    while (later := _later(calls, given, depth)) is None:
        depth += 1
    return _Template([_kinds(call) for call in calls[:depth]], later)


def _later(calls: list[_Call], given: list[list[int | None]], depth: int) -> list[_Call] | None:
    """The calls of the blocks from ``depth`` on in terms of those before; None if they hold something of their own."""
    known = {name: _FromBlock(i, j) for i in range(depth) for j, name in enumerate(given[i]) if name is not None}
    constants = {path: leaf for path, leaf in _named_leaves(calls[depth - 1]) if not isinstance(leaf, Tensor)}
    later = []
    for call, names in zip(calls[depth:], given[depth:]):
        sources: list[Any] = []
        for (path, leaf), name in zip(_named_leaves(call), names):
            if name in known:
                sources.append(known[name])
            elif isinstance(leaf, _FromPrevious) or _is_constant(leaf, constants.get(path, _FromPrevious)):
                sources.append(leaf)
            else:
                return None
        order = iter(sources)
        later.append(map_leaves(lambda _, order=order: next(order), call))
    return later


def _named_leaves(call: _Call) -> list[tuple[tuple, Any]]:
    args, kwargs = call
    named = {**dict(enumerate(args)), **kwargs}
    return [((name, i), leaf) for name, value in named.items() for i, leaf in enumerate(_leaves(value))]


def _is_constant(leaf: Any, other: Any) -> bool:
    return not isinstance(leaf, Tensor) and type(leaf) is type(other) and leaf == other


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
