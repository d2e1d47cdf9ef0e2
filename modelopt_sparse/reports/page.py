"""The HTML report: one file with text, plots and tables, which needs no network.

Short texts stand in the page. Plots, rows of tables and plotly's script are packed (JSON, gzip, base64), so that 20,000
rows and the script are about 2 MB; `page.js` unpacks and draws them. The template of it all is `page.html`, and styles
are in `page.css`.

Figures are plain values that plotly.js draws. A layer's name is read as block and role: `model.layers.3.mlp.up_proj` is
`mlp.up_proj` in the block `model.layers.3`. Layers of one block and one role, such as the experts of a list, are one
point: the mean.
"""

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from itertools import takewhile
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from modelopt_sparse.checks import grouped
from modelopt_sparse.reports.evaluate import TaskScore, task_scores
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.text import finite, product_of, refuse_no_folder, steps_text, write_whole
from modelopt_sparse.reports.values import ERROR_FROM, LayerReport, Shrunk, in_words

NO_PLOTLY = 'the HTML report draws with plotly, which is not installed: pip install "modelopt-sparse[report]"'
ARROW = "\N{RIGHTWARDS ARROW}"
PLACES = 5  # significant digits of numbers in tables
ROLES = 10  # lines of one figure; further roles become one line
MAPS = 6  # masks that are drawn
SCORES = 6  # on tasks, at the top; the table has all
CORNER = 64  # rows and columns of a mask that are shown one by one
CELLS = (96, 192)  # rows and columns of a map of a whole mask
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")

Runs = Sequence[tuple[str, Report]]  # each with its title
Point = tuple[Any, str, float | None]  # (line of a figure, block, value)


# the file -------------------------------------------------------------------------------------------------------------


def write_page(
    path: str | Path,
    report: Report,
    title: str | None,
    masks: Mapping[str, Tensor],
    compare: Report | None,
    compare_title: str | None,
) -> Path:
    """Write the page of one report, or of two side by side, and return its path. See `Report.to_html`."""
    path = checked_page(path)
    refuse_no_folder(path)
    for name, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise ValueError(f"mask {name!r} is no bool tensor: give those of modelopt_sparse.named_masks")
    if compare is None:
        texts = {"run": _one_run(report), "compared": None}
        text = _page(title or "Sparsity report", texts, figures_of(report, masks), _tables(report))
    else:
        titles = (title or "first run", compare_title or "second run")
        runs = list(zip(titles if titles[0] != titles[1] else ("A", "B"), (report, compare), strict=True))
        name = f"{runs[0][0]} and {runs[1][0]}"
        texts = {"runs": {key: _one_run(run) for key, run in runs}, "compared": _two_runs(runs)}
        text = _page(name, texts, compared_figures(runs), [_compared_table(runs)])
    write_whole(path, text)
    return path


def checked_page(path: str | Path) -> Path:
    """The path of a page to write. Raises ValueError for a folder, a wrong suffix, and where plotly is missing."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(path)!r}: the HTML report is a file that ends in .html")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: give the path of a file to write")
    if find_spec("plotly") is None:
        raise ValueError(NO_PLOTLY)
    return path


@dataclass(frozen=True)
class Figure:
    """One figure: plotly's traces and layout, and the heading and caption that stand above it.

    choices: label -> the indices of the traces that are drawn when it is chosen; empty: all are drawn.
    """

    key: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)


Table = dict[str, Any]  # see `_table`


def _page(title: str, texts: dict[str, Any], figures: Sequence[Figure | None], tables: Sequence[Table]) -> str:
    """The whole file; plots and tables without data are left out. ``texts``: what `page.html` shows beside them."""
    drawn = [figure for figure in figures if figure is not None and figure.traces]
    tables = [table for table in tables if table["heads"]]
    data = {"figures": [*map(vars, drawn)], "tables": tables}
    script = ""
    if drawn:
        from plotly.offline import get_plotlyjs  # an extra, and slow to import: only when a page with plots is written

        script = get_plotlyjs()
    room = files("modelopt_sparse.reports")
    frame, style, code = (room.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    template = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined).from_string(frame)
    return template.render(
        texts,
        title=title,
        style=style,
        figures=drawn,
        tables=tables,
        data=_packed(json.dumps(finite(data), separators=(",", ":"), allow_nan=False)),
        plotly=_packed(script),
        script=code,
    )


def _packed(text: str) -> str:
    """Text that `page.js` unpacks."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


