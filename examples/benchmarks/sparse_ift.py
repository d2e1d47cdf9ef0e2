"""Sparse-IFT against dense models of the same FLOPs: a byte-level Llama, and a small ResNet on scikit-learn's digits.

All models of one task see the same batches for the same number of steps with the same settings. Printed: nats per byte
on held-out text, and the loss and errors on held-out images, mean and spread over seeds. Needs scikit-learn. Two
processes of one thread each:

    python examples/benchmarks/sparse_ift.py
"""

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from modelopt_sparse import training

TEXT = Path(__file__).parent.parent / "testbed"
LENGTH = 64
IMAGES, TRAINED = 1797, 1000  # of the digits, and how many of them are trained on

Rule = Callable[[float], training.SparsityAlgorithm]


def rules(steps: int) -> dict[str, Rule]:
    """How layers are trained at a level. Masks move in the first three quarters of training."""
    update = {"freq": max(1, steps // 20), "stop": steps * 3 // 4}
    drop = training.Cosine(0.3, steps * 3 // 4)
    return {
        "static": training.Static,
        "SET": lambda level: training.SET(level, scope="matrix", update=update, drop_fraction=drop),
        "GMP": lambda level: training.GMP(
            training.Cubic(0.0, level, steps // 10, steps * 7 // 10), update=update["freq"]
        ),
    }


ROWS: dict[str, tuple[str, float, str] | None] = {  # member, level, rule
    "dense": None,
    "wide 0.75, static": ("wide", 0.75, "static"),
    "wide 0.75, SET": ("wide", 0.75, "SET"),
    "wide 0.75, GMP": ("wide", 0.75, "GMP"),
    "wide 0.5, SET": ("wide", 0.5, "SET"),
    "parallel 0.75, SET": ("parallel", 0.75, "SET"),
    "factorized 0.75, SET": ("factorized", 0.75, "SET"),
    "doped 0.75, SET": ("doped", 0.75, "SET"),
}


# a language model -----------------------------------------------------------------------------------------------------


def bytes_of(name: str) -> Tensor:
    return torch.tensor(list((TEXT / name).read_bytes()))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
    )


def text_batches(seed: int) -> Callable[[], tuple[Tensor, ...]]:
    text, random = bytes_of("calibration.txt"), torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, ...]:
        starts = torch.randint(len(text) - LENGTH, (24,), generator=random)
        return (torch.stack([text[start : start + LENGTH] for start in starts]),)

    return draw


def loss_of_text(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def judge_text(model: nn.Module) -> dict[str, float]:
    windows = bytes_of("heldout.txt")[: 600 * LENGTH].view(-1, LENGTH)
    return {"nats per byte": statistics.mean(float(loss_of_text(model, part)) for part in windows.split(100))}


# a model of images ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(inner)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A stem, three blocks of 4, 8 and 16 channels, pixels averaged, a head: 8 x 8 pixels -> 10 digits."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).sub(8).div(8).unsqueeze(1)
    return images[order], torch.tensor(data.target)[order]


def image_batches(seed: int) -> Callable[[], tuple[Tensor, ...]]:
    images, labels = (each[:TRAINED] for each in digits())
    random = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, ...]:
        """64 images, each moved by up to one pixel in both directions."""
        chosen = torch.randint(TRAINED, (64,), generator=random)
        moved = [
            torch.roll(images[i], tuple(torch.randint(-1, 2, (2,), generator=random).tolist()), (1, 2)) for i in chosen
        ]
        return torch.stack(moved), labels[chosen]

    return draw


def loss_of_images(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def judge_images(model: nn.Module) -> dict[str, float]:
    images, labels = (each[TRAINED:] for each in digits())
    logits = model(images)
    errors = float((logits.argmax(1) != labels).float().mean())
    return {"loss": float(F.cross_entropy(logits, labels)), "errors, %": 100 * errors}


# one run --------------------------------------------------------------------------------------------------------------

TASKS: dict[str, dict[str, Any]] = {
    "text": {
        "model": llama,
        "batches": text_batches,
        "loss": loss_of_text,
        "judge": judge_text,
        "example": {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)},
        "rate": 4e-3,
        "steps": 400,
    },
    "images": {
        "model": ResNet,
        "batches": image_batches,
        "loss": loss_of_images,
        "judge": judge_images,
        "example": torch.zeros(1, 1, 8, 8),
        "rate": 4e-3,
        "steps": 600,
    },
}


def run(job: tuple[str, str, int, int | None]) -> dict[str, Any]:
    """Train one model -> what it reached."""
    task_name, row, seed, steps = job
    task = TASKS[task_name]
    steps = steps or task["steps"]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    torch.manual_seed(seed)
    model, ift, settings = task["model"](), None, ROWS[row]
    if settings is not None:
        member, level, rule = settings
        iso = "model" if member == "wide" else "layers"  # the head is wider as well, and has to be paid for
        ift = training.sparse_ift(model, level, member, rule=rules(steps)[rule], iso=iso, example=task["example"])
        model = ift.model
        ift.sparsity.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["rate"], betas=(0.9, 0.98), weight_decay=0.1)
    if ift is not None:
        ift.sparsity.apply(optimizer)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    draw = task["batches"](seed)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        task["loss"](model, *draw()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        reached = task["judge"](model)
    return {
        "task": task_name,
        "row": row,
        "seed": seed,
        **reached,
        "live parameters": sum(p.numel() for p in model.parameters()) if ift is None else ift.plan.live_parameters,
        "FLOPs": 1.0 if ift is None else ift.plan.model_ratio,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run; the default is 400 for text, 600 for images")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    seeds = range(options.seeds)
    jobs = [(task, row, seed, options.steps) for task in options.tasks for seed in seeds for row in options.only]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(run, jobs, chunksize=1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.seeds} seeds")
    for task in options.tasks:
        show([result for result in results if result["task"] == task], options.only)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def show(results: list[dict[str, Any]], rows: list[str]) -> None:
    """One task as a table: means, and in brackets the largest minus the smallest of the seeds."""
    measures = [key for key in ("nats per byte", "loss", "errors, %") if key in results[0]]
    print(f"\n| {results[0]['task']} | {' | '.join(measures)} | FLOPs, times dense | live parameters | seconds |")
    print("| --- |" + " ---: |" * (len(measures) + 3))
    for row in rows:
        own = [result for result in results if result["row"] == row]
        cells = []
        for measure in measures:
            values = [result[measure] for result in own]
            spread = max(values) - min(values) if len(values) > 1 else math.nan
            cells.append(f"{statistics.mean(values):.3f} ({spread:.3f})")
        seconds = statistics.mean(result["seconds"] for result in own)
        print(
            f"| {row} | {' | '.join(cells)} | {own[0]['FLOPs']:.3f} | {own[0]['live parameters']:,} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
