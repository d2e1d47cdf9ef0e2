"""Peak memory of dropping a quarter of the experts of a folder: llm-compressor's REAP beside `shrink_checkpoint`.

    python examples/benchmarks/experts_memory.py --work peers

Makes a Qwen3-MoE of random weights (0.84 GB in bfloat16, 16 blocks of 32 experts) and runs each tool in a process of
its own, on 16 windows of 256 tokens and one thread. Prints the peak of resident memory, with the pages of mapped files;
for `shrink_checkpoint` also that of anonymous memory beyond what importing the libraries takes, beside what the plan
says. Linux only. ``--work`` keeps llm-compressor's environment.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from streaming import anonymous_peak
from tools import TITLES, Tools
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from worker import peak_mib

import modelopt_sparse as mts

VOCABULARY, WINDOWS, LENGTH, BATCH = 4096, 16, 256, 8
OURS = "shrink_checkpoint"


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )


def random_mixture() -> Any:
    torch.manual_seed(0)
    return nn.Module.to(Qwen3MoeForCausalLM(config()), torch.bfloat16)


def windows() -> torch.Tensor:
    return torch.randint(VOCABULARY, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))


def shrink(source: str, target: str, refit: bool) -> None:
    """In a process of its own: prints the peaks in MiB as JSON."""
    torch.set_num_threads(1)
    print("imported", flush=True)
    sys.stdin.readline()
    data = [*windows().split(BATCH)]
    mts.shrink_checkpoint(
        source, target, experts=0.25, criterion="reap", refit=refit, data_loader=data, progress=False, overwrite=True
    )
    print(json.dumps(peak_mib()), flush=True)


def measured(source: Path, target: Path, refit: bool) -> tuple[float, float]:
    """MiB at the peak: resident, and anonymous beyond what the imports take."""
    command = [sys.executable, __file__, "--shrink", str(source), str(target), *(["--refit"] if refit else [])]
    peak, printed = anonymous_peak(command)
    return json.loads(printed), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where llm-compressor's environment is made; without it ours alone")
    parser.add_argument("--shrink", nargs=2, metavar=("SOURCE", "TARGET"), help=argparse.SUPPRESS)
    parser.add_argument("--refit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shrink is not None:
        shrink(*options.shrink, refit=options.refit)
        return
    with tempfile.TemporaryDirectory() as work:
        source, target = Path(work, "dense"), Path(work, "smaller")
        random_mixture().save_pretrained(source, max_shard_size="60MB")
        with torch.device("meta"):
            model = random_mixture()
        print("| tool | peak MiB | anonymous, beyond imports | plan |\n| --- | ---: | ---: | ---: |")
        for refit in (False, True):
            peak, anonymous = measured(source, target, refit)
            data = {"num_samples": WINDOWS, "seq_len": LENGTH, "batch_size": BATCH}
            plan = mts.plan_shrink(model, experts=0.25, refit=refit, **data)
            planned = sum(plan.streamed["host"].values()) / 2**20
            name = f"{OURS}, refit" if refit else OURS
            print(f"| {name} | {peak:,.0f} | {anonymous:,.0f} | {planned:,.0f} |", flush=True)
        if options.work is not None:
            tools, name = Tools(options.work.resolve(), 1), "llmcompressor"
            cost = tools.run(name, source, windows(), target, "--method", "reap", "--pattern", "25%")
            loads = tools.run(name, source, windows(), target)
            version = cost["versions"][name]
            print(f"| {TITLES[name]} {version}, float32 | {cost['peak_mib']:,.0f} | | |")
            print(f"| the same, loading alone | {loads['peak_mib']:,.0f} | | |")


if __name__ == "__main__":
    main()
