"""SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774), in the left-looking form with one Cholesky factorization.

With H = X^T X + damping = U U^T (U upper triangular), R = U^-1 is the factor that the paper takes from H^-1 = R^T R.
The columns are swept from left to right: pruning w_j leaves err_j = w_j / R_jj, and the columns to its right move by
-err_j R_j,: (paper, equation 3 and algorithm 1). The paper updates all columns to the right of a block at once. Here
each block is brought up to date when its turn comes:

    V_b = W_b - (Q - W)_{<b} U_{<b,b} R_bb

This needs neither an inverse of H nor the Cholesky factor of one, and writes each weight once.
"""

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelopt_sparse.checks import check_number, check_whole
from modelopt_sparse.methods.base import Method, Solution, Stats, relative_error, written
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, keep_largest, sub_pattern

# the sweep over one block of columns (algorithm 1, inner loop) -------------------------------------------------------
# Two paths compute the same: plain torch, for every dtype, device and pattern, and one fused Triton kernel. The torch
# path has a few small operations for every column, and a GPU takes longer to launch them than to run them.


WIDEST_GROUP = 16  # largest M of N:M that the kernel takes, as it unrolls a group
WIDEST_BLOCK = 256  # most columns of a block that the kernel takes, as a row of the block stays in registers


def eliminate(current: Tensor, inverse: Tensor, pattern: Pattern, start: int) -> tuple[Tensor, Tensor]:
    """Sweep one block of columns: weights ``[..., R, b]`` and R_bb ``[..., b, b]`` -> (pruned weights, mask).

    R_bb is ``inverse``; it lacks leading dimensions of the weights if their matrices share it. ``pattern`` is that of
    the matrix, and ``start`` the block's first column in it. The mask of an N:M group is chosen when the sweep comes to
    the group, from the weights as updated so far; that of an unstructured block as a whole, before the sweep.

    The kernel runs where `kernel_takes` and `has_kernels` allow it. All else, the CPU and float64 above all, goes
    through torch.
    """
    block = current.shape[-1]
    pivot_b = inverse.diagonal(dim1=-2, dim2=-1)
    if isinstance(pattern, NM):
        choice = sub_pattern(pattern, slice(None), slice(start, start + block))
    else:
        choice = _choose_block(current.square() / pivot_b.square().unsqueeze(-2), pattern, start)
    if kernel_takes(current, pattern) and has_kernels(current.device):
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
            mask[..., first:last, :] = sub_pattern(choice, slice(None), slice(first, last)).mask(score.mT).mT
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


def kernel_takes(current: Tensor, pattern: Pattern) -> bool:
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
    zeros = pattern.even_zeros_before(start + block, rows) - pattern.even_zeros_before(start, rows)
    score = sub_pattern(pattern, slice(None), slice(start, start + block)).allowed(score)
    flat = pattern.by_scope(score)
    return keep_largest(flat, flat.shape[-1] - zeros).view(score.shape)


# the method -----------------------------------------------------------------------------------------------------------


MAX_DAMPING = 1.0  # relative to the mean of the Gram matrix's diagonal


@dataclass(frozen=True)
class Factor:
    """The factor of an input's damped Gram matrix. All layers with this input share it.

    upper: ``[..., C, C]``, the upper factor U.
    stats: what it was made from.
    notes: for the report, if more damping or float64 was needed.
    """

    upper: Tensor
    stats: Stats
    notes: tuple[str, ...]


class SparseGPT(Method):
    """``damping`` is relative to the mean of the Gram matrix's diagonal, ``block_size`` is in columns."""

    name = "sparsegpt"
    needs = "gram"
    updates = True
    rows_independent = True
    options = {"damping": 0.01, "block_size": 128}

    def check(self, options) -> None:
        check_number("sparsegpt: damping", options["damping"], f"(0, {MAX_DAMPING:g}]")
        check_whole("sparsegpt: block_size", options["block_size"])

    def prepare(self, stats: Stats | None, options) -> Factor:
        assert stats is not None
        assert stats.gram is not None
        mean_diagonal = stats.gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        gram = stats.with_dead_channels().gram
        assert gram is not None
        upper, notes = _factorize(gram, mean_diagonal, options["damping"])
        return Factor(upper, stats, notes)

    def solve(self, weight, state: Factor, pattern: Pattern, options) -> Solution:
        work = state.upper.dtype
        dense = weight.to(work)
        columns = dense.shape[-1]
        group = pattern.m if isinstance(pattern, NM) else 1
        block = -(-options["block_size"] // group) * group  # N:M groups never straddle two blocks
        pruned, mask = torch.zeros_like(dense), torch.zeros_like(dense, dtype=torch.bool)
        for start in range(0, columns, block):
            end = min(start + block, columns)
            upper_bb = state.upper[..., start:end, start:end]
            eye = torch.eye(end - start, dtype=work, device=dense.device).expand(upper_bb.shape)
            inverse_bb = torch.linalg.solve_triangular(upper_bb, eye, upper=True)
            drift = (pruned[..., :start] - dense[..., :start]) @ state.upper[..., :start, start:end]
            current = dense[..., start:end] - drift @ inverse_bb
            pruned[..., start:end], mask[..., start:end] = eliminate(current, inverse_bb, pattern, start)
        pruned = written(pruned, mask, weight.dtype)
        return Solution(pruned, mask, relative_error(weight, pruned, state.stats), state.notes)


def _factorize(matrix: Tensor, mean_diagonal: Tensor, damping: float) -> tuple[Tensor, tuple[str, ...]]:
    """Upper U with matrix + damping = U U^T, and a note if it was not found at the first attempt.

    Attempts are made with more and more damping, then the same in float64. If all of them fail, ValueError is raised. U
    comes from the Cholesky factor of the matrix with its rows and columns reversed.
    """
    dampings = [damping]
    while dampings[-1] < MAX_DAMPING:
        dampings.append(min(10 * dampings[-1], MAX_DAMPING))
    for dtype in (matrix.dtype, torch.float64):
        for attempt in dampings:
            damped = matrix.to(dtype, copy=True)
            damped.diagonal(dim1=-2, dim2=-1).add_(attempt * mean_diagonal.to(dtype))
            lower, info = torch.linalg.cholesky_ex(damped.flip(-2, -1))
            if info.any():
                continue
            usual = attempt == damping and dtype == matrix.dtype
            note = f"factorized with damping {attempt:g} in {dtype}, {damping:g} in {matrix.dtype} was not enough"
            return lower.flip(-2, -1), () if usual else (note.replace("torch.", ""),)
    raise ValueError(f"the Gram matrix {list(matrix.shape)} cannot be factorized: give more data, or use 'wanda'")
