"""From a 2:4 weight to its packed form, and back: nothing is packed that does not come back bit for bit.

torch's packing trusts its input: of three nonzeros in a group it drops one without a word, and takes -0.0 for a
nonzero in some kernels. So the pattern is checked first, -0.0 becomes +0.0, and the packed form is unpacked once.

Shape letters: R rows (out features), C columns (in features), G groups of four columns.
"""

import torch
from torch import Tensor

from modelopt_sparse.runtime.backends import Backend

# what a packed weight may be made from; the 8-bit formats are made from these by quantize.py
DTYPES = (torch.float16, torch.bfloat16)


class NotPackable(ValueError):
    """Why a weight cannot be packed; the text is the reason alone, whoever catches it knows the layer."""


def misfit(weight: Tensor) -> str:
    """Why a weight [R, C] is not 2:4, naming the first row that breaks it, or ""."""
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
    """Why a backend takes no weight [R, C] packed as ``dtype``, or ""."""
    if dtype not in backend.dtypes:
        return f"dtype: {backend.name} has no kernel for {dtype}"
    rows, columns, _ = backend.multiples(dtype)
    if shape[0] % rows or shape[1] % columns:
        return f"shape: {shape[0]} x {shape[1]} is no multiple of the {rows} x {columns} that {backend.name} takes"
    return ""


def without_negative_zeros(weight: Tensor) -> Tensor:
    """A contiguous copy in which -0.0 is +0.0."""
    if weight.dtype == torch.float8_e4m3fn:  # has no comparison of its own
        bits = weight.view(torch.uint8)
        return bits.masked_fill(bits == 0x80, 0).view(weight.dtype).contiguous()
    return weight.masked_fill(weight == 0, 0).contiguous()


@torch.no_grad()
def pack(weight: Tensor, backend: Backend) -> tuple[Tensor, Tensor | None]:
    """(values, metadata) of a 2:4 weight [R, C]. Raises NotPackable with the reason, the row in it."""
    values = weight.float() if weight.dtype == torch.float8_e4m3fn else weight
    if reason := shape_misfit(weight.shape, weight.dtype, backend) or misfit(values):
        raise NotPackable(reason)
    clean = without_negative_zeros(weight.detach())
    packed, metadata = backend.pack(clean)
    back = backend.unpack(packed, metadata, weight.shape[1])
    if not torch.equal(back.view(torch.uint8), clean.view(torch.uint8)):
        raise NotPackable(f"{backend.name} does not give its weight back bit for bit")
    return packed, metadata
