"""Call templates: what the later blocks of a call are called with, in terms of its first ones.

Calls that fit a template run the dense model only up to the first block; without them the dense run would be one more
pass over all of the data. What they bring, as CPU seconds of SparseGPT at 2:4 on one thread (the jobs of
examples/benchmarks/cpu_speed.py, Intel Xeon at 2.5 GHz, torch 2.13.0): the testbed takes 12.4 with them and 22.0
without, the wide model 115 and 164.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.model.devices import leaves_of, map_leaves, version

RecordedCall = tuple[tuple, dict[str, Any]]  # positional and keyword arguments of one block
# for each leaf of what a block was called with: the id of a tensor, None for anything else
TensorIds = list[int | None]


@dataclass(frozen=True, eq=False)
class Addend:
    """What a model adds to a block's output on its way to the next block: ``values`` in some ``rows`` of a tensor of
    this ``shape``, and nothing in the others."""

    shape: torch.Size
    rows: Tensor
    values: Tensor

    @staticmethod
    def between(output: Tensor, x: Tensor, hold: Callable[[Tensor], Tensor]) -> "Addend":
        """What makes ``x`` of ``output``."""
        rows = (x != output).reshape(-1, x.shape[-1]).any(-1).nonzero().squeeze(-1)
        wide = torch.promote_types(x.dtype, torch.float32)  # a difference has more digits than its terms
        after, before = (y.detach().reshape(-1, y.shape[-1])[rows].to(wide) for y in (x, output))
        return Addend(x.shape, hold(rows), hold(after - before))

    def added_to(self, state: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """``state`` with ``part`` of the addend."""
        values, rows = self.values.to(state.device), self.rows.to(state.device)
        whole = values.new_zeros(self.shape)
        whole.view(-1, self.shape[-1])[rows] = values
        return (state.to(values.dtype) + part(whole)).to(state.dtype)


@dataclass(frozen=True)
class FromPrevious:
    """Stands in a recorded call for tensor number ``index`` of the previous block's output, to which the model adds
    ``addend``."""

    index: int
    addend: Addend | None = None


# position of a block -> number of an argument -> number of the output of the block before that it is the sum of, and of
# something else. A block that is given nothing of the other blocks has no such argument.
Between = Mapping[int, Mapping[int, int]]


def previous_output(x: Tensor, previous: list[tuple[Tensor, int]]) -> int | None:
    """Which of the ``previous`` outputs ``x`` is, if nothing was written to it since; each comes with its version."""
    return next((i for i, (output, before) in enumerate(previous) if x is output and version(x) == before), None)


@dataclass(frozen=True)
class _FromBlock:
    """Stands in a template for leaf number ``leaf`` of what block ``position`` was called with in the same call."""

    position: int
    leaf: int


@dataclass(frozen=True)
class CallTemplate:
    """The later blocks' arguments, expressed by those of the first blocks.

    It applies to every call whose first blocks get arguments of the same shapes and constants (``kinds``): a mask that
    is there in one call and None in another, or of another length, makes another template. A tensor of a later block
    comes from an earlier one if it was the same object. Anything else is a constant if the block before got the same.
    """

    kinds: list[list[Any]]
    later: list[RecordedCall]

    def filled(self, first: list[RecordedCall]) -> list[RecordedCall]:
        leaves = [leaves_of(call) for call in first]
        return [
            map_leaves(lambda x: leaves[x.position][x.leaf] if isinstance(x, _FromBlock) else x, call)
            for call in self.later
        ]


def kinds_of(call: RecordedCall) -> list[Any]:
    """What two calls of a block must have in common to be of one template: all but the values of tensors."""
    args, kwargs = call
    return [len(args), list(kwargs), [_kind_of(x) for x in leaves_of(call)]]


def _kind_of(x: Any) -> tuple:
    if isinstance(x, FromPrevious):
        return (FromPrevious, x.index, x.addend is None)
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x)


def template_of(calls: list[RecordedCall], tensor_ids: list[TensorIds]) -> CallTemplate:
    """What further calls follow from their first blocks, from as few of them as will do."""
    depth = 1
    while (later := _later(calls, tensor_ids, depth)) is None:
        depth += 1
    return CallTemplate([kinds_of(call) for call in calls[:depth]], later)


def _later(calls: list[RecordedCall], tensor_ids: list[TensorIds], depth: int) -> list[RecordedCall] | None:
    """The calls of the blocks from ``depth`` on in terms of those before; None if they hold something of their own."""
    known = {name: _FromBlock(i, j) for i in range(depth) for j, name in enumerate(tensor_ids[i]) if name is not None}
    constants = {path: leaf for path, leaf in _named_leaves(calls[depth - 1]) if not isinstance(leaf, Tensor)}
    later = []
    for call, names in zip(calls[depth:], tensor_ids[depth:]):
        sources: list[Any] = []
        for (path, leaf), name in zip(_named_leaves(call), names):
            if name in known:
                sources.append(known[name])
            elif (isinstance(leaf, FromPrevious) and leaf.addend is None) or _is_constant(
                leaf, constants.get(path, FromPrevious)
            ):
                sources.append(leaf)
            else:
                return None
        order = iter(sources)
        later.append(map_leaves(lambda _, order=order: next(order), call))
    return later


def _named_leaves(call: RecordedCall) -> list[tuple[tuple, Any]]:
    args, kwargs = call
    named = {**dict(enumerate(args)), **kwargs}
    return [((name, i), leaf) for name, value in named.items() for i, leaf in enumerate(leaves_of(value))]


def _is_constant(leaf: Any, other: Any) -> bool:
    return not isinstance(leaf, Tensor) and type(leaf) is type(other) and leaf == other
