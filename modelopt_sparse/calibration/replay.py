"""The blocks of a recorded stack, run one by one."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.calibration.recorder import Recording
from modelopt_sparse.calibration.templates import FromPrevious
from modelopt_sparse.model.devices import flat_tensors, leaves_of, map_leaves, version

# of a block that is called with what it cannot take; not those of reading files
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


class StackReplay:
    """The state of each call is the output of the block before ``position``, which runs next."""

    def __init__(self, recording: Recording, hold: Callable[[Tensor], Tensor]) -> None:
        self.stack, self.masks = recording.stack, recording.masks
        self.position = 0
        self._calls = [list(calls) for calls in recording.calls]
        self._states: list[list[Tensor | None]] = [[] for _ in self._calls]
        self._hold = hold

    def __len__(self) -> int:
        """How many calls there are."""
        return len(self.masks)

    @property
    def nbytes(self) -> int:
        """What the first block of all calls is called with, which is about the size of all states."""
        inputs = {id(x): x for calls in self._calls for x in flat_tensors(calls[0])}
        return sum(x.nbytes for x in inputs.values())

    def forward(self, index: int) -> list[Tensor]:
        """Run the next block on call ``index`` -> the tensors of its output."""
        return self._forward(self.position, index, self._states[index])

    def held(self, index: int, output: list[Tensor]) -> list[Tensor | None]:
        """What the block after the next one takes of the ``output`` of call ``index``, held for it."""
        if self.position + 1 == len(self.stack.blocks):
            return []
        links = leaves_of(self._calls[index][self.position + 1])
        wanted = {link.index for link in links if isinstance(link, FromPrevious)}
        return [self._hold(x) if i in wanted else None for i, x in enumerate(output)]

    def advance_one(self, index: int, state: list[Tensor | None]) -> None:
        """Make ``state``, which `held` gave, that of call ``index``, and forget what only this block needed."""
        self._calls[index][self.position] = ((), {})
        self._states[index] = state

    def next_block(self) -> None:
        """All calls have been advanced. After the last block nothing is held any more."""
        self.position += 1
        if self.position == len(self.stack.blocks):
            self._calls.clear()
            self._states.clear()

    def problem(self, first_outputs: Mapping[int, list[Tensor]]) -> str | None:
        """Why the blocks, run one by one, do not reproduce the model's own outputs on the first call; None if they do.

        The last row of the batch is asked first, at a fraction of the cost: it decides where rows are independent and
        nothing was written to an output on its way to the next block, of which inference tensors keep no count.
        """
        all_outputs = [x for output in first_outputs.values() for x in output]
        batch = next((len(x) for x in all_outputs if x.dim()), 1)
        counted = not any(x.is_inference() for x in all_outputs)
        if batch > 1 and counted:
            last_row = self._difference(first_outputs, lambda x: x[-1:] if x.dim() and len(x) == batch else x)
            if last_row is None:
                return None
        return self._difference(first_outputs, lambda x: x)

    def _difference(self, first_outputs: Mapping[int, list[Tensor]], part: Callable[[Tensor], Tensor]) -> str | None:
        """What is different from the model's own run, given ``part`` of each recorded tensor of the first call."""
        recorded = [x for call in self._calls[0] for x in flat_tensors(call)]
        state: list[Tensor] = []
        for position in range(len(self.stack.blocks)):
            before = [(x, version(x)) for x in (*recorded, *state)]
            try:
                state = self._forward(position, 0, state, part)
            except FAILURES as error:
                return f"block {self.stack.names[position]!r} cannot be run by itself ({error})"
            if any(version(x) != was for x, was in before):
                return "blocks write to their inputs"
            if position in first_outputs:
                goal = [part(x) for x in first_outputs[position]]
                if len(state) != len(goal) or not all(map(close, state, goal)):
                    return "blocks run one by one do not give the model's own output"
        return None

    def _forward(
        self, position: int, index: int, state: list, part: Callable[[Tensor], Tensor] = lambda x: x
    ) -> list[Tensor]:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, FromPrevious):
                x = state[leaf.index]
                return x if leaf.addend is None else leaf.addend.added_to(x, part)
            return part(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(value, self._calls[index][position])
        return flat_tensors(self.stack.blocks[position](*args, **kwargs))


def close(a: Tensor, b: Tensor) -> bool:
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
