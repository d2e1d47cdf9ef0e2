"""Text for people: suggestions, lists, tables, tables that fold, and files.

A table folds rows whose names differ only in numbers and whose cells are equal. `*` in a folded name stands for all
numbers that occur there: `model.layers.*.mlp.up_proj`. If only some are meant, they are listed:
`model.layers.0-3,7.mlp.up_proj`. Cells that differ in numbers show the smallest and the largest: `0.01..0.05`.
"""

import difflib
import json
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, Literal

from modelopt_sparse.checks import grouped, shown

WIDTH = 100  # columns of the terminal that folded text fits
LEAST = 14  # columns of a table are not made narrower than this, nor than their words
MAX_LEVELS = 4  # in a column of levels, a name with at most this many different cells keeps a row for each
NO_BREAK = "\N{NO-BREAK SPACE}"  # where `paragraph` starts no line, and writes a space
BREAKS = re.compile(r"(?<=[ ,+/])")  # where a cell may go on in the next line
INDEX = re.compile(r"0|[1-9][0-9]*")  # a part of a name that is a number
# a number that stands alone: not in a name (layers.3), not in a pattern (2:4), not in a version (1.2.3)
NUMBER = re.compile(r"(?<![\w.:])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|[.:]\d)")

Stem = tuple[str | None, ...]  # the parts of a name; None for a number
Places = tuple[int, ...]  # the numbers of a name


class Printed:
    """What ``print`` shows to people as `text` gives it, and machines read as `as_dict` or `to_json` give it."""

    def text(self, *, all_rows: bool = False) -> str:
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, in plain values."""
        return asdict(self)  # type: ignore[call-overload]  # all that are printed are dataclasses

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """`as_dict` as indented JSON, with null for NaN and infinity."""
        return json.dumps(finite(self.as_dict()), indent=2, default=str)


@contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """The path to write a file to, which is renamed to ``path`` at the end: an error, as on a full disk, leaves the
    file that was there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_no_folder(path: Path) -> None:
    """Raise ValueError for a file that is to be written where there is no folder."""
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{str(path)!r}: there is no folder {str(path.parent)!r}: make it first, or give another path")


def write_whole(path: Path, text: str) -> None:
    """Write a file of text in one piece."""
    with in_one_piece(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks, and with keys that are text, as there."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# words and plain tables -----------------------------------------------------------------------------------------------


def nearest(name: object, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" with the known name that is most like ``name``; "" if none is."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def refuse_unknown(names: Iterable[str], known: Sequence[str], where: str = "") -> None:
    """Raise ValueError for the name of an option that is not among the known ones. ``where`` begins the text."""
    for name in names:
        if name not in known:
            allowed = ", ".join(sorted(known))
            raise ValueError(f"{where}option {shown(name)} is not known{nearest(name, known)}; allowed are {allowed}")


def first_few(items: Sequence[str], shown: int = 5) -> str:
    """The first ``shown`` of the items, and how many more there are."""
    rest = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return "; ".join([*items[:shown], *rest])


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None = None) -> str:
    """A table as text: the head, a rule, and the rows, with columns as wide as their widest cell.

    width: how wide the table may be: long cells go on in further lines. Names, in the first column, and single words
      are not broken: a table of long ones is wider. None: as wide as it is.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    words = [2 + max(len(word.rstrip()) for cell in cells for word in BREAKS.split(cell)) for cells in columns]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        spare = [i for i in range(1, len(widths)) if widths[i] > max(LEAST, words[i])]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1
    lines = []
    for row in [head, *rows]:
        broken = [[row[0]], *(_broken(cell, column) for cell, column in zip(row[1:], widths[1:], strict=True))]
        for cells in zip_longest(*broken, fillvalue=""):
            lines.append("  ".join(cell.ljust(column) for cell, column in zip(cells, widths, strict=True)).rstrip())
        if row is head:
            lines.append("  ".join("-" * column for column in widths))
    return "\n".join(lines)


def steps_text(*values: float, arrow: str = "->") -> str:
    """The values of consecutive steps: "0.1000 -> 0.0500"."""
    return f" {arrow} ".join(f"{value:.4f}" for value in values)


def product_of(shape: Iterable[int]) -> str:
    """A shape as "64 x 32"."""
    return " x ".join(map(str, shape))


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell, broken at spaces and signs."""
    lines = [""]
    for piece in BREAKS.split(cell):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1]:
            lines.append("  ")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


