"""Times a layer dense and 2:4 on one device.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelopt_sparse.runtime.kernels import Algorithm, Backend, multiply, operand

Calls = Sequence[Callable[[], Any]]
Timer = Callable[[Calls], float]  # seconds of one call, the mean over calls that use different memory

BLAS_LIBRARIES = ("cublas", "cublaslt")  # the libraries that dense products are timed with
TIMED_SECONDS = 0.1  # a time is the median of what runs in about so long
LARGEST_SET = 64  # most copies of a weight that one timing goes through, so that no cache holds them all


def eager_seconds(calls: Calls) -> float:
    """Wall time of a call, when calls are made one after the other from Python. The cost of launching is included."""
    from torch.utils import benchmark  # slow to import: only where layers are timed

    timer = benchmark.Timer("for call in calls: call()", globals={"calls": calls})
    return timer.blocked_autorange(min_run_time=TIMED_SECONDS).median / len(calls)


@dataclass(frozen=True)
class Place:
    """A device that layers are packed for.

    backend: the library that multiplies there.
    title: the device's name, for the report.
    timer: how a layer is timed there.
    cache_bytes: size of the L2 cache.
    """

    device: torch.device
    backend: Backend
    title: str
    timer: Timer
    cache_bytes: int


# timing a layer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """The times of one layer on ``tokens`` rows, in seconds.

    dense, dense_library: the time of the fastest dense library, and its name.
    sparse, algorithm: the time of the fastest 2:4 algorithm, and that algorithm.
    """

    tokens: int
    dense: float
    dense_library: str
    sparse: float
    algorithm: Algorithm

    @property
    def speedup(self) -> float:
        """How many times as fast 2:4 is as dense."""
        return self.dense / self.sparse


def time_layer(
    tokens: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    packed: tuple[Tensor, Tensor | None],
    place: Place,
) -> list[Timing]:
    """Time F.linear with the dense weight [R, C] against the packed one, for each of the sorted token counts.

    One timing multiplies by copies of the weight that together take twice the cache. A single weight would stay in the
    L2 cache and look faster than it is in a model, where other layers come in between.
    """
    dense_set: list[Any] = _copies((weight,), 2 * place.cache_bytes)
    sparse_set: list[Any] = _copies(packed, 2 * place.cache_bytes)
    timings = []
    # timers and graphs use the current device
    with torch.cuda.device(weight.device) if weight.device.type == "cuda" else nullcontext():
        for count in tokens:
            generator = torch.Generator(weight.device).manual_seed(count)
            x = torch.randn(count, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype)
            dense: dict[str, float] = {}
            for library in BLAS_LIBRARIES:
                with blas_library(library):
                    dense[library] = place.timer([partial(F.linear, x, one, bias) for (one,) in dense_set])
            values, metadata = packed
            probe = operand(x, place.backend.multiples(values.dtype).dense_min_rows)
            sparse: dict[Algorithm, float] = {}
            for algorithm in place.backend.search(values, metadata, probe, bias):
                choices = (0, *algorithm)
                product = partial(multiply, rows=len(weight), backend=place.backend.name, choices=choices)
                sparse[algorithm] = place.timer([partial(product, x, *one, bias) for one in sparse_set])
            library, algorithm = min(dense, key=dense.__getitem__), min(sparse, key=sparse.__getitem__)
            timings.append(Timing(count, dense[library], library, sparse[algorithm], algorithm))
    return timings


def _copies(tensors: tuple[Tensor | None, ...], size: int) -> list[tuple[Tensor | None, ...]]:
    """The tensors, and copies of them, until all together take ``size`` bytes; at most LARGEST_SET."""
    set_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    count = min(max(-(-size // max(set_bytes, 1)), 1), LARGEST_SET)
    return [tensors] + [tuple(t if t is None else t.clone() for t in tensors) for _ in range(count - 1)]


@contextmanager
def blas_library(name: str) -> Iterator[None]:
    """While entered, torch prefers one library for dense products."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
