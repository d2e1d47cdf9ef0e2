"""The sweep over one block of columns as one Triton kernel. Importing this file imports Triton.

A program owns a tile: some rows of one matrix, with all columns of the block, in float32 registers. Rows do not depend
on each other. The program goes from group to group (of N:M, or of STEP columns). In each it

1. takes the group's columns out of the tile;
2. chooses the weights to keep;
3. eliminates one column after the other;
4. updates the columns to the right.

Shape letters: T rows of the tile, G groups, S slots of a group. G and S are rounded up to powers of two, which Triton
requires, and the additional groups and slots are masked out.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from modelopt_sparse.methods.patterns import NM

STEP = 8  # columns of a group if the pattern is not N:M
TILE = 2048  # weights in a tile


def sweep(current: Tensor, inverse: Tensor, choice: NM | Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[..., R, b]`` and R_bb ``[..., b, b]``, float32 -> (pruned weights, mask). Inputs are left untouched.

    ``choice`` is the N:M pattern, by which the kernel chooses the mask, or the mask itself. R_bb is ``inverse``; it
    lacks leading dimensions of the weights if their matrices share it.
    """
    current = current.contiguous()
    *lead, rows, columns = current.shape
    batched = inverse.shape[:-2].numel() > 1
    inverse = (inverse.expand(*lead, columns, columns) if batched else inverse).contiguous()
    pruned = torch.empty_like(current)
    if isinstance(choice, NM):
        n, m, mask = choice.n, choice.m, torch.empty_like(current, dtype=torch.bool)
    else:
        n, m, mask = 0, min(STEP, columns), choice.expand(current.shape).contiguous()
    slots, groups = triton.next_power_of_2(m), triton.next_power_of_2(triton.cdiv(columns, m))
    tile = max(1, TILE // (slots * groups))
    tiles = triton.cdiv(rows, tile)
    programs = tiles * current.shape[:-2].numel()
    if programs:
        flags = mask.view(torch.uint8)
        factor_size = columns * columns if batched else 0
        sizes = {"KEPT": n, "M": m, "T": tile, "G": groups, "S": slots}
        with torch.cuda.device_of(current):
            launch = _sweep[(programs,)]  # pyright: ignore[reportIndexIssue]
            launch(current, inverse, pruned, flags, rows, columns, tiles, factor_size, **sizes)
    return pruned, mask


@triton.jit
def _sweep(
    current,  # [matrices, rows, columns]
    inverse,  # the same for all matrices if factor_size is 0
    pruned,
    flags,  # the mask: written if KEPT, otherwise read
    rows,
    columns,
    tiles,
    factor_size,
    KEPT: tl.constexpr,  # N of N:M, or 0 if the mask is read from flags
    M: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    matrix = (tl.program_id(0) // tiles).to(tl.int64)  # offsets of a stack of experts may pass 2^31
    row_T = tl.program_id(0) % tiles * T + tl.arange(0, T)
    group_G, slot_S = tl.arange(0, G), tl.arange(0, S)
    column_GS = group_G[:, None] * M + slot_S[None, :]
    in_block_GS = (slot_S < M)[None, :] & (column_GS < columns)
    place_T = (matrix * rows + row_T) * columns
    in_tile_TGS = (row_T < rows)[:, None, None] & in_block_GS[None, :, :]
    values_TGS = tl.load(current + place_T[:, None, None] + column_GS[None, :, :], mask=in_tile_TGS, other=0.0)
    inverse += matrix * factor_size

    for first in range(0, columns, M):
        real_S = (slot_S < M) & (first + slot_S < columns)  # the last group may be short
        place_TS = place_T[:, None] + (first + slot_S)[None, :]
        real_TS = (row_T < rows)[:, None] & real_S[None, :]
        pivot_S = tl.load(inverse + (first + slot_S) * (columns + 1), mask=real_S, other=1.0)
        group_TS = tl.sum(tl.where((group_G * M == first)[None, :, None], values_TGS, 0.0), axis=1)

        if KEPT:
            # divisions round as those of torch do, so that scores that tie there tie here
            score_TS = tl.div_rn(group_TS * group_TS, tl.broadcast_to((pivot_S * pivot_S)[None, :], (T, S)))
            above_TS = tl.zeros((T, S), tl.int32)  # slots of larger score; of equal ones the lower index is kept
            for i in range(M):
                other_T1 = tl.sum(tl.where(slot_S[None, :] == i, score_TS, 0.0), axis=1)[:, None]
                above_TS += ((other_T1 > score_TS) | ((other_T1 == score_TS) & (slot_S > i)[None, :])).to(tl.int32)
            keep_TS = above_TS < KEPT
            tl.store(flags + place_TS, keep_TS.to(tl.uint8), mask=real_TS)
        else:
            keep_TS = tl.load(flags + place_TS, mask=real_TS, other=1) != 0

        for i in tl.static_range(M):
            here_S = slot_S == i
            pivot = tl.sum(tl.where(here_S, pivot_S, 0.0), axis=0)
            pruned_T = tl.sum(tl.where(here_S[None, :] & (keep_TS == 0), group_TS, 0.0), axis=1)
            error_T = tl.div_rn(pruned_T, tl.broadcast_to(pivot, (T,)))
            line = inverse + (first + i) * columns  # row first + i of R_bb
            is_real = first + i < columns
            in_group_S = tl.load(line + first + slot_S, mask=is_real & real_S & (slot_S > i), other=0.0)
            group_TS -= error_T[:, None] * in_group_S[None, :]
            to_the_right_GS = is_real & in_block_GS & (column_GS >= first + M)
            right_GS = tl.load(line + column_GS, mask=to_the_right_GS, other=0.0)
            values_TGS -= error_T[:, None, None] * right_GS[None, :, :]
        tl.store(pruned + place_TS, tl.where(keep_TS, group_TS, 0.0), mask=real_TS)
