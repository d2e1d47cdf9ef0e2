"""Channel orders for N:M sparsity: how much of a score n:m keeps depends on which input channels share a group of m.

Shape letters: R rows (out features), C columns (input channels), G groups of m consecutive columns.
"""

import torch
from torch import Tensor

SMALL = 1e-4  # a swap must add at least this share of the score that an average group keeps


def channel_order(score: Tensor, n: int, m: int, block: int = 1024) -> Tensor:
    """Score ``[R, C]`` (larger = keep, additive) -> order ``[C]``: ``score[:, order]`` keeps more under n:m.

    ``order[i]`` is the channel that moves to place i. It is found in two steps:

    1. Channels sorted by their total score are dealt out in serpentine order, so that every group gets one of each
       quantile (RIA's heuristic, Zhang et al. 2024).
    2. Channels of different groups swap places as long as that raises the kept score, among about ``block`` columns at
       a time. That bounds the work to O(C * block * R) per sweep.

    Raises ValueError if C is not a multiple of m.
    """
    columns = score.shape[-1]
    if columns % m:
        raise ValueError(f"a score of shape {list(score.shape)}: {columns} channels are not a multiple of {m}")
    if n >= m:
        return torch.arange(columns, device=score.device)
    score = score.float()
    chunks = list(score.sum(0).argsort(descending=True, stable=True).view(m, -1))
    groups = torch.stack([chunk.flip(0) if place % 2 else chunk for place, chunk in enumerate(chunks)], dim=1).cpu()
    parts = -(-columns // block)
    for part in range(parts):  # every parts-th group, so that each part spans all quantiles
        groups[part::parts] = _swap(score, groups[part::parts].clone(), n)
    return groups.flatten().to(score.device)


def _swap(score: Tensor, groups: Tensor, n: int) -> Tensor:
    """Swap channels between groups ``[G, m]`` (on the CPU) until no swap of two raises the kept score noticeably.

    A sweep makes the best swap, then the best one among the groups not yet touched, and so on: swaps of disjoint
    groups add up exactly.
    """
    size, m = groups.shape
    while True:
        ordered = score[:, groups.flatten()]
        kept_score = ordered.unflatten(-1, (size, m)).topk(n).values.sum()
        gain = _swap_gains(ordered, n, m).view(size, m, size, m).transpose(1, 2).flatten(2)
        # a GPU would wait for the host at every swap, and its kernels would take longer to start than to run
        best, which = (tensor.cpu() for tensor in gain.max(-1))
        best.fill_diagonal_(0)  # within a group nothing changes
        floor = float(SMALL * kept_score / size)
        if not best.max() > floor:
            return groups
        while best.max() > floor:
            g, h = divmod(int(best.argmax()), size)
            i, j = divmod(int(which[g, h]), m)
            groups[g, i], groups[h, j] = groups[h, j].clone(), groups[g, i].clone()
            best[[g, h]] = 0
            best[:, [g, h]] = 0


def _swap_gains(score: Tensor, n: int, m: int) -> Tensor:
    """``[R, C]`` in groups of m -> ``[C, C]``: what the kept score gains if columns i and j swap places.

    Take a row in which column i leaves its group and another column comes, with the scores x_i and y. Then the group
    keeps max(y, rival) in place of max(x_i, cut), where cut is the n-th largest score of the group, and rival the n-th
    largest without x_i. Summed over the rows, max(u, v) is half of sum u + sum v + sum |u - v|. The last of these sums
    is a distance, which can be computed without a tensor [R, C, C].
    """
    grouped = score.unflatten(-1, (-1, m))
    ranked = grouped.sort(-1, descending=True).values
    cut = ranked[..., n - 1 : n]
    rival = torch.where(grouped >= cut, ranked[..., n : n + 1], cut).flatten(1)
    leaves = torch.maximum(grouped, cut).flatten(1).sum(0)
    comes = (rival.sum(0)[:, None] + score.sum(0) + torch.cdist(rival.T, score.T, p=1)) / 2
    change = comes - leaves[:, None]
    return change + change.T


def kept_share(score: Tensor, n: int, m: int) -> float:
    """The share of a score ``[R, C]`` that n:m keeps: that of the n largest of every m consecutive columns."""
    largest = score.unflatten(-1, (-1, m)).topk(n).values
    return float(largest.sum(dtype=torch.float64) / score.sum(dtype=torch.float64))
