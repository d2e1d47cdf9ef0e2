"""X^T X of a batch's rows, added to a running sum in float32, or in float64 for float64 rows.

bfloat16 and float16 rows on a CUDA device are multiplied as they are, on tensor cores, with sums and result in float32.
A copy in float32 would give the same products: they have at most 16 and 22 significant bits, and float32 has 24.
Everything else is multiplied in the dtype of the sum.

Shape letters: T tokens, C columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LARGE = 4096  # columns from which only the upper half of the matrix is computed on a CUDA device
STRIP = 1024  # rows of it that one product makes


def add_product(gram: Tensor | None, rows: Tensor) -> Tensor:
    """gram + X^T X ``[..., C, C]`` for rows X ``[..., T, C]``; in place where the shapes are equal.

    Of a large matrix on a CUDA device what is below its strips may be missing until `completed`. Nothing waits for the
    device.
    """
    if on_tensor_cores(rows.device, rows.dtype):
        if gram is not None and gram.dim() != rows.dim():
            return gram + _product(rows.mT, rows)
        if gram is None:
            gram = rows.new_zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float32)
        add_upper(gram, rows, _product, _strip(gram))
        return gram
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if gram is None:
        gram = rows.new_zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1])
    if gram.dim() != rows.dim():  # one attention, called with one input for q, k and v and with several
        return gram + rows.mT @ rows
    return gram.addmm_(rows.mT, rows) if rows.dim() == 2 else gram.baddbmm_(rows.mT, rows)


def completed(gram: Tensor) -> Tensor:
    """The sum that `add_product` has made, in place, with all of its entries."""
    mirror(gram, _strip(gram))
    return gram


def on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows are multiplied as they are. Not float16 if the user lets torch sum it up in float16."""
    if device.type != "cuda":
        return False
    return dtype == torch.bfloat16 or (
        dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


def add_upper(gram: Tensor, rows: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], strip: int) -> None:
    """Add X^T X to ``gram``, in strips of rows that begin at the diagonal: about half the work if they are narrow, and
    no more than a strip of it is held besides the sum."""
    columns = rows.shape[-1]
    for first in range(0, columns, strip):
        part = slice(first, first + strip)
        gram[..., part, first:].add_(multiply(rows[..., part].mT, rows[..., first:]))


def mirror(gram: Tensor, strip: int) -> None:
    """Copy what the strips hold to the other side of the diagonal."""
    for first in range(0, gram.shape[-1], strip):
        last = first + strip
        gram[..., last:, first:last] = gram[..., first:last, last:].mT


def _strip(gram: Tensor) -> int:
    columns = gram.shape[-1]
    return STRIP if gram.is_cuda and columns >= LARGE else max(columns, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In float32, of half-precision matrices on a CUDA device."""
    return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
