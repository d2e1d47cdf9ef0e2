"""What the three runners share: one process loads a model, makes it sparse, and writes a folder and what that cost.

It runs in each tool's own environment: nothing here but torch, transformers and safetensors. Linux only (/proc).
"""

import argparse
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

BATCH_SIZE = 8
LIBRARIES = (  # those that take part in the computation; reported if installed
    *("modelopt-sparse", "nvidia-modelopt", "llmcompressor", "compressed-tensors", "torch", "transformers"),
    *("accelerate", "tokenizers", "safetensors", "numpy"),
)

Sparsify = Callable[[nn.Module, Sequence[Tensor], argparse.Namespace], nn.Module]


def main(sparsify: Sparsify) -> None:
    """``sparsify(model, batches, options)`` gives a plain model with zeros; without --method it is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="Hugging Face folder of the dense model")
    parser.add_argument("windows", type=Path, help="safetensors file: calibration windows [n, seq_len] as 'windows'")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--method", help="without it the process only loads its libraries, the model and the windows")
    parser.add_argument("--pattern", help="N:M with N kept, or a pruned percentage such as 50%%")
    parser.add_argument("--masks-of", type=Path, metavar="FOLDER", help="keep what is nonzero in this sparse model")
    parser.add_argument("--autocast", help="modelopt_sparse only: the precision that blocks run in")
    parser.add_argument("--sequential", default="block", help="modelopt_sparse only: what is sparse before a layer")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    batches = load_file(options.windows)["windows"].split(BATCH_SIZE)
    began, began_cpu = time.perf_counter(), time.process_time()
    if options.method is not None:
        model = sparsify(model, batches, options)
    cost = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,  # of all threads
        "peak_mib": peak_mib(),
        "versions": versions(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    if options.method is not None:
        model.save_pretrained(options.out)
    (options.out / "cost.json").write_text(json.dumps(cost), encoding="utf-8")


def peak_mib() -> float:
    """Peak resident memory of this process.

    Not getrusage's ru_maxrss: Linux carries the parent's peak over to it through exec.
    """
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def versions() -> dict[str, str]:
    installed = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    return {name: installed[name] for name in LIBRARIES if name in installed}
