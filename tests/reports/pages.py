"""What is in an HTML report, read without a browser; reports to make pages of, and texts that are compared whole."""

import base64
import gzip
import html
import json
import os
import random
import re
from pathlib import Path

import modelopt_sparse as mts
from modelopt_sparse.reports.values import BlockReport, Distilled, LayerReport, Shrunk, Skipped, StepReport

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """With GOLDEN=renew in the environment the texts are written anew."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "renew":
        path.write_text(f"{text}\n", encoding="utf-8")
    assert f"{text}\n" == path.read_text(encoding="utf-8")


def unpacked(page: Path, key: str) -> str:
    """What the page holds packed under a key: "data" or "plotly"."""
    (packed,) = re.findall(rf'<script type="text/plain" id="packed-{key}">([^<]*)</script>', visible(page))
    return gzip.decompress(base64.b64decode(packed)).decode()


def visible(page: Path) -> str:
    """The file as it is."""
    return page.read_text(encoding="utf-8")


def figures(page: Path) -> dict[str, dict]:
    return {figure["key"]: figure for figure in json.loads(unpacked(page, "data"))["figures"]}


def tables(page: Path) -> dict[str, dict[str, list]]:
    """Key of a table -> head -> column."""
    shown = json.loads(unpacked(page, "data"))["tables"]
    return {table["key"]: dict(zip(table["heads"], table["columns"], strict=True)) for table in shown}


def as_text(page: Path) -> str:
    """All that a page shows: its texts, what is drawn, and the rows of its tables."""
    data = json.loads(unpacked(page, "data"))
    hidden = r"<(style|script)\b.*?</\1>|<(?!/?(tr|p|li|h1|h2|dt|summary)\b)[^>]+>"
    plain = re.sub(hidden, " ", visible(page), flags=re.S)
    lines = [" ".join(html.unescape(line).split()) for line in re.split(r"<[^>]+>", plain)]
    for figure in data["figures"]:
        lines += [f"\nfigure {figure['key']}: {figure['choices']}", f"layout {figure['layout']}"]
        lines += [str(trace) for trace in figure["traces"]]
    for table in data["tables"]:
        lines += [f"\ntable {table['key']}: {table['heads']}", *map(str, zip(*table["columns"], strict=True))]
    return "\n".join(filter(None, lines))


def layer(name: str, errors: tuple[float, ...] = (), **changes) -> LayerReport:
    """A row of a report, with an error for each of the steps sparsegpt and polish that it names."""
    steps = [StepReport(step, error, 0.5) for step, error in zip(("sparsegpt", "polish"), errors)]
    values = {"name": name, "parameter": f"{name}.weight", "type": "Linear", "shape": [4, 8]}
    values |= {"recipe": "+".join(step.step for step in steps) or "magnitude", "pattern": "2:4", "options": {}}
    values |= {"zeros": 16, "size": 32, "error": errors[-1] if errors else None, "error_from": "gram", "tokens": 64}
    values |= {"seconds": 0.5 * len(steps), "notes": [], "steps": steps}
    return LayerReport(**{**values, **changes})


def large_report(rows: int = 20_000) -> mts.Report:
    """A report with a row for each of many experts, whose names are in no order that sorting would not change."""
    chance = random.Random(0)
    names = [f"model.layers.{i // 300}.mlp.experts.{i % 300 // 3}.{'abc'[i % 3]}_proj" for i in range(rows)]
    chance.shuffle(names)
    return mts.Report(layers=[layer(name, (chance.random(), chance.random())) for name in names])


RESULTS = {  # as lm-evaluation-harness 0.4 writes them: a group, a task of it, a filter, a group without scores
    "first": {"acc,none": 0.6, "acc_stderr,none": 0.05, "alias": "first"},
    "part": {"alias": " - part", "sample_len": 9, "acc,none": 0.25, "acc_stderr,none": "N/A", "acc_norm,none": 1},
    "third": {"alias": "third", "exact_match,strict-match": 0.0, "exact_match_stderr,strict-match": 0.0},
    "all": {"alias": "all", " ": " "},
}


def shrunk_report() -> mts.Report:
    """Of a model with fewer experts, by figures that can be checked by eye."""
    names = [f"h.{i}.moe.down" for i in (0, 1)]
    kept, errors = {"experts": {names[0]: [0, 2], names[1]: [1, 2]}}, {names[0]: [0.25], names[1]: [0.5]}
    scores = {names[0]: [4.0, 1.0, 2.0], names[1]: [0.0, 5.0, 5.0]}
    measured = {"kl": {"as is": 0.5, "reconstructed": 0.125}, "costs": {"parameters": [1000.0, 750.0]}}
    return mts.Report(shrunk=Shrunk({"num_experts": [3, 2]}, "reap", kept, scores, errors=errors, **measured))


def full_report() -> mts.Report:
    """Every part of a report, by figures that can be checked by eye."""
    rows = [
        layer("h.0.fc", (0.2, 0.1), notes=["damping was raised"]),
        layer("h.0.moe.experts.0.up", (0.2,), tokens=10),
        layer("h.0.moe.experts.1.up", (0.3,), tokens=30),
        layer("h.1.fc", (0.4,), pattern="25% per row", zeros=8, error_from="square_sums"),
        layer("h.2.fc", (0.0,)),  # a gap on a logarithmic scale
        layer("h.1.moe.experts", shape=[2, 4, 8], expert_tokens=[5, 6], error_from="weights"),
    ]
    blocks = [BlockReport("h.0", 0.3, 0.2, 1, 4.0), BlockReport("h.1", 0.5, 0.1, 2, 6.0, ["it was not stable"])]
    report = mts.Report(rows, blocks, (Skipped("head", "Linear", (8, 16), "an output head"),), notes=["a note"])
    report.settings = {"seed": 0, "update": True}
    plans = {"the choice by losses": [0.5, 0.25], "one level": [0.75, 0.125], "the last dense": [1.0, None]}
    curve = {"unit": "zeros", "points": [[40, 0.25, 0.5, 0.1], [50, 0.5, None, None]]}
    zeros = {"h.0.fc": 0.5, "h.1.fc": 0.25, "h.1.out": 0.0}
    chosen = {"asked": "40% zeros", "taken": "one level", "tried": plans}
    report.settings["budget"] = chosen | {"curve": curve, "zeros": zeros}
    report.calibration, report.versions = {"calls": 4, "source": "text.txt"}, {"torch": "2.13.0"}
    report.distillation = Distilled(0.25, 0.125, 2, 30.0, ["a longer one would help"])
    report.seconds = {"dense run": 1.0, "blocks": 20.0, "permutation": 2.0, "distillation": 30.0}
    report.peak_memory, report.tasks = {"cpu": 1_500_000_000}, RESULTS
    report.evaluation = mts.Evaluation(8.0, 7.0, 0.5, 3, 9)
    return report
