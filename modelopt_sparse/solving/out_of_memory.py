"""When memory runs out in a solve: the layer is solved again in smaller pieces, which give the same as all of it.

Pieces of fused experts are fewer experts at once. Those of one matrix are some of its rows, where a method's rows are
independent of each other and the pattern counts in a row. Whatever else runs out of memory is an error that names the
layer.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.model.devices import free_what_can_be_freed, is_out_of_memory
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.plan.plan import LayerPlan

# rows of the smallest piece: as many as a matrix has columns, divided by this. What a solver holds for them is then
# little beside the state that all rows share, and fewer would not help.
SMALLEST = 64

# what is done for all of a layer at once
COPIED, PREPARED, JOINED, WRITTEN = (
    "while its weight was copied",
    "while its solver was prepared",
    "while its solution was put together",
    "while its solution was written into the model",
)

Known = dict[tuple[Any, ...], tuple[int, int]]


class Cut:
    """How much of a layer is solved at once: all of it, or as many experts as a memory limit leaves room for; and half
    of that, as often as memory runs out in an `attempt`.

    ``known``: what layers of this shape, method and pattern came to before; a new layer starts there.
    """

    def __init__(self, layer: LayerPlan, known: Known) -> None:
        self._layer, self._known = layer, known
        self._whole = layer.at_once or layer.matrices, layer.shape[-2]
        # all that decides whether and how a layer can be cut
        self._key = layer.type, layer.shape, id(layer.method), layer.pattern, layer.steps
        self.experts, self.rows = known.get(self._key, self._whole)
        self._failed = False

    @contextmanager
    def attempt(self, *, rows: bool = True) -> Iterator[None]:
        """Something that takes memory for this layer. Where that is not there, smaller pieces are to be tried: `again`
        says so. If there are none, raises MemoryError. ``rows``: whether fewer rows would take less."""
        self._failed = False
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not self._halve(rows):
                raise no_memory(self._layer, self._tried() if rows else PREPARED, error) from error
            self._failed = True

    def again(self) -> bool:
        """Whether the last attempt has failed. What it held is freed then: its error is gone by now, and the frames
        that it kept alive."""
        if self._failed:
            free_what_can_be_freed()
        return self._failed

    @property
    def note(self) -> tuple[str, ...]:
        """What to say in the report about pieces that memory has forced."""
        if (self.experts, self.rows) == self._whole:
            return ()
        found = []
        if self.experts < self._whole[0]:
            found.append("one expert at a time" if self.experts == 1 else f"{self.experts} experts at a time")
        if self.rows < self._whole[1]:
            found.append("one row at a time" if self.rows == 1 else f"{self.rows} rows at a time")
        return (f"solved {', '.join(found)}, because memory ran out",)

    def _tried(self) -> str:
        layer = self._layer
        if (self.experts, self.rows) == (layer.matrices, layer.shape[-2]):
            why = _whole_because(layer)
            return "while it was solved" + (f", and it cannot be solved in pieces: {why}" if why else "")
        experts = "" if layer.matrices == 1 else f"{self.experts} of its {layer.matrices} matrices, "
        return f"even while no more than {experts}{self.rows} rows of {layer.shape[-1]} were solved at once"

    def _halve(self, rows: bool) -> bool:
        if isinstance(self._layer.layer.adapter, RoutedAdapter) and self.experts > 1:
            self.experts = -(-self.experts // 2)
        elif rows and not _whole_because(self._layer) and self.rows > max(self._layer.shape[-1] // SMALLEST, 1):
            self.rows = -(-self.rows // 2)
        else:
            return False
        self._known[self._key] = self.experts, self.rows
        return True


def _whole_because(layer: LayerPlan) -> str:
    """Why the rows of a matrix can only be solved together, or ""."""
    if not layer.method.rows_independent:
        return f"method {layer.method.name!r} solves the rows of a matrix together"
    if not isinstance(layer.pattern, NM) and layer.pattern.scope != "row":
        return f"pattern {layer.pattern} compares all weights of the matrix, and a pattern per row or an N:M would not"
    return ""


def no_memory(layer: LayerPlan, when: str, error: BaseException) -> MemoryError:
    """The error of a layer for which memory ran out ``when`` something was done, and what to do."""
    advice = []
    if layer.at_once is None and isinstance(layer.layer.adapter, RoutedAdapter) and layer.needs == "gram":
        advice.append("memory_limit=, which holds the Gram matrices of a few experts at a time")
    if layer.needs == "gram" and when not in (COPIED, JOINED, WRITTEN):
        advice.append("a method without a Gram matrix (wanda, magnitude), for this layer through rules=")
    advice.append("device= with more memory, or exclude=")
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    asked = f" ({wanted[1]} more were asked for)" if wanted else ""
    return MemoryError(
        f"layer {layer.name!r} {list(layer.shape)}: out of memory{asked} {when}; give {'; or '.join(advice)}"
    )
