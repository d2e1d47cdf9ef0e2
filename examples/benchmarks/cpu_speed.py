"""How long SparseGPT at 2:4 takes on the CPU: this library, NVIDIA ModelOpt and llm-compressor in turns, in one run.
This library three times: in float32; with the blocks under autocast in bfloat16; and with dense inputs throughout
(sequential="none"), which is how ModelOpt runs.

Two jobs: the testbed with 128 x 512 tokens, and a random Llama of 4 blocks, 1,024 wide, with 64 x 512 tokens. Every
tool runs ``--rounds`` times, one after the other; a ratio is between fastest runs. The floor is what the arithmetic of
this library's way would take at the rate of torch's large float32 matrix multiplications, which the same run measures.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import cut, load, measure
from tools import TITLES, Failed, Tools, machine
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parent / "testbed"
ROWS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # row -> title, tool, arguments
    "ours": (TITLES["ours"], "ours", ()),
    "ours-autocast": (f"{TITLES['ours']}, autocast=bfloat16", "ours", ("--autocast", "bfloat16")),
    "ours-none": (f"{TITLES['ours']}, sequential=none", "ours", ("--sequential", "none")),
    "modelopt": (TITLES["modelopt"], "modelopt", ()),
    "llmcompressor": (TITLES["llmcompressor"], "llmcompressor", ()),
}
WINDOWS = {"testbed": 128, "wide": 64}
HEAD = "| job | tool | seconds | CPU seconds | times ours | peak MiB | beside the loaded model MiB | perplexity | KL |"


def wide(folder: Path, tokenizer: Any) -> Path:
    """A random Llama of 4 blocks: 1,024 wide, MLP 2,816, 16 heads, 8 of keys and values."""
    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=4, max_position_embeddings=1024, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def floor(model: Any, tokens: int, length: int, rate: float) -> dict[str, float]:
    """Seconds that the matrix multiplications take at ``rate`` operations a second: each block run twice, the last one
    once, attention without its causal half, the lower half of one Gram matrix for each input that layers share, and the
    solver's updates."""
    config, blocks = model.config, model.model.layers
    hidden, wide = config.hidden_size, config.intermediate_size
    weights = sum(p.numel() for name, p in blocks[0].named_parameters() if p.dim() == 2)
    runs = 2 * len(blocks) - 1
    attention = 2 * tokens * length * config.num_attention_heads * config.head_dim  # half of two multiplications
    operations = {
        "forward": runs * (2 * tokens * weights + attention),
        "Gram": len(blocks) * tokens * (3 * hidden**2 + wide**2),
        "solve": sum(2 * p.numel() * p.shape[1] / 2 for p in blocks.parameters() if p.dim() == 2),
    }
    return {name: count / rate for name, count in operations.items()}


def multiplication_rate() -> float:
    """Operations a second of the fastest of ten of torch's float32 multiplications of two 2,048 x 2,048 matrices."""
    a = torch.randn(2048, 2048)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


def job(name: str, folder: Path, windows: Tensor, heldout: Tensor, tools: Tools, rounds: int) -> dict[str, Any]:
    """Costs of every round by tool, what the sparse models are worth, and the floor."""
    dense = load(folder)
    loaded = {row: tools.run(tool, folder, windows, tools.work / name / "loaded") for row, (_, tool, _) in ROWS.items()}
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    for index in range(rounds):
        for row, (title, tool, arguments) in ROWS.items():
            place = tools.work / name / row
            cost = tools.run(tool, folder, windows, place, "--method", "sparsegpt", "--pattern", "2:4", *arguments)
            runs[row].append(cost)
            print(f"{name}, round {index}, {title}: {cost['seconds']:.1f} s", file=sys.stderr, flush=True)
    worth = {}
    for row, (title, _, _) in ROWS.items():
        found = measure(tools.work / name / row, dense, "2:4", {"heldout": heldout})
        if not found["holds"] or found["layers_with_zeros"] != found["layers"]:
            raise SystemExit(f"{name}: {title} left layers that are not 2:4, so its time says nothing")
        worth[row] = found["heldout"]
    rate = multiplication_rate()
    return {
        "job": name,
        "windows": len(windows),
        "runs": runs,
        "loaded": loaded,
        "heldout": worth,
        "rate": rate,
        "floor": floor(dense, windows.numel(), windows.shape[1], rate),
    }


def lines(found: dict[str, Any]) -> list[str]:
    fastest = {row: min(run["seconds"] for run in runs) for row, runs in found["runs"].items()}
    made = []
    for row, runs in found["runs"].items():
        peak = max(run["peak_mib"] for run in runs)
        cpu = min(run["cpu_seconds"] for run in runs)
        cells = [found["job"], ROWS[row][0], f"{fastest[row]:.1f}", f"{cpu:.1f}"]
        cells += [f"{fastest[row] / fastest['ours']:.2f}", f"{peak:.0f}"]
        cells += [f"{peak - found['loaded'][row]['peak_mib']:.0f}"]
        cells += [f"{found['heldout'][row]['perplexity']:.2f}", f"{found['heldout'][row]['kl']:.4f}"]
        made.append(f"| {' | '.join(cells)} |")
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["floor"].items())
    total = sum(found["floor"].values())
    made.append(f"| {found['job']} | floor of ours: {parts} s | {total:.1f} |" + " |" * (HEAD.count("|") - 4))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=[*WINDOWS], help="testbed,wide")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heldout-windows", type=int, metavar="N", default=50, help="evaluate on the first N windows")
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="environments")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_speed", help="writes OUT.md and OUT.json")
    given = parser.parse_args()
    if unknown := set(given.jobs) - set(WINDOWS):
        parser.error(f"--jobs {','.join(sorted(unknown))}: allowed are {','.join(WINDOWS)}")
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least 1")

    torch.set_num_threads(given.threads)
    tools = Tools(given.work.resolve(), given.threads)
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "tiny-llama")
    calibration, heldout = (
        cut(tokenizer, (TESTBED / f"{name}.txt").read_text(encoding="utf-8"), count)
        for name, count in (("calibration", max(WINDOWS.values())), ("heldout", given.heldout_windows))
    )
    found = []
    for name in given.jobs:
        folder = TESTBED / "tiny-llama" if name == "testbed" else wide(tools.work / "random-llama", tokenizer)
        try:
            found.append(job(name, folder, calibration[: WINDOWS[name]], heldout, tools, given.rounds))
        except Failed as error:
            raise SystemExit(f"{name}: {error}") from error
    text = [HEAD, "| --- | --- |" + " ---: |" * (HEAD.count("|") - 3)]
    text += [line for one in found for line in lines(one)]
    text += [
        "",
        f"- SparseGPT, 2:4, float32 models, batches of 8 windows; fastest of {given.rounds} rounds, largest peak",
    ]
    for one in found:
        text += [f"- {one['job']}: torch's float32 matrix multiplications at {one['rate'] / 1e9:.0f} GFLOP/s"]
    for row, cost in found[0]["loaded"].items():
        if ROWS[row][2]:
            continue  # the same versions as without arguments
        text += [f"- {ROWS[row][0]}: {', '.join(' '.join(item) for item in cost['versions'].items())}"]
    text += [f"- {machine()}; {given.threads} threads; {datetime.date.today().isoformat()}"]
    print("\n".join(text))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    record = {"machine": machine(), "threads": given.threads, "jobs": found}
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
