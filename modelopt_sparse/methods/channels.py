"""Which channels of a layer's input stay, from the sums of that input.

Shape letters: R rows (out features), C columns (input channels), K columns that go together.
"""

import torch
from torch import Tensor

DAMPING = 1e-3  # of the mean of the Gram matrix's diagonal
CHUNK, SHARE = 16, 256  # channels that go at a time: 16, or a 256th of all


def gram_scores(weight_RC: Tensor, gram_CC: Tensor, count: int, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """(indices of the ``count`` channels that stay, ascending; a score for each channel, larger = keep).

    Greedy structured OBS (Hassibi and Stork 1992, for whole columns; ZipLM, Kurtic et al. 2023): the channels go whose
    loss is least when all others make up for them, ``chunk`` at a time; then the others do so. The loss of
    channel j is ||w_j||^2 / [H^-1]_jj, at the time that it goes; of one that stays, at the end.
    """
    columns = weight_RC.shape[1]
    weight, hessian = weight_RC.double(), gram_CC.to(torch.float64, copy=True)
    hessian.diagonal().add_((DAMPING * hessian.diagonal().mean()).clamp_min(1e-30))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    del hessian  # as large as the inverse
    scores = torch.zeros(columns, dtype=torch.float64, device=weight.device)
    left = torch.arange(columns, device=weight.device)
    while True:
        losses = weight.square().sum(0) / inverse.diagonal()
        scores[left] = losses
        if len(left) <= count:
            return left, scores
        going = min(max(chunk, columns // SHARE), len(left) - count)
        order = losses.argsort(stable=True)
        gone_K, stay = order[:going], order[going:].sort().values
        factor = torch.linalg.cholesky(inverse[gone_K][:, gone_K])
        shares = torch.cholesky_solve(inverse[gone_K][:, stay], factor)  # [K, those that stay]
        weight = weight[:, stay] - weight[:, gone_K] @ shares
        inverse = inverse[stay][:, stay] - inverse[stay][:, gone_K] @ shares
        left = left[stay]


def largest(scores_C: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest scores, ascending; of equal ones the first."""
    return scores_C.argsort(descending=True, stable=True)[:count].sort().values
