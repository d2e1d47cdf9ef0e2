"""What transformers knows of a model: its class, its configuration, the arguments of its forward."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

# tokens of a batch of text on the CPU: with more, larger temporaries are paged in anew each time, which costs more than
# it saves
CPU_BATCH = 2048
WINDOWS = 8  # windows of a batch elsewhere


def longest_window(model: nn.Module) -> int | None:
    """How many tokens a text may have for the model, or for the text model inside it; None if its config sets no
    limit."""
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    longest = (getattr(part, "max_position_embeddings", None) for part in (config, text_config))
    return next((size for size in longest if isinstance(size, int) and size > 0), None)


def default_seq_len(model: nn.Module) -> int:
    """Tokens of a calibration window if the user names no number: 2048, or fewer if the model takes fewer."""
    return min(2048, longest_window(model) or 2048)


def refuse_longer_windows(model: nn.Module, seq_len: int | None) -> None:
    """Raise ValueError for windows of more tokens than the model takes."""
    longest = longest_window(model)
    if seq_len is not None and longest is not None and seq_len > longest:
        raise ValueError(
            f"seq_len={seq_len}: this {type(model).__name__} takes at most {longest} tokens (max_position_embeddings "
            "of its config): give as many or fewer, or leave seq_len out"
        )


def refuse_unknown_tokens(model: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError for token ids that the model's embedding has no row for."""
    try:
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:
        return
    size = getattr(embedding, "num_embeddings", None)
    if isinstance(size, int) and tokens.numel() and (largest := int(tokens.max())) >= size:
        raise ValueError(
            f"the text holds the token id {largest}, and the vocabulary of this {type(model).__name__} has {size} "
            "tokens: give the tokenizer that belongs to the model"
        )


def default_batch_size(seq_len: int, device: torch.device) -> int:
    """Windows of a batch of text if the user names no number: on the CPU as many as have about CPU_BATCH tokens."""
    return max(1, CPU_BATCH // seq_len) if device.type == "cpu" else WINDOWS


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def writes_text(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not is_encoder_decoder(model)


def takes(module: nn.Module, name: str) -> bool:
    """Whether ``module.forward`` has an argument of this name."""
    try:
        return name in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled modules have no signature
        return False


# what a model may be given -> arguments of its forward that hold it
ARGUMENTS = {
    "image": ("pixel_values", "flattened_patches", "image_pixel_values"),
    "video": ("pixel_values_videos", "pixel_values"),
    "audio": ("input_features", "input_values", "audio_input_features", "audio_values"),
    "text": ("input_ids",),
}


def tower_of(model: nn.Module, name: str) -> str | None:
    """Path of the innermost model of transformers inside of ``model`` that holds the module ``name``; None: there is
    none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        if isinstance(model.get_submodule(path), PreTrainedModel):
            return path
    return None


def inputs_that_reach(model: nn.Module, path: str) -> str | None:
    """What has to be in the data of ``model`` for the model at ``path`` inside of it to run: "images (pixel_values)".

    None if it is not said by transformers, or if it is nothing but text.
    """
    kinds = getattr(model.get_submodule(path), "input_modalities", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not kinds or "text" in kinds:
        return None
    words = []
    for kind in kinds:
        arguments = [name for name in ARGUMENTS.get(kind, ()) if takes(model, name)]
        if arguments:
            words.append(f"{'audio' if kind == 'audio' else kind + 's'} ({arguments[0]})")
    return " or ".join(words) or None


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
    raise ValueError(f"config.json of {str(source)!r} names no model class that transformers knows: {names}")


def empty_model(source: str | Path, **options: Any) -> nn.Module:
    """The model of a folder or hub name, on the meta device: its configuration is read, its weights are not."""
    config = AutoConfig.from_pretrained(source, **options)
    architecture = model_class(config, source)
    with torch.device("meta"):
        if issubclass(architecture, PreTrainedModel):
            model = architecture(config)
        else:
            model = architecture.from_config(config, trust_remote_code=options.get("trust_remote_code"))
    model.tie_weights()  # older versions of transformers do not do so on the meta device
    return model


def unloaded(info: Mapping[str, Any]) -> list[str]:
    """One sentence for each tensor that transformers could not match when it loaded a folder.

    ``info`` is what ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    missing = [f"{name!r} of the model is not in the folder" for name in sorted(info["missing_keys"])]
    return missing + [f"{name!r} has no place in the model" for name in sorted(info["unexpected_keys"])]
