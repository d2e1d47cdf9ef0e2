"""The figures of the HTML report, as plain values that plotly.js draws. None of them is made without its data.

A layer's name is read as block and role: `model.layers.3.mlp.up_proj` is `mlp.up_proj` in the block `model.layers.3`.
Layers of one block and one role, such as the experts of a list, are one point: the mean.
"""

import base64
import gzip
import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.reports.values import ERROR_FROM, BlockReport, LayerReport, ReportValues

# plots ----------------------------------------------------------------------------------------------------------------


ROLES = 10  # so many lines are told apart; what further roles there are becomes one
MAPS = 6  # so many masks are drawn
CORNER = 64  # rows and columns of a mask that are shown one by one
CELLS = (96, 192)  # rows and columns of a map of a whole mask
SYMBOLS = ("circle", "square", "diamond", "x", "triangle-up", "cross", "triangle-down", "star", "pentagon", "hexagon")
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")

Value = Callable[[LayerReport], float | None]


@dataclass(frozen=True)
class Figure:
    """One figure: plotly's traces and layout, and the HTML heading and caption that stand above it.

    choices: label -> the indices of the traces that are drawn when it is chosen; empty: all are drawn.
    """

    key: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {"key": self.key, "traces": self.traces, "layout": self.layout, "choices": self.choices}


def figures_of(report: ReportValues, masks: Mapping[str, Tensor]) -> list[Figure]:
    """The figures of one run, in the page's order. ``masks``: bool masks to draw, by parameter name."""
    layers, blocks = report.layers, report.blocks
    stacks = {layer.parameter for layer in layers if len(layer.shape) == 3}
    drawn = [
        _errors_by_layer(layers),
        _errors_by_block(layers),
        _reconstruction(blocks),
        _zeros(layers),
        _levels(layers),
        _tried(report.settings.get("allocation")),
        _seconds(layers, blocks),
        _experts(layers),
        _mask_maps({name: masks[name] for name in drawn_masks(report, masks)}, stacks),
    ]
    return [figure for figure in drawn if figure is not None]


def compared_figures(runs: Sequence[tuple[str, ReportValues]]) -> list[Figure]:
    """The figures of two runs beside each other, each with its title."""
    layers = [(title, report.layers) for title, report in runs]
    blocks = [
        (html.escape(title), [(block.name, block.error_after) for block in report.blocks]) for title, report in runs
    ]
    mean = "The mean over the layers of a block"
    held = "Of the output of a block, on calibration batches that it was not tuned on."
    drawn = [
        _lines("errors", "Error by block", f"{mean}, after the last step.", _by_run(layers, _last), "error", log=True),
        _error_pairs(layers),
        _lines("reconstruction", "Block error after reconstruction", held, blocks, "error", log=True),
        _lines("zeros", "Zeros by block", f"{mean}.", _by_run(layers, _percent), "% zeros"),
        _seconds_of_runs(runs),
    ]
    return [figure for figure in drawn if figure is not None]


def drawn_masks(report: ReportValues, names: Iterable[str]) -> list[str]:
    """Of the masks ``names`` those that a page shows: at most six, of the layers with the largest errors."""
    errors = {layer.parameter: _last(layer) or 0.0 for layer in report.layers}
    return sorted(names, key=lambda name: -errors.get(name, 0.0))[:MAPS]


def place_of(name: str) -> tuple[str, str]:
    """(block, role) of a layer's name: all up to its first number, and the rest with `*` for numbers.

    Without a number: what stands before the last dot, and the rest.
    """
    first = NUMBER.search(name)
    if first is None:
        block, _, role = name.rpartition(".")
        return block or name, role or name
    return name[: first.end()], NUMBER.sub("*", name[first.end() + 1 :]) or "layer"


# one run --------------------------------------------------------------------------------------------------------------


def _errors_by_layer(layers: Sequence[LayerReport]) -> Figure | None:
    """A line for each role, for each step; the last step is shown first."""
    traces, choices = [], {}
    for step in reversed(_steps_of(layers)):
        lines = _lines_by_role(layers, lambda layer, step=step: _error_after(layer, step), log=True)
        choices[f"after {step}"] = list(range(len(traces), len(traces) + len(lines)))
        traces += lines
    if not traces:
        return None
    caption = "||(W - Q) X||^2 / ||W X||^2 of each layer, on a logarithmic scale."
    axes = {"xaxis": _block_axis(_blocks_of(layers)), "yaxis": _log_axis("error", traces)}
    return Figure("errors", "Error by layer", caption, traces, axes, choices if len(choices) > 1 else {})


