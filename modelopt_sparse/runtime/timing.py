"""Times a layer dense and 2:4 on one device, and decides from the times in which form it runs.

Shape letters: R rows (out features), C columns (in features), T tokens.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelopt_sparse.reports.text import write_whole
from modelopt_sparse.runtime.kernels import (
    Algorithm,
    Backend,
    Choice,
    dtype_name,
    library_version,
    multiply,
    operand,
)

Calls = Sequence[Callable[[], Any]]
Timer = Callable[[Calls], float]  # seconds of one call, the mean over calls that use different memory

LIBRARIES = ("cublas", "cublaslt")  # the libraries that dense products are timed with
TIMED_SECONDS = 0.1  # a time is the median of what runs in about so long
LARGEST_SET = 64  # most copies of a weight that one timing goes through, so that no cache holds them all
CACHE_FORMAT = "modelopt_sparse 2:4 timings"
CACHE_VERSION = 1


def eager_seconds(calls: Calls) -> float:
    """Wall time of a call, when calls are made one after the other from Python. The cost of launching is included."""
    from torch.utils import benchmark  # slow to import: only where layers are timed

    timer = benchmark.Timer("for call in calls: call()", globals={"calls": calls})
    return timer.blocked_autorange(min_run_time=TIMED_SECONDS).median / len(calls)


def graph_seconds(calls: Calls) -> float:
    """Time of a call that is replayed from a CUDA graph. The cost of launching is not included."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
        torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return eager_seconds([graph.replay]) / len(calls)


TIMERS: dict[str, Timer] = {"eager": eager_seconds, "graph": graph_seconds}


@dataclass(frozen=True)
class Place:
    """A device that layers are packed for.

    backend: the library that multiplies there.
    title: the device's name, for the report and for the cache of timings.
    timer: how a layer is timed there.
    cache_bytes: size of the L2 cache.
    libraries: the libraries that dense products are timed with.
    """

    device: torch.device
    backend: Backend
    title: str
    timer: Timer
    cache_bytes: int
    libraries: Sequence[str] = LIBRARIES


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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timing":
        return cls(**{**data, "algorithm": Algorithm(*data["algorithm"])})


def time_layer(
    tokens: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    packed: tuple[Tensor, Tensor | None],
    place: Place,
) -> list[Timing]:
    """Time F.linear with the dense weight [R, C] against the packed one, for each token count.

    One timing multiplies by copies of the weight that together take twice the cache. A single weight would stay in the
    L2 cache and look faster than it is in a model, where other layers come in between.
    """
    dense_set: list[Any] = _copies((weight,), 2 * place.cache_bytes)
    sparse_set: list[Any] = _copies(packed, 2 * place.cache_bytes)
    timings = []
    # timers and graphs use the current device
    with torch.cuda.device(weight.device) if weight.device.type == "cuda" else nullcontext():
        for count in sorted(tokens):
            generator = torch.Generator(weight.device).manual_seed(count)
            x = torch.randn(count, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype)
            dense: dict[str, float] = {}
            for library in place.libraries:
                with blas_library(library):
                    dense[library] = place.timer([partial(F.linear, x, one, bias) for (one,) in dense_set])
            values, metadata = packed
            probe = operand(x, place.backend.multiples(values.dtype).tokens)
            sparse: dict[Algorithm, float] = {}
            for algorithm in place.backend.search(values, metadata, probe, bias):
                choices = (Choice(0, True, algorithm),)
                product = partial(multiply, rows=len(weight), backend=place.backend.name, choices=choices)
                sparse[algorithm] = place.timer([partial(product, x, *one, None, bias) for one in sparse_set])
            library, algorithm = min(dense, key=dense.__getitem__), min(sparse, key=sparse.__getitem__)
            timings.append(Timing(count, dense[library], library, sparse[algorithm], algorithm))
    return timings


def _copies(tensors: tuple[Tensor | None, ...], size: int) -> list[tuple[Tensor | None, ...]]:
    """The tensors, and copies of them, until all together take ``size`` bytes; at most LARGEST_SET."""
    each = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    count = min(max(-(-size // max(each, 1)), 1), LARGEST_SET)
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


def decide(timings: Sequence[Timing], min_speedup: float, keep_both: bool) -> tuple[Choice, ...] | None:
    """How a layer is to run, by token count; None if it is to stay dense.

    2:4 wins a token count if it is at least ``min_speedup`` times as fast as the faster of the dense libraries. A layer
    is packed if 2:4 wins at every token count that was timed. With ``keep_both`` it is also packed if 2:4 wins at some
    of them: then both forms are kept, and each count uses the winner. A count that was not timed runs as the largest
    timed one below it.
    """
    ordered = sorted(timings, key=lambda timing: timing.tokens)
    wins = [timing.speedup >= min_speedup for timing in ordered]
    if not any(wins) or (not keep_both and not all(wins)):
        return None
    return tuple(Choice(timing.tokens, win, timing.algorithm) for timing, win in zip(ordered, wins))


# timings of earlier runs ----------------------------------------------------------------------------------------------


def timing_key(place: Place, mode: str, weight: Tensor, bias: Tensor | None) -> str:
    """A text with everything that a timing depends on, except for the token count."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {library_version(place.backend)}"
    shape = f"{weight.shape[0]} x {weight.shape[1]}{'' if bias is None else ' + bias'}"
    return f"{place.title}; {versions}; {place.backend.name}; {mode}; {dtype_name(weight.dtype)}; {shape}"


class TimingCache:
    """Timings by key and token count: in memory, and in a JSON file if ``path`` names one.

    Raises ValueError if the file holds anything else than timings of this version.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._timings: dict[str, dict[int, Timing]] = {}
        if self.path is None or not self.path.exists():
            return
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != CACHE_FORMAT or data["format_version"] != CACHE_VERSION:
                raise ValueError(f"format {data['format']!r}, version {data['format_version']!r}")
            for key, listed in data["timings"].items():
                self._timings[key] = {timing.tokens: timing for timing in map(Timing.from_dict, listed)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"cache {str(path)!r} holds no timings ({error!r}): give another path") from None

    def get(self, key: str, tokens: Sequence[int]) -> list[Timing] | None:
        """The timings of these token counts; None if one of them is missing, as all counts are timed together."""
        known = self._timings.get(key, {})
        return [known[count] for count in sorted(tokens)] if all(count in known for count in tokens) else None

    def put(self, key: str, timings: Sequence[Timing]) -> None:
        """Add timings, and write the file."""
        self._timings.setdefault(key, {}).update({timing.tokens: timing for timing in timings})
        if self.path is None:
            return
        listed = {key: [asdict(known[count]) for count in sorted(known)] for key, known in self._timings.items()}
        text = json.dumps({"format": CACHE_FORMAT, "format_version": CACHE_VERSION, "timings": listed}, indent=2)
        write_whole(self.path, text + "\n")
