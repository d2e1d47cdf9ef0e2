"""The HTML report: one file with text, plots and tables, which needs no network.

What is short stands in the page as text. Plots, rows of tables and plotly's script are packed (JSON, gzip, base64), and
`page.js` unpacks them, so that 20,000 rows and the script are about 2 MB. Styles are in `page.css`.
"""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.reports.plots import Figure, compared_figures, figures_of
from modelopt_sparse.reports.values import ERROR_FROM, LayerReport, ReportValues

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
