"""A public model, pruned and shrunk by this library, ModelOpt, llm-compressor and Torch-Pruning: a table, a picture.

    python examples/benchmarks/public_model.py --draws 3 --only "2:4"
    python examples/benchmarks/public_model.py

The model is AntiBERTy (a BERT of 8 blocks, 512 wide, 26 million parameters, trained by its authors on antibody
sequences), from the package antiberty; sequences are put together from the germline genes of the package anarci. Both
are downloaded into --work, where the environments of the peers are made too. Each draw has --rows sequences of about
120 tokens for calibration, 15 % masked; 384 sequences of other genes are held out. Linux.

Columns: KL from the dense model, the mean over real tokens in float64; cross-entropy of the masked tokens; how many of
the weights of the encoder's matrices are zero or gone; CPU seconds of the process. ± is the largest minus the smallest
over draws. Rows that are done are kept in --work under all that they depend on, and shown whether --only names them or
not. A row that failed shows the last line of its error, and is tried again. The picture needs matplotlib.
"""

import argparse
import copy
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from accuracy import Row, digest, spread
from kinds import encoder, in_batches, package, predictions, sequences
from shrink import BLOCK, REPAIR, torch_pruning
from shrink import ROWS as BY
from tools import REQUIREMENTS, TITLES, Failed, Tools, last_line, machine
from torch import Tensor, nn
from transformers import BertForMaskedLM

import modelopt_sparse as mts

HERE = Path(__file__).resolve().parent
HELD_OUT, HELD_OUT_SEED, BATCH = 384, 99, 32
QUALITIES = [f"quality={level}" for level in ("fast", "balanced", "best", "max")]
METHODS = {
    "modelopt": ("sparse_magnitude", "sparsegpt"),
    "llmcompressor": ("wanda", "sparsegpt"),
    "ours": ("magnitude", "wanda", "ria", "sparsegpt", "alps", *QUALITIES),
}
SIZES: dict[str, dict[str, Any]] = {
    "25% of the MLP channels": {"mlp": 0.25},
    "50% of the MLP channels": {"mlp": 0.5},
    "2 of 8 blocks": {"blocks": 2},
}
OF_CHANNELS: dict[str, dict[str, Any]] = {
    "norm": BY["norm"],
    "norm, repaired": {**BY["norm"], **REPAIR},
    **{way: BY[way] for way in ("gram, refit", "gram, refit, repaired")},
}
OF_BLOCKS: dict[str, dict[str, Any]] = {**BLOCK, "repaired": REPAIR}
LOOKS = {"ours": ("tab:blue", "o"), "modelopt": ("tab:green", "s"), "llmcompressor": ("tab:orange", "^")}
HEAD = "| pattern or cut | method | KL | masked-token loss | weights off | CPU seconds |\n| --- | --- |" + " ---: |" * 4


def rows() -> Iterator[Row]:
    for tool, methods in METHODS.items():
        yield from (Row(tool, method, "2:4") for method in methods)
    for level in ("50%", "60%", "70%"):  # the qualities share them out by a budget
        yield Row("llmcompressor", "sparsegpt", level)
        yield from (Row("ours", method, level) for method in ("sparsegpt", "quality=balanced", "quality=best"))
    for size, cut in SIZES.items():
        if "mlp" in cut:
            yield Row("torch_pruning", "", size)
        yield from (Row("ours", way, size) for way in (OF_CHANNELS if "mlp" in cut else OF_BLOCKS))


