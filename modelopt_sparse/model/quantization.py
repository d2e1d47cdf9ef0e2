"""Quantized models: what says that a model is one, and which of its parameters hold codes in the place of weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from modelopt_sparse.distributed import is_sharded

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The settings of a config's quantization, that of its text model included, or None."""
    for part in parts_of(config):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else found.to_dict()
    return None


def method_of(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    return str(getattr(method, "value", method))


def holds_codes(parameter: nn.Parameter) -> bool:
    """Whether a parameter's numbers are codes, or its tensor makes them of codes."""
    strange = is_traceable_wrapper_subclass(parameter) and not is_sharded(parameter)
    return strange or parameter.dtype not in FLOATS


def codes_in(model: nn.Module) -> str:
    """What to call a model's codes in a sentence: "quantized (fp8)"."""
    quantization = quantization_of(getattr(model, "config", None))
    return "quantized" if quantization is None else f"quantized ({method_of(quantization)})"


def forget_quantization(config: Any) -> None:
    """Take the settings of a quantization out of a config."""
    for part in parts_of(config):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def parts_of(config: Any) -> list[Any]:
    """A transformers config, and that of its text model where it is another; nothing for anything else."""
    if not isinstance(config, PreTrainedConfig):
        return []
    text = config.get_text_config()
    return [config] if text is config else [config, text]
