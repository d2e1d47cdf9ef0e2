"""What sparse training adds to a step of a masked model, and the memory that an update of the masks takes.

    python examples/benchmarks/sparse_step.py            # about three minutes on one core

Time: one step (16 windows of 128 tokens, AdamW) of the testbed with masks at 50 % that nothing moves, divided into the
same step under Static and RigL: between updates, and with an update in each step. Processor time, in turns, medians.
Memory: the resident memory that ``optimizer.step()`` adds at its peak, in a model of eight 2,048 x 2,048 matrices
(Linux only).
"""

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import modelopt_sparse as mts
from modelopt_sparse import training

TESTBED = Path(__file__).resolve().parents[1] / "testbed" / "tiny-llama"
NEVER = {"freq": 10**9, "start": 1}
WIDTH, DEPTH = 2048, 8

RECIPES: dict[str, Any] = {
    "Static": lambda: training.Static(0.5, include="blocks", init_method="topk"),
    "RigL, between updates": lambda: training.RigL(0.5, scope="row", include="blocks", update=NEVER),
    "RigL, an update in each step": lambda: training.RigL(0.5, scope="row", include="blocks", update=1),
    "SET, an update in each step": lambda: training.SET(0.5, scope="row", include="blocks", update=1),
}


def stepper(model: nn.Module, sparsity: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if sparsity is not None:
        sparsity.apply(model)
        sparsity.apply(optimizer)
    ids = torch.randint(3, 4096, (16, 128), generator=torch.Generator().manual_seed(0)) % model.config.vocab_size

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def times(rounds: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32).train()
    masked = copy.deepcopy(model)
    training.Static(0.5, include="blocks", init_method="topk").apply(masked)
    steps = {"masks alone": stepper(masked, None)}
    steps.update({name: stepper(copy.deepcopy(model), build()) for name, build in RECIPES.items()})
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number:  # the first round is not counted
                seconds[name].append(time.process_time() - started)
    alone = seconds["masks alone"]
    print("| a step under | ms | times masks alone |\n| --- | ---: | ---: |")
    for name, own in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(own, alone))
        print(f"| {name} | {statistics.median(own) * 1e3:.0f} | {ratio:.3f} |")


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024


def memory() -> None:
    matrix = WIDTH**2 * 4
    print("\n| peak of optimizer.step(), beyond what was there | MiB | matrices |\n| --- | ---: | ---: |")
    for name, update in (("between updates", NEVER), ("with an update", 1)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        sparsity = training.RigL(0.5, scope="row", include="*.weight", update=update)
        sparsity.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        sparsity.apply(optimizer)
        peaks = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before = resident("VmRSS")
            optimizer.step()
            peaks.append(resident("VmHWM") - before)
        print(f"| RigL, {name} | {peaks[-1] / 2**20:.0f} | {peaks[-1] / matrix:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {mts.__version__}, one thread\n")
    times(options.rounds)
    if Path("/proc/self/clear_refs").exists():
        memory()


if __name__ == "__main__":
    main()