def _errors_by_block(layers: Sequence[LayerReport]) -> Figure | None:
    """A line for each step: the mean of a block's layers."""
    lines = []
    for step in _steps_of(layers):
        pairs = [(place_of(layer.name)[0], _error_after(layer, step)) for layer in layers]
        lines.append((f"after {html.escape(step)}", _means(pairs)))
    caption = "The mean over the layers of a block, after each step of the recipe."
    return _lines("steps", "Error by block and step", caption, lines, "mean error", log=True)


def _reconstruction(blocks: Sequence[BlockReport]) -> Figure | None:
    """The error of each block's output before and after it was tuned."""
    before = [(block.name, block.error_before) for block in blocks]
    after = [(block.name, block.error_after) for block in blocks]
    title = "Block error before and after reconstruction"
    caption = "Relative squared error of the output of a block, on calibration batches that it was not tuned on."
    return _lines("reconstruction", title, caption, [("before", before), ("after", after)], "error", log=True)


def _zeros(layers: Sequence[LayerReport]) -> Figure | None:
    if not layers:
        return None
    traces = _lines_by_role(layers, _percent)
    axis = {"title": {"text": "% zeros"}, "rangemode": "tozero"}
    layout = {"xaxis": _block_axis(_blocks_of(layers)), "yaxis": axis}
    return Figure("zeros", "Zeros by layer", "The fraction of the weights of a layer that is zero.", traces, layout)


def _levels(layers: Sequence[LayerReport]) -> Figure | None:
    """Zeros as a map of blocks and roles, where patterns differ: how they were shared out."""
    if len({layer.pattern for layer in layers}) < 2:
        return None
    cells = _grouped(layers, _percent)
    blocks, roles = _blocks_of(layers), list(cells)
    values = [[dict(cells[role]).get(block) for block in blocks] for role in roles]
    trace = _heatmap(values, x=_short(blocks), y=[html.escape(role) for role in roles], name="% zeros")
    layout = {"xaxis": _block_axis(blocks), "yaxis": {"autorange": "reversed"}}
    return Figure("levels", "Allocation", "Zeros, in per cent, by block and kind of layer.", [trace], layout)


def _tried(allocation: object) -> Figure | None:
    """The plans that an allocation tried, and what they measured."""
    if not isinstance(allocation, Mapping) or not allocation.get("tried"):
        return None
    tried, chosen = allocation["tried"], allocation["chosen"]
    names = [f"{html.escape(name)}{' (chosen)' if name == chosen else ''}" for name in tried]
    text = [f"{value:.4g}" for value in tried.values()]
    bars = {"type": "bar", "orientation": "h", "x": list(tried.values()), "y": names, "text": text}
    layout = {
        "xaxis": {
            "title": {"text": html.escape(str(allocation["measure"]))},
            "range": [0, 1.25 * max(tried.values())],  # room for the longest bar's text
        },
        "yaxis": {"autorange": "reversed"},
    }
    caption = "What the allocations that were tried measured; lower is better."
    return Figure(
        "tried", "Allocations tried", caption, [{**bars, "textposition": "outside", "cliponaxis": False}], layout
    )


def _seconds(layers: Sequence[LayerReport], blocks: Sequence[BlockReport]) -> Figure | None:
    """Stacked bars: the seconds of each step in each block."""
    steps = dict.fromkeys(step.step for layer in layers for step in layer.steps)
    spent = [(html.escape(step), _seconds_by_block(layers, (), step)) for step in steps]
    if blocks:
        spent.append(("reconstruct", _seconds_by_block((), blocks)))
    if not any(sum(counts.values()) for _, counts in spent):
        return None
    names = list(dict.fromkeys(block for _, counts in spent for block in counts))
    return _bars("Time by block and step", "Without running the model over the data.", spent, names, "stack")


def _seconds_by_block(
    layers: Sequence[LayerReport], blocks: Sequence[BlockReport], only: str | None = None
) -> dict[str, float]:
    """Block -> the seconds that its layers and its reconstruction took; of the step ``only``, if one is named."""
    spent: dict[str, float] = {}
    for layer in layers:
        block = place_of(layer.name)[0]
        seconds = sum(step.seconds for step in layer.steps if only in (None, step.step))
        spent[block] = spent.get(block, 0.0) + seconds
    for tuned in blocks:
        block = place_of(tuned.name)[0]
        spent[block] = spent.get(block, 0.0) + tuned.seconds
    return spent


