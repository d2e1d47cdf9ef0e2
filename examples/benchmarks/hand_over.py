"""A sparse model on its way to be served: sparsify, eval, ask lm_eval, quantize, and verify what was quantized.

    python examples/benchmarks/hand_over.py
    python examples/benchmarks/hand_over.py --tools compressed_tensors,llmcompressor,torchao

Zeros are counted in the dequantized weights. compressed-tensors is used where it is installed; the other two get an
environment of their own. Exit code 1 if a folder that should be 2:4 is not.
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from quantizing import DEQUANTIZED
from safetensors.torch import save_file
from tools import HERE, TITLES, Failed, Tools, machine

import modelopt_sparse as mts

TESTBED = HERE.parent / "testbed"
ROWS = {
    "compressed_tensors": ["FP8_DYNAMIC", "W8A16", "W4A16", "W4A16_ASYM"],
    "llmcompressor": ["FP8_DYNAMIC", "W8A8", "W4A16", "W4A16_ASYM", "GPTQ W4A16"],
    "torchao": ["fp8", "int8"],
}
LOSES = {"GPTQ W4A16"}  # what is known to write into pruned weights
TASK = """task: next_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TESTBED / "tiny-llama")
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="environments, folders")
    parser.add_argument("--tools", type=lambda text: text.split(","), default=["compressed_tensors"])
    parser.add_argument("--schemes", type=lambda text: text.split(","), help="of these alone. Default: all of a tool's")
    parser.add_argument("--windows", type=int, default=32, help="of calibration, 512 tokens each")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--characters", type=int, default=60_000, help="of held-out text")
    options = parser.parse_args()
    work: Path = (options.work / "hand-over").resolve()
    work.mkdir(parents=True, exist_ok=True)
    sparse = work / "sparse"
    calibration = ["--data", TESTBED / "calibration.txt", "--num-samples", options.windows, "--seq-len", 512]
    calibration += ["--dtype", "bfloat16", "--quiet"]
    run("modelopt_sparse", "sparsify", options.model, "--out", sparse, "--overwrite", *calibration)
    heldout = (TESTBED / "heldout.txt").read_text(encoding="utf-8")
    write_task(work / "tasks", heldout, options.questions)
    (work / "held.txt").write_text(heldout[: options.characters], encoding="utf-8")
    measure = ["--data", work / "held.txt", "--seq-len", 512]
    print(run("modelopt_sparse", "eval", sparse, "--reference", options.model, *measure))
    tasks = {"tasks": ["next_words"], "task_manager": TaskManager(include_path=work / "tasks", include_defaults=False)}
    for model in (options.model, sparse):
        print(
            make_table(simple_evaluate("hf", f"pretrained={model},dtype=float32", device="cpu", batch_size=8, **tasks))
        )

    windows = torch.randint(2048, (16, 256), generator=torch.Generator().manual_seed(0))
    save_file({"windows": windows}, work / "windows")
    tools, kept, lines = Tools(options.work, torch.get_num_threads()), zeros_in(sparse)[1], []
    for tool in options.tools:
        for scheme in [each for each in ROWS[tool] if each in (options.schemes or ROWS[tool])]:
            place = work / f"{tool} {scheme}".replace(" ", "-")
            try:
                cost = tools.quantize(tool, sparse, work / "windows", place, scheme)
            except Failed as error:
                lines.append(f"| {TITLES[tool]} | {scheme} | failed: {error} | | |")
                continue
            holds, zeros = zeros_in(place / DEQUANTIZED)
            verdict = "yes" if holds else "NO"
            lines.append(f"| {TITLES[tool]} {cost['version']} | {scheme} | {verdict} | {kept:.2%} | {zeros:.2%} |")
            if holds == (scheme in LOSES):
                lines.append(f"| | | not as expected of {scheme} | | |")
    print("| tool | scheme | 2:4 | zeros before | zeros after |\n| --- | --- | --- | ---: | ---: |")
    print("\n".join(lines))
    print(f"\n{machine()}; torch {torch.__version__}; Python {sys.version.split()[0]}")
    return int(any("not as expected" in line or "failed" in line for line in lines))


def run(module: str, *arguments: object) -> str:
    """What a module prints as a program. Raises SystemExit with its error."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def zeros_in(folder: Path) -> tuple[bool, float]:
    """(whether all layers in a folder hold 2:4, the share of zeros in them)."""
    try:
        holds, layers = True, mts.verify(folder, "2:4").layers
    except mts.PatternError as error:
        holds, layers = False, error.verification.layers
    return holds, sum(layer.zeros for layer in layers) / sum(layer.size for layer in layers)


def write_task(folder: Path, text: str, count: int) -> None:
    """A task of two answers: how a line of the text goes on, and how the next long line does."""
    folder.mkdir(exist_ok=True)
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 80][: count + 1]
    rows = [{"begin": a[:50], "choices": [a[50:80], b[50:80]]} for a, b in pairwise(lines)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "next_words.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
