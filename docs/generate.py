"""Writes options.md, cli-reference.md and report.md from what declares them: python docs/generate.py"""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

import modelopt_sparse as mts
from modelopt_sparse.cli.commands import app
from modelopt_sparse.reports.evaluate import Evaluation
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.values import BlockReport, Distilled, LayerReport, Shrunk, Skipped, StepReport

NOTE = "<!-- written by docs/generate.py; edit the docstrings or the command line's help instead -->\n"
OPTIONS = f"""# Options

{NOTE}
After this page you know every option of `sparsify` and `make_plan`, and its default. How to give them:
[plan and rules](plan-and-rules.md#giving-options). The methods' own options stand with the [methods](methods.md).
"""
CLI = f"""# Commands and flags

{NOTE}
After this page you know every flag of `modelopt-sparse`. Examples and what lies around it: [command line](cli.md).
"""
REPORT = f"""# What a report holds

{NOTE}
After this page you can read `mts.report(model)` field by field. As JSON (`as_dict()`, `to_json`, and the key `report`
of [`sparsity.json`](format.md#sparsityjson)) each of these is an object, None is null, and `a -> b` an object with b by
the name a.
"""
MORE = {  # group of SparsifyConfig's docstring -> where to read on
    "What to prune": "[plan and rules](plan-and-rules.md), [masks of your own](accuracy.md#masks-of-your-own)",
    "Calibration data": "[data](data.md), [calibration](calibration.md), [experts](experts.md)",
    "How": "[accuracy](accuracy.md), [sequential modes](calibration.md#sequential-modes), "
    "[budget](accuracy.md#a-budget), [devices](calibration.md#devices-and-offloading), [training](training.md)",
    "Several processes": "[several processes](large-models.md#several-processes)",
}


def entries(text: str) -> dict[str, str]:
    """The lines "name: meaning" of a docstring; a meaning may go on in lines that are indented further."""
    found = re.findall(r"^( *)([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*(?:\n\1 +\S.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()).replace("``", "`").replace("|", "\\|") for _, name, meaning in found}


def rows(config: Any, meanings: dict[str, str]) -> str:
    lines = [f"| `{name}` | `{getattr(config, name)}` | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *lines]) + "\n"


def options_page() -> str:
    page, text = OPTIONS, inspect.getdoc(mts.SparsifyConfig) or ""
    assert set(entries(text)) == {item.name for item in fields(mts.SparsifyConfig)}, "an option without a meaning"
    for head, group in re.findall(r"^([\w ]+?)(?: \(.*|, .*)?:\n((?:  .*\n?)+)", text, re.MULTILINE):
        page += f"\n## {head}\n\n{rows(mts.SparsifyConfig(), entries(group))}\nMore: {MORE[head]}.\n"
    for name in ("reconstruct", "distill"):
        keys = getattr(mts.SparsifyConfig(**{name: True}), name)
        page += f"\n## Keys of {name}\n\n{rows(keys, entries(inspect.getdoc(keys) or ''))}"
    return page


def report_page() -> str:
    page = REPORT
    for kind in (Report, LayerReport, StepReport, BlockReport, Skipped, Distilled, Evaluation, Shrunk):
        text = inspect.getdoc(kind) or ""
        meanings = entries(text)
        assert ", ".join(meanings).split(", ") == [item.name for item in fields(kind)], f"{kind.__name__}: its fields"
        lines = [f"| `{names.replace(', ', '`, `')}` | {meaning} |" for names, meaning in meanings.items()]
        table = "\n".join(["| field | meaning |", "| --- | --- |", *lines])
        head = " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
        page += f"\n## {kind.__name__}\n\n{head}\n\n{table}\n"
    return page


def flag_row(option: Any) -> str:
    value = "" if getattr(option, "is_flag", False) else f" {option.metavar or 'VALUE'}"
    names = [""] if option.param_type_name == "argument" else [*option.opts, *option.secondary_opts]
    flags = ", ".join(f"`{(name + value).strip()}`" for name in names)
    meaning = (getattr(option, "help", "") or "").replace("|", "\\|") + (" Required." if option.required else "")
    given = isinstance(option.default, str | int) and not isinstance(option.default, bool)
    return f"| {flags} | {meaning}{f' Default: {option.default}.' if given else ''} |\n"


def cli_page() -> str:
    root: Any = app if hasattr(app, "commands") else typer.main.get_command(app)
    page = CLI
    for name, command in {"modelopt-sparse": root, **root.commands}.items():
        page += f"\n## {name}\n\n{' '.join((command.help or '').split())}\n\n| flag | meaning |\n| --- | --- |\n"
        page += "".join(flag_row(option) for option in command.params if "completion" not in option.name)
    return page


PAGES = {"options.md": options_page, "cli-reference.md": cli_page, "report.md": report_page}

if __name__ == "__main__":
    for file, made in PAGES.items():
        (Path(__file__).parent / file).write_text(made(), encoding="utf-8")
