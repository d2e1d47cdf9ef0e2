"""What is in an HTML report, read without a browser; and reports to make pages of."""

import base64
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.values import LayerReport, StepReport


def unpacked(page: Path, key: str) -> str:
    """What the page holds packed under a key: "data" or "plotly"."""
    (packed,) = re.findall(rf'<script type="text/plain" id="packed-{key}">([^<]*)</script>', visible(page))
    return gzip.decompress(base64.b64decode(packed)).decode()


def visible(page: Path) -> str:
    """The file as it is."""
    return page.read_text(encoding="utf-8")


def figures(page: Path) -> dict[str, dict[str, Any]]:
    return {figure["key"]: figure for figure in json.loads(unpacked(page, "data"))["figures"]}


def tables(page: Path) -> dict[str, dict[str, list[Any]]]:
    """Key of a table -> head -> column."""
    shown = json.loads(unpacked(page, "data"))["tables"]
    return {table["key"]: dict(zip(table["heads"], table["columns"], strict=True)) for table in shown}


def layer(name: str, errors: tuple[float, ...] = (), **changes: Any) -> LayerReport:
    """A row of a report, with an error for each of the steps sparsegpt and polish that it names."""
    steps = [StepReport(step, error, 0.5) for step, error in zip(("sparsegpt", "polish"), errors)]
    values: dict[str, Any] = {"name": name, "parameter": f"{name}.weight", "type": "Linear", "shape": [4, 8]}
    values |= {"recipe": "+".join(step.step for step in steps) or "magnitude", "pattern": "2:4", "options": {}}
    values |= {"zeros": 16, "size": 32, "error": errors[-1] if errors else None, "error_from": "gram", "tokens": 64}
    values |= {"seconds": 0.5 * len(steps), "notes": [], "steps": steps}
    return LayerReport(**{**values, **changes})


def large_report(rows: int = 20_000) -> Report:
    """A report with a row for each of many experts, whose names are in no order that sorting would not change."""
    chance = random.Random(0)
    names = [f"model.layers.{i // 300}.mlp.experts.{i % 300 // 3}.{'abc'[i % 3]}_proj" for i in range(rows)]
    chance.shuffle(names)
    return Report(layers=[layer(name, (chance.random(), chance.random())) for name in names])