def _experts(layers: Sequence[LayerReport]) -> Figure | None:
    """How many calibration tokens each expert of each block got: of experts in one tensor, and of those in a list."""
    tokens: dict[str, dict[int, int]] = {}
    for layer in layers:
        listed = re.search(r"\.experts\.(\d+)\.", layer.name)
        counts = {int(listed[1]): layer.tokens} if listed else dict(enumerate(layer.expert_tokens))
        for expert, count in counts.items():
            tokens.setdefault(place_of(layer.name)[0], {}).setdefault(expert, count)
    if not tokens:
        return None
    experts = sorted({expert for counts in tokens.values() for expert in counts})
    values = [[counts.get(expert) for counts in tokens.values()] for expert in experts]
    trace = _heatmap(values, x=_short([*tokens]), y=[str(expert) for expert in experts], name="tokens")
    layout = {
        "xaxis": _block_axis([*tokens]),
        "yaxis": {"title": {"text": "expert"}, "type": "category", "autorange": "reversed"},
    }
    return Figure("experts", "Tokens of experts", "Calibration tokens that were routed to each.", [trace], layout)


def _mask_maps(masks: Mapping[str, Tensor], stacks: Collection[str]) -> Figure | None:
    """For each mask its first rows and columns one by one, and all of it as fractions of zeros.

    ``stacks``: the names of those that are stacks of matrices, of which the first is drawn.
    """
    traces, choices = [], {}
    for name, mask in masks.items():
        matrix = mask[0] if name in stacks and mask.dim() > 2 else mask
        zeros = (~matrix.cpu()).float().reshape(len(matrix) if matrix.dim() > 1 else 1, -1)
        corner = {
            **_heatmap(zeros[:CORNER, :CORNER].int().tolist(), name="zero"),
            "showscale": False,
            "zmin": 0,
            "zmax": 1,
        }
        cells = min(len(zeros), CELLS[0]), min(zeros.shape[1], CELLS[1])
        coarse = torch.nn.functional.adaptive_avg_pool2d(zeros[None], cells)[0]
        rows, columns = (full / count for full, count in zip(zeros.shape, cells, strict=True))
        whole = _heatmap([[round(value, 3) for value in row] for row in coarse.tolist()], name="fraction of zeros")
        whole |= {"dx": columns, "x0": columns / 2, "dy": rows, "y0": rows / 2, "zmin": 0, "zmax": 1}
        choices[name] = [len(traces), len(traces) + 1]
        traces += [corner, {**whole, "xaxis": "x2", "yaxis": "y2"}]
    if not traces:
        return None
    layout = {
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "xaxis": {"title": {"text": "first columns"}, "constrain": "domain"},
        "yaxis": {"autorange": "reversed", "title": {"text": "rows"}},
        "xaxis2": {"title": {"text": "all columns"}},
        "yaxis2": {"autorange": "reversed"},
    }
    caption = (
        f"Left: the first {CORNER} rows and columns, zeros bright. Right: the whole mask, each cell the fraction of "
        "zeros in it. Of a stack of experts the first is shown."
    )
    return Figure("masks", "Map of a mask", caption, traces, layout, choices)


# two runs -------------------------------------------------------------------------------------------------------------


