"""What transformers knows of a model: the texts that it takes, its class, and whether it is quantized."""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from modelopt_sparse.distributed import is_sharded

# texts ----------------------------------------------------------------------------------------------------------------

CPU_BATCH = 2048  # tokens of a batch on the CPU: with more, large temporaries are paged in anew each time
WINDOWS = 8  # windows of a batch elsewhere


def longest_window(model: nn.Module) -> int | None:
    """How many tokens the model, or the text model inside it, takes; None if its config sets no limit."""
    configs = (getattr(model, "config", None), text_config_of(model))
    sizes = (getattr(config, "max_position_embeddings", None) for config in configs)
    longest = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    # positions of RoBERTa, ESM, MPNet and others begin behind that of padding, in a table of this size
    tables = (x for name, x in model.named_modules() if "position" in name and isinstance(x, nn.Embedding))
    padding = [x.padding_idx for x in tables if x.num_embeddings == longest and x.padding_idx is not None]
    return longest and longest - max((1 + place for place in padding), default=0)


def text_config_of(model: nn.Module) -> Any:
    """The config of a model, or of the text model inside it, of two the decoder's; None if the model has none."""
    config = getattr(model, "config", None)
    return [config, *parts_of(config)][-1]


def default_seq_len(model: nn.Module) -> int:
    """Tokens of a calibration window if the user names no number: 2048, or fewer if the model takes fewer."""
    return min(2048, longest_window(model) or 2048)


def refuse_longer_windows(model: nn.Module, seq_len: int | None) -> None:
    """Raise ValueError for windows of more tokens than the model takes."""
    longest = longest_window(model)
    if seq_len is not None and longest is not None and seq_len > longest:
        raise ValueError(f"seq_len={seq_len}: this {type(model).__name__} takes at most {longest} tokens: give fewer")


def refuse_unknown_tokens(model: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError for token ids that the model's embedding has no row for."""
    try:
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:
        return
    size = getattr(embedding, "num_embeddings", None)
    if isinstance(size, int) and (wrong := tokens[(tokens < 0) | (tokens >= size)]).numel():
        worst = wrong[wrong.abs().argmax()]
        raise ValueError(f"the text holds token id {worst}, the model has {size} tokens: give its own tokenizer")


def default_batch_size(seq_len: int, device: torch.device) -> int:
    """Windows of a batch of text if the user names no number: on the CPU as many as have about CPU_BATCH tokens."""
    return max(1, CPU_BATCH // seq_len) if device.type == "cpu" else WINDOWS


def is_encoder_decoder(model: nn.Module) -> bool:
    says_so = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    encoder = getattr(model, "get_encoder", None)  # what holds such a model and its config has none; its decoder has
    return says_so and callable(encoder) and encoder() is not model  # that model's config, and gives itself


def writes_text(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not is_encoder_decoder(model)


def redraws_text(model: nn.Module) -> bool:
    """Whether it is a masked language model of transformers, which predicts each token from those on both sides."""
    mapping: Any = transformers.MODEL_FOR_MASKED_LM_MAPPING  # which imports much, so not before it is asked
    masked = mapping.get(type(getattr(model, "config", None)), ())
    return isinstance(model, masked) and not is_encoder_decoder(model) and not writes_text(model)


def adds_text(model: nn.Module) -> bool:
    """Whether it can write more text where there is some."""
    return writes_text(model) or redraws_text(model)


def takes(module: nn.Module, name: str) -> bool:
    """Whether ``module.forward`` has an argument of this name."""
    try:
        return name in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled modules have no signature
        return False


CACHES = ("past_key_values", "cache")  # names of the KV cache: transformers changed it in 5.24


def cache_name(model: nn.Module) -> str | None:
    """The name of a model's KV cache, as an argument and in its output."""
    return next((name for name in CACHES if takes(model, name)), None)


# classes --------------------------------------------------------------------------------------------------------------


def model_class(config: Any, source: str | Path) -> Any:
    """The model class that a config names: one of transformers, or an Auto class for a model with its own code.

    Raises ValueError if it names none that transformers knows; ``source`` is the folder or hub name for the message.
    """
    names = config.architectures or []
    if names and (architecture := getattr(transformers, names[0], None)) is not None:
        return architecture
    remote = getattr(config, "auto_map", None) or {}
    for auto in remote:
        if auto.startswith("AutoModel") and (not names or remote[auto].endswith(f".{names[0]}")):
            return getattr(transformers, auto)
    problem = f"config.json of {str(source)!r} names no model class that transformers knows"
    raise ValueError(f"{problem}: give one, such as 'architectures': ['LlamaForCausalLM'], in place of {names}")


def built(architecture: Any, config: PreTrainedConfig, device: Any = "meta") -> Any:
    """A model of a class of transformers with the weights that its config begins with."""
    with torch.device(device):
        model = architecture(config)
    model.tie_weights()  # older versions of transformers do not do so on the meta device
    return model


def empty_model(source: str | Path, **options: Any) -> nn.Module:
    """The model of a folder or hub name, on the meta device: its configuration is read, its weights are not."""
    config = AutoConfig.from_pretrained(source, **options)
    architecture = model_class(config, source)
    if not issubclass(architecture, PreTrainedModel):
        architecture = partial(architecture.from_config, trust_remote_code=options.get("trust_remote_code"))
    return built(architecture, config)


def unloaded(info: Mapping[str, Any]) -> list[str]:
    """One sentence for each tensor that transformers could not match when it loaded a folder.

    ``info`` is what ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    problems = [f"{name!r} of the model is not in the folder" for name in sorted(info["missing_keys"])]
    problems += [f"{name!r} has no place in the model" for name in sorted(info["unexpected_keys"])]
    for name, stored, shape in sorted(info["mismatched_keys"]):
        problems.append(f"{name!r} has shape {list(stored)} in the folder and {list(shape)} in the model")
    return problems


# quantization ---------------------------------------------------------------------------------------------------------

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


def holds_codes(parameter: Tensor) -> bool:
    """Whether a parameter holds codes: its dtype is no floating point type, or its tensor class wraps codes."""
    strange = is_traceable_wrapper_subclass(parameter) and not is_sharded(parameter)
    return strange or parameter.dtype not in FLOATS


def codes_in(model: nn.Module) -> str:
    """What a message says of a model with codes: "quantized (fp8)"."""
    quantization = quantization_of(getattr(model, "config", None))
    return "quantized" if quantization is None else f"quantized ({method_of(quantization)})"


def refuse_codes(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Raise ValueError if the parameter of this layer of a model holds codes."""
    if holds_codes(parameter):
        raise ValueError(f"layer {name!r} holds codes, {codes_in(model)}: load the model dequantized")


def forget_quantization(config: Any) -> None:
    """Delete the quantization settings from a config."""
    for part in parts_of(config):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def parts_of(config: Any) -> list[Any]:
    """A transformers config, and that of the text model in it if that is another object, of two the decoder's, as
    MusicGen has; [] for any other object."""
    if not isinstance(config, PreTrainedConfig):
        return []
    try:
        text = config.get_text_config()
    except ValueError:
        text = config.get_text_config(decoder=True)
    return [config] if text is config else [config, text]
