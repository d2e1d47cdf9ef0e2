"""Calibration data in every form that users have it, as calls of the model; and which of its tokens are padding."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.sources import documents_of, processed, prompt_of, tokens_of
from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.hf import default_seq_len, refuse_unknown_tokens
from modelopt_sparse.model.nested import flat_tensors, map_tensors
from modelopt_sparse.plan.config import STEP_TOKENS, SparsifyConfig

IMAGES = 8  # of a batch, if nobody says how many
HELD_BACK = 16  # one of so many calibration batches, at least one, only judges


@dataclass(frozen=True)
class Call:
    """One call of the model: ``model(*args, **kwargs)``."""

    args: tuple
    kwargs: dict[str, Any]


def judging(batches: int) -> int:
    """How many of the user's calibration batches, the last ones, only judge where blocks are tuned."""
    return max(1, batches // HELD_BACK)


def load_calls(config: SparsifyConfig, model: nn.Module) -> list[Call]:
    """The calls that data_loader or text stand for, on the CPU or wherever the user's tensors are. Where something is
    tuned, a batch of a data_loader is cut into steps."""
    if config.processor is not None:
        size = config.batch_size or IMAGES
        batches: Iterable[Any] = processed(config.data, config.processor, config.num_samples, size, config.seed)
    elif config.data is not None:
        batches = text_windows(config, model)
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
    cut = config.tunes and config.data is None
    return [step for call in calls for step in _steps(call)] if cut else calls


def _steps(call: Call) -> list[Call]:
    """A batch of nothing but tokens, cut into ones of about STEP_TOKENS; any other as it is, for which of its tensors
    have a row for each sample is not known."""
    tensors = flat_tensors((call.args, call.kwargs))
    if not tensors or any(x.dim() != 2 or x.is_floating_point() or x.shape != tensors[0].shape for x in tensors):
        return [call]
    rows, length = tensors[0].shape
    size = max(1, STEP_TOKENS // max(length, 1))
    cuts = [slice(begin, begin + size) for begin in range(0, rows, size)] or [slice(None)]
    return [Call(*map_tensors(lambda x, rows=cut: x[rows], (call.args, call.kwargs))) for cut in cuts]


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

    Windows do not overlap, and no batch needs padding. What the tokens are: see `tokens_of`.
    """
    assert config.data is not None
    tokens = tokens_of(config.data, config.tokenizer)
    seq_len = config.seq_len or default_seq_len(model)
    windows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len) if len(tokens) >= seq_len else tokens[None]
    if tokens.numel() == 0:
        raise ValueError("data holds no text: calibration needs at least one token")
    refuse_unknown_tokens(model, tokens)
    if len(windows) < config.num_samples:
        warnings.warn(
            f"the text gives {len(windows)} windows of {windows.shape[1]} tokens, not the {config.num_samples} asked "
            "for; all are used",
            stacklevel=2,
        )
    chosen = windows[_drawn(len(windows), config)]
    size = config.windows_per_batch(len(chosen), chosen.shape[1], config.device or input_device(model))
    return [{"input_ids": batch} for batch in chosen.split(size)]


def _drawn(windows: int, config: SparsifyConfig) -> Tensor:
    """Which of so many windows are drawn, in their order."""
    return (
        torch.randperm(windows, generator=torch.Generator().manual_seed(config.seed))[: config.num_samples]
        .sort()
        .values
    )


def chat_prompts(config: SparsifyConfig, model: nn.Module, windows: int, judges: int) -> list[Tensor]:
    """The user's chats up to the model's last turn, as tokens [n], but for those that reach into the last ``judges`` of
    the ``windows`` that they gave; none if the data holds other text."""
    documents = documents_of(config.data)
    if any(isinstance(document, str) for document in documents):
        return []
    sizes = [len(tokens_of([chat], config.tokenizer)) for chat in documents]
    seq_len = config.seq_len or default_seq_len(model)
    drawn = _drawn(max(1, sum(sizes) // seq_len), config)[:windows]
    limit = int(drawn[-judges]) * seq_len if judges else sum(sizes)
    before = [chat for chat, end in zip(documents, accumulate(sizes)) if end <= limit] or documents
    prompts = [prompt_of(chat, config.tokenizer) for chat in before]
    return [prompt for prompt in prompts if prompt is not None]


def take_in(digest: "hashlib._Hash", args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Add every tensor of one call of the model to the digest of the calibration data."""
    for x in flat_tensors((args, kwargs)):
        digest.update(f"{x.dtype}{list(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
