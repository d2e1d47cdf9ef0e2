"""Text for error messages, plans and reports: suggestions, lists, tables."""

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest

LEAST = 14  # columns of a table are not made narrower than this
BREAKS = re.compile(r"(?<=[ ,+/])|(?<=\.)(?=\D)")  # where a cell may go on in the next line


def nearest(name: object, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" with the known name that is most like ``name``; "" if none is."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def unknown_option(key: str, known: Sequence[str]) -> str:
    """The text of an error for an option that is not among the known ones."""
    return f"option {key!r} is not known{nearest(key, known)}; allowed are {', '.join(sorted(known))}"


def first_few(items: Sequence[str], shown: int = 5) -> str:
    """The first ``shown`` of the items, and how many more there are."""
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return "; ".join([*items[:shown], *more])


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None = None) -> str:
    """A table as text: the head, a rule, and the rows, with columns as wide as their widest cell.

    width: how wide the table may be: long cells go on in further lines. None: as wide as it is.
    """
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > LEAST:
        widest = max(widths[1:], default=0)  # names are broken last
        widths[widths.index(widest, 1) if widest > LEAST else 0] -= 1
    lines = []
    for row in [head, *rows]:
        broken = [_broken(cell, column) for cell, column in zip(row, widths, strict=True)]
        for cells in zip_longest(*broken, fillvalue=""):
            lines.append("  ".join(cell.ljust(column) for cell, column in zip(cells, widths, strict=True)).rstrip())
        if row is head:
            lines.append("  ".join("-" * column for column in widths))
    return "\n".join(lines)


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell: broken at spaces, signs and dots that no number follows; within a word if it is too long."""
    lines = [""]
    for piece in BREAKS.split(cell):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1]:
            lines.append("  ")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], "  " + lines[-1][width:]]
    return [line.rstrip() for line in lines]
