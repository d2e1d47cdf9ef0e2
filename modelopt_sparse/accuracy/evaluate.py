"""How far a model is from another one: `evaluate`, on text or on batches.

Perplexity follows the protocol of the pruning literature. The text is tokenized as a whole, without special tokens, and
cut into windows that do not overlap. The model sees one window at a time; tokens that do not fill the last window are
dropped. Perplexity is exp of the mean negative log-likelihood of the windows' predictions.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import batch_rows, load_calls
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.find import model_inside
from modelopt_sparse.model.hf import (
    default_batch_size,
    default_seq_len,
    is_encoder_decoder,
    redraws_text,
    refuse_longer_windows,
    refuse_unknown_tokens,
)
from modelopt_sparse.model.output import Divergence, Which, relative
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.evaluate import Evaluation
from modelopt_sparse.reports.report import Report
from modelopt_sparse.run import InMemory, Progress, Run, calibrating


def evaluate(
    model: nn.Module,
    tokens: Tensor | Iterable[Any],
    *,
    seq_len: int | None = None,
    reference: nn.Module | None = None,
    batch_size: int | None = None,
    output: Which | None = None,
    divergence: Divergence | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Evaluate a causal language model on a 1-D tensor of token ids, by its perplexity; or any model on batches, by how
    far what it puts out is from the reference's.

    tokens: the text, whose logits are converted to float32; or batches, as a ``data_loader`` of `sparsify` has them.
    seq_len: tokens of a window. None: 2048, or the model's maximum if that is less.
    reference: the dense model: its perplexity is measured as well, and the KL divergence from it.
    batch_size: windows per forward; None: on the CPU as many as have about 2,048 tokens, on other devices 8.
    output, divergence: what counts of the output, and how far two are apart, as for `sparsify`. With one of them
      windows of text are batches too, and no perplexity is measured.
    progress: True and False show and hide a progress bar; None shows it on a terminal or in a notebook, and elsewhere
      writes a line every minute.

    Raises ValueError for tokens that are not 1-D, for less than one window of text, for a seq_len below 2 or above what
    the model takes, for batch_size < 1, for a reference with an output of another shape, and for outputs that hold NaN.
    A model that rules a token out which comes next, or has collapsed, has an infinite perplexity.
    """
    inside = model_inside(model)
    causal = not (redraws_text(inside) or is_encoder_decoder(inside))  # others see the tokens that come next
    as_text = isinstance(tokens, Tensor) and output is None and divergence is None and causal
    if isinstance(tokens, Tensor):
        windows = _windows(model, tokens, default_seq_len(model) if seq_len is None else seq_len, batch_size)
        tokens, seq_len = [{"input_ids": batch} for batch in windows], windows[0].shape[1] if as_text else None
    if as_text:
        output, divergence = _of_next_tokens, "kl"
    config = SparsifyConfig(data_loader=tokens, output=output, divergence=divergence)
    run = Run(inside, Plan((), (), {}, ()), config, InMemory(), Processes(), Report())
    runs = [run] if reference is None else [run, replace(run, model=model_inside(reference))]
    calls, sums = load_calls(config, run.model, run.report.notes), []
    if reference is None and not as_text:
        raise ValueError("text of causal models aside, batches have no perplexity, but a distance: give reference=")
    bar = Progress("evaluate", "batch", len(calls), show=progress)
    with calibrating(run.model), calibrating(runs[-1].model), bar:
        for number, call in enumerate(calls):
            sides = [CalibrationData(side, calls) for side in runs]
            model_output, *dense = outputs = [side.counted(*side.output_of(number)) for side in sides]
            losses = [_loss(counted.values, call.kwargs["input_ids"]) for counted in outputs if as_text]
            sums.append([*losses, *(x for counted in dense for x in counted.sums(model_output))])
            bar.update()
    for note in run.report.notes:
        warnings.warn(note, stacklevel=2)
    added, rows = [sum(column) for column in zip(*sums)], sum(batch_rows(call.args, call.kwargs) for call in calls)
    losses, count = added[: len(runs) * as_text], rows * ((seq_len or 2) - 1)
    if any(map(math.isnan, added)):
        whose = "a model's" if not losses else "the model's" if math.isnan(losses[0]) else "the reference's"
        raise ValueError(f"{whose} output holds NaN or inf on these data: run it in bfloat16 or float32")
    perplexity, reference_perplexity = [*(_exp(loss / count) for loss in losses), None, None][:2]
    distance = None if reference is None else relative(added[len(losses) :])
    measure = run.report.settings.get("divergence") or "kl"
    return Evaluation(perplexity, reference_perplexity, distance, rows, seq_len, measure)


def _windows(model: nn.Module, tokens: Tensor, seq_len: int, batch_size: int | None) -> Sequence[Tensor]:
    """Batches of windows, ``[B, S]``. Raises ValueError for what makes none."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.dim() != 1:
        raise ValueError(f"tokens are {tokens.dtype} {list(tokens.shape)}: give one row of token ids, whole numbers")
    tokens = tokens.long()
    if seq_len < 2 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"seq_len={seq_len}, batch_size={batch_size}: at least 2 tokens predict one, in batches of 1")
    if len(tokens) < seq_len:
        raise ValueError(f"the text has {len(tokens)} tokens, less than one window of {seq_len}: give more text")
    refuse_longer_windows(model, seq_len)
    refuse_unknown_tokens(model, tokens)
    size = default_batch_size(seq_len, input_device(model)) if batch_size is None else batch_size
    return tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len).split(size)


def _of_next_tokens(output: Any) -> Tensor:
    """The logits of the next token for each but the last of a window, in float32. -inf rules a token out."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ValueError("perplexity is of causal language models: give reference= and divergence= to compare others")
    return logits[:, :-1].float()


def _loss(logits: Tensor, batch: Tensor) -> float:
    """The sum of the negative log-probabilities of the tokens that really come next."""
    log_p = logits.log_softmax(-1).gather(-1, batch[:, 1:].unsqueeze(-1).to(logits.device))
    return -float(log_p.sum(dtype=torch.float64))


def _exp(mean_loss: float) -> float:
    """exp, with infinity where a model has collapsed: Python's raises OverflowError."""
    return float(torch.tensor(mean_loss, dtype=torch.float64, device="cpu").exp())
