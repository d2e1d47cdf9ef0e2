"""KL from dense of the embedded model with a budget, beside uniform levels and beside 2:4 with the last layers dense.

Calibration on windows of 512 tokens, another draw of them for each ``--draws``; KL on held-out windows, in float32.
CPU seconds are those of this process, of the whole call of `sparsify`, with what the budget takes.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_sparse as mts

TESTBED = Path(__file__).resolve().parent.parent / "testbed"
SEQ_LEN = 512
HARDWARE = ["dense", "2:4"]


def windows(model: Path, text: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN)


class Bench:
    """A dense model, its data, and how far sparse ones are from it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.model, self.samples = given.model, given.samples
        self.calibration = windows(given.model, given.calibration)
        self.heldout = windows(given.model, given.heldout)[: given.windows]
        self.dense = self.load()

    def load(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def run(self, draw: int, **options) -> tuple[float, float, mts.Report]:
        """(KL on held-out text, CPU seconds, report)."""
        model = self.load()
        batches = self.calibration[draw * self.samples :][: self.samples].split(4)
        began = time.process_time()
        mts.sparsify(model, data_loader=batches, progress=False, **options)
        seconds = time.process_time() - began
        found = mts.evaluate(model, self.heldout.flatten(), seq_len=SEQ_LEN, reference=self.dense, progress=False)
        return found.kl, seconds, mts.report(model)


def row(draw: int, what: str, share: str, plain: tuple, own: tuple) -> str:
    """``plain`` and ``own``: (KL, CPU seconds, report) without and with a budget."""
    cells = draw, what, share, f"{plain[0]:.4f}", f"{own[0]:.4f}", f"{own[0] / plain[0]:.0%}"
    taken = own[2].settings["budget"]["taken"]
    return f"| {' | '.join(map(str, cells))} | {plain[1]:.1f} | {own[1]:.1f} | {taken} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TESTBED / "tiny-llama")
    parser.add_argument("--calibration", type=Path, default=TESTBED / "calibration.txt")
    parser.add_argument("--heldout", type=Path, default=TESTBED / "heldout.txt")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows (64)")
    parser.add_argument("--windows", type=int, default=32, help="held-out windows (32)")
    parser.add_argument("--draws", default="0,1,2", help="of calibration windows (0,1,2)")
    parser.add_argument("--recipes", default="sparsegpt,fast", help="methods and qualities (sparsegpt,fast)")
    parser.add_argument("--levels", default="35,50", help="zeros in percent (35,50)")
    parser.add_argument("--hardware", action="store_true", help="2:4 or dense as well, at 17 and 33 %% zeros")
    given = parser.parse_args()
    bench = Bench(given)
    print(
        f"{given.model.name}, float32, {given.samples} windows of {SEQ_LEN} tokens, KL on {len(bench.heldout)}; "
        f"{os.cpu_count()}-core CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )
    print("| draw | recipe | zeros | KL, plain | KL, budget | share | CPU s, plain | CPU s, budget | taken |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for draw in map(int, given.draws.split(",")):
        for recipe in given.recipes.split(","):
            how = {"quality": recipe} if recipe in ("fast", "balanced", "best") else {"method": recipe}
            for level in given.levels.split(","):
                plain = bench.run(draw, pattern=f"{level}%", budget=None, **how)
                own = bench.run(draw, budget=f"{level}% zeros", **how)
                print(row(draw, recipe, f"{level}%", plain, own), flush=True)
        for share in ("16.7", "33.3") if given.hardware else ():
            own = bench.run(draw, method="sparsegpt", budget=f"{share}% zeros", choices=HARDWARE)
            layers = mts.make_plan(bench.dense, "sparsegpt", pattern="2:4").layers
            zeros, first = sum(layer.zeros for layer in own[2].layers), []
            while sum(layer.size // 2 for layer in first) < zeros:  # as many, the last layers dense
                first.append(layers[len(first)])
            plain = bench.run(draw, method="sparsegpt", pattern="2:4", include=[layer.name for layer in first])
            print(row(draw, "sparsegpt, 2:4 or dense", f"{share}%", plain, own), flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main()