# tables that fold ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table, with a cell for each row.

    numbers: "exact": rows with different cells are never folded. "range": rows whose cells differ only in numbers are
      folded. "levels": the same, if a name has more than four different cells.
    below: cells are texts that stand below the table, under a number.
    shared: a cell that all rows share stands once, above the table.
    """

    head: str
    cells: Sequence[str]
    numbers: Literal["exact", "levels", "range"] = "exact"
    below: bool = False
    shared: bool = True


def fold(names: Sequence[str], keys: Sequence[Hashable], among: Iterable[str] = ()) -> list[tuple[str, list[int]]]:
    """Rows of equal keys whose names differ only in numbers: (folded name, indices of the rows), by first occurrence.

    among: further names. `*` stands for all numbers that occur in the names and in these.
    """
    known: dict[Stem, set[Places]] = {}
    for name in (*among, *names):
        stem, places = _split(name)
        known.setdefault(stem, set()).add(places)
    groups: dict[tuple[Stem, Hashable], dict[Places, list[int]]] = {}
    for index, (name, key) in enumerate(zip(names, keys, strict=True)):
        stem, places = _split(name)
        groups.setdefault((stem, key), {}).setdefault(places, []).append(index)
    rows = []
    for (stem, _), members in groups.items():
        all_of_them = known[stem]
        boxes = [_columns(members)] if len(members) == len(all_of_them) else _boxes(set(members))
        for box in boxes:
            indices = [index for places in product(*map(sorted, box)) for index in members.get(places, ())]
            rows.append((_label(stem, box, _columns(all_of_them)), sorted(indices)))
    return sorted(rows, key=lambda row: row[1][0])


def folded_names(names: Sequence[str], among: Iterable[str] = ()) -> list[str]:
    """Names without their repetitions: "model.layers.*.mlp.gate x32"."""
    rows = fold(names, [()] * len(names), among)
    return [label if len(indices) == 1 else f"{label} x{len(indices)}" for label, indices in rows]


def rows_of(
    head: str, names: Sequence[str], columns: Sequence[Column], among: Iterable[str] = (), *, all_rows: bool = False
) -> str:
    """A table of at most 100 columns with folded rows: what all rows share, the rows, and the texts that stand below.

    all_rows: a line for each row instead, as wide as it is.
    """
    if all_rows:
        heads = (head, *(column.head for column in columns))
        return table(heads, list(zip(names, *(column.cells for column in columns), strict=True)))
    groups = fold(names, list(zip(*(_keys(names, column) for column in columns), strict=True)), among)
    shown = [[_spread([column.cells[i] for i in indices]) for _, indices in groups] for column in columns]
    equal, heads, cells, texts = [], [head], [[label for label, _ in groups]], []
    if any(len(indices) > 1 for _, indices in groups):
        heads.append("")
        cells.append([f"x{len(indices)}" if len(indices) > 1 else "" for _, indices in groups])
    for column, values in zip(columns, shown, strict=True):
        if not any(values):
            continue
        if column.shared and len(set(values)) == 1 and len(values) > 1:
            equal.append(f"{column.head} {values[0]}")
            continue
        if column.below:
            texts += [text for text in dict.fromkeys(values) if text and text not in texts]
            values = [f"[{texts.index(text) + 1}]" if text else "" for text in values]
        heads.append(column.head)
        cells.append(values)
    parts = [paragraph(f"In every row: {'; '.join(equal)}.")] if equal else []
    parts.append(table(tuple(heads), list(zip(*cells, strict=True)), WIDTH))
    if texts:
        parts.append("\n".join(paragraph(f"[{number}] {text}") for number, text in enumerate(texts, 1)))
    return "\n\n".join(parts)


def by_reason(word: str, reasons: Mapping[str, str], among: Iterable[str] = (), *, all_rows: bool = False) -> str:
    """A line for each reason: ``word``, the names that have it, and the reason. ``reasons``: name -> reason."""
    names = grouped(reasons, reasons.__getitem__)
    if all_rows:
        return "\n".join(f"{word}: {', '.join(group)} ({why})" for why, group in names.items())
    every = (*among, *reasons)
    folded = {why: [name.replace(" ", NO_BREAK) for name in folded_names(group, every)] for why, group in names.items()}
    return "\n".join(paragraph(f"{word}: {', '.join(group)} ({why})") for why, group in folded.items())


def paragraph(text: str, *, all_rows: bool = False) -> str:
    """Text in lines of at most 100 columns; with ``all_rows`` as it is."""
    if all_rows:
        return text
    lines = textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines.replace(NO_BREAK, " ")


def counted(values: Iterable[str]) -> str:
    """The different values, with their counts if there are several: "sparsegpt 2:4 x30; wanda 4:8 x12"."""
    counts = Counter(values)
    return first_few([value if len(counts) == 1 else f"{value} x{n}" for value, n in counts.most_common()], 3)


def _split(name: str) -> tuple[Stem, Places]:
    """The parts of a name, with None for numbers, and these numbers."""
    parts = name.split(".")
    stem = tuple(None if INDEX.fullmatch(part) else part for part in parts)
    return stem, tuple(int(part) for part in parts if INDEX.fullmatch(part))


def _columns(places: Iterable[Places]) -> tuple[frozenset[int], ...]:
    """The numbers that occur at the first place of a name, at the second, and so on."""
    return tuple(map(frozenset, zip(*places, strict=True)))


def _boxes(places: set[Places]) -> list[tuple[frozenset[int], ...]]:
    """Products of sets of numbers that together hold exactly these places, each once."""
    if () in places:
        return [()]
    rests: dict[int, set[Places]] = {}
    for first, *rest in sorted(places):
        rests.setdefault(first, set()).add(tuple(rest))
    firsts = grouped(rests, lambda first: frozenset(rests[first]))
    return [(frozenset(numbers), *box) for rest, numbers in firsts.items() for box in _boxes(set(rest))]


def _label(stem: Stem, box: tuple[frozenset[int], ...], known: tuple[frozenset[int], ...]) -> str:
    """The folded name: `*` where all known numbers are meant, except that a name of numbers alone lists them."""
    starred = any(part is not None for part in stem)
    written = (
        "*" if starred and len(some) > 1 and some == every else _ranges(some)
        for some, every in zip(box, known, strict=True)
    )
    return ".".join(next(written) if part is None else part for part in stem)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _keys(names: Sequence[str], column: Column) -> list[Hashable]:
    """A key for each row: rows with equal keys may be folded."""
    if column.numbers == "exact":
        return list(column.cells)
    words = [tuple(NUMBER.split(cell)) for cell in column.cells]
    if column.numbers == "range":
        return list(words)
    different: dict[Stem, set[str]] = {}
    stems = [_split(name)[0] for name in names]
    for stem, cell in zip(stems, column.cells, strict=True):
        different.setdefault(stem, set()).add(cell)
    return [
        cell if len(different[stem]) <= MAX_LEVELS else text
        for stem, cell, text in zip(stems, column.cells, words, strict=True)
    ]


def _spread(cells: Sequence[str]) -> str:
    """One text for cells that differ only in numbers: each number, or the smallest and the largest."""
    if len(set(cells)) == 1:
        return cells[0]
    text = NUMBER.split(cells[0])
    ranges = []
    for numbers in zip(*(NUMBER.findall(cell) for cell in cells), strict=True):
        ordered = sorted(numbers, key=lambda number: float(number.replace(",", "")))
        ranges.append(ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}..{ordered[-1]}")
    return "".join(part for pair in zip(text, [*ranges, ""], strict=True) for part in pair)
