"""Perplexity and KL divergence of language models, by the protocol of the pruning literature.

The text is tokenized as a whole, without special tokens, and cut into windows that do not overlap. Each window is fed
to the model alone; tokens that do not fill the last window are dropped. Perplexity is exp of the mean negative
log-likelihood of the windows' predictions.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.hf import default_batch_size, refuse_longer_windows, refuse_unknown_tokens
from modelopt_sparse.reports.progress import Progress


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns. ``print`` shows it; ``as_dict`` is for machines.

    perplexity: of the model.
    reference_perplexity: of the reference; None without one.
    kl: the mean of KL(reference || model) over all predictions, in nats; None without a reference.
    windows, seq_len: how many windows were evaluated, and how many tokens each has.
    """

    perplexity: float
    reference_perplexity: float | None
    kl: float | None
    windows: int
    seq_len: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Evaluation":
        """The evaluation whose fields ``data`` holds. Raises TypeError for other keys."""
        return cls(**data)

    def beside_dense(self) -> str:
        """One line for the report of a sparse model, whose reference is the dense one."""
        how = f"{self.windows} windows of {self.seq_len} tokens"
        if self.reference_perplexity is None:
            return f"held-out perplexity: sparse {self.perplexity:.3f}; {how}"
        return (
            f"held-out perplexity: dense {self.reference_perplexity:.3f}, sparse {self.perplexity:.3f}; "
            f"KL from dense {self.kl:.4f} nats per token; {how}"
        )

    def __str__(self) -> str:
        head = f"perplexity {self.perplexity:.3f}"
        if self.reference_perplexity is None:
            beside = " (of the dense model: not known, give it as reference)"
        else:
            beside = f" (reference {self.reference_perplexity:.3f}, KL from it {self.kl:.4f} nats per token)"
        plural = "" if self.windows == 1 else "s"
        return f"{head}{beside}, {self.windows} window{plural} of {self.seq_len} tokens"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tensor,
    *,
    seq_len: int,
    reference: nn.Module | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Evaluate a causal language model on a 1-D tensor of token ids. Logits are converted to float32.

    seq_len: tokens of a window.
    reference: the dense model: its perplexity is measured as well, and the KL divergence from it.
    batch_size: windows per forward; None: on the CPU as many as have about 2,048 tokens, on other devices 8.
    progress: True and False show and hide a progress bar; None shows it on a terminal or in a notebook, and elsewhere
      writes a line every minute.

    Raises ValueError for tokens that are not 1-D, for less than one window of text, for a seq_len below 2 or above what
    the model takes, for batch_size < 1, for a reference with another vocabulary, and for logits that are not finite.
    """
    _check(model, tokens, seq_len, batch_size)
    size = default_batch_size(seq_len, input_device(model)) if batch_size is None else batch_size
    windows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
    loss = reference_loss = kl = 0.0
    with in_eval_mode(model, *([] if reference is None else [reference])):
        batches = windows.split(size)
        with Progress("evaluate", "batch", len(batches), show=progress) as bar:
            for batch in batches:
                log_p = _log_probabilities(model, batch)
                loss -= _picked(log_p, batch)
                if reference is not None:
                    log_q = _log_probabilities(reference, batch).to(log_p.device)
                    if log_q.shape != log_p.shape:
                        raise ValueError(
                            f"the reference has a vocabulary of {log_q.shape[-1]}, the model one of {log_p.shape[-1]}: "
                            "give the dense model that it was made from"
                        )
                    reference_loss -= _picked(log_q, batch)
                    kl += float((log_q.exp() * (log_q - log_p)).sum(dtype=torch.float64))
                bar.update()
    for name, total in (("model", loss), ("reference", reference_loss)):
        if not math.isfinite(total):
            raise ValueError(f"the {name}'s logits hold NaN or inf on this text: run it in bfloat16 or float32")
    count = windows.shape[0] * (seq_len - 1)
    beside = None if reference is None else math.exp(reference_loss / count)
    return Evaluation(
        math.exp(loss / count), beside, None if reference is None else kl / count, windows.shape[0], seq_len
    )


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Within it models are in evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(model: nn.Module, tokens: Tensor, seq_len: int, batch_size: int | None) -> None:
    if tokens.dim() != 1:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: give one row of token ids, it is cut into windows")
    if seq_len < 2 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"seq_len={seq_len}, batch_size={batch_size}: at least 2 tokens predict one, in batches of 1")
    if len(tokens) < seq_len:
        raise ValueError(
            f"the text has {len(tokens)} tokens, less than one window of {seq_len}: give more, or a shorter seq_len"
        )
    refuse_longer_windows(model, seq_len)
    refuse_unknown_tokens(model, tokens)


def _log_probabilities(model: nn.Module, batch: Tensor) -> Tensor:
    """The log-probabilities of the next token, ``[B, S - 1, vocabulary]``, for token ids ``[B, S]``."""
    logits = model(input_ids=batch.to(input_device(model)), use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1)


def _picked(log_p: Tensor, batch: Tensor) -> float:
    """The sum of the log-probabilities of the tokens that really come next."""
    return float(log_p.gather(-1, batch[:, 1:, None].to(log_p.device)).sum(dtype=torch.float64))
