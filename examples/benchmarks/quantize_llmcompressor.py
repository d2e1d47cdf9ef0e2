"""Quantize a folder with llm-compressor: FOLDER WINDOWS OUT --scheme NAME, or "GPTQ NAME"."""

import quantizing
import torch
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports] - in an environment of its own
from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader
from transformers import CompressedTensorsConfig


def quantize(model, windows, scheme, out):
    cls = GPTQModifier if scheme.startswith("GPTQ ") else QuantizationModifier
    recipe = cls(targets="Linear", scheme=scheme.removeprefix("GPTQ "), ignore=["re:.*lm_head"])
    data = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in windows.split(4)]
    loader = DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType] - a list will do
    options = {"dataset": loader} if scheme.startswith("GPTQ ") or scheme == "W8A8" else {}
    oneshot(model=model, recipe=recipe, **options)
    model.save_pretrained(out)


if __name__ == "__main__":
    quantizing.main(quantize, "llmcompressor", quantization_config=CompressedTensorsConfig(run_compressed=False))