def _by_run(
    runs: Sequence[tuple[str, Sequence[LayerReport]]], value: Value
) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each run the mean of ``value`` over the layers of each block."""
    return [
        (html.escape(title), _means((place_of(layer.name)[0], value(layer)) for layer in layers))
        for title, layers in runs
    ]


def _seconds_of_runs(runs: Sequence[tuple[str, ReportValues]]) -> Figure | None:
    """Bars beside each other: the seconds that each run took for each block."""
    spent = [(html.escape(title), _seconds_by_block(report.layers, report.blocks)) for title, report in runs]
    names = list(dict.fromkeys(block for _, counts in spent for block in counts))
    if not any(sum(counts.values()) for _, counts in spent):
        return None
    return _bars("Time by block", "Solving and reconstruction.", spent, names, "group")


def _error_pairs(runs: Sequence[tuple[str, Sequence[LayerReport]]]) -> Figure | None:
    """Each layer as a point: its error in one run and in the other; means by block and role."""
    first, second = (
        {(role, block): value for role, points in _grouped(layers, _last).items() for block, value in points}
        for _, layers in runs
    )
    both = [key for key in first if first[key] > 0 and second.get(key, 0) > 0]
    if not both:
        return None
    traces = []
    for number, role in enumerate(dict.fromkeys(role for role, _ in both)):
        keys = [key for key in both if key[0] == role]
        points = {"x": [first[key] for key in keys], "y": [second[key] for key in keys]}
        marker = {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 7}
        texts = [html.escape(key[1]) for key in keys]
        drawn = {"type": "scatter", "mode": "markers", "name": html.escape(role), "text": texts, "marker": marker}
        traces.append({**drawn, **points})
    axes = [_log_axis(f"error, {html.escape(title)}", traces, axis) for axis, (title, _) in zip("xy", runs)]
    values = [value for key in both for value in (first[key], second[key])]
    ends, line = [min(values), max(values)], {"color": "#888888", "dash": "dot"}
    traces.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": line})
    caption = "Below the dotted line the second run is better."
    return Figure("pairs", "Error of each layer in both", caption, traces, {"xaxis": axes[0], "yaxis": axes[1]})


# values of layers -----------------------------------------------------------------------------------------------------


def _steps_of(layers: Iterable[LayerReport]) -> list[str]:
    """The names of the steps that left an error, in their order."""
    return list(dict.fromkeys(step.step for layer in layers for step in layer.steps if step.error is not None))


def _error_after(layer: LayerReport, step: str) -> float | None:
    return next((each.error for each in layer.steps if each.step == step), None)


def _last(layer: LayerReport) -> float | None:
    return layer.errors[-1] if layer.errors else None


def _percent(layer: LayerReport) -> float:
    return 100 * layer.zeros / layer.size


def _blocks_of(layers: Iterable[LayerReport]) -> list[str]:
    return list(dict.fromkeys(place_of(layer.name)[0] for layer in layers))


def _means(pairs: Iterable[tuple[str, float | None]]) -> list[tuple[str, float]]:
    """The mean for each name, of the values that are known."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        if value is not None:
            values.setdefault(name, []).append(value)
    return [(name, sum(some) / len(some)) for name, some in values.items()]


def _grouped(layers: Sequence[LayerReport], value: Value) -> dict[str, list[tuple[str, float]]]:
    """Role -> (block, mean of the values) for each block that has one; rare roles are one, where there are many."""
    counts = Counter(place_of(layer.name)[1] for layer in layers)
    shown = {role for role, _ in counts.most_common(ROLES - 1 if len(counts) > ROLES else ROLES)}
    pairs: dict[str, list[tuple[str, float | None]]] = {}
    for layer in layers:
        block, role = place_of(layer.name)
        pairs.setdefault(role if role in shown else "others", []).append((block, value(layer)))
    return {role: means for role, each in pairs.items() if (means := _means(each))}


# plotly ---------------------------------------------------------------------------------------------------------------


def _lines_by_role(layers: Sequence[LayerReport], value: Value, *, log: bool = False) -> list[dict[str, Any]]:
    groups = _grouped(layers, value)
    short = dict(zip(names := _blocks_of(layers), _short(names), strict=True))
    return [
        _line(html.escape(role), [(short[block], mean) for block, mean in points], i, log)
        for i, (role, points) in enumerate(groups.items())
    ]


def _lines(
    key: str,
    title: str,
    caption: str,
    lines: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    measure: str,
    *,
    log: bool = False,
) -> Figure | None:
    """A line for each entry of ``lines``: (name, points of (block, value)). None without any point."""
    names = list(dict.fromkeys(block for _, points in lines for block, _ in points))
    if not names:
        return None
    short = dict(zip(names, _short(names), strict=True))
    traces = [
        _line(name, [(short[block], value) for block, value in points], i, log)
        for i, (name, points) in enumerate(lines)
        if points
    ]
    axis = _log_axis(measure, traces) if log else {"title": {"text": measure}, "rangemode": "tozero"}
    return Figure(key, title, caption, traces, {"xaxis": _block_axis(names), "yaxis": axis})


