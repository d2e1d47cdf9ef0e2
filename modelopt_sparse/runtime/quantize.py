"""8-bit codes for 2:4 layers: one scale for each row of the weight, one for each token of the input.

The scales are applied to the product, not inside the kernel. To pass a scale to cuSPARSELt, torch reads it on the host:
that waits for the GPU in every call, and cannot be captured in a CUDA graph. And the kernel takes one scale for all
rows and tokens; applied to the product, one for each costs nothing more.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

import torch
from torch import Tensor

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# dtypes of the sums of products of codes: exact for int8; for fp8 with the range of float32, as sums can pass 65,504,
# the largest number of float16
SUMS = {torch.float8_e4m3fn: torch.bfloat16, torch.int8: torch.int32}


def quantize_rows(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes [..., C] of ``dtype``, float32 scales [..., 1]), so that matrix ~ codes * scales.

    The largest entry of a row gets the largest code. Zeros stay zeros; a row of zeros has scale 1.
    """
    wide = matrix.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    scales = scales.masked_fill(scales == 0, 1)
    scaled = (wide / scales).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def rescaled(sums: Tensor, tokens: Tensor, rows: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums of products of codes [T, R], times the scales of tokens [T, 1] and of rows [R, 1], plus the bias [R].

    It is computed in float32 and returned as ``dtype``.
    """
    out = sums.float() * tokens * rows.t()
    return (out if bias is None else out + bias.float()).to(dtype)


def relative_squared_error(actual: Tensor, wanted: Tensor) -> float:
    """||actual - wanted||^2 / ||wanted||^2, in float64; if ``wanted`` is zero, ||actual||^2."""
    size = wanted.double().square().sum()
    distance = (actual.double() - wanted.double()).square().sum()
    return float(distance / size) if size else float(distance)
