"""One table: this library, NVIDIA ModelOpt and llm-compressor on the same model, data, layers and machine.

README.md beside this file says what is measured. Exit code 1 if a row failed; its error then stands in the table.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from measure import SEQ_LEN, cpp_headers, cut, load, measure
from tools import TITLES, Failed, Tools, last_line, machine
from torch import Tensor
from transformers import AutoTokenizer

import modelopt_sparse as mts

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parent / "testbed"
PATTERNS = ("2:4", "4:8", "50%", "60%", "70%")
RUN = 128  # windows of one calibration run
OTHER = 100  # windows of the other domain
HEAD = (
    "| pattern | method | perplexity | KL | KL share | C++ perplexity | C++ KL | layers | zeros | holds "
    "| seconds | CPU seconds | peak MiB | loaded MiB |"
)
COLUMNS = HEAD.count("|") - 1


@dataclass(frozen=True)
class Row:
    tool: str
    method: str = ""
    pattern: str = ""
    masks_of: "Row | None" = None

    def __str__(self) -> str:
        return f"{TITLES[self.tool]} {self.method}".strip() + (f" on {self.masks_of}'s mask" if self.masks_of else "")


def rows(pattern: str) -> Iterator[Row]:
    yield Row("modelopt", "sparse_magnitude", pattern)
    yield Row("modelopt", "sparsegpt", pattern)
    yield Row("llmcompressor", "wanda", pattern)
    yield (peer := Row("llmcompressor", "sparsegpt", pattern))
    for method in ("wanda", "sparsegpt", "alps", "quality=fast", "quality=balanced", "quality=best", "quality=max"):
        yield Row("ours", method, pattern)
    if pattern == "2:4":
        yield Row("ours", "reconstruct", pattern, masks_of=peer)
        for method in ("sparsegpt data=self", "quality=balanced data=self"):
            yield Row("ours", method, pattern)


def offered(row: Row) -> bool:
    return row.tool != "modelopt" or row.pattern == "2:4"


class Bench:
    """The dense model, the data, an environment for each tool, and the results so far in the work folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.model, self.work, self.threads = given.model.resolve(), given.work.resolve(), given.threads
        self.tools = Tools(self.work, self.threads)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        windows = cut(tokenizer, given.calibration.read_text(encoding="utf-8"))
        if len(windows) < RUN * (max(given.seeds) + 1):
            raise SystemExit(f"{given.calibration} has {len(windows)} windows of {SEQ_LEN} tokens, a seed takes {RUN}")
        self.calibration = windows.split(RUN)
        heldout, few = given.heldout.read_text(encoding="utf-8"), given.heldout_windows
        self.texts = {
            "heldout": cut(tokenizer, heldout, few),
            "cpp": cut(tokenizer, cpp_headers(OTHER), min(OTHER, few or OTHER)),
        }
        self.dense = load(self.model)
        self.loaded: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, Failed] = {}

    def result(self, row: Row, seed: int) -> dict[str, Any]:
        """Cost and measurements of one row; kept in the work folder. Raises Failed."""
        place = self._place(row, seed)
        saved = place / "result.json"
        if not saved.exists():
            cost = {} if row.tool == "dense" else self._sparsify(row, seed, place)
            try:
                found = measure(self.model if row.tool == "dense" else place, self.dense, row.pattern, self.texts)
            except Exception as error:
                raise Failed(last_line(f"{type(error).__name__}: {error}")) from error
            if not any(other.masks_of == row for other in rows(row.pattern)):
                for weights in place.glob("*.safetensors"):
                    weights.unlink()
            place.mkdir(parents=True, exist_ok=True)
            saved.write_text(json.dumps({"name": str(row), "seed": seed, **found, **cost}, indent=1), encoding="utf-8")
        return json.loads(saved.read_text(encoding="utf-8"))

    def load_only(self, tool: str) -> dict[str, Any]:
        """Cost and versions of a process that loads its libraries, the model and the windows, and does nothing."""
        if tool in self.broken:
            raise self.broken[tool]  # a package index that cannot be reached is asked once
        if tool not in self.loaded:
            try:
                self.loaded[tool] = self.tools.run(tool, self.model, self.calibration[0], self.work / "loaded" / tool)
            except Failed as error:
                self.broken[tool] = error
                raise
        return self.loaded[tool]

    def _place(self, row: Row, seed: int) -> Path:
        """The row's folder, named by all that its result depends on."""
        package = Path(mts.__file__).parent
        code = [HERE / name for name in ("measure.py", "worker.py", f"run_{row.tool}.py") if (HERE / name).exists()]
        code += sorted(package.rglob("*.py")) if row.tool == "ours" else [package / "reports" / "evaluate.py"]
        tools = ["ours"] if row.tool == "dense" else ["ours", row.tool]  # ours: it evaluates
        key = digest(
            *sorted(path for path in self.model.iterdir() if path.is_file()),
            *code,
            self.calibration[seed],
            *self.texts.values(),
            *(self.load_only(tool)["versions"] for tool in tools),
            self.threads,
            row.masks_of and self._place(row.masks_of, seed).name,
        )
        return self.work / "rows" / re.sub(r"[^\w.]+", "-", f"{row.pattern} {row} {seed} {key}").strip("-")

    def _sparsify(self, row: Row, seed: int, place: Path) -> dict[str, Any]:
        arguments = ["--method", row.method, "--pattern", row.pattern]
        if row.masks_of is not None:
            self.result(row.masks_of, seed)
            arguments += ["--masks-of", str(self._place(row.masks_of, seed))]
        return self.tools.run(row.tool, self.model, self.calibration[seed], place, *arguments)