def _line(name: str, points: Sequence[tuple[str, float]], number: int, log: bool) -> dict[str, Any]:
    """A line; what a logarithmic scale has no place for is a gap."""
    places, values = zip(*points, strict=True)
    shown = [None if log and value <= 0 else float(f"{value:.6g}") for value in values]
    marker = {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 7}
    return {"type": "scatter", "mode": "lines+markers", "name": name, "marker": marker, "x": list(places), "y": shown}


def _bars(
    title: str, caption: str, bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], mode: str
) -> Figure:
    """For each entry of ``bars`` a bar of seconds for each block, stacked or in groups."""
    places = _short(names)
    traces = [
        {"type": "bar", "name": name, "x": places, "y": [round(spent.get(block, 0.0), 4) for block in names]}
        for name, spent in bars
    ]
    axis = {"title": {"text": "seconds"}, "rangemode": "tozero"}
    return Figure("seconds", title, caption, traces, {"barmode": mode, "xaxis": _block_axis(names), "yaxis": axis})


def _heatmap(values: list[list[Any]], name: str, **axes: Any) -> dict[str, Any]:
    scale = {"colorscale": "Viridis", "colorbar": {"title": {"text": name, "side": "right"}, "thickness": 12}}
    return {"type": "heatmap", "z": values, "name": name, "hoverongaps": False, **scale, **axes}


def _block_axis(blocks: Sequence[str]) -> dict[str, Any]:
    """An axis with a place for each block, whose title says what all of their names begin with."""
    prefix = _prefix(blocks)
    title = f"block ({html.escape(prefix)}*)" if prefix else "block"
    names = _short(blocks)
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names,
        "title": {"text": title},
        "automargin": True,
    }


def _log_axis(title: str, traces: Sequence[Mapping[str, Any]], values: str = "y") -> dict[str, Any]:
    """A logarithmic axis with written ticks: the more, the fewer decades the traces' values span."""
    shown = [value for trace in traces for value in trace[values] if value]
    span = max(shown) / min(shown) if shown else 1.0
    digits = (1,) if span > 1000 else (1, 2, 5) if span > 10 else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [float(f"{digit}e{power}") for power in range(-12, 4) for digit in digits]
    texts = [f"{tick:g}" for tick in ticks]
    return {"type": "log", "title": {"text": title}, "tickvals": ticks, "ticktext": texts}


def _prefix(names: Sequence[str]) -> str:
    """What more than one name all begin with, up to a dot."""
    parts = zip(*(name.split(".")[:-1] for name in names)) if len(names) > 1 else ()
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _short(names: Sequence[str]) -> list[str]:
    """Names without what all of them begin with, ready for plotly, which reads text as HTML."""
    prefix = _prefix(names)
    return [html.escape(name.removeprefix(prefix)) for name in names]


# html -----------------------------------------------------------------------------------------------------------------
# The HTML report: one file with text, plots and tables, which needs no network.
#
# What is short stands in the page as text. Plots, rows of tables and plotly's script are packed (JSON, gzip, base64),
# and
# `page.js` unpacks them, so that 20,000 rows and the script are about 2 MB. Styles are in `page.css`.


MISSING = 'the HTML report draws with plotly, which is not installed: pip install "modelopt-sparse[report]"'
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
PLACES = 5  # significant digits of numbers in tables


