"""SparseGPT's sweep over one block of columns (Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1, inner loop).

Two paths compute the same: plain torch, for every dtype, device and pattern, and one fused Triton kernel, as the torch
path is a chain of a few small operations for every column, which on a GPU costs more than the arithmetic in it.
"""

import importlib.util

import torch
from torch import Tensor

from modelopt_sparse.patterns import NM, Pattern, Unstructured, count_zeros, keep_largest

WIDEST_GROUP = 16  # M of N:M that the kernel takes: it unrolls a group
WIDEST_BLOCK = 256  # columns of a block that the kernel takes: a row of it stays in registers


def eliminate(current: Tensor, inverse: Tensor, pattern: Pattern, start: int) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns: weights ``[..., R, b]`` and R_bb ``[..., b, b]`` -> (pruned weights, mask).

    R_bb may lack leading dimensions of the weights (shared by their matrices). An N:M group is chosen on the weights as
    compensated so far; an unstructured block, which begins at column ``start`` of the matrix, is chosen as a whole when
    the sweep enters it. Goes through the kernel where `takes` allows it on a CUDA device with Triton installed; all
    else, above all the CPU and float64, through torch.
    """
    block = current.shape[-1]
    pivot_b = inverse.diagonal(dim1=-2, dim2=-1)
    if isinstance(pattern, NM):
        choice = pattern
    else:
        choice = _choose_block(current.square() / pivot_b.square().unsqueeze(-2), pattern, start)
    if takes(current, pattern) and has_kernels(current.device):
        from modelopt_sparse.methods.eliminate_triton import sweep  # Triton is imported where it is used, and only then

        return sweep(current, inverse, choice)
    # transposed copies, so that a column of the block is contiguous
    values = current.mT.clone(memory_format=torch.contiguous_format)  # [..., b, R]
    mask = torch.empty_like(values, dtype=torch.bool)
    if isinstance(choice, NM):
        step = choice.m
    else:
        step = min(16, block)  # a group only bounds how far single-column updates reach
        mask[:] = choice.mT
    for first in range(0, block, step):
        last = min(first + step, block)
        if isinstance(choice, NM):
            score = values[..., first:last, :].mT.square() / pivot_b[..., None, first:last].square()
            mask[..., first:last, :] = choice.mask(score).mT
        errors = torch.empty_like(values[..., first:last, :])
        for j in range(first, last):
            column = values[..., j, :]
            error = column.masked_fill(mask[..., j, :], 0) / pivot_b[..., j, None]
            values[..., j + 1 : last, :] -= inverse[..., j, j + 1 : last, None] * error.unsqueeze(-2)
            errors[..., j - first, :] = error
        values[..., last:, :] -= inverse[..., first:last, last:].mT @ errors
    return values.masked_fill(~mask, 0).mT, mask.mT


def takes(current: Tensor, pattern: Pattern) -> bool:
    """Whether the kernel is written for such a block: float32, up to WIDEST_BLOCK columns, M up to WIDEST_GROUP."""
    narrow = not isinstance(pattern, NM) or pattern.m <= WIDEST_GROUP
    return current.dtype == torch.float32 and current.shape[-1] <= WIDEST_BLOCK and narrow


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run there: on CUDA devices of compute capability 7.0 (Volta) or later, if Triton is
    installed, which torch's CUDA builds for Linux bring along."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def _choose_block(score: Tensor, pattern: Unstructured, start: int) -> Tensor:
    """Mask of one column block; the blocks' zeros add up to the exact count of the row or the matrix."""
    *_, rows, block = score.shape
    per_column = 1 if pattern.scope == "row" else rows

    def zeros_up_to(column: int) -> int:
        return count_zeros(pattern.sparsity, per_column * column)

    zeros = zeros_up_to(start + block) - zeros_up_to(start)
    flat = score if pattern.scope == "row" else score.flatten(-2)
    return keep_largest(flat, flat.shape[-1] - zeros).view(score.shape)
