"""What a model puts out: the tensor of its output that counts, and how far two of these are from each other.

Shapes: T rows (predictions of real tokens), V their vocabulary or classes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modelopt_sparse.checks import shown
from modelopt_sparse.model.devices import parts_of

Which = str | int | Callable[[Any], Tensor]
Divergence = str | Callable[[Tensor, Tensor], Tensor]


# `problem_type` of a config -> the divergence of its logits, which are no classes
OF_PROBLEMS = {"regression": "squared", "multi_label_classification": "bernoulli"}


class OutputError(ValueError):
    """Which tensor of a model's output counts is not known, or it does not go with the divergence."""


def name_of(function: Any) -> Any:
    """The name of a function, for reports; anything else as it is."""
    return getattr(function, "__name__", type(function).__name__) if callable(function) else function


def _is_usable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0 and not x.is_nested


@dataclass(frozen=True)
class Output:
    """The tensor that counts of what a model puts out in one call.

    values: of "kl" logits ``[..., V]``; of "bernoulli" logits of no and yes, ``[..., 2]``; of others what there is,
      with a last axis of one.
    by: "kl", over the last axis; "squared", the squared error in parts of the variance of all numbers of the dense
      output; "bernoulli", the KL divergence of each number, a probability; or a function of (dense, sparse), both
      without padding, to a tensor whose mean counts.
    is_logits: whether they are the ``.logits`` of the output.
    token_mask: which of the call's tokens are real; None: all.
    """

    values: Tensor
    by: Divergence
    is_logits: bool
    token_mask: Tensor | None = None

    @classmethod
    def of(
        cls, output: Any, which: Which | None, by: Divergence | None, token_mask: Tensor | None, problem: str = ""
    ) -> "Output":
        """``which``, ``by``: the options output and divergence. ``problem``: the config's ``problem_type``. Raises
        OutputError where it cannot be told which tensor counts, or the divergence is not defined for it."""
        parts = {"": output} if isinstance(output, Tensor) else parts_of(output)
        numbers = {name: x for name, x in parts.items() if _is_usable(x)}
        logits = getattr(output, "logits", parts.get("logits"))
        counting = [logits] if _is_usable(logits) else [*numbers.values()]
        if which is not None:
            counting = [which(output) if callable(which) else {**dict(enumerate(parts.values())), **parts}.get(which)]
        values: Any = counting[0] if len(counting) == 1 else None
        if not _is_usable(values):
            holds = ", ".join(f"{name!r} {list(x.shape)}" for name, x in numbers.items()) or "no tensor of numbers"
            form = f"a {type(output).__name__} with no {'logits' if which is None else shown(name_of(which))}"
            raise OutputError(f"the output is {form} but {holds}: give output=, a name, an index, or a function of it")
        is_logits, classes = values is logits, values.dim() > 1 and values.shape[-1] > 1
        by = by or (OF_PROBLEMS.get(problem, "kl") if is_logits and classes and values.dim() < 4 else "squared")
        if by == "kl" and not classes:
            raise OutputError(f"divergence='kl' is of logits [..., classes], not of {list(values.shape)}: give another")
        if by == "bernoulli" and not is_logits:
            if ((values < 0) | (values > 1)).any():
                raise OutputError("divergence='bernoulli' is of numbers in [0, 1]: let output= take the sigmoid")
            values = values.float().logit(torch.finfo(torch.float32).eps)  # 0 and 1 have none that is finite
        if by != "kl":
            values = torch.stack([torch.zeros_like(values), values], -1) if by == "bernoulli" else values.unsqueeze(-1)
        return cls(values, by, is_logits, token_mask)

    def _real(self, x: Tensor) -> Tensor:
        """Drop padding from x, whose first axes are those of the values. There is a value for each token where there
        are more than two axes, or as many rows as tokens: ``[batch, hidden]`` are samples, whatever the sizes."""
        mask, axes = self.token_mask, self.values.dim() - (self.by != "kl")
        rows = x.flatten(0, 1) if mask is not None and axes > 2 and mask.shape == x.shape[:2] else x
        return rows[mask.flatten().to(x.device, torch.bool)] if mask is not None and len(rows) == mask.numel() else x

    def apart(self, sparse: "Output") -> Tensor:
        """Distance of ``sparse`` from this dense output, for each row ``[T]``; of "squared" the square of each number,
        not yet in parts of the variance. The gradient is that of ``sparse``."""
        p, q = self._real(self.values).to(sparse.values.device), sparse._real(sparse.values)
        if p.shape != q.shape:
            sizes = f"{list(self.values.shape)}, and the other's is {list(sparse.values.shape)}"
            raise OutputError(f"the output of the reference is {sizes}: give the dense model that it was made from")
        if callable(self.by):
            return torch.as_tensor(self.by(p.squeeze(-1), q.squeeze(-1))).flatten()
        if self.by == "squared":
            return (q.double() - p.double()).square().flatten()
        return kl_divergence(p.flatten(0, -2), q.flatten(0, -2))

    def sums(self, sparse: "Output") -> list[float]:
        """Sums of how far ``sparse`` is, to be added up over batches: see `relative`."""
        rows = self.apart(sparse)
        return [float(rows.sum(dtype=torch.float64)), *self.moments(len(rows))]

    def moments(self, rows: int) -> list[float]:
        """Sums that divergences are relative to: [rows], or of "squared" [squares, sum, number] of the values."""
        if self.by != "squared":
            return [float(rows)]
        wide = self._real(self.values.detach()).double()
        return [float(wide.square().sum()), float(wide.sum()), float(wide.numel())]

    def drawn_loss(self, seed: int, first: int = 0) -> Tensor:
        """A loss of each prediction or number of real tokens. Of its gradients g, d^T E[g g^T] d / 2 is what a small
        change d costs: -log p(y), with y drawn from the predictions; of all but classes the number times a random sign
        and sqrt(2) (Gauss-Newton). ``first``: the row of the batch that these values begin with."""
        shape, generator = self.values.shape[:-1], torch.Generator().manual_seed(seed)
        count = math.prod(shape)
        before = first * count // max(len(self.values), 1)
        uniforms = torch.rand(before + count, generator=generator, dtype=torch.float64, device="cpu")
        uniforms = self._real(uniforms[before:].view(shape)).flatten()
        rows = self._real(self.values).flatten(0, -2)  # padding may hold NaN
        uniforms = uniforms.to(rows.device)
        if rows.shape[-1] == 1:
            return rows[:, 0].float() * torch.where(uniforms < 0.5, -(2**0.5), 2**0.5).float()
        return nn.functional.cross_entropy(rows.float(), drawn(rows.detach(), uniforms), reduction="none")


