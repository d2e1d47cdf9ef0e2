"""Quantized models: how a config says that a model is quantized, and which parameters hold codes, not weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from modelopt_sparse.distributed import is_sharded

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The quantization settings in a transformers config, or in that of its text model; None if there are none."""
    for part in parts_of(config):
        settings = getattr(part, "quantization_config", None)
        if settings is not None:
            return dict(settings) if isinstance(settings, Mapping) else settings.to_dict()
    return None


def method_of(quantization: Mapping[str, Any]) -> str:
    """The name of the method in quantization settings: "fp8"."""
    method = quantization.get("quant_method")
    return str(getattr(method, "value", method))


def holds_codes(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds codes: its dtype is no floating point type, or its tensor class wraps codes."""
    strange = is_traceable_wrapper_subclass(parameter) and not is_sharded(parameter)
    return strange or parameter.dtype not in FLOATS


def codes_in(model: nn.Module) -> str:
    """What a message says of a model with codes: "quantized (fp8)"."""
    quantization = quantization_of(getattr(model, "config", None))
    return "quantized" if quantization is None else f"quantized ({method_of(quantization)})"


def forget_quantization(config: Any) -> None:
    """Delete the quantization settings from a config."""
    for part in parts_of(config):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def parts_of(config: Any) -> list[Any]:
    """A transformers config, and its text model's if that is another object; [] for any other object."""
    if not isinstance(config, PreTrainedConfig):
        return []
    text = config.get_text_config()
    return [config] if text is config else [config, text]
