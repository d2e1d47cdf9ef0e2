"""Calibration data in every form that users have it, as calls of the model; and which of its tokens are padding."""

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from modelopt_sparse.plan.config import SparsifyConfig


@dataclass(frozen=True)
class Call:
    """One call of the model: ``model(*args, **kwargs)``."""

    args: tuple
    kwargs: dict[str, Any]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with everything in nested tuples, lists and mappings replaced."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, item) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, item) for key, item in value.items()}
        return type(value)(**mapped) if isinstance(value, ModelOutput) else mapped
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists and mappings replaced; anything else stays what it is."""
    return map_leaves(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def version(x: Tensor) -> int:
    """A number that rises whenever something writes to ``x``; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def load_calls(config: SparsifyConfig, model: nn.Module) -> list[Call]:
    """The calls that data_loader or text stand for, on the CPU or wherever the user's tensors are."""
    if config.data is not None:
        batches: Iterable[Any] = text_windows(config, model)
    else:
        assert config.data_loader is not None
        batches = config.data_loader
    calls = []
    for batch in batches:
        calls.append(_as_call(batch if config.collect_func is None else config.collect_func(batch), config))
        if len(calls) == config.max_batches:
            break
    if not calls:
        raise ValueError(
            "data_loader gives no batch: it is empty, or a generator that has already been used up; "
            "give a list or a DataLoader, or make the generator anew"
        )
    return calls


def _as_call(batch: Any, config: SparsifyConfig) -> Call:
    """ModelOpt's convention: a mapping is keywords, a tuple is positional with a last mapping as keywords.

    Without ``collect_func`` a loader's (input, label) tuple or list gives its first element.
    """
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    if isinstance(batch, Tensor):
        return Call((batch,), {})
    if isinstance(batch, (tuple, list)) and batch:
        if isinstance(batch[-1], Mapping):
            return Call(tuple(batch[:-1]), dict(batch[-1]))
        if config.collect_func is not None and isinstance(batch, tuple):
            return Call(tuple(batch), {})
        if config.collect_func is None:
            return _as_call(batch[0], config)
    raise TypeError(
        f"a calibration batch is a {type(batch).__name__}: give tensors, tuples or mappings, "
        "or a collect_func that turns a batch into one of them"
    )


def text_windows(config: SparsifyConfig, model: nn.Module) -> list[dict[str, Tensor]]:
    """Text -> batches of ``num_samples`` windows of ``seq_len`` tokens, drawn without replacement by ``seed``.

    The text is tokenized without special tokens, documents are joined by the end-of-text token, and cut into
    non-overlapping windows, so that no batch needs padding.
    """
    assert config.data is not None
    tokens = tokenize(config.tokenizer, read_documents(config.data))
    seq_len = config.seq_len or default_seq_len(model)
    windows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len) if len(tokens) >= seq_len else tokens[None]
    if tokens.numel() == 0:
        raise ValueError("data holds no text: calibration needs at least one token")
    if len(windows) < config.num_samples:
        warnings.warn(
            f"the text gives {len(windows)} windows of {windows.shape[1]} tokens, not the {config.num_samples} asked "
            "for; all are used",
            stacklevel=2,
        )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(config.seed))[: config.num_samples]
    chosen = windows[order.sort().values]
    return [{"input_ids": batch} for batch in chosen.split(config.batch_size)]


def default_seq_len(model: nn.Module) -> int:
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(2048, longest) if isinstance(longest, int) and longest > 0 else 2048


def read_documents(data: str | Path | Sequence[str]) -> list[str]:
    """A string is one document, a list is its documents, a Path is a .txt file or a .jsonl file with a "text" key."""
    if isinstance(data, Path):
        if not data.is_file():
            raise ValueError(f"data {str(data)!r} is not a file: give a .txt or .jsonl file, or the text itself")
        if data.suffix == ".jsonl":
            lines = enumerate(data.read_text(encoding="utf-8").splitlines(), start=1)
            return [_text_of(line, f"{str(data)!r} line {number}") for number, line in lines if line.strip()]
        return [data.read_text(encoding="utf-8")]
    if isinstance(data, str):
        if data.endswith((".txt", ".jsonl")) and "\n" not in data:
            raise ValueError(f"data={data!r} looks like a file: give Path({data!r}), a plain string is the text itself")
        return [data]
    documents = list(data)
    if any(not isinstance(document, str) for document in documents):
        raise TypeError("data is text: a string, a list of strings or a Path; token tensors go into data_loader")
    return documents


def _text_of(line: str, where: str) -> str:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{where}: every line must be a JSON object with a "text" key') from None


def tokenize(tokenizer: Any, documents: Sequence[str]) -> Tensor:
    """Documents -> one 1-D tensor of token ids, no special tokens added, end-of-text between documents."""
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in documents:
        # verbose=False: a whole file is longer than any model takes, and is cut into windows afterwards
        ids += (between if ids else []) + tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens of one call are real (True), by the side of the model that they belong to; None = all of them.

    A model that is no encoder-decoder has the same mask on both of these sides; ``image`` is for the image encoder
    beside or inside of a text model, which text padding says nothing about.
    """

    encoder: Tensor | None = None
    decoder: Tensor | None = None
    image: Tensor | None = None


class PaddingError(ValueError):
    """Which rows are padding cannot be told."""


def token_masks(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], *, count_padding: bool) -> TokenMasks:
    """The padding of one call of ``model``, from attention_mask and its relatives."""
    if count_padding:
        return TokenMasks()
    named = _by_name(model, args, kwargs)
    own = _token_mask("attention_mask", named.get("attention_mask"))
    if own is None:
        own = _key_padding(model, named)
    image = None
    for name in ("pixel_attention_mask", "pixel_mask"):
        if isinstance(value := named.get(name), Tensor) and not value.all():
            image = value.flatten(1) != 0  # of pixels: it fits no layer's rows, which is an error
    if not is_encoder_decoder(model):
        return TokenMasks(own, own, image)
    decoder = _token_mask("decoder_attention_mask", named.get("decoder_attention_mask"))
    labels = named.get("labels")
    if named.get("decoder_attention_mask") is None and isinstance(labels, Tensor) and labels.dim() == 2:
        decoder = _any_padding(labels != -100)
    return TokenMasks(own, decoder, image)


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


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


def takes(module: nn.Module, name: str) -> bool:
    """Whether ``module.forward`` has an argument of this name."""
    try:
        return name in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled modules have no signature
        return False


def _token_mask(name: str, mask: Any) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        what = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise PaddingError(
            f"{name} {what}, which does not say which tokens are padding: give it as a tensor [batch, sequence], or "
            "set count_padding=True if there is none"
        )
    return _any_padding(mask != 0)


def _key_padding(model: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """torch's own convention: ``*key_padding_mask`` [batch, sequence], True (or a number below zero) = padding."""
    found = {
        name: ~value if value.dtype == torch.bool else value == 0
        for name, value in named.items()
        if name.endswith("key_padding_mask") and isinstance(value, Tensor)
    }
    if not found:
        return None
    first, *others = found.values()
    if any(not torch.equal(first, other) for other in others):
        raise PaddingError(
            f"{' and '.join(found)} differ, and which layer's tokens each of them describes cannot be told: give "
            "batches without padding, or set count_padding=True to let padding into the statistics"
        )
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    if attentions and not any(module.batch_first for module in attentions):
        first = first.mT  # the model's tokens are [sequence, batch]
    return _any_padding(first)


def _any_padding(real: Tensor) -> Tensor | None:
    return None if bool(real.all()) else real
