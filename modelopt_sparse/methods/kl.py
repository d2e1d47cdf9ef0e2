"""The KL divergence between what two models predict, row by row, with a gradient, and in little memory.

In float32 it holds a few copies of one piece of the rows, however many there are. The backward pass keeps the logits as
they came, and computes the softmax again.

Shapes: T rows (predictions), V their vocabulary or classes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# numbers of a piece: on the CPU so few that they stay in its cache, elsewhere so many that launching is no cost
ON_THE_CPU, ELSEWHERE = 2**18, 2**24


def kl_divergence(logits_p_TV: Tensor, logits_q_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(softmax(p / temperature) || softmax(q / temperature)) of each row ``[T]``, in nats and in float64.

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
        return torch.cat([_rows(p, q, temperature) for p, q in zip(_pieces(p_TV), _pieces(q_TV))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]  # torch leaves it open
        p_TV, q_TV = ctx.saved_tensors
        result_TV = torch.empty_like(q_TV)
        size = _rows_of_a_piece(q_TV)
        for p, q, gradient, result in zip(_pieces(p_TV), _pieces(q_TV), gradient_T.split(size), _pieces(result_TV)):
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


def _rows_of_a_piece(logits_TV: Tensor) -> int:
    size = ON_THE_CPU if logits_TV.device.type == "cpu" else ELSEWHERE
    return max(1, size // logits_TV.shape[-1])


def _pieces(logits_TV: Tensor) -> tuple[Tensor, ...]:
    return logits_TV.split(_rows_of_a_piece(logits_TV))