@dataclass(frozen=True)
class Table:
    """A table that the page sorts and filters: columns by their heads, all of one length.

    Numbers sort as numbers; None is an empty cell.
    """

    key: str
    title: str
    columns: Mapping[str, Sequence[str | float | None]]

    def as_dict(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {"key": self.key, "heads": list(self.columns), "columns": list(self.columns.values())}


def write_page(
    path: str | Path,
    report: ReportValues,
    title: str | None,
    masks: Mapping[str, Tensor],
    compare: ReportValues | None,
    compare_title: str | None,
) -> Path:
    """Write the page of one report, or of two side by side, and return its path. See `Report.to_html`."""
    path = checked_page(path)
    for name, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise ValueError(f"mask {name!r} is no bool tensor: give those of modelopt_sparse.named_masks")
    if compare is None:
        text = _page(title or "Sparsity report", _one_run(report), figures_of(report, masks), _tables(report))
    else:
        titles = (title or "first run", compare_title or "second run")
        runs = list(zip(titles if titles[0] != titles[1] else ("A", "B"), (report, compare), strict=True))
        tables = [_compared_table(runs)]
        text = _page(f"{runs[0][0]} and {runs[1][0]}", _two_runs(runs), compared_figures(runs), tables)
    path.write_text(text, encoding="utf-8")
    return path


def checked_page(path: str | Path) -> Path:
    """The path of a page to write. Raises ValueError for a folder, a wrong suffix, and where plotly is missing."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(path)!r}: the HTML report is a file that ends in .html")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: give the path of a file to write")
    _plotly()
    return path


def _plotly() -> Callable[[], str]:
    """plotly's function that gives its script."""
    try:
        from plotly.offline import get_plotlyjs  # an extra, and slow to import: only when a page is written
    except ImportError:
        raise ValueError(MISSING) from None
    return get_plotlyjs


# the page -------------------------------------------------------------------------------------------------------------


def _page(title: str, texts: Mapping[str, str], figures: Sequence[Figure], tables: Sequence[Table]) -> str:
    """The whole file. ``texts``: "top" and "bottom", HTML that stands before and after plots and tables."""
    tables = [table for table in tables if table.columns]
    data = {"figures": [figure.as_dict() for figure in figures], "tables": [table.as_dict() for table in tables]}
    room = files("modelopt_sparse.reports")
    body = [
        f"<header><h1>{escape(title)}</h1>{texts['top']}</header>",
        '<p id="trouble" role="alert" hidden></p>',
        "<noscript><p>Plots and tables need JavaScript.</p></noscript>",
        f'<section class="figures">{"".join(map(_figure_place, figures))}</section>' if figures else "",
        *map(_table_place, tables),
        texts["bottom"],
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{room.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>",
            *filter(None, body),
            _packed("data", json.dumps(data, separators=(",", ":"), allow_nan=False)),
            _packed("plotly", _plotly()() if figures else ""),
            f"<script>{room.joinpath('page.js').read_text(encoding='utf-8')}</script></body></html>\n",
        ]
    )


def _packed(key: str, text: str) -> str:
    """Text that `page.js` unpacks."""
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="packed-{key}">{packed}</script>'


def _figure_place(figure: Figure) -> str:
    return (
        f'<figure id="figure-{figure.key}"><h2>{escape(figure.title)}</h2><figcaption>{escape(figure.caption)}'
        '</figcaption><div class="plot"></div></figure>'
    )


def _table_place(table: Table) -> str:
    return f'<section class="rows" id="table-{table.key}"><h2>{escape(table.title)}</h2></section>'


def _pairs(title: str, values: Mapping[str, object]) -> str:
    """Names and values, folded away; nothing without any."""
    if not values:
        return ""
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(_said(value))}</td></tr>" for key, value in values.items()
    )
    return f'<details><summary>{escape(title)}</summary><div class="wide"><table>{rows}</table></div></details>'


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# one run --------------------------------------------------------------------------------------------------------------


def _one_run(report: ReportValues) -> dict[str, str]:
    """The page's texts: what was done and what it cost; and notes, settings and versions."""
    cards = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="more">{escape(more)}</dd></div>'
        for name, (value, more) in cost_of(report).items()
    )
    return {"top": f'<p>{escape(report.summary())}</p><dl class="cards">{cards}</dl>', "bottom": _circumstances(report)}


