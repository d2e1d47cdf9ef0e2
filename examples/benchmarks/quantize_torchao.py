"""Quantize a folder with torchao, weights only: FOLDER WINDOWS OUT --scheme fp8 or int8."""

import quantizing
from torchao.quantization import (  # pyright: ignore[reportMissingImports] - in an environment of its own
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

CONFIGS = {"fp8": Float8WeightOnlyConfig, "int8": Int8WeightOnlyConfig}


def quantize(model, windows, scheme, out):
    config = TorchAoConfig(CONFIGS[scheme](), modules_to_not_convert=["lm_head"])
    again = AutoModelForCausalLM.from_pretrained(model.name_or_path, quantization_config=config)
    again.save_pretrained(out)


if __name__ == "__main__":
    quantizing.main(quantize, "torchao")
