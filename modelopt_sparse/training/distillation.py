"""Distillation: a model learns to predict what its teacher predicts, by a hook that replaces the model's own loss.

Shapes: B batch, S sequence, V vocabulary or classes, H hidden. A prediction is a row of logits: one for each token of a
language model, one for each sample of a classifier.
"""

import inspect
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from modelopt_sparse.accuracy.distill import OF_THE_LOSS
from modelopt_sparse.checks import check_number
from modelopt_sparse.distributed import is_sharded
from modelopt_sparse.model.devices import flat_tensors, has_hook, in_eval_mode, unwrapped
from modelopt_sparse.model.hf import is_encoder_decoder, takes
from modelopt_sparse.model.output import kl_divergence

IGNORED = -100  # transformers' label of what is not to be predicted


class Distillation(ExitStack):
    """What `distill` returns: `remove` ends it, and so does leaving a ``with`` block that it was given to."""

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.close()


@dataclass(frozen=True)
class _Weights:
    """The options of `distill`."""

    kl: float
    task: float
    square_head: float
    temperature: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, "(0, inf)" if name == "temperature" else "[0, inf)")
        if not (self.kl or self.task or self.square_head):
            raise ValueError("kl, task and square_head are all 0, so that there is no loss: give one of them a weight")


def distill(
    model: nn.Module,
    teacher: nn.Module,
    *,
    kl: float = 1.0,
    task: float = 0.0,
    square_head: float = 0.0,
    temperature: float = 1.0,
) -> Distillation:
    """From now on ``output.loss`` of ``model`` says, in training mode, how far the model is from its teacher.

    It is ``kl`` x KL(teacher || model) + ``task`` x the model's own loss + ``square_head`` x SquareHead. So any loop
    that calls ``loss.backward()`` distills: Hugging Face's Trainer, accelerate, DDP, one of your own. In eval mode
    nothing changes. Returns a handle; ``handle.remove()`` ends it.

    model: gives logits by name, [B, S, V] or [B, V]: a model of transformers, or one whose output is a dict.
    teacher: the dense model, or a larger one with the same vocabulary, on the device where the model runs. It is called
      with the model's arguments but labels, without gradients and in eval mode, and is moved nowhere.
    kl: weight of the KL divergence in nats, the mean over the predictions that count, times ``temperature`` ** 2, which
      keeps gradients as large as at 1 (Hinton et al. 2015, arXiv 1503.02531).
    task: weight of the model's own loss, which takes labels.
    square_head: weight of SquareHead (arXiv 2310.06927), the mean over layers of MSE(model, teacher) / MSE(teacher, 0)
      of hidden states, on tokens that are no padding. Outputs hold hidden states then.
    temperature: logits are divided by it.

    Predictions count whose label is not -100. Labels stand one to the right of their predictions where transformers
    shifts them, and in models that are none of its; ``shift_labels`` are taken as they are. Without labels all tokens
    count but padding (attention_mask [B, S]). Sums are divided by ``num_items_in_batch`` if the model is called with
    it, as Trainer does: then the batches of a step have together the gradient of one big batch. (SquareHead's quotient
    is each batch's own, weighted by its share of the predictions.)

    Raises ValueError for weights that are negative or all 0, a model that is distilled already, and a teacher that
    shares modules or trained weights with the model; in the first call in training mode for a teacher on another
    device, with another vocabulary or other hidden states, and a model that has no logits, or none that can be
    compared.
    """
    weights = _Weights(kl, task, square_head, temperature)
    student = unwrapped(model)
    _refuse_parts_of_the_model(student, teacher)
    end = Distillation()
    if square_head:
        end.enter_context(student.register_forward_pre_hook(_ask_for_hidden_states, with_kwargs=True))

    # a closure: a deepcopy of the model copies what is bound to a partial or to a method, which would be the teacher
    def distilled(*x: Any) -> Any:
        return _distilled(weights, teacher, *x)

    if distilled.__code__ in [getattr(hook, "__code__", None) for hook in student._forward_hooks.values()]:
        raise ValueError("the model is distilled already: remove() the handle of the call before")
    end.enter_context(student.register_forward_hook(distilled, with_kwargs=True))
    return end


