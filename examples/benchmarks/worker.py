"""What the three runners share: one process loads a model, makes it sparse, and writes a folder and what that cost.

It runs in each tool's own environment: nothing here but torch, transformers and safetensors. Linux only (/proc).
"""

import argparse
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

LIBRARIES = (  # those that take part in the computation; reported if installed
    *("modelopt-sparse", "nvidia-modelopt", "llmcompressor", "compressed-tensors", "torch", "transformers"),
    *("accelerate", "tokenizers", "safetensors", "numpy"),
)

Batch = Tensor | Mapping[str, Tensor]  # token ids, or what the model is called with, by name
Sparsify = Callable[[nn.Module, Sequence[Batch], argparse.Namespace], nn.Module]


def main(sparsify: Sparsify) -> None:
    """``sparsify(model, batches, options)`` gives a plain model with zeros; without --method it is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="Hugging Face folder of the dense model")
    parser.add_argument("windows", type=Path, help="safetensors file: token ids [n, seq_len] as 'windows', or inputs")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--method", help="without it the process only loads its libraries, the model and the windows")
    parser.add_argument("--pattern", help="N:M with N kept, or a pruned percentage such as 50%%")
    parser.add_argument("--masks-of", type=Path, metavar="FOLDER", help="keep what is nonzero in this sparse model")
    parser.add_argument("--autocast", help="modelopt_sparse only: the precision that blocks run in")
    parser.add_argument("--sequential", default="block", help="modelopt_sparse only: what is sparse before a layer")
    parser.add_argument("--batch", type=int, default=8, help="calibration windows in a batch")
    parser.add_argument("--skip", default="lm_head", help="peers only: layers whose name has this in it stay dense")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    architectures = AutoConfig.from_pretrained(options.model).architectures or [""]
    model_class: Any = getattr(transformers, architectures[0], AutoModelForCausalLM)
    model: Any = model_class.from_pretrained(options.model, dtype=torch.float32)
    batches = in_batches(load_file(options.windows), options.batch)
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


def in_batches(inputs: Mapping[str, Tensor], size: int) -> Sequence[Batch]:
    if "windows" in inputs:
        return inputs["windows"].split(size)
    parts = {name: x.split(size) for name, x in inputs.items()}
    return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]


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
