"""What the scripts that quantize a folder share. It runs in each tool's own environment."""

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Quantize = Callable[[Any, Tensor, str, Path], None]


def main(quantize: Quantize, package: str) -> None:
    """``quantize(model, windows, scheme, out)`` writes the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="Hugging Face folder of the sparse model")
    parser.add_argument("windows", type=Path, help="safetensors file with token ids [n, seq_len] as 'windows'")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    quantize(model, load_file(options.windows)["windows"], options.scheme, options.out)
    version = {"version": importlib.metadata.version(package)}
    (options.out / "cost.json").write_text(json.dumps(version), encoding="utf-8")