def _ask_for_hidden_states(student: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    return (args, {**kwargs, "output_hidden_states": True}) if student.training else None


def _distilled(
    weights: _Weights, teacher: nn.Module, student: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> Any:
    """The student's output with another loss; None in eval mode: its own."""
    if not student.training:
        return None
    logits = _logits(output, "model")
    positional = inspect.signature(student.forward).bind_partial(*args)
    named = {**positional.arguments, **kwargs}
    answer = _ask(teacher, student, positional, kwargs)
    loss = _loss(weights, student, named, output, logits, answer)
    _tell_if_unused(loss, logits)
    # the loss first, as transformers has it, whose outputs are indexed by number as well
    return type(output)(**{"loss": loss, **{name: value for name, value in output.items() if name != "loss"}})


def _tell_if_unused(loss: Tensor, logits: Tensor) -> None:
    """Warn if the model is trained by its logits, and not by this loss."""
    if loss.requires_grad and logits.requires_grad and not torch.compiler.is_compiling():
        used: list[Tensor] = []
        loss.register_hook(used.append)
        causes = "as Trainer does with label_smoothing_factor or compute_loss_func"
        text = f"distill: the model is trained by its logits, {causes}, and not by output.loss: leave them out"
        logits.register_hook(lambda _: None if used else warnings.warn(text, stacklevel=2))


# the teacher ----------------------------------------------------------------------------------------------------------


def _refuse_parts_of_the_model(student: nn.Module, teacher: nn.Module) -> None:
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"the teacher is a {type(teacher).__name__}: give the model itself")
    teacher = unwrapped(teacher)
    parts = {*student.modules(), *(weight for weight in student.parameters() if weight.requires_grad)}
    for name, part in (*teacher.named_modules(), *teacher.named_parameters()):
        if part in parts:
            shared = name or type(part).__name__
            raise ValueError(f"{shared!r} of the teacher is the model's own: give a deepcopy of the model")


def _ask(teacher: nn.Module, student: nn.Module, positional: inspect.BoundArguments, kwargs: Mapping[str, Any]) -> Any:
    """The teacher's output for the arguments that the student was called with, without those of the loss."""
    left_out = {*OF_THE_LOSS, "use_cache"}  # nothing would read its cache
    if is_encoder_decoder(student):
        left_out.remove("labels")  # the decoder's inputs are made from them
    for name in left_out & positional.arguments.keys():
        del positional.arguments[name]
    args, by_name = positional.args, {**positional.kwargs, **kwargs}
    by_name = {name: x for name, x in by_name.items() if name not in left_out}
    if takes(teacher, "use_cache"):
        by_name["use_cache"] = False
    if any(isinstance(x, Cache) for x in (*args, *by_name.values())):
        raise ValueError("distill: the teacher cannot repeat a call with a cache: call model.eval() before generate")
    weight, inputs = next(teacher.parameters(), None), flat_tensors((args, by_name))
    moves_inputs = has_hook(teacher) or (weight is not None and is_sharded(weight))
    if weight is not None and inputs and not moves_inputs and weight.device != inputs[0].device:
        raise ValueError(f"distill: the teacher is on {weight.device}: move it to {inputs[0].device}, as the model is")
    with torch.no_grad(), in_eval_mode(teacher):
        return teacher(*args, **by_name)


# the loss -------------------------------------------------------------------------------------------------------------


def _loss(
    weights: _Weights, student: nn.Module, named: Mapping[str, Any], output: Any, logits: Tensor, answer: Any
) -> Tensor:
    """The loss that takes the place of the student's own. ``named``: the arguments that it was called with."""
    work = torch.promote_types(logits.dtype, torch.float32)
    loss = torch.zeros((), dtype=work, device=logits.device)
    counts = _counts(student, named, logits.shape[:-1]).to(logits.device)
    items, labels = named.get("num_items_in_batch"), named.get("labels")
    if items is not None and counts.dim() == 1 and isinstance(labels, Tensor):  # Trainer counts each label of a sample
        items = items * counts.numel() / labels.numel()
    count = counts.sum().clamp(min=1) if items is None else items  # at least 1: a batch may have nothing to predict
    if weights.kl:
        problem_type = getattr(getattr(student, "config", None), "problem_type", None)
        if logits.shape[-1] == 1 or problem_type in ("regression", "multi_label_classification"):
            raise ValueError(f"distill: logits {list(logits.shape)} are no classes ({problem_type=}): set kl=0")
        taught = _logits(answer, "teacher").to(logits.device)
        if logits.shape != taught.shape:
            sizes = f"the teacher's logits are {list(taught.shape)}, the model's {list(logits.shape)}"
            raise ValueError(f"distill: {sizes}: give a teacher with the same vocabulary")
        rows = kl_divergence(taught.flatten(0, -2), logits.flatten(0, -2), temperature=weights.temperature)
        total = rows.where(counts.flatten(), 0).sum()
        loss = loss + weights.kl * weights.temperature**2 * (total / count).to(work)
    if weights.task:
        if (task_loss := output.get("loss")) is None:
            raise ValueError(f"distill(task={weights.task}): the model gives no loss of its own: give labels")
        loss = loss + weights.task * task_loss
    if weights.square_head:
        fraction = 1.0 if items is None else counts.sum() / items
        square_head = _square_head(_hidden_states(output, "model"), _hidden_states(answer, "teacher"), student, named)
        loss = loss + weights.square_head * fraction * square_head.to(loss.device, work)
    return loss


def _logits(output: Any, side: str) -> Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise ValueError(f"distill: the {side} gives no logits: use one with a head, without return_dict=False")
    return logits


def _counts(student: nn.Module, named: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """The predictions that count: bool, of the logits' shape without its last dimension."""
    name = next((name for name in ("shift_labels", "labels") if isinstance(named.get(name), Tensor)), None)
    if len(shape) == 1:  # samples: labels may have any shape and meaning, and padding is inside of them
        if name is None or named[name].is_floating_point() or named[name].numel() != shape[0]:
            return torch.ones(shape, dtype=torch.bool, device="cpu")
        return named[name].flatten() != IGNORED
    if name is None:
        return _token_mask(student, named, shape)
    counts = named[name] != IGNORED
    # transformers goes by ``loss_type``, the end of a class name; what has none is a causal language model
    kinds = [str(getattr(student, "loss_type", None)), *(cls.__name__ for cls in type(student).__mro__)]
    loss = next((LOSS_MAPPING[key] for kind in kinds for key in LOSS_MAPPING if kind.endswith(key)), ForCausalLMLoss)
    if name == "labels" and loss is ForCausalLMLoss and not is_encoder_decoder(student):  # one to the right
        counts = torch.cat([counts[..., 1:], torch.zeros_like(counts[..., :1])], -1)
    if counts.shape != shape:
        raise ValueError(f"distill: {name} {list(counts.shape)} does not fit {list(shape)} predictions")
    return counts


def _token_mask(student: nn.Module, named: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """The tokens ``[B, S]`` that are no padding, as bool."""
    name = "decoder_attention_mask" if is_encoder_decoder(student) else "attention_mask"
    mask = named.get(name)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device="cpu")
    if not isinstance(mask, Tensor) or mask.shape != shape:
        form = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"distill: {name} {form} does not say which of {list(shape)} tokens are padding")
    return mask != 0


# SquareHead -----------------------------------------------------------------------------------------------------------


def _hidden_states(output: Any, side: str) -> tuple[Tensor, ...]:
    states = output.get("hidden_states") if isinstance(output, Mapping) else None
    if not states:
        raise ValueError(f"distill: the {side} gives no hidden_states: leave square_head out")
    return tuple(states)[1:] or tuple(states)  # the first are the embeddings, which are no layer


def _square_head(
    states: tuple[Tensor, ...], taught: tuple[Tensor, ...], student: nn.Module, named: Mapping[str, Any]
) -> Tensor:
    """The mean over layers of MSE(h, t) / MSE(t, 0), of hidden states ``[B, S, H]`` and tokens that are no padding."""
    if [x.shape for x in states] != [x.shape for x in taught]:
        sizes = [f"{len(side)} hidden states {list(side[0].shape)}" for side in (states, taught)]
        raise ValueError(f"distill: the model has {sizes[0]}, the teacher {sizes[1]}: leave square_head out")
    errors = []
    for h, t in zip(states, taught):
        real = _token_mask(student, named, h.shape[:-1]).to(h.device)
        work = torch.promote_types(h.dtype, torch.float32)
        wanted = t.to(h.device, work)
        error, scale = (x.square().sum(-1).where(real, 0).sum() for x in (h.to(work) - wanted, wanted))
        errors.append((error / scale).to(states[-1].device))
    return torch.stack(errors).mean()