class Bench:
    """The dense model, the sequences, and the results so far in the work folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work, self.threads = options.work.resolve(), options.threads
        self.batch = min(BATCH, max(1, options.rows // 4))  # some batches judge what the others are tuned on
        self.folder = self.work / "public_model" / "model"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "model.safetensors").exists():
            encoder(self.work, 0).save_pretrained(self.folder)
        self.dense = BertForMaskedLM.from_pretrained(self.folder, dtype=torch.float32)
        drawn = partial(sequences, work=self.work)
        self.calibration = [drawn(options.rows, draw, held_out=False) for draw in range(options.draws)]
        held_out = drawn(HELD_OUT, HELD_OUT_SEED, held_out=True)
        real = held_out["attention_mask"].bool()
        self.targets = drawn(HELD_OUT, HELD_OUT_SEED, held_out=True, masked=0.0)["input_ids"][real]
        self.masked = self.targets != held_out["input_ids"][real]
        self.held_out = in_batches(held_out, 64)
        self.predicted = torch.cat(predictions(self.dense, self.held_out))
        versions = (torch.__version__, transformers.__version__)
        everything = (*held_out.values(), *versions, self.threads, self.batch)
        self.of_all = digest(self.folder / "model.safetensors", HERE / "worker.py", *everything)

    def place(self, row: Row, draw: int) -> Path:
        """The row's folder, named by all that its result depends on."""
        sources = [*HERE.glob(f"run_{row.tool}.py")]
        sources += sorted(Path(mts.__file__).parent.rglob("*.py")) if row.tool == "ours" else []
        key = digest(self.of_all, *sources, *self.calibration[draw].values(), REQUIREMENTS.get(row.tool))
        return self.folder.parent / re.sub(r"[^\w.]+", "-", f"{row.pattern} {row} {draw} {key}")

    def result(self, row: Row, draw: int) -> dict[str, Any]:
        """Cost and measurements of one row, written into its folder. Raises Failed."""
        place = self.place(row, draw)
        make = self.shrunk if row.pattern in SIZES else self.pruned
        try:
            model, cost = make(row, draw, place)
            found = {**self.measured(model), **cost}
        except Failed:
            raise
        except Exception as error:
            raise Failed(last_line(f"{type(error).__name__}: {error}")) from error
        for data in (place / "windows", *place.glob("*.safetensors")):
            data.unlink(missing_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        (place / "result.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        return found

    def pruned(self, row: Row, draw: int, place: Path) -> tuple[nn.Module, dict[str, Any]]:
        """The sparse model that a process of the tool has written, and what that cost."""
        arguments = ("--method", row.method, "--pattern", row.pattern, "--batch", str(self.batch), "--skip", "cls")
        cost = Tools(self.work, self.threads).run(row.tool, self.folder, self.calibration[draw], place, *arguments)
        model = BertForMaskedLM.from_pretrained(place, dtype=torch.float32)
        for name, value in self.dense.named_parameters():
            if value.dim() > 1 and ".encoder." not in name and not torch.equal(value, model.get_parameter(name)):
                raise ValueError(f"{name} differs from the dense model's: only the encoder's matrices may")
        return model, cost

    def shrunk(self, row: Row, draw: int, _: Path) -> tuple[nn.Module, dict[str, Any]]:
        """A smaller copy of the dense model, and what that cost."""
        cut = SIZES[row.pattern]
        if row.tool == "torch_pruning":
            package("torch_pruning", self.work)
            sys.path.append(str(self.work))
        batches, model = in_batches(self.calibration[draw], self.batch), copy.deepcopy(self.dense)
        began = time.process_time()
        if row.tool == "torch_pruning":
            torch_pruning(model, cut["mlp"], mlp_alone=True)
        else:
            mts.shrink(model, data_loader=batches, progress=False, **cut, **{**OF_CHANNELS, **OF_BLOCKS}[row.method])
        return model.eval(), {"cpu_seconds": time.process_time() - began}

    def measured(self, model: nn.Module) -> dict[str, float]:
        found = torch.cat(predictions(model, self.held_out))
        kl = (self.predicted.exp() * (self.predicted - found)).sum(-1).mean()
        off = 1 - nonzeros(model) / nonzeros(self.dense)
        return {"kl": float(kl), "loss": self.loss(found), "off": off}

    def loss(self, found: Tensor) -> float:
        """Mean cross-entropy of the masked tokens, of log probabilities [real tokens, vocabulary]."""
        return -float(found[self.masked].gather(-1, self.targets[self.masked, None]).mean())


def nonzeros(model: nn.Module) -> int:
    matrices = [x.weight for name, x in model.named_modules() if ".encoder." in name and isinstance(x, nn.Linear)]
    return sum(int(x.count_nonzero()) for x in matrices)


def line(pattern: str, name: str, runs: list[dict[str, Any]], error: str | None) -> str:
    if not runs:
        return f"| {pattern} | {name} | failed: {str(error).replace('|', '/')} | | | |"
    kl, loss = (spread([run[measure] for run in runs], 4) for measure in ("kl", "loss"))
    off, seconds = (mean(run[measure] for run in runs) for measure in ("off", "cpu_seconds"))
    return f"| {pattern} | {name} | {kl} | {loss} | {off:.2%} | {seconds:.{0 if seconds >= 10 else 1}f} |"


def draw_picture(points: dict[Row, list[float]], file: Path) -> None:
    """KL over CPU seconds, a point for each tool and method, with its name where it covers least."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - nothing else needs it
    from matplotlib.transforms import Bbox  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="CPU seconds", ylabel="KL from the dense model, nats per token")
    axes.margins(0.12)
    for tool, (color, marker) in LOOKS.items():
        of_tool = [point for row, point in points.items() if row.tool == tool]
        if of_tool:
            axes.scatter(*zip(*of_tool, strict=True), c=color, marker=marker, label=TITLES[tool], zorder=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()
    centers = axes.transData.transform([*points.values()])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centers]
    for row, point in points.items():
        places: list[Any] = []
        for x, y in ((9, 0), (-9, 0), (0, 10), (0, -10), (9, 9), (9, -9), (-9, 9), (-9, -9)):
            looks: dict[str, Any] = {"ha": {9: "left", 0: "center", -9: "right"}[x], "color": LOOKS[row.tool][0]}
            name = row.method.removeprefix("quality=")
            text = axes.annotate(name, point, (x, y), textcoords="offset points", va="center", fontsize=9, **looks)
            box = text.get_window_extent()
            outside = not (axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1))
            places.append((box.count_overlaps(taken) + 9 * outside, len(places), text, box))
        places.sort()
        taken.append(places[0][-1])
        for _, _, text, _ in places[1:]:
            text.remove()
    axes.legend(loc="lower left")  # no tool is there: quick and exact
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1, help="of calibration sequences (%(default)s)")
    parser.add_argument("--rows", type=int, default=512, help="calibration sequences in a draw (%(default)s)")
    parser.add_argument("--only", default="", metavar="A,B", help="run rows with one of these in pattern and name")
    parser.add_argument("--threads", type=int, default=1, help="of each tool (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "public_model", help="writes OUT.json, OUT.svg")
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="environments, packages, finished rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench, wanted = Bench(options), options.only.lower().split(",")
    results: dict[Row, dict[str, Any]] = {}
    for row, draw in itertools.product(rows(), range(options.draws)):
        saved = bench.place(row, draw) / "result.json"
        if not saved.exists() and not any(part in f"{row.pattern} {row}".lower() for part in wanted):
            continue
        made = results.setdefault(row, {"pattern": row.pattern, "name": str(row), "runs": [], "error": None})
        try:
            found = json.loads(saved.read_text("utf-8")) if saved.exists() else bench.result(row, draw)
            made["runs"].append(found)
            outcome = f"KL {found['kl']:.4f}"
        except Failed as error:
            made["error"] = str(error)
            outcome = f"failed: {error}"
        print(f"{row.pattern} {row}, draw {draw}: {outcome}", file=sys.stderr, flush=True)
    facts = {"machine": machine(), "threads": options.threads, "sequences": options.rows}
    facts["dense_loss"] = bench.loss(bench.predicted)
    print(HEAD, f"| - | dense | 0 | {facts['dense_loss']:.4f} | 0 | - |", sep="\n")
    print(*(line(**made) for made in results.values()), sep="\n")
    print(f"\n{facts['machine']}; {options.threads} threads; {options.draws} draws of {options.rows} sequences")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    written = json.dumps({**facts, "rows": [*results.values()]}, indent=1)
    options.out.with_suffix(".json").write_text(written + "\n", encoding="utf-8")
    at_2_4 = {row: made["runs"] for row, made in results.items() if row.pattern == "2:4" and made["runs"]}
    points = {row: [mean(run[x] for run in runs) for x in ("cpu_seconds", "kl")] for row, runs in at_2_4.items()}
    try:
        if points:
            draw_picture(points, options.out.with_suffix(".svg"))
    except ModuleNotFoundError as error:
        raise SystemExit(f"no picture: {error}; pip install matplotlib and run this again: all rows are kept") from None


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main()