def cost_of(report: ReportValues) -> dict[str, tuple[str, str]]:
    """What was done and what it cost: name -> (value, more about it)."""
    layers, blocks, measured = report.layers, report.blocks, report.evaluation
    pruned = sum(layer.size for layer in layers)
    total = pruned + sum(math.prod(weight.shape) for weight in report.skipped)
    whole = f"; {report.sparsity * pruned / total:.2%} of all matrix weights" if total > pruned else ""
    cost = {"zeros": (f"{report.sparsity:.2%}", f"of {pruned:,} weights in pruned layers{whole}")}
    cost["layers"] = (f"{len(layers):,} pruned", f"{len(report.skipped):,} stay dense")
    if "training" in report.settings:
        cost["training"] = (f"step {report.settings['training']['step']:,}", "of sparse training")
    if measured is not None:
        windows = f"{measured.windows:,} windows of {measured.seq_len:,} tokens"
        dense = measured.reference_perplexity
        before = "" if dense is None else f"{dense:.3f} \N{RIGHTWARDS ARROW} "
        words = f"sparse, {windows}" if dense is None else f"dense \N{RIGHTWARDS ARROW} sparse, {windows}"
        cost["perplexity"] = (f"{before}{measured.perplexity:.3f}", words)
        if measured.kl is not None:
            cost["KL from dense"] = (f"{measured.kl:.4f}", "nats per token")
    for task, metric, dense, sparse, recovery, _ in () if report.tasks is None else report.tasks.rows()[-1:]:
        words = f"dense {dense}" + (f", {recovery} recovered" if recovery else "") if dense else "sparse"
        cost[f"{metric}, {task}"] = (sparse, words)
    errors = [(layer.errors[-1], layer.name) for layer in layers if layer.errors]
    if errors:
        worst, name = max(errors)
        mean = sum(error for error, _ in errors) / len(errors)
        cost["error of a layer"] = (f"{mean:.4f}", f"the mean; the largest is {worst:.4f}, of {name}")
    if blocks:
        before, after = (sum(some) / len(blocks) for some in zip(*((b.error_before, b.error_after) for b in blocks)))
        cost["error of a block"] = (f"{before:.4f} \N{RIGHTWARDS ARROW} {after:.4f}", "by reconstruction, the mean")
    if (tuned := report.distillation) is not None:
        value = f"{tuned.kl_before:.4f} \N{RIGHTWARDS ARROW} {tuned.kl_after:.4f}"
        cost["KL by distillation"] = (value, "nats, on calibration batches that it was not tuned on")
    if spent := report.time_by_part():
        parts = ", ".join(f"{part} {_duration(seconds)}" for part, seconds in spent.items())
        cost["time"] = (_duration(sum(spent.values())), parts)
    for device, held in report.peak_memory.items():
        cost["memory"] = (f"{held / 1e9:.1f} GB", f"the most that the process held on {device}")
    return cost


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _circumstances(report: ReportValues) -> str:
    """Notes, settings, data and versions, of earlier runs as well."""
    parts = []
    notes = [note for run in report.earlier for note in run["notes"]] + report.notes
    if notes:
        parts.append(
            f"<section><h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul></section>"
        )
    measured = {layer.error_from for layer in report.layers if layer.errors}
    legend = {f"error from {short}": text for key, (short, text) in ERROR_FROM.items() if key in measured}
    parts.append(_pairs("What errors were measured with", legend))
    parts.append(_pairs("Settings", report.settings))
    parts.append(_pairs("Calibration data", report.calibration))
    parts.append(_pairs("Versions", report.versions))
    for number, run in enumerate(report.earlier, 1):
        parts.append(_pairs(f"Earlier run {number}, of {len(run['layers'])} layers: settings", run["settings"]))
    return "\n".join(filter(None, parts))


def _tables(report: ReportValues) -> list[Table]:
    """A row for each layer, for each block, and for each weight that stays dense. Columns without a value are left
    out."""
    layers, blocks, skipped = report.layers, report.blocks, report.skipped
    steps = dict.fromkeys(step.step for layer in layers for step in layer.steps if step.error is not None)
    columns: dict[str, list[Any]] = {"layer": [layer.name for layer in layers]}
    columns |= {key: [getattr(layer, key) for layer in layers] for key in ("recipe", "pattern")}
    columns["% zeros"] = [round(100 * layer.zeros / layer.size, 3) for layer in layers]
    for step in steps:
        columns[f"error after {step}"] = _rounded(
            next((each.error for each in layer.steps if each.step == step), None) for layer in layers
        )
    if not steps:
        columns["error"] = _rounded(layer.error for layer in layers)
    columns["error from"] = [ERROR_FROM[layer.error_from][0] if layer.errors else None for layer in layers]
    columns["tokens"] = [layer.tokens or None for layer in layers]
    columns["seconds"] = _rounded(layer.seconds or None for layer in layers)
    columns["notes"] = ["; ".join(layer.notes) or None for layer in layers]
    columns["shape"] = [" x ".join(map(str, layer.shape)) for layer in layers]
    columns["type"] = [layer.type for layer in layers]
    tables = [Table("layers", "Layers", columns)]
    columns = {"block": [block.name for block in blocks]}
    columns["error before"] = _rounded(block.error_before for block in blocks)
    columns["error after"] = _rounded(block.error_after for block in blocks)
    columns["best epoch"] = [block.epoch for block in blocks]
    columns["seconds"] = _rounded(block.seconds for block in blocks)
    columns["notes"] = ["; ".join(block.notes) or None for block in blocks]
    tables.append(Table("blocks", "Reconstructed blocks", columns))
    scores = () if report.tasks is None else report.tasks.scores
    columns = {key: [getattr(each, key) for each in scores] for key in ("task", "metric")}
    columns["dense"] = _rounded(each.reference for each in scores)
    columns["sparse"] = _rounded(each.score for each in scores)
    columns["% recovery"] = _rounded(None if each.recovery is None else 100 * each.recovery for each in scores)
    columns |= {key: [getattr(each, key) for each in scores] for key in ("stderr", "shots", "samples")}
    tables.insert(0, Table("tasks", "Scores on tasks", columns))
    columns = {key: [getattr(weight, key) for weight in skipped] for key in ("name", "reason", "type")}
    columns["shape"] = [" x ".join(map(str, weight.shape)) for weight in skipped]
    tables.append(Table("skipped", "What stays dense", columns))
    return [_without_empty(table) for table in tables]


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.{PLACES}g}") for value in values]


