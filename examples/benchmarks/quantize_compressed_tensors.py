"""Quantize a folder by rounding to nearest, with compressed-tensors alone: FOLDER WINDOWS OUT --scheme NAME."""

import quantizing
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn
from transformers import CompressedTensorsConfig

SCHEMES = ("FP8_DYNAMIC", "W8A16", "W4A16", "W4A16_ASYM")


def quantize(model, windows, name, out):
    scheme: QuantizationScheme = preset_name_to_scheme(name, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if isinstance(module, nn.Linear) and scheme is not None:
            arguments = scheme.weights
            group = arguments.group_size or module.in_features
            groups = module.weight.detach().unflatten(-1, (-1, group))
            scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            module.weight_scale.data.copy_(scale)
            if getattr(module, "weight_zero_point", None) is not None:
                module.weight_zero_point.data.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with torch.no_grad():
        model.save_pretrained(out)
    compressor.update_config(str(out))


if __name__ == "__main__":
    quantizing.main(quantize, "compressed-tensors", quantization_config=CompressedTensorsConfig(run_compressed=False))
