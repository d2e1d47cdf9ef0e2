"""SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774), in the left-looking form with one Cholesky factorization.

With H = X^T X + damping = U U^T (U upper triangular), R = U^-1 is the factor that the paper takes from H^-1 = R^T R.
The columns are swept from left to right: pruning w_j leaves err_j = w_j / R_jj, and the columns to its right move by
-err_j R_j,: (paper, equation 3 and algorithm 1). The paper updates all columns to the right of a block at once. Here
each block is brought up to date when its turn comes:

    V_b = W_b - (Q - W)_{<b} U_{<b,b} R_bb

This needs neither an inverse of H nor the Cholesky factor of one, and writes each weight once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.methods.base import Method, Solution, Stats, is_number, relative_error, written
from modelopt_sparse.methods.patterns import NM, Pattern
from modelopt_sparse.methods.sweep import eliminate

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
        damping, block_size = options["damping"], options["block_size"]
        if not is_number(damping) or not 0 < damping <= MAX_DAMPING:
            raise ValueError(f"option damping={damping!r} of sparsegpt: must be a number in (0, {MAX_DAMPING:g}]")
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise ValueError(f"option block_size={block_size!r} of sparsegpt: a positive whole number of columns")

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
        step = pattern.m if isinstance(pattern, NM) else 1
        block = -(-options["block_size"] // step) * step  # N:M groups never straddle two blocks
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
    levels = [damping]
    while levels[-1] < MAX_DAMPING:
        levels.append(min(10 * levels[-1], MAX_DAMPING))
    for dtype in (matrix.dtype, torch.float64):
        for level in levels:
            damped = matrix.to(dtype, copy=True)
            damped.diagonal(dim1=-2, dim2=-1).add_(level * mean_diagonal.to(dtype))
            lower, info = torch.linalg.cholesky_ex(damped.flip(-2, -1))
            if info.any():
                continue
            usual = level == damping and dtype == matrix.dtype
            raised = (
                f"factorized with damping {level:g} in {_short(dtype)}, because damping {damping:g} in "
                f"{_short(matrix.dtype)} was not enough"
            )
            return lower.flip(-2, -1), () if usual else (raised,)
    raise ValueError(
        f"the Gram matrix {list(matrix.shape)} cannot be factorized, not even in float64 with damping {MAX_DAMPING:g}: "
        "give more or more varied calibration data, or use method 'wanda' for this layer"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
