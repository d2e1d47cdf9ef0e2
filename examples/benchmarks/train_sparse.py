"""Sparse training from scratch: a byte-level Llama with 95 % of its block weights pruned, by each algorithm.

All sparse models have the same number of live weights, and a smaller dense model has as many. Printed: nats per byte on
held-out text, mean and spread over seeds. Two processes of one thread each:

    python examples/benchmarks/train_sparse.py
"""

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from modelopt_sparse import training

TEXT = Path(__file__).parent.parent / "testbed"
LEVEL, STEPS, BATCH, LENGTH, WARM_UP = 0.95, 400, 24, 64, 40
UPDATE = {"freq": 20, "stop": 300}
DROP = training.Cosine(0.3, 300)
BLOCKS = {"include": "blocks"}

RECIPES: dict[str, Any] = {
    "GMP, cubic": lambda: training.GMP(training.Cubic(0.0, LEVEL, 40, 280), update=20, **BLOCKS),
    "SET": lambda: training.SET(LEVEL, scope="matrix", update=UPDATE, drop_fraction=DROP, **BLOCKS),
    "RigL per row": lambda: training.RigL(LEVEL, scope="row", update=UPDATE, drop_fraction=DROP, **BLOCKS),
    "Static": lambda: training.Static(LEVEL, **BLOCKS),
    "smaller dense": None,
    "Static per row": lambda: training.Static(LEVEL, scope="row", **BLOCKS),
    "RigL per matrix": lambda: training.RigL(LEVEL, scope="matrix", update=UPDATE, drop_fraction=DROP, **BLOCKS),
}


def bytes_of(name: str) -> Tensor:
    return torch.tensor(list((TEXT / name).read_bytes()))


def model_of(width: int, mlp: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def block_weights(model: torch.nn.Module) -> int:
    return sum(int((p != 0).sum()) for name, p in model.named_parameters() if "proj" in name)


def run(job: tuple[str, int, int]) -> dict[str, Any]:
    """Train one model -> what it reached."""
    name, seed, steps = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    dense = RECIPES[name] is None
    model = model_of(32, 72, seed) if dense else model_of(128, 384, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = get_linear_schedule_with_warmup(optimizer, WARM_UP, steps)
    if not dense:
        sparsity = RECIPES[name]()
        sparsity.apply(model)
        sparsity.apply(optimizer)
    text = bytes_of("calibration.txt")
    random = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {
        "recipe": name,
        "seed": seed,
        "nats per byte": held_out_loss(model),
        "live": block_weights(model),
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def held_out_loss(model: torch.nn.Module) -> float:
    """Nats per byte on 600 windows of held-out text."""
    text = bytes_of("heldout.txt")
    windows = text[: 600 * LENGTH].view(-1, LENGTH)
    model.eval()
    losses = [float(model(input_ids=part, labels=part).loss) for part in windows.split(100)]
    return statistics.mean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    jobs = [(name, seed, options.steps) for seed in range(options.seeds) for name in options.only]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(run, jobs, chunksize=1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.seeds} seeds")
    print("| | nats per byte | spread | live block weights | seconds |\n| --- | ---: | ---: | ---: | ---: |")
    for name in options.only:
        own = [result for result in results if result["recipe"] == name]
        losses = [result["nats per byte"] for result in own]
        spread = max(losses) - min(losses) if len(losses) > 1 else math.nan
        seconds = statistics.mean(result["seconds"] for result in own)
        print(f"| {name} | {statistics.mean(losses):.3f} | {spread:.3f} | {own[0]['live']:,} | {seconds:.0f} |")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