def relative(sums: Sequence[float]) -> float:
    """The divergence that added-up `Output.sums` give."""
    return sums[0] / max(size_of(sums[1:]), torch.finfo(torch.float32).tiny)


def size_of(moments: Sequence[float]) -> float:
    """The number that divergences are relative to: rows, or the sum of squared deviations from the mean."""
    size, *rest = moments
    return max(size - rest[0] ** 2 / max(rest[1], 1), 0.0) if rest else size


def drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row of logits [n, vocabulary], by inverting the cumulative distribution at uniforms [n]."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    if not torch.isfinite(cumulative).all():
        raise ValueError("the dense model's logits are not finite, so that it cannot write text: repair the checkpoint")
    chosen = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


# KL divergence --------------------------------------------------------------------------------------------------------


# numbers of a piece: on the CPU so few that they stay in its cache, elsewhere so many that launching is no cost
CPU_PIECE, DEVICE_PIECE = 2**18, 2**24


def kl_divergence(logits_p_TV: Tensor, logits_q_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(softmax(p / temperature) || softmax(q / temperature)) of each row ``[T]``, in nats and in float64.

    In float32 it holds a few copies of one piece of the rows, however many there are. The backward pass keeps the
    logits as they came, and computes the softmax again.

    Computed in float32, or in float64 if either of the two is; the terms of a row, which cancel each other to a large
    part, are summed up in float64. Where p is zero a term is zero. The gradient is that of q,
    (softmax(q / temperature) - softmax(p / temperature)) / temperature, in q's dtype; p counts as a constant. A row
    whose divergence is not used has a gradient of zero, whatever it holds.
    """
    assert logits_p_TV.shape == logits_q_TV.shape, (logits_p_TV.shape, logits_q_TV.shape)
    return _Divergence.apply(logits_p_TV, logits_q_TV, temperature)  # type: ignore[return-value]  # torch types it as Any or None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p_TV: Tensor, q_TV: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(p_TV, q_TV)
        ctx.temperature = temperature
        return torch.cat([_rows(p, q, temperature) for p, q in _pieces(p_TV, q_TV)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]  # torch leaves it open
        p_TV, q_TV = ctx.saved_tensors
        result_TV = torch.empty_like(q_TV)
        for p, q, gradient, result in _pieces(p_TV, q_TV, gradient_T, result_TV):
            log_p, log_q = _log_probabilities(p, q, ctx.temperature)
            scale = (gradient / ctx.temperature).to(log_q.dtype).unsqueeze(-1)
            slope = log_q.exp_().sub_(log_p.exp_()).mul_(scale)
            result.copy_(slope.masked_fill_(scale == 0, 0))
        return None, result_TV, None


def _rows(p: Tensor, q: Tensor, temperature: float) -> Tensor:
    log_p, log_q = _log_probabilities(p, q, temperature)
    probabilities = log_p.exp()
    terms = log_p.sub_(log_q).mul_(probabilities).masked_fill_(probabilities == 0, 0)
    return terms.sum(-1, dtype=torch.float64)


def _log_probabilities(p: Tensor, q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    work = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
    p, q = (x.to(work) if temperature == 1 else x.to(work) / temperature for x in (p, q))
    return p.log_softmax(-1), q.log_softmax(-1)


def _pieces(logits_TV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all of them, so many at a time that those of the logits make a piece."""
    size = CPU_PIECE if logits_TV.device.type == "cpu" else DEVICE_PIECE
    rows = max(1, size // logits_TV.shape[-1])
    return zip(*(x.split(rows) for x in (logits_TV, *others)))
