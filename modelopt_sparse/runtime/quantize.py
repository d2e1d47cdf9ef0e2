"""8-bit codes for 2:4 layers: one scale for each row of the weight, one for each token of the input.

The scales are applied to the product, not inside the kernel: torch passes a scale to cuSPARSELt by reading it on the
host, which waits for the GPU in every call and cannot be captured in a CUDA graph. Outside, scales per row and per
token cost nothing more, where the kernel takes one number for all.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

import torch
from torch import Tensor

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# what the kernels sum into: exact for int8; for fp8 as wide as float32, since the unscaled sums pass 65,504
SUMS = {torch.float8_e4m3fn: torch.bfloat16, torch.int8: torch.int32}


def quantize_rows(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes [..., C] of ``dtype``, float32 scales [..., 1]): matrix ~ codes * scales, the largest entry of a row exact
    but for rounding. Zeros stay zeros; a row of zeros has scale 1."""
    wide = matrix.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    scales = scales.masked_fill(scales == 0, 1)
    scaled = (wide / scales).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def rescaled(sums: Tensor, tokens: Tensor, rows: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums of codes [T, R] with the scales of tokens [T, 1] and rows [R, 1] and the bias [R], in float32, as dtype."""
    out = sums.float() * tokens * rows.t()
    return (out if bias is None else out + bias.float()).to(dtype)


def relative_squared_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted||^2 / ||wanted||^2, in float64; 0 where both are zero."""
    size = wanted.double().square().sum()
    distance = (found.double() - wanted.double()).square().sum()
    return float(distance / size) if size else float(distance)
