"""The blocks of a recorded stack, run one by one."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.calibration.recorder import Recorder
from modelopt_sparse.calibration.templates import FromPrevious
from modelopt_sparse.model.nested import flat_tensors, leaves_of, map_leaves, version

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
            if isinstance(leaf, FromPrevious):
                return state[leaf.index]
            return part(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(given, self._calls[index][position])
        return flat_tensors(self.stack.blocks[position](*args, **kwargs))

    def _linked(self, position: int, index: int) -> set[int]:
        call = self._calls[index][position] if position < len(self.stack.blocks) else ()
        return {x.index for x in leaves_of(call) if isinstance(x, FromPrevious)}


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
