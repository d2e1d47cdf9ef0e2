"""SparseGPT's sweep over one block of columns (Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1, inner loop).

Two paths compute the same: plain torch, for every dtype, device and pattern, and one fused Triton kernel. The torch
path is a chain of a few small operations for every column; on a GPU launching them takes longer than their arithmetic.
"""

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, cut, keep_largest

WIDEST_GROUP = 16  # largest M of N:M that the kernel takes, as it unrolls a group
WIDEST_BLOCK = 256  # most columns of a block that the kernel takes, as a row of the block stays in registers


def eliminate(current: Tensor, inverse: Tensor, pattern: Pattern, start: int) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns: weights ``[..., R, b]`` and R_bb ``[..., b, b]`` -> (pruned weights, mask).

    R_bb is ``inverse``; it lacks leading dimensions of the weights if their matrices share it. ``pattern`` is that of
    the matrix, and ``start`` the block's first column in it. The mask of an N:M group is chosen when the sweep comes to
    the group, from the weights as updated so far; that of an unstructured block as a whole, before the sweep.

    The kernel runs where `takes` and `has_kernels` allow it. Everything else, above all the CPU and float64, goes
    through torch.
    """
    block = current.shape[-1]
    pivot_b = inverse.diagonal(dim1=-2, dim2=-1)
    if isinstance(pattern, NM):
        choice = cut(pattern, slice(None), slice(start, start + block))
    else:
        choice = _choose_block(current.square() / pivot_b.square().unsqueeze(-2), pattern, start)
    if takes(current, pattern) and has_kernels(current.device):
        from modelopt_sparse.methods.sweep_triton import sweep  # Triton is imported where it is used, and only then

        return sweep(current, inverse, choice)
    # transposed, so that a column of the block is contiguous
    values = _turned(current, inverse).clone(memory_format=torch.contiguous_format)
    mask = torch.empty_like(values, dtype=torch.bool)
    errors = torch.empty_like(values)
    unit = choice.m if isinstance(choice, NM) else 1
    if isinstance(choice, NM):
        # turned as the values are, so that groups lie along the rows of a view
        choice = choice if choice.within is None else replace(choice, within=_turned(choice.within, inverse).mT)
    else:
        mask[:] = _turned(choice, inverse)
    if inverse.dim() > 2:
        inverse = inverse.expand(*current.shape[:-2], block, block).flatten(0, -3)
    pivot_b1 = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def update(first: int, last: int, end: int) -> None:
        """Apply the errors of the columns [first, last) to the columns [last, end)."""
        if last < end:
            rest, factors = values[..., last:end, :], inverse[..., first:last, last:end].mT
            add = rest.addmm_ if rest.dim() == 2 else rest.baddbmm_
            add(factors, errors[..., first:last, :], alpha=-1)

    for first in range(0, block, unit):
        last = first + unit
        if isinstance(choice, NM):
            score = values[..., first:last, :].square() / pivot_b1[..., first:last, :].square()
            mask[..., first:last, :] = cut(choice, slice(None), slice(first, last)).mask(score.mT).mT
        for j in range(first, last):
            dropped = values[..., j, :].masked_fill(mask[..., j, :], 0)
            errors[..., j, :] = dropped / pivot_b1[..., j, :]
            update(j, j + 1, last)
        # After each unit the last 2^t units that are done update the next 2^t, where 2^t is the largest power of two
        # that divides the number of those done. So each unit updates each later one once, before that one's turn, and
        # most of the work is in large products.
        done = last // unit
        reach = (done & -done) * unit
        update(last - reach, last, min(last + reach, block))
    return values.masked_fill(~mask, 0).mT.reshape(current.shape), mask.mT.reshape(current.shape)


def _turned(x_RC: Tensor, inverse: Tensor) -> Tensor:
    """``[..., R, b]`` -> ``[b, R]``, the rows of all matrices, if they share ``inverse``; otherwise ``[E, b, R]``."""
    return x_RC.flatten(0, -2).mT if inverse.dim() == 2 else x_RC.flatten(0, -3).mT


def takes(current: Tensor, pattern: Pattern) -> bool:
    """Whether the kernel can sweep such a block: float32, up to WIDEST_BLOCK columns, M up to WIDEST_GROUP, and groups
    in which any weight may stay."""
    narrow = not isinstance(pattern, NM) or (pattern.m <= WIDEST_GROUP and pattern.within is None)
    return current.dtype == torch.float32 and current.shape[-1] <= WIDEST_BLOCK and narrow


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: CUDA, compute capability 7.0 (Volta) or later, and Triton installed.

    torch's CUDA builds for Linux bring Triton along.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def _choose_block(score: Tensor, pattern: Unstructured, start: int) -> Tensor:
    """Mask of one column block. The zeros of all blocks add up to the exact count of the row or the matrix."""
    *_, rows, block = score.shape
    zeros = pattern.zeros_up_to(start + block, rows) - pattern.zeros_up_to(start, rows)
    score = cut(pattern, slice(None), slice(start, start + block)).allowed(score)
    flat = score if pattern.scope == "row" else score.flatten(-2)
    return keep_largest(flat, flat.shape[-1] - zeros).view(score.shape)