# texts ----------------------------------------------------------------------------------------------------------------


def _one_run(report: Report) -> dict[str, Any]:
    """What was done and what it cost; and notes, settings, data and versions, of earlier runs as well."""
    parts = {
        "What errors were measured with": {f"error from {short}": text for short, text in report.errors_from().items()},
        "Settings": report.settings,
        "Calibration data": report.calibration,
        "Versions": report.versions,
    }
    for number, run in enumerate(report.earlier, 1):
        which = f"of {len(run['layers'])} layers" if run["layers"] else "which made the model smaller"
        parts[f"Earlier run {number}, {which}: settings"] = run["settings"]
    rows = {title: {key: [_text(value)] for key, value in values.items()} for title, values in parts.items()}
    return {"summaries": report.summaries(), "cost": cost_of(report), "notes": report.all_notes(), "parts": rows}


def _two_runs(runs: Runs) -> dict[str, Any]:
    """Costs side by side, name -> (value, more about it) of each run; and settings and versions that differ."""
    costs = [cost_of(report) for _, report in runs]
    both = [{key: _text(value) for key, value in {**report.settings, **report.versions}.items()} for _, report in runs]
    settings = {key: [texts.get(key, "") for texts in both] for key in {**both[0], **both[1]}}
    return {
        "costs": {name: [cost.get(name, ("", "")) for cost in costs] for name in {**costs[0], **costs[1]}},
        "settings": {key: texts for key, texts in settings.items() if texts[0] != texts[1]},
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def cost_of(report: Report) -> dict[str, tuple[str, str]]:
    """What was done and what it cost: name -> (value, more about it)."""
    layers, blocks, measured = report.layers, report.blocks, report.evaluation
    measure, nats = in_words(report.settings.get("divergence"))
    pruned, total = report.weights
    whole = f"; {report.sparsity * pruned / total:.2%} of all matrix weights" if total > pruned else ""
    cost = {}
    if layers or report.shrunk is None:
        cost["zeros"] = (f"{report.sparsity:.2%}", f"of {pruned:,} weights in pruned layers{whole}")
        cost["layers"] = (f"{len(layers):,} pruned", f"{len(report.skipped):,} stay dense")
    if (shrunk := report.shrunk) is not None:
        for name, (old, new) in {**shrunk.sizes, **shrunk.costs}.items():
            cost[name] = (f"{new / old:.1%}", f"{old:,.4g} {ARROW} {new:,.4g}")
        if shrunk.kl:
            steps, (moved, unit) = [*shrunk.kl.items()], in_words(shrunk.divergence)
            (first, before), (last, after) = steps[0], steps[-1]
            words = f"{unit}, {first} {ARROW} {last}, on calibration batches held back"
            cost[f"{moved} from the model before"] = (steps_text(before, after, arrow=ARROW), words)
    if "training" in report.settings:
        cost["training"] = (f"step {report.settings['training']['step']:,}", "of sparse training")
    if measured is not None and measured.perplexity is None:
        cost["held-out batches"] = (f"{measured.kl:.4f}", str(measured))
    elif measured is not None:
        windows = f"{measured.windows:,} windows of {measured.seq_len:,} tokens"
        value, words = f"{measured.perplexity:.3f}", f"sparse, {windows}"
        if measured.reference_perplexity is not None:
            value, words = f"{measured.reference_perplexity:.3f} {ARROW} {value}", f"dense {ARROW} {words}"
        cost["perplexity"] = (value, words)
        if measured.kl is not None:
            cost["KL from dense"] = (f"{measured.kl:.4f}", "nats per token")
    for score in [*task_scores(report.tasks or {})][:SCORES]:
        cost[f"{score.metric}, {score.task}"] = (str(score), "")
    errors = [(layer.errors[-1], layer.name) for layer in layers if layer.errors]
    if errors:
        worst, name = max(errors)
        mean = fmean(error for error, _ in errors)
        cost["error of a layer"] = (f"{mean:.4f}", f"the mean; the largest is {worst:.4f}, of {name}")
    if blocks:
        before, after = fmean(block.error_before for block in blocks), fmean(block.error_after for block in blocks)
        cost["error of a block"] = (steps_text(before, after, arrow=ARROW), "by reconstruction, the mean")
    if (tuned := report.distillation) is not None:
        words = f"{nats}, on calibration batches that it was not tuned on"
        cost[f"{measure} by distillation"] = (steps_text(tuned.kl_before, tuned.kl_after, arrow=ARROW), words)
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


# tables ---------------------------------------------------------------------------------------------------------------


def _tables(report: Report) -> list[Table]:
    """A row for each score, each layer, each block, and each weight that stays dense."""
    layers, blocks, scores = report.layers, report.blocks, [*task_scores(report.tasks or {})]
    errors = {f"error after {step}": values for step, values in _errors_by_step(layers).items()}
    of_layers = {
        "layer": [layer.name for layer in layers],
        **_fields(layers, "recipe", "pattern"),
        "% zeros": [*map(_percent, layers)],
        **(errors or _fields(layers, "error")),
        "error from": [ERROR_FROM[layer.error_from][0] if layer.errors else None for layer in layers],
        "tokens": [layer.tokens or None for layer in layers],
        "seconds": [layer.seconds or None for layer in layers],
        "notes": _notes(layers),
        "shape": [product_of(layer.shape) for layer in layers],
        **_fields(layers, "type"),
    }
    of_blocks = {
        "block": [block.name for block in blocks],
        "error before": [block.error_before for block in blocks],
        "error after": [block.error_after for block in blocks],
        "best epoch": [block.epoch for block in blocks],
        **_fields(blocks, "seconds"),
        "notes": _notes(blocks),
    }
    shapes = [product_of(weight.shape) for weight in report.skipped]
    return [
        _table("tasks", "Scores on tasks", _fields(scores, *TaskScore._fields)),
        _table("layers", "Layers", of_layers),
        _table("blocks", "Reconstructed blocks", of_blocks),
        _table("skipped", "What stays dense", {**_fields(report.skipped, "name", "reason", "type"), "shape": shapes}),
    ]


def _compared_table(runs: Runs) -> Table:
    """A row for each layer of either run."""
    by_name = [{layer.name: layer for layer in report.layers} for _, report in runs]
    names = {**by_name[0], **by_name[1]}
    columns: dict[str, Sequence[Any]] = {"layer": [*names]}

    def side_by_side(head: str, value: Callable[[LayerReport], Any]) -> list[list[Any]]:
        values = [[value(layers[name]) if name in layers else None for name in names] for layers in by_name]
        columns.update({f"{head}, {title}": cells for (title, _), cells in zip(runs, values)})
        return values

    errors = zip(*side_by_side("error", _last))
    columns["second / first"] = [b / a if a and b is not None else None for a, b in errors]
    side_by_side("% zeros", _percent)
    side_by_side("pattern", attrgetter("pattern"))
    side_by_side("recipe", attrgetter("recipe"))
    side_by_side("seconds", lambda layer: layer.seconds or None)
    return _table("layers", "Layers", columns)


def _table(key: str, title: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """A table that the page sorts and filters, of the columns that have a value: their heads, and the columns, all of
    one length. Numbers sort as numbers, and floats have so many digits as are shown; None is an empty cell."""
    shown = {
        head: [float(f"{value:.{PLACES}g}") if isinstance(value, float) else value for value in values]
        for head, values in columns.items()
        if any(value is not None for value in values)
    }
    return {"key": key, "title": title, "heads": list(shown), "columns": list(shown.values())}


def _fields(rows: Iterable[Any], *names: str) -> dict[str, Sequence[Any]]:
    """Columns that hold fields of the rows, under their names."""
    return {name: [getattr(row, name) for row in rows] for name in names}


def _notes(rows: Iterable[Any]) -> list[str | None]:
    return ["; ".join(row.notes) or None for row in rows]


# figures of one run ---------------------------------------------------------------------------------------------------


def figures_of(report: Report, masks: Mapping[str, Tensor]) -> list[Figure | None]:
    """The figures of one run, in the page's order.

    masks: bool masks to draw, by parameter name.
    """
    layers, blocks, after = report.layers, report.blocks, _errors_by_step(report.layers)
    budget = report.settings.get("budget")
    budget = budget if isinstance(budget, Mapping) else {}
    by_layer = {f"after {step}": _by_role(layers, after[step]) for step in reversed(after)}
    errors = [(f"after {step.step}", _block(layer), step.error) for layer in layers for step in layer.steps]
    tuned = [("before", block.name, block.error_before) for block in blocks]
    tuned += [("after", block.name, block.error_after) for block in blocks]
    relative = "||(W - Q) X||^2 / ||W X||^2 of each layer, on a logarithmic scale."
    by_step = "The mean over the layers of a block, after each step of the recipe."
    held = "Relative squared error of the output of a block, on calibration batches that it was not tuned on."
    fraction = "The fraction of the weights of a layer that is zero."
    return [
        _lines("errors", "Error by layer", relative, by_layer, "error", log=True),
        _lines("steps", "Error by block and step", by_step, {"": errors}, "mean error", log=True),
        _lines("reconstruction", "Block error before and after reconstruction", held, {"": tuned}, "error", log=True),
        _lines("zeros", "Zeros by layer", fraction, {"": _by_role(layers, [*map(_percent, layers)])}, "% zeros"),
        _levels(layers, budget),
        _tried(budget),
        _curve(budget),
        _bars("Time by block and step", "Without running the model over the data.", _spent(report), "stack"),
        _experts(layers),
        *([] if report.shrunk is None else _shrunk(report.shrunk)),
        _mask_maps(masks, report),
    ]


def _shrunk(shrunk: Shrunk) -> list[Figure | None]:
    """Figures of a shrunk model: the divergence after each step, errors by block, and the scores of experts."""
    bars = {"type": "bar", "x": [*shrunk.kl], "y": [*shrunk.kl.values()]}
    title = "{} from the model before, in {}".format(*in_words(shrunk.divergence))
    layout = {"yaxis": _axis(title, rangemode="tozero")}
    held = "On the calibration batches held back."
    errors = [
        (state, place_of(name)[0], error)
        for name, layer_errors in shrunk.errors.items()
        for state, error in zip(("as is", "refit"), layer_errors)
    ]
    output = "Relative squared error of what takes the channels, or of the mixture, without those that go."
    scores = [
        (expert, place_of(name)[0], shrunk.scores[name][expert] / max(*shrunk.scores[name], 1e-30))
        for name, stay in shrunk.kept.get("experts", {}).items()
        for expert in (stay if shrunk.scores.get(name) else ())
    ]
    empty = f"By {shrunk.criterion!r}, relative to the largest of the mixture. Empty: those that went."
    return [
        Figure("kl", "Divergence after each step", held, [bars], layout) if shrunk.kl else None,
        _lines("shrunk", "Error by block", output, {"": errors}, "error", log=True),
        _map("stay", "Scores of the experts that stay", empty, scores, "score", "expert"),
    ]


def drawn_masks(report: Report, names: Iterable[str]) -> list[str]:
    """The masks that a page shows: at most six of ``names``, of the layers with the largest errors."""
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


def _levels(layers: Sequence[LayerReport], budget: Mapping[str, Any]) -> Figure | None:
    """Zeros as a map of blocks and roles, where patterns differ: how they were shared out."""
    points = _by_role(layers, [*map(_percent, layers)]) if len({layer.pattern for layer in layers}) > 1 else []
    if "zeros" in budget:  # of what stays dense as well
        placed = ((*place_of(name), fraction) for name, fraction in budget["zeros"].items())
        points = [(role, block, 100 * fraction) for block, role, fraction in placed]
    caption = "Zeros, in per cent, by block and kind of layer."
    return _map("levels", "Allocation", caption, points, "% zeros")


def _curve(budget: Mapping[str, Any]) -> Figure | None:
    """KL over budgets, of the choice by losses and of the plain plan."""
    if "curve" not in budget:
        return None
    unit, points = budget["curve"]["unit"], budget["curve"]["points"]
    percents, chosen, plain, _ = zip(*points) if points else ((), (), (), ())
    lines = {"the choice by losses": chosen, "plain: one level, or the last layers dense": plain}
    traces = [_points(name, [*percents], [*y]) for name, y in lines.items()]
    measure, nats = in_words(budget.get("divergence"))
    layout = {"xaxis": _axis(f"% {unit}"), "yaxis": _log_axis(f"{measure} from dense, in {nats}")}
    caption = "By the losses of layers, corrected by the plans that were measured; on a logarithmic scale."
    return Figure("curve", f"{measure} by budget", caption, traces, layout)


def _tried(budget: Mapping[str, Any]) -> Figure | None:
    """The plans that were measured for a budget."""
    if not budget.get("tried"):
        return None
    tried, chosen = {name: kl for name, (_, kl) in budget["tried"].items()}, budget["taken"]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [value or 0 for value in tried.values()],
        "y": [f"{escape(name)}{' (chosen)' if name == chosen else ''}" for name in tried],
        "text": ["not finite" if value is None else f"{value:.4g}" for value in tried.values()],
        "textposition": "outside",
        "cliponaxis": False,
    }
    room = [0, 1.25 * max(filter(None, tried.values()), default=1)]  # for the longest bar's text
    caption = f"Plans for a budget of {budget['asked']}, on the batches held back, before any repair."
    label = "{} from dense, in {}".format(*in_words(budget.get("divergence")))
    layout = {"xaxis": _axis(label, range=room), "yaxis": {"autorange": "reversed"}}
    return Figure("tried", "Plans tried", caption, [bars], layout)


def _experts(layers: Sequence[LayerReport]) -> Figure | None:
    """Draw the calibration tokens of each expert of each block, of experts in one tensor and of those in a list."""
    points = []
    for layer in layers:
        listed = re.search(r"\.experts\.(\d+)\.", layer.name)
        counts = {int(listed[1]): layer.tokens} if listed else dict(enumerate(layer.expert_tokens))
        points += [(expert, _block(layer), count) for expert, count in counts.items()]
    caption = "Calibration tokens that were routed to each."  # all matrices of an expert got the same
    return _map("experts", "Tokens of experts", caption, points, "tokens", "expert")


def _mask_maps(masks: Mapping[str, Tensor], report: Report) -> Figure:
    """Draw the first rows and columns of each mask one by one, and all of it as fractions of zeros."""
    # groups of convolutions too are matrices, one after the other in the mask
    stacks = {layer.parameter for layer in report.layers if len(layer.shape) == 3 and "Conv" not in layer.type}
    traces, choices = [], {}
    for name in drawn_masks(report, masks):
        mask = masks[name][0] if name in stacks and masks[name].dim() > 2 else masks[name]
        zeros = (~mask.cpu()).float().reshape(len(mask) if mask.dim() > 1 else 1, -1)
        corner = _heatmap(zeros[:CORNER, :CORNER].int().tolist(), "zero", showscale=False, zmin=0, zmax=1)
        cells = min(len(zeros), CELLS[0]), min(zeros.shape[1], CELLS[1])
        coarse = torch.nn.functional.adaptive_avg_pool2d(zeros[None], cells)[0]
        rows, columns = (full / count for full, count in zip(zeros.shape, cells, strict=True))
        offsets = {"dx": columns, "x0": columns / 2, "dy": rows, "y0": rows / 2, "xaxis": "x2", "yaxis": "y2"}
        fractions = [[round(value, 3) for value in row] for row in coarse.tolist()]
        choices[name] = [len(traces), len(traces) + 1]
        traces += [corner, _heatmap(fractions, "fraction of zeros", zmin=0, zmax=1, **offsets)]
    layout = {
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "xaxis": _axis("first columns", constrain="domain"),
        "yaxis": _axis("rows", autorange="reversed"),
        "xaxis2": _axis("all columns"),
        "yaxis2": {"autorange": "reversed"},
    }
    caption = (
        f"Left: the first {CORNER} rows and columns, zeros bright. Right: the whole mask, each cell the fraction of "
        "zeros in it. Of a stack of experts the first is shown."
    )
    return Figure("masks", "Map of a mask", caption, traces, layout, choices)


# figures of two runs --------------------------------------------------------------------------------------------------


def compared_figures(runs: Runs) -> list[Figure | None]:
    """The figures of two runs beside each other."""
    errors: list[Point] = [(title, _block(layer), _last(layer)) for title, report in runs for layer in report.layers]
    zeros = [(title, _block(layer), _percent(layer)) for title, report in runs for layer in report.layers]
    tuned = [(title, block.name, block.error_after) for title, report in runs for block in report.blocks]
    spent = [(title, block, seconds) for title, report in runs for _, block, seconds in _spent(report)]
    mean = "The mean over the layers of a block"
    held = "Of the output of a block, on calibration batches that it was not tuned on."
    return [
        _lines("errors", "Error by block", f"{mean}, after the last step.", {"": errors}, "error", log=True),
        _error_pairs(runs),
        _lines("reconstruction", "Block error after reconstruction", held, {"": tuned}, "error", log=True),
        _lines("zeros", "Zeros by block", f"{mean}.", {"": zeros}, "% zeros"),
        _bars("Time by block", "Solving and reconstruction.", spent, "group"),
    ]


def _error_pairs(runs: Runs) -> Figure | None:
    """Each layer as a point: its error in one run and in the other; means by block and role. All roles are drawn, for
    what is rare in one run may not be in the other."""
    points = ([(place_of(x.name), "", _last(x)) for x in report.layers] for _, report in runs)
    first, second = ({place: mean[""] for place, mean in _grouped(layers).items()} for layers in points)
    both = [place for place in first if first[place] > 0 and second.get(place, 0) > 0]
    if not both:
        return None
    traces = []
    for role, places in grouped(both, itemgetter(1)).items():
        drawn = _points(role, [first[x] for x in places], [second[x] for x in places], "markers")
        traces.append({**drawn, "text": [escape(block) for block, _ in places]})
    x, y = (_log_axis(f"error, {escape(title)}") for title, _ in runs)
    values = [errors[place] for place in both for errors in (first, second)]
    ends, line = [min(values), max(values)], {"color": "#888888", "dash": "dot"}
    traces.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": line})
    caption = "Below the dotted line the second run is better."
    return Figure("pairs", "Error of each layer in both", caption, traces, {"xaxis": {**x, "nticks": 4}, "yaxis": y})


# values of layers, by line and block ----------------------------------------------------------------------------------


def _block(layer: LayerReport) -> str:
    return place_of(layer.name)[0]


def _errors_by_step(layers: Sequence[LayerReport]) -> dict[str, list[float | None]]:
    """Step that left an error, in their order -> the error of each layer after it."""
    errors = [{step.step: step.error for step in reversed(layer.steps)} for layer in layers]
    steps = dict.fromkeys(step.step for layer in layers for step in layer.steps if step.error is not None)
    return {step: [of_layer.get(step) for of_layer in errors] for step in steps}


def _last(layer: LayerReport) -> float | None:
    return layer.errors[-1] if layer.errors else None


def _percent(layer: LayerReport) -> float:
    return 100 * layer.zeros / layer.size


def _spent(report: Report) -> list[Point]:
    """The seconds of each step of each layer, and of the reconstruction of blocks."""
    spent: list[Point] = [(step.step, _block(layer), step.seconds) for layer in report.layers for step in layer.steps]
    return [*spent, *(("reconstruct", place_of(block.name)[0], block.seconds) for block in report.blocks)]


def _by_role(layers: Sequence[LayerReport], values: Sequence[float | None]) -> list[Point]:
    """The ``values`` of layers, a line for each role; rare roles are one line, where there are many."""
    positions = [place_of(layer.name) for layer in layers]
    counts = Counter(role for _, role in positions)
    shown = {role for role, _ in counts.most_common(ROLES - 1 if len(counts) > ROLES else ROLES)}
    return [
        (role if role in shown else "others", block, value)
        for value, (block, role) in zip(values, positions, strict=True)
    ]


def _blocks(points: Iterable[Point]) -> list[str]:
    return list(dict.fromkeys(block for _, block, _ in points))


def _grouped(points: Iterable[Point], combined: Callable[[list[float]], float] = fmean) -> dict[Any, dict[str, float]]:
    """Line -> block -> the mean, or what else ``combined`` makes, of the values that are known."""
    known: dict[Any, dict[str, list[float]]] = {}
    for line, block, value in points:
        if value is not None:
            known.setdefault(line, {}).setdefault(block, []).append(value)
    return {line: {block: combined(values) for block, values in blocks.items()} for line, blocks in known.items()}


# as plotly takes them -------------------------------------------------------------------------------------------------


def _lines(
    key: str, title: str, caption: str, choices: Mapping[str, Sequence[Point]], measure: str, *, log: bool = False
) -> Figure:
    """A line of means over the blocks for each line of the points of each choice.

    A value that a logarithmic scale has no place for is a gap.
    """
    blocks = _blocks(point for points in choices.values() for point in points)
    short = dict(zip(blocks, _short(blocks), strict=True))
    traces: list[dict[str, Any]] = []
    drawn: dict[str, list[int]] = {}
    for choice, points in choices.items():
        lines = _grouped(points)
        drawn[choice] = list(range(len(traces), len(traces) + len(lines)))
        for name, values in lines.items():
            shown = [None if log and value <= 0 else float(f"{value:.6g}") for value in values.values()]
            traces.append(_points(name, [short[block] for block in values], shown))
    axis = _log_axis(measure) if log else _axis(measure, rangemode="tozero")
    layout = {"xaxis": _block_axis(blocks), "yaxis": axis}
    return Figure(key, title, caption, traces, layout, drawn if len(drawn) > 1 else {})


def _points(name: str, x: list[Any], y: list[Any], mode: str = "lines+markers") -> dict[str, Any]:
    return {"type": "scatter", "name": escape(name), "x": x, "y": y, "mode": mode}


def _bars(title: str, caption: str, points: Sequence[Point], mode: str) -> Figure | None:
    """The seconds of each block, stacked or in groups; None if no time was taken."""
    if not any(seconds for _, _, seconds in points):
        return None
    blocks = _blocks(points)
    traces = [
        {"type": "bar", "name": escape(name), "x": _short(blocks), "y": [round(spent.get(b, 0.0), 4) for b in blocks]}
        for name, spent in _grouped(points, sum).items()
    ]
    layout = {"barmode": mode, "xaxis": _block_axis(blocks), "yaxis": _axis("seconds", rangemode="tozero")}
    return Figure("seconds", title, caption, traces, layout)


def _map(key: str, title: str, caption: str, points: Sequence[Point], name: str, numbered: str = "") -> Figure | None:
    """A row of cells for each line, a column for each block; None without lines. ``numbered``: what lines are that are
    numbers, and stand in their order."""
    lines, blocks = _grouped(points), _blocks(points)
    if not lines:
        return None
    order = sorted(lines) if numbered else [*lines]
    cells = [[lines[line].get(block) for block in blocks] for line in order]
    trace = _heatmap(cells, name, x=_short(blocks), y=[escape(str(line)) for line in order])
    axis = _axis(numbered, type="category", autorange="reversed")
    return Figure(key, title, caption, [trace], {"xaxis": _block_axis(blocks), "yaxis": axis})


def _heatmap(cells: list[list[Any]], name: str, **options: Any) -> dict[str, Any]:
    scale = {"colorscale": "Viridis", "colorbar": {"title": {"text": name, "side": "right"}, "thickness": 12}}
    return {"type": "heatmap", "z": cells, "name": name, "hoverongaps": False, **scale, **options}


def _axis(title: str, **options: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **options}


def _block_axis(blocks: Sequence[str]) -> dict[str, Any]:
    """An axis with a place for each block; its title says how all of their names begin."""
    prefix = _prefix(blocks)
    categories = {"type": "category", "categoryorder": "array", "categoryarray": _short(blocks), "automargin": True}
    return _axis(f"block ({escape(prefix)}*)" if prefix else "block", **categories)


def _log_axis(title: str) -> dict[str, Any]:
    # else there are ticks at all digits, which overlap, and those between powers of ten show one digit alone
    return _axis(title, type="log", nticks=8, tickformat="~g")


def _short(names: Sequence[str]) -> list[str]:
    """Names without what all of them begin with, ready for plotly, which reads text as HTML."""
    prefix = _prefix(names)
    return [escape(name.removeprefix(prefix)) for name in names]


def _prefix(names: Sequence[str]) -> str:
    """The beginning that all of several names share, up to a dot."""
    parts = zip(*(name.split(".")[:-1] for name in names)) if len(names) > 1 else ()
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))