def _without_empty(table: Table) -> Table:
    cells = {head: column for head, column in table.columns.items() if any(cell is not None for cell in column)}
    return Table(table.key, table.title, cells)


# two runs -------------------------------------------------------------------------------------------------------------


def _two_runs(runs: Sequence[tuple[str, ReportValues]]) -> dict[str, str]:
    """The page's texts for two runs: costs side by side; settings that differ, and what each run says of itself."""
    costs = [cost_of(report) for _, report in runs]
    names = dict.fromkeys(name for cost in costs for name in cost)
    heads = "".join(f"<th>{escape(title)}</th>" for title, _ in runs)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(_cost_cell(cost, name) for cost in costs)}</tr>" for name in names
    )
    summaries = "".join(f"<p><b>{escape(title)}</b>: {escape(report.summary())}</p>" for title, report in runs)
    top = f'{summaries}<section class="wide"><table class="costs"><tr><td></td>{heads}</tr>{rows}</table></section>'
    both = [{**report.settings, **report.versions} for _, report in runs]
    differing = [key for key in {**both[0], **both[1]} if _setting(both[0], key) != _setting(both[1], key)]
    rows = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(_setting(each, key))}</td>' for each in both)}</tr>"
        for key in differing
    )
    bottom = [
        f'<section><h2>What differs in settings and versions</h2><div class="wide"><table><tr><td></td>{heads}</tr>'
    ]
    bottom += [rows, "</table></div></section>"] if rows else ["</table></div><p>Nothing.</p></section>"]
    for title, report in runs:
        bottom.append(f"<section><h2>{escape(title)}</h2>{_circumstances(report)}</section>")
    return {"top": top, "bottom": "".join(bottom)}


def _cost_cell(cost: Mapping[str, tuple[str, str]], name: str) -> str:
    value, more = cost.get(name, ("", ""))
    return f'<td><b>{escape(value)}</b><span class="more">{escape(more)}</span></td>'


def _setting(settings: Mapping[str, object], key: str) -> str:
    return _said(settings[key]) if key in settings else ""


def _compared_table(runs: Sequence[tuple[str, ReportValues]]) -> Table:
    """A row for each layer of either run."""
    by_name = [{layer.name: layer for layer in report.layers} for _, report in runs]
    names = list({**by_name[0], **by_name[1]})
    columns: dict[str, list[Any]] = {"layer": names}

    def side_by_side(head: str, value: Callable[[LayerReport], Any]) -> None:
        for (title, _), layers in zip(runs, by_name, strict=True):
            columns[f"{head}, {title}"] = [value(layers[name]) if name in layers else None for name in names]

    side_by_side("error", lambda layer: float(f"{layer.errors[-1]:.{PLACES}g}") if layer.errors else None)
    errors = list(columns.values())[1:]
    columns["second / first"] = _rounded(b / a if a and b is not None else None for a, b in zip(*errors, strict=True))
    side_by_side("% zeros", lambda layer: round(100 * layer.zeros / layer.size, 3))
    side_by_side("pattern", lambda layer: layer.pattern)
    side_by_side("recipe", lambda layer: layer.recipe)
    side_by_side("seconds", lambda layer: layer.seconds or None)
    return _without_empty(Table("layers", "Layers", columns))
