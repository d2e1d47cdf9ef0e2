"""Text for error messages, plans and reports: suggestions, lists, tables."""

import difflib
from collections.abc import Iterable, Sequence


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


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table as text: the head, a rule, and the rows, with columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
