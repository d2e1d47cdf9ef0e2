"""The slow, obvious version of what the package does fast: loops, sorts, fresh inverses, exact or float64 numbers."""

import itertools
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import torch
from torch import Tensor


def zeros_of(sparsity: float, size: int) -> int:
    """round-half-even(sparsity * size), with the sparsity as it is written in decimal."""
    return int((Decimal(str(sparsity)) * size).to_integral_value(ROUND_HALF_EVEN))


def nm_mask(score: Tensor, n: int, m: int) -> Tensor:
    """[R, C]: every one of the C(m, n) choices is tried for every group; the first one of the largest sum wins."""
    rows, columns = score.shape
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        for start in range(0, columns, m):
            group = [Fraction(value) for value in score[row, start : start + m].tolist()]
            choices = list(itertools.combinations(range(m), n))
            best = max(choices, key=lambda kept: sum(group[i] for i in kept))
            for i in best:
                mask[row, start + i] = True
    return mask


def keep_by_full_sort(score: Tensor, keep: int) -> Tensor:
    """1-D: sorted from the largest, of equal scores the lower index first; the first ``keep`` are kept."""
    values = score.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[order[:keep]] = True
    return mask


def unstructured_mask(score: Tensor, sparsity: float, scope: str) -> Tensor:
    """[R, C], by a full sort of each row or of the whole matrix."""
    scopes = score if scope == "row" else score.reshape(1, -1)
    kept = [keep_by_full_sort(line, len(line) - zeros_of(sparsity, len(line))) for line in scopes]
    return torch.stack(kept).view(score.shape)


def filled_square_sums(square_sums: list[float]) -> list[float]:
    """A dead channel counts as the smallest live one, and as 1 where none lives."""
    live = [value for value in square_sums if value > 0]
    return [value if value > 0 else min(live, default=1.0) for value in square_sums]


def sparsegpt(
    weight: Tensor,
    gram: Tensor,
    *,
    nm: tuple[int, int] | None = None,
    sparsity: float = 0.0,
    scope: str = "matrix",
    damping: float = 0.01,
    block_size: int = 128,
    within: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """SparseGPT on [R, C], one weight at a time, the inverse computed from scratch for every column. With ``nm``, none
    is kept where ``within`` is False.

    ``nm``: choices are made at the start of each group, on the weights as compensated so far. Otherwise ``sparsity`` is
    chosen at the start of each block of ``block_size`` columns. Returns (pruned weight, mask), in float64.
    """
    current = weight.double().clone()
    damped = gram.double().clone()
    rows, columns = current.shape
    mean_diagonal = damped.diagonal().mean()
    square_sums = filled_square_sums(gram.diagonal().tolist())
    for j in range(columns):
        damped[j, j] = square_sums[j] + damping * mean_diagonal
    # the inverse of what is not processed yet when it is column j's turn
    inverse = [torch.linalg.inv(damped[j:, j:]) for j in range(columns)]
    mask = torch.ones(rows, columns, dtype=torch.bool)
    step = nm[1] if nm else block_size
    for j in range(columns):
        if j % step == 0:
            end = min(j + step, columns)
            cost = torch.stack([current[:, k] ** 2 / inverse[k][0, 0] for k in range(j, end)], dim=1)
            if nm and within is not None:
                mask[:, j:end] = nm_mask(cost.masked_fill(~within[:, j:end], -1), *nm) & within[:, j:end]
            elif nm:
                mask[:, j:end] = nm_mask(cost, *nm)
            elif scope == "row":
                pruned = zeros_of(sparsity, end) - zeros_of(sparsity, j)
                mask[:, j:end] = torch.stack([keep_by_full_sort(line, end - j - pruned) for line in cost])
            else:
                pruned = zeros_of(sparsity, rows * end) - zeros_of(sparsity, rows * j)
                mask[:, j:end] = keep_by_full_sort(cost.flatten(), cost.numel() - pruned).view(cost.shape)
        for row in range(rows):
            if not mask[row, j]:
                # the optimal brain surgeon's update of the weights that are still free
                current[row, j:] -= current[row, j] / inverse[j][0, 0] * inverse[j][0]
                current[row, j] = 0
    return current, mask


def output_error(weight: Tensor, pruned: Tensor, inputs: Tensor) -> float:
    """||X (W - Q)^T||^2 / ||X W^T||^2, from the inputs [T, C] themselves."""
    weight, pruned, inputs = weight.double(), pruned.double(), inputs.double()
    return float((inputs @ (weight - pruned).mT).square().sum() / (inputs @ weight.mT).square().sum())


def drawn_loss(logits: Tensor, number: int) -> Tensor:
    """The loss of labels that are drawn from the predictions [..., V] themselves, by the numbers of this batch."""
    log_p = logits.flatten(0, -2).log_softmax(-1)
    places = torch.rand(len(log_p), generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    cumulative = log_p.detach().double().exp().cumsum(-1)
    drawn = (cumulative <= (places * cumulative[:, -1])[:, None]).sum(-1)
    return -log_p[torch.arange(len(log_p)), drawn].sum()
