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
DEQUANTIZED = "dequantized"  # folder in the quantized one: its weights as `verify` takes them


def main(quantize: Quantize, package: str, **options: Any) -> None:
    """``quantize(model, windows, scheme, out)`` writes the folder, ``options`` of ``from_pretrained`` dequantize it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="Hugging Face folder of the sparse model")
    parser.add_argument("windows", type=Path, help="safetensors file with token ids [n, seq_len] as 'windows'")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    quantize(model, load_file(given.windows)["windows"], given.scheme, given.out)
    coded = AutoModelForCausalLM.from_pretrained(given.out, **options).state_dict()
    dense = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    dense.load_state_dict({name: tensor.dequantize() for name, tensor in coded.items()})  # torchao's are coded still
    dense.save_pretrained(given.out / DEQUANTIZED)
    version = {"version": importlib.metadata.version(package)}
    (given.out / "cost.json").write_text(json.dumps(version), encoding="utf-8")
