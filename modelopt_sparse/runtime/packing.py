"""Packing a 2:4 weight: a weight is packed only if it can be unpacked bit for bit.

torch's packing does not check its input. Of three nonzeros in a group it drops one silently, and some kernels take -0.0
for a nonzero. So the pattern is checked first, -0.0 becomes +0.0, and the packed form is unpacked once and compared.

Shape letters: R rows (out features), C columns (in features), G groups of four columns.
"""

import torch
from torch import Tensor

from modelopt_sparse.runtime.backends import Backend

# dtypes of the weights that can be packed; quantize.py makes 8-bit codes from these
DTYPES = (torch.float16, torch.bfloat16)


class NotPackable(ValueError):
    """A weight cannot be packed. The text is the reason alone: the caller knows the layer's name."""


def misfit(weight: Tensor) -> str:
    """Why a weight [R, C] cannot be packed 2:4, with the first row that breaks the pattern, or ""."""
    rows, columns = weight.shape
    if not torch.isfinite(weight).all():
        return "its weight holds NaN or inf"
    if columns % 4:
        return f"not 2:4: {columns} input channels are not a multiple of 4"
    nonzeros_RG = (weight != 0).view(rows, -1, 4).sum(-1, dtype=torch.uint8)
    breaking_R = (nonzeros_RG > 2).any(-1)
    if not breaking_R.any():
        return ""
    row = int(breaking_R.nonzero()[0])
    group = int((nonzeros_RG[row] > 2).nonzero()[0])
    return (
        f"not 2:4: row {row} has {int(nonzeros_RG[row, group])} nonzeros in columns {4 * group} to {4 * group + 3}; "
        f"{int(breaking_R.sum())} of {rows} rows break the pattern"
    )


def shape_misfit(shape: torch.Size, dtype: torch.dtype, backend: Backend) -> str:
    """Why a backend cannot pack a weight of shape [R, C] as ``dtype``, or ""."""
    if dtype not in backend.dtypes:
        return f"dtype: {backend.name} has no kernel for {dtype}"
    rows, columns, _ = backend.multiples(dtype)
    if shape[0] % rows or shape[1] % columns:
        return f"shape: {shape[0]} x {shape[1]} is no multiple of the {rows} x {columns} that {backend.name} takes"
    return ""


def without_negative_zeros(weight: Tensor) -> Tensor:
    """A contiguous copy in which -0.0 is +0.0."""
    if weight.dtype == torch.float8_e4m3fn:  # torch cannot compare this dtype
        bits = weight.view(torch.uint8)
        return bits.masked_fill(bits == 0x80, 0).view(weight.dtype).contiguous()
    return weight.masked_fill(weight == 0, 0).contiguous()


@torch.no_grad()
def pack(weight: Tensor, backend: Backend) -> tuple[Tensor, Tensor | None]:
    """(values, metadata) of a 2:4 weight [R, C].

    Raises NotPackable if it is not 2:4, if its shape or dtype does not fit, or if it does not unpack bit for bit.
    """
    values = weight.float() if weight.dtype == torch.float8_e4m3fn else weight
    if reason := shape_misfit(weight.shape, weight.dtype, backend) or misfit(values):
        raise NotPackable(reason)
    clean = without_negative_zeros(weight.detach())
    packed, metadata = backend.pack(clean)
    back = backend.unpack(packed, metadata, weight.shape[1])
    if not torch.equal(back.view(torch.uint8), clean.view(torch.uint8)):
        raise NotPackable(f"{backend.name} does not give its weight back bit for bit")
    return packed, metadata
