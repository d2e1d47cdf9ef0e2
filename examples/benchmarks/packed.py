"""How large packed folders are, and how long they take to write and to read.

    python examples/benchmarks/packed.py            # about ten minutes, 5 GB of disk, 6 GB of memory
    python examples/benchmarks/packed.py --rounds 0 # sizes alone

Makes the embedded model, a Llama of random weights (1.1 GB in bfloat16) and a mixture of random weights (0.2 GB) sparse
by magnitude at 2:4 and at 50, 70 and 90 % of each matrix, saves each and packs it. The mixture is a Qwen3-MoE, whose
experts transformers fuses in memory. Sizes are those of weights and masks together; "share" is what is left of the
weights that are pruned, with their bits.

Seconds, each the median of ``--rounds`` rounds in which all of them take turns: to copy the plain weight file, flushed
to disk as `pack` does, to pack, to unpack, and to load the folder, plain and packed, by ``mts.load``.
``peak``: the most memory that a process of its own takes to load it, beyond what importing takes. Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from streaming import anonymous_peak
from tools import machine
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import modelopt_sparse as mts
from modelopt_sparse.checkpoint.packed import PackedFile

TESTBED = Path(__file__).resolve().parents[1] / "testbed"
PATTERNS = {"2:4": "2:4", "50 %": 0.5, "70 %": 0.7, "90 %": 0.9}
MASKS = "sparsity_masks.safetensors"


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    return made(lambda: LlamaForCausalLM(config))


def mixture() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        dtype="bfloat16",
    )
    return made(lambda: Qwen3MoeForCausalLM(config))


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return nn.Module.to(make(), torch.bfloat16)


MODELS: dict[str, Callable[[], Any]] = {
    "embedded": lambda: AutoModelForCausalLM.from_pretrained(TESTBED / "tiny-llama"),
    "Llama": llama,
    "mixture": mixture,
}


def weights_of(folder: Path) -> list[Path]:
    return sorted([*folder.glob("model*.safetensors"), *folder.glob("packed.model*.safetensors")])


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in [*weights_of(folder), folder / MASKS])


def share(folder: Path) -> float:
    """Bytes of the packed weights of a folder, with their bits, over those in the plain files."""
    before = after = 0
    for path in weights_of(folder):
        file = PackedFile(path, folder / MASKS)
        for name in file.facts["places"]:
            begin, end = file.header[name]["data_offsets"]
            before, after = before + end - begin, after + file.size(name)
    return after / before


def copy(plain: Path, out: Path) -> None:
    out.mkdir()
    for path in weights_of(plain):
        shutil.copyfile(path, out / path.name)
        with (out / path.name).open("r+b") as file:
            os.fsync(file.fileno())


def timed(call: Callable[[], Any], made: Path | None = None) -> float:
    """Seconds of a call; the folder that it has made is deleted after it."""
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    if made is not None:
        shutil.rmtree(made)
    return seconds


def peak(folder: Path) -> float:
    """The most memory, in MiB, that a process takes to load a folder, beyond what importing takes."""
    return anonymous_peak([sys.executable, __file__, "--load", str(folder)])[0]


def load(folder: str) -> None:
    """In a process of its own."""
    for name in ("modelopt_sparse.checkpoint.save", "transformers.models.llama.modeling_llama"):
        __import__(name)
    print("imported", flush=True)
    sys.stdin.readline()
    mts.load(folder)


def rows(name: str, pattern: str, work: Path, rounds: int) -> dict[str, Any]:
    """One line of the table."""
    plain, packed, made = work / "plain", work / "packed", work / "made"
    for folder in (plain, packed):
        shutil.rmtree(folder, ignore_errors=True)
    level = PATTERNS[pattern]
    asked = mts.Unstructured(level, "matrix") if isinstance(level, float) else level
    mts.save(mts.sparsify(MODELS[name](), "magnitude", pattern=asked, progress=False), plain)
    mts.pack(plain, packed)
    calls: dict[str, tuple[Callable[[], Any], Path | None]] = {
        "copy": (lambda: copy(plain, made), made),
        "pack": (lambda: mts.pack(plain, made), made),
        "unpack": (lambda: mts.unpack(packed, made), made),
        "load plain": (lambda: mts.load(plain), None),
        "load packed": (lambda: mts.load(packed), None),
    }
    seconds: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(rounds):
        for what, (call, folder) in calls.items():
            seconds[what].append(timed(call, folder))
    measured = {what: statistics.median(each) for what, each in seconds.items() if each}
    if rounds:
        measured |= {"peak plain": peak(plain), "peak packed": peak(packed)}
    return {
        "model": name,
        "pattern": pattern,
        "plain": size(plain),
        "packed": size(packed),
        "share": share(packed),
        **measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=[*PATTERNS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help="a folder on the disk to measure; default: the system's for temporary files")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        load(options.load)
        return
    transformers.utils.logging.disable_progress_bar()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine()}; {versions}, safetensors {safetensors.__version__}\n")
    head = ("model", "pattern", "plain MB", "packed MB", "of it", "share", "copy s", "pack s", "unpack s", "load s")
    head += ("load packed s", "peak MiB", "peak packed MiB")
    head = head if options.rounds else head[:6]
    print(f"| {' | '.join(head)} |\n| --- | --- |{' ---: |' * (len(head) - 2)}")
    found = []
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name in options.models:
            for pattern in options.patterns:
                row = rows(name, pattern, Path(work), options.rounds)
                found.append(row)
                cells = [f"{row['plain'] / 1e6:,.1f}", f"{row['packed'] / 1e6:,.1f}"]
                cells += [f"{row['packed'] / row['plain']:.0%}", f"{row['share']:.1%}"]
                if options.rounds:
                    cells += [f"{row[what]:.2f}" for what in ("copy", "pack", "unpack", "load plain", "load packed")]
                    cells += [f"{row[what]:,.0f}" for what in ("peak plain", "peak packed")]
                print(f"| {name} | {pattern} | {' | '.join(cells)} |", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
