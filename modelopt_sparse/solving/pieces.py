"""A layer that is solved in pieces: a few experts at a time, or some rows.

When memory runs out in a solve, the layer is solved again in smaller pieces, which give the same as all of it:

- of fused experts fewer at once,
- of one matrix some rows, where a method's rows are independent of each other and the pattern counts in a row.

Whatever else runs out of memory is an error that names the layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.calibration.run import Run
from modelopt_sparse.methods.base import Solution
from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.model.devices import free_what_can_be_freed, is_out_of_memory
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.values import StepReport
from modelopt_sparse.solving.out_of_memory import PREPARED, no_memory

# The smallest piece of a matrix with C columns has C / SMALLEST rows. What a solver holds for them is then little
# beside the state that all rows share, and fewer would not help.
SMALLEST = 64


@dataclass(frozen=True)
class Piece:
    """Where a part of a layer lies: its experts (all of anything else), and its rows."""

    experts: slice
    rows: slice

    def of(self, matrix: Tensor) -> Tensor:
        """A view of this piece of ``[E, R, C]``, or of ``[..., R, C]`` for all experts."""
        return matrix[self.experts][..., self.rows, :]

    def within(self, other: "Piece") -> "Piece":
        """The same place counted from the first expert of a piece with all rows that it is part of."""
        first = other.experts.start or 0
        if not first:
            return self
        return Piece(slice(self.experts.start - first, self.experts.stop - first), self.rows)

    def plan(self, layer_plan: LayerPlan) -> LayerPlan:
        """The plan of a layer as that of this piece of it."""
        shape = self.of(torch.empty(layer_plan.shape, device="meta")).shape
        method = layer_plan.method
        if isinstance(method, GivenMask) and method.mask is not None:
            method = GivenMask(self.of(method.mask))
        return replace(layer_plan, shape=tuple(shape), method=method)


ALL_ROWS = slice(None)
WHOLE = Piece(slice(None), ALL_ROWS)


@dataclass(frozen=True)
class SolvedPiece:
    """A piece, or all of a layer, solved; ``energy`` is what its errors are relative to, the squared norm of its dense
    output (1 if it is all)."""

    piece: Piece
    solution: Solution
    steps: list[StepReport]
    energy: float


def joined(piece: Piece, shape: Sequence[int], pieces: Sequence[SolvedPiece], notes: Sequence[str] = ()) -> SolvedPiece:
    """Pieces that make up ``piece``, whose weights are of ``shape``, as one. Errors are relative to the energy of all
    of them. ``notes`` are added to those of the pieces."""
    if len(pieces) == 1 and not notes:
        return pieces[0]
    total = sum(part.energy for part in pieces)

    def error(errors: Iterable[float | None]) -> float | None:
        known = [(part.energy, value) for part, value in zip(pieces, errors)]
        if any(value is None for _, value in known):
            return None
        return sum(energy * (value or 0.0) for energy, value in known) / total if total > 0 else 0.0

    steps = [
        StepReport(same[0].step, error(step.error for step in same), round(sum(step.seconds for step in same), 4))
        for same in zip(*(part.steps for part in pieces))
    ]
    first = pieces[0].solution
    weight, mask = first.weight.new_empty(shape), first.mask.new_empty(shape)
    for part in pieces:
        place = part.piece.within(piece)
        place.of(weight).copy_(part.solution.weight)
        place.of(mask).copy_(part.solution.mask)
    error_of_all = sum(part.energy * part.solution.error for part in pieces) / total if total > 0 else 0.0
    said = dict.fromkeys(note for part in pieces for note in part.solution.notes)
    return SolvedPiece(piece, Solution(weight, mask, error_of_all, (*said, *notes)), steps, total)


class PieceSizes:
    """How much of a layer is solved at once: all of it, or as many experts as a memory limit leaves room for; and half
    of that, as often as memory runs out in an `attempt`.

    The run remembers what layers of one shape, method and pattern came to; the next such layer starts there.
    """

    def __init__(self, layer_plan: LayerPlan, run: Run) -> None:
        self._layer_plan, self._known = layer_plan, run.piece_sizes
        self._whole = layer_plan.at_once or layer_plan.matrices, layer_plan.shape[-2]
        # all that decides whether and how a layer can be cut
        self._key = layer_plan.type, layer_plan.shape, id(layer_plan.method), layer_plan.pattern, layer_plan.steps
        self.experts, self.rows = self._known.get(self._key, self._whole)
        self.failed = False

    @contextmanager
    def attempt(self, *, fewer_rows_help: bool = True, when: str = PREPARED) -> Iterator[None]:
        """Something that takes memory for this layer. Where memory runs out, `failed` is set and smaller pieces are to
        be tried. Raises MemoryError, which says ``when`` it was, if there are none."""
        self.failed = False
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not self._halve(fewer_rows_help):
                raise no_memory(self._layer_plan, self._tried() if fewer_rows_help else when, error) from error
            self.failed = True

    def free_if_failed(self) -> bool:
        """Whether the last attempt has failed. What it held is freed then: its error is gone by now, and the frames
        that it kept alive."""
        if self.failed:
            free_what_can_be_freed()
        return self.failed

    @property
    def note(self) -> tuple[str, ...]:
        """What to say in the report about pieces that memory has forced."""
        if (self.experts, self.rows) == self._whole:
            return ()
        sizes = []
        if self.experts < self._whole[0]:
            sizes.append("one expert at a time" if self.experts == 1 else f"{self.experts} experts at a time")
        if self.rows < self._whole[1]:
            sizes.append("one row at a time" if self.rows == 1 else f"{self.rows} rows at a time")
        return (f"solved {', '.join(sizes)}, because memory ran out",)

    def _tried(self) -> str:
        layer_plan = self._layer_plan
        if (self.experts, self.rows) == (layer_plan.matrices, layer_plan.shape[-2]):
            why = _whole_because(layer_plan)
            return "while it was solved" + (f", and it cannot be solved in pieces: {why}" if why else "")
        experts = "" if layer_plan.matrices == 1 else f"{self.experts} of its {layer_plan.matrices} matrices, "
        return f"even while no more than {experts}{self.rows} rows of {layer_plan.shape[-1]} were solved at once"

    def _halve(self, fewer_rows_help: bool) -> bool:
        layer_plan = self._layer_plan
        if isinstance(layer_plan.layer.adapter, RoutedAdapter) and self.experts > 1:
            self.experts = -(-self.experts // 2)
        elif (
            fewer_rows_help and not _whole_because(layer_plan) and self.rows > max(layer_plan.shape[-1] // SMALLEST, 1)
        ):
            self.rows = -(-self.rows // 2)
        else:
            return False
        self._known[self._key] = self.experts, self.rows
        return True


def _whole_because(layer_plan: LayerPlan) -> str:
    """Why the rows of a matrix can only be solved together, or ""."""
    if not layer_plan.method.rows_independent:
        return f"method {layer_plan.method.name!r} solves the rows of a matrix together"
    pattern = layer_plan.pattern
    if not isinstance(pattern, NM) and pattern.scope != "row":
        return f"pattern {pattern} compares all weights of the matrix, and a pattern per row or an N:M would not"
    return ""
