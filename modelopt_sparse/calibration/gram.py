"""X^T X of a batch's rows, added to a running sum in float32, or in float64 for float64 rows.

bfloat16 and float16 rows on a CUDA device are multiplied as they are, on tensor cores, with sums and result in float32.
A copy in float32 would give the same products: they have at most 16 and 22 significant bits, and float32 has 24.
Everything else is multiplied in the dtype of the sum.

Shape letters: T tokens, C columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# by device: columns from which only the upper half of the matrix is computed, and rows of it that one product makes
STRIPS = {"cuda": ((4096, 1024),), "cpu": ((1024, 256), (256, 128))}


def add_product(gram: Tensor | None, rows: Tensor) -> Tensor:
    """gram + X^T X ``[..., C, C]`` for rows X ``[..., T, C]``; in place where the shapes are equal.

    Of a large matrix what is below its strips may be missing until `completed`. Nothing waits for a CUDA device.
    """
    work = torch.promote_types(rows.dtype, torch.float32)
    add = _add_half_precision
    if not on_tensor_cores(rows.device, rows.dtype):
        rows, add = rows.to(work), _add
    square = (*rows.shape[:-2], rows.shape[-1], rows.shape[-1])
    if gram is None:
        gram = rows.new_zeros(square, dtype=work)
    if gram.dim() != rows.dim():  # one attention, called with one input for q, k and v and with several
        return gram + add_product(None, rows)
    add_upper(gram, rows, add, _strip(gram))
    return gram


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


def add_upper(gram: Tensor, rows: Tensor, add: Callable[[Tensor, Tensor, Tensor], None], strip: int) -> None:
    """Add X^T X to ``gram``, in strips of rows that begin at the diagonal: about half the work if they are narrow, and
    no more than a strip of it is held besides the sum. ``add(sum, left, right)`` adds a product in place."""
    columns = rows.shape[-1]
    for first in range(0, columns, strip):
        part = slice(first, first + strip)
        add(gram[..., part, first:], rows[..., part].mT, rows[..., first:])


def mirror(gram: Tensor, strip: int) -> None:
    """Copy what the strips hold to the other side of the diagonal."""
    for first in range(0, gram.shape[-1], strip):
        last = first + strip
        gram[..., last:, first:last] = gram[..., first:last, last:].mT


def _strip(gram: Tensor) -> int:
    columns = gram.shape[-1]
    strips = STRIPS["cuda" if gram.is_cuda else "cpu"]
    return next((strip for large, strip in strips if columns >= large), max(columns, 1))


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dim() == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)


def _add_half_precision(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The product in float32 of half-precision matrices on a CUDA device."""
    total.add_((torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32))
