"""Which tokens of a call are padding."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modelopt_sparse.model.hf import is_encoder_decoder, takes


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens of one call are real (True), by the side of the model that they belong to; None = all of them.

    A model that is no encoder-decoder has the same mask on both of these sides; ``image`` is for the image encoder
    beside or inside of a text model, which text padding says nothing about.
    """

    encoder: Tensor | None = None
    decoder: Tensor | None = None
    image: Tensor | None = None


INSTEAD = "give batches without padding, or set count_padding=True to let padding into the statistics"


class PaddingError(ValueError):
    """Which rows are padding cannot be told."""


def token_masks(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> TokenMasks:
    """The padding of one call of ``model``, from attention_mask and its relatives."""
    named = _by_name(model, args, kwargs)
    own = _token_mask(named, "attention_mask")
    if own is None:
        own = _key_padding(model, named)
    image = None
    for name in ("pixel_attention_mask", "pixel_mask"):
        if isinstance(value := named.get(name), Tensor) and not value.all():
            image = value.flatten(1) != 0  # of pixels: it fits no layer's rows, which is an error
    if not is_encoder_decoder(model):
        return TokenMasks(own, own, image)
    decoder = _token_mask(named, "decoder_attention_mask")
    labels = named.get("labels")
    if named.get("decoder_attention_mask") is None and isinstance(labels, Tensor) and labels.dim() == 2:
        decoder = _any_padding(labels != -100)
    return TokenMasks(own, decoder, image)


def _by_name(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by the names that ``model.forward`` gives them."""
    try:
        signature = inspect.signature(model.forward)
        named = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # compiled, or the call itself will say what is wrong with it
        return dict(kwargs)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named


def _token_mask(named: Mapping[str, Any], name: str) -> Tensor | None:
    if (mask := named.get(name)) is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        what = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise PaddingError(f"{name} {what}: give it as a tensor [batch, sequence], or set count_padding=True")
    return _any_padding(mask != 0)


def _key_padding(model: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """torch's own convention: ``*key_padding_mask`` [batch, sequence], True (or a number below zero) = padding."""
    real = {
        name: ~value if value.dtype == torch.bool else value == 0
        for name, value in named.items()
        if name.endswith("key_padding_mask") and isinstance(value, Tensor)
    }
    if not real:
        return None
    first, *others = real.values()
    if any(not torch.equal(first, other) for other in others):
        raise PaddingError(f"{' and '.join(real)} differ, and whose tokens each describes cannot be told: {INSTEAD}")
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    if attentions and not any(module.batch_first for module in attentions):
        first = first.mT  # the model's tokens are [sequence, batch]
    return _any_padding(first)


def _any_padding(real: Tensor) -> Tensor | None:
    return None if bool(real.all()) else real


Side = Literal["encoder", "decoder", "image"]  # the fields of TokenMasks


def sides_of(model: nn.Module) -> dict[nn.Module, Side]:
    """Which modules belong to the encoder of an encoder-decoder model, or to an image encoder in a text model; all
    others to the decoder."""
    sides: dict[nn.Module, Side] = dict.fromkeys(model.modules(), "decoder")
    for module in model.modules() if takes(model, "input_ids") else ():
        if takes(module, "pixel_values") and not takes(module, "input_ids"):
            sides.update(dict.fromkeys(module.modules(), "image"))
    if is_encoder_decoder(model):
        sides.update(dict.fromkeys(model.get_encoder().modules(), "encoder"))  # type: ignore[operator] - not on nn.Module
    return sides