def digest(*things: Any) -> str:
    """Of files and tensors by content, of the rest by value."""
    state = hashlib.sha256()
    for thing in things:
        if isinstance(thing, Path):
            content = thing.read_bytes()
        else:
            content = thing.numpy().tobytes() if isinstance(thing, Tensor) else repr(thing).encode()
        state.update(hashlib.sha256(content).digest())
    return state.hexdigest()[:12]


# the table ----------------------------------------------------------------------------------------------------------

Results = dict[Row, dict[int, dict[str, Any]] | Failed]


def cells(row: Row, results: Results, loaded: dict[str, Any]) -> list[str]:
    found = results.get(row)
    if found is None:
        return [row.pattern, str(row), *"-" * (COLUMNS - 2)]
    if isinstance(found, Failed):
        return [row.pattern, str(row), f"failed: {found}".replace("|", "/"), *[""] * (COLUMNS - 3)]

    def over_seeds(text: str, measure: str, digits: int) -> str:
        return spread([one[text][measure] for one in found.values()], digits)

    peer = results.get(Row("llmcompressor", "sparsegpt", row.pattern))
    share = "-"
    if isinstance(peer, dict):
        share = spread([found[seed]["heldout"]["kl"] / peer[seed]["heldout"]["kl"] for seed in found], 2)
    last = list(found.values())[-1]
    made = [row.pattern or "-", str(row), over_seeds("heldout", "perplexity", 2), over_seeds("heldout", "kl", 3), share]
    made += [over_seeds("cpp", "perplexity", 2), over_seeds("cpp", "kl", 3)]
    made += [f"{last['layers_with_zeros']}/{last['layers']}", f"{last['zeros']:.2%}"]
    made += ["-" if last["holds"] is None else "yes" if all(one["holds"] for one in found.values()) else "NO"]
    if row.tool == "dense":
        return made + ["-"] * 4
    made += [f"{mean(one[key] for one in found.values()):.1f}" for key in ("seconds", "cpu_seconds")]
    return [*made, f"{max(one['peak_mib'] for one in found.values()):.0f}", f"{loaded[row.tool]['peak_mib']:.0f}"]


def spread(values: list[float], digits: int) -> str:
    """Mean, and behind it the distance from the smallest to the largest."""
    beside = f" ± {max(values) - min(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{beside}"


def table(lines: list[list[str]], given: argparse.Namespace, bench: Bench) -> str:
    text = [HEAD, "| --- | --- |" + " ---: |" * (COLUMNS - 2), *(f"| {' | '.join(line)} |" for line in lines)]
    text += [
        "",
        "README.md says what the columns mean. ± is the largest value minus the smallest over the calibration runs.",
        "",
        f"- model {given.model.name}, float32; calibration runs {', '.join(map(str, given.seeds))} of {RUN} windows of "
        f"{SEQ_LEN} tokens; {len(bench.texts['heldout'])} held-out windows, {len(bench.texts['cpp'])} of C++",
    ]
    if any(line[2] == "-" for line in lines):
        text += ["- ModelOpt: 2:4 is the only pattern that it has"]
    for tool, cost in bench.loaded.items():
        text += [f"- {TITLES[tool]}: {', '.join(' '.join(item) for item in cost['versions'].items())}"]
    text += [f"- {machine()}; {given.threads} threads; {datetime.date.today().isoformat()}"]
    return "\n".join(text) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TESTBED / "tiny-llama", help="folder; with texts of its own")
    parser.add_argument("--calibration", type=Path, metavar="FILE", default=TESTBED / "calibration.txt")
    parser.add_argument("--heldout", type=Path, metavar="FILE", default=TESTBED / "heldout.txt")
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="environments and finished rows")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accuracy", help="writes OUT.md and OUT.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", metavar="A,B", help="rows whose name has one of these in it")
    parser.add_argument("--patterns", type=lambda text: text.split(","), default=PATTERNS, help="2:4,50%%")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[0, 1, 2], help="0,1,2")
    parser.add_argument("--heldout-windows", type=int, metavar="N", help="evaluate on the first N windows only")
    parser.add_argument("--fresh", action="store_true", help="forget the finished rows in the work folder")
    given = parser.parse_args()
    if unknown := set(given.patterns) - set(PATTERNS):
        parser.error(f"--patterns {','.join(sorted(unknown))}: allowed are {','.join(PATTERNS)}")
    return given


def main() -> int:
    given = arguments()
    if given.fresh:
        shutil.rmtree(given.work / "rows", ignore_errors=True)
    torch.set_num_threads(given.threads)
    bench = Bench(given)
    wanted = given.only.lower().split(",")
    asked = [row for pattern in given.patterns for row in rows(pattern) if any(x in str(row).lower() for x in wanted)]
    results: Results = {}
    for row in [Row("dense"), *filter(offered, asked)]:
        found: dict[int, dict[str, Any]] = {}
        results[row] = found
        for seed in given.seeds if row.tool != "dense" else given.seeds[:1]:
            try:
                found[seed] = bench.result(row, seed)
                line = f"perplexity {found[seed]['heldout']['perplexity']:.3f}"
            except Failed as error:
                results[row] = error
                line = f"failed: {error}"
            print(f"{row.pattern} {row}, run {seed}: {line}".strip(), file=sys.stderr, flush=True)
    made = table([cells(row, results, bench.loaded) for row in (Row("dense"), *asked)], given, bench)
    print(made)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".md").write_text(made, encoding="utf-8")
    listed = [
        {"pattern": row.pattern, "name": str(row), **({"error": str(r)} if isinstance(r, Failed) else {"runs": r})}
        for row, r in results.items()
    ]
    record = {"machine": machine(), "threads": given.threads, "loaded": bench.loaded, "rows": listed}
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(isinstance(found, Failed) for found in results.values()))


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
