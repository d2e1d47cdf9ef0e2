"""Whether what a layer saw is enough to go by. Zeros say nothing, and numbers whose squares are lost in the sums say no
more than zeros do; few tokens say little."""

import math
import warnings

import torch
from torch import Tensor

from modelopt_sparse.reports.report import Report

FEWER = "fewer than its inputs"


def says_nothing(square_sums: Tensor) -> Tensor:
    """Square sums ``[..., C]`` -> bool ``[...]``: all zero, or so small that the least numbers which their dtype has
    are no longer far below the rounding errors of the largest of them."""
    info = torch.finfo(square_sums.dtype)
    return square_sums.amax(-1) < info.tiny / info.eps


def without_data(name: str, tokens: int, square_sums: Tensor | None, now: str = "") -> str:
    """What to say of a layer that cannot be solved from what it saw. ``now`` says when that was."""
    if square_sums is None or not tokens:
        return f"layer {name!r} saw no calibration data{now}: give more varied data, or exclude it"
    instead = f"exclude it, or choose by size alone with rules={{{name!r}: {{'method': 'magnitude'}}}}"
    dtype, info = str(square_sums.dtype).removeprefix("torch."), torch.finfo(square_sums.dtype)
    largest = float(square_sums.max())
    if largest == 0:
        lost = math.sqrt(info.tiny * info.eps)
        return (
            f"layer {name!r} saw nothing but zeros (or numbers below {lost:.0e}, whose squares are 0 in {dtype}) on "
            f"the calibration data{now}: give data that reaches it, {instead}"
        )
    return (
        f"layer {name!r}: its inputs on the calibration data are too small{now}: the squares of its largest channel "
        f"sum up to {largest:.1e}, and {dtype} holds such sums well from {info.tiny / info.eps:.0e} on; scale the data "
        f"up, convert the model to float64 (model.double()), {instead}"
    )


def warn_of_few_tokens(name: str, tokens: int, columns: int, report: Report) -> None:
    """Warn of a layer that saw fewer tokens than it has inputs, unless this report has warned of one before."""
    if tokens >= columns or any(FEWER in note for note in report.notes):
        return
    seen = "1 token" if tokens == 1 else f"{tokens} tokens"
    text = (
        f"layer {name!r} saw {seen}, {FEWER} ({columns}): almost any weights fit so little data, and errors come out "
        "too small; give more (said once, of the first such layer)"
    )
    warnings.warn(text, stacklevel=2)
    report.notes.append(text)
