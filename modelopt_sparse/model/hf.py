"""What transformers knows of a model: its class, its configuration, the arguments of its forward."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.other import is_compiled_module  # in accelerate.utils itself only since 1.6
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from modelopt_sparse.distributed import is_sharded

# hf -------------------------------------------------------------------------------------------------------------------


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


# quantization ---------------------------------------------------------------------------------------------------------
# Quantized models: how a config says that a model is quantized, and which parameters hold codes, not weights.


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


# wrappers -------------------------------------------------------------------------------------------------------------
# Wrappers around a model: that of torch.compile, DataParallel and DistributedDataParallel.
#
# They put ``_orig_mod.`` or ``module.`` before every name, and hide the model's class and configuration.


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers. It has the same Parameters, and names without the wrappers' prefixes."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def refuse_wrapped_parts(model: nn.Module, done: str) -> None:
    """Raise ValueError if a part of an unwrapped model has a wrapper of its own, whose prefix would stand in the middle
    of names. ``done`` says in the message what cannot be done to the model: "pruned"."""
    for name, module in model.named_modules():
        if _inside(module) is not None:
            how = "_orig_mod" if is_compiled_module(module) else "module"
            raise ValueError(
                f"{name!r} of this {type(model).__name__} is wrapped by {type(module).__name__}, which changes the "
                f"names of its weights, so that the model cannot be {done}: put {name}.{how} in its place and wrap it "
                "again afterwards, or compile it in place with its method compile()"
            )


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """If the model is compiled, or a part of it, in place or not, nothing is while this context lasts.

    Hooks and sparse classes that come and go would have it compiled again each time.
    """
    # what nn.Module.compile() sets has no public name
    compiled = any(is_compiled_module(m) or getattr(m, "_compiled_call_impl", None) for m in model.modules())
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None if it is none."""
    if is_compiled_module(module):
        return module.get_submodule("_orig_mod")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return None


# checks ---------------------------------------------------------------------------------------------------------------
# What is refused before anything is done to it: models that are none, or that cannot be looked into.


def refuse_no_model(model: object) -> None:
    """Raise TypeError for what is no ``nn.Module`` at all, and ValueError for modules that cannot be worked on:
    ScriptModules, whose code is fixed, and lazy ones, whose weights have no shape yet."""
    if isinstance(model, str):
        raise TypeError(
            f"the model is a string, {model!r}: give the model itself, such as "
            f"AutoModelForCausalLM.from_pretrained({model!r}); sparsify_checkpoint takes names and folders"
        )
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"the model is {kind}: give an instance of torch.nn.Module")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a ScriptModule, whose weights and code are fixed: sparsify the module that it was made "
                "from, and script or trace it afterwards"
            )
        lazy = [key for key, parameter in module.named_parameters(recurse=False) if is_lazy(parameter)]
        if lazy:
            raise ValueError(
                f"{where} is a {type(module).__name__} whose {lazy[0]!r} has no shape yet: run the model once on an "
                "input, then sparsify it"
            )


# tuners ---------------------------------------------------------------------------------------------------------------
# Adapters of fine-tuning (LoRA and its kin) beside a model's own weights: told by PEFT's types, and by name.


REASON = "adapter beside the layer (PEFT, LoRA)"


def tuner_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that hold weights of adapters: what one of PEFT's layers holds beside the layer that it wraps, and
    whatever is called ``lora_...``, as other libraries do.

    PEFT is not imported here: if nobody has imported it, the model has none of its layers.
    """
    utils = sys.modules.get("peft.tuners.tuners_utils")
    wrapper = getattr(utils, "BaseTunerLayer", None)
    tuners: set[nn.Module] = set()
    for module in model.modules():
        of_peft = wrapper is not None and isinstance(module, wrapper)
        for name, child in module.named_children():
            if name.lower().startswith("lora_") or (of_peft and name != "base_layer"):
                tuners.update(child.modules())
    return tuners


# reparametrized -------------------------------------------------------------------------------------------------------
# Weights that torch computes from other parameters in each forward: what they are called, and how to end that.


# class of a parametrization -> what people call it
KNOWN = {"_WeightNorm": "weight norm", "_SpectralNorm": "spectral norm", "_Orthogonal": "an orthogonal parametrization"}


def reparametrization(module: nn.Module, param: str) -> str | None:
    """Why a parameter is no weight of its own, and what to call first; None for any other parameter."""
    if isinstance(module, ParametrizationList):
        classes = [type(parametrization).__name__ for parametrization in module]
        names = " and ".join(KNOWN.get(name, f"the parametrization {name}") for name in classes)
        return f"its weight is computed by {names}: call torch.nn.utils.parametrize.remove_parametrizations first"
    buffers = dict(module.named_buffers(recurse=False))
    whole, _, part = param.rpartition("_")
    if part == "orig" and f"{whole}_mask" in buffers:
        return f"pruned by torch.nn.utils.prune: call torch.nn.utils.prune.remove(module, {whole!r}) first"
    if part == "orig" and f"{whole}_u" in buffers:
        return "its weight is computed by spectral norm: call torch.nn.utils.remove_spectral_norm first"
    if part in ("g", "v") and {f"{whole}_g", f"{whole}_v"} <= dict(module.named_parameters(recurse=False)).keys():
        return "its weight is computed by weight norm: call torch.nn.utils.remove_weight_norm first"
    return None
