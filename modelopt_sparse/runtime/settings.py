"""The options of `to_semi_structured`, checked, and the device that layers are packed for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from modelopt_sparse.reports.text import nearest
from modelopt_sparse.runtime.backends import BACKENDS, Backend, choose_backend
from modelopt_sparse.runtime.quantize import FORMATS
from modelopt_sparse.runtime.timing import LIBRARIES, TIMERS, Timer


@dataclass(frozen=True)
class Settings:
    """The options of `to_semi_structured`, with their defaults. Raises ValueError for values that are not allowed."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    strict: bool = False
    tune: tuple[int, ...] | None = None
    timing: str = "eager"
    min_speedup: float = 1.05
    keep_both: bool = False
    quantize: str | None = None
    backend: str | None = None
    cache: str | Path | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Options as users write them: one glob or token count may stand for a tuple of them."""
        known = [option.name for option in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(
                    f"option {key!r} of to_semi_structured is not known{nearest(key, known)}; "
                    f"allowed are {', '.join(known)}"
                )
        values = dict(options)
        for key in ("include", "exclude"):
            if isinstance(values.get(key), str):
                values[key] = (values[key],)
            if values.get(key) is not None:
                values[key] = tuple(values[key])
        if isinstance(values.get("tune"), int) and not isinstance(values["tune"], bool):
            values["tune"] = (values["tune"],)
        if values.get("tune") is not None:
            values["tune"] = _token_counts(values["tune"])
        return cls(**values)

    def __post_init__(self) -> None:
        if self.timing not in TIMERS:
            raise ValueError(f"timing {self.timing!r} is not known: allowed are {', '.join(TIMERS)}")
        if not self.min_speedup > 0:
            raise ValueError(f"min_speedup {self.min_speedup}: it must be above 0; 1.05 asks for 5 % more speed")
        if self.quantize is not None and self.quantize not in FORMATS:
            raise ValueError(f"quantize {self.quantize!r} is not known: allowed are {', '.join(FORMATS)}, or None")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is not known: allowed are {', '.join(BACKENDS)}, or None")
        if self.tune is None:
            for key in ("keep_both", "cache"):
                if getattr(self, key):
                    raise ValueError(f"{key} is for layers that are timed: give tune=, for example tune=(1, 64, 2048)")
        if self.keep_both and self.quantize:
            raise ValueError("keep_both with quantize would give one token other values than two: choose one of them")

    @property
    def packed_dtype(self) -> torch.dtype | None:
        """The 8-bit dtype that packed weights are quantized to, or None."""
        return None if self.quantize is None else FORMATS[self.quantize]


def _token_counts(tune: Any) -> tuple[int, ...]:
    counts: tuple[Any, ...] = tuple(tune) if isinstance(tune, Sequence) and not isinstance(tune, str) else (tune,)
    wrong = [count for count in counts if not isinstance(count, int) or isinstance(count, bool) or count < 1]
    if wrong or not counts:
        raise ValueError(f"tune {tune!r}: give token counts from 1, for example tune=(1, 64, 2048)")
    return tuple(sorted(set(counts)))


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

    @classmethod
    def of(cls, device: torch.device, settings: Settings) -> "Place":
        backend = choose_backend(device, settings.backend)
        properties = torch.cuda.get_device_properties(device)
        if settings.quantize == "fp8" and (reason := _no_fp8(device, backend)):
            raise ValueError(f'quantize="fp8" does not run on {properties.name}: {reason}')
        return cls(device, backend, properties.name, TIMERS[settings.timing], properties.L2_cache_size)


def _no_fp8(device: torch.device, backend: Backend) -> str:
    if torch.float8_e4m3fn not in backend.dtypes:
        return f'{backend.name} has no fp8; quantize="int8" runs with it'
    if torch.cuda.get_device_capability(device) < (8, 9):
        return 'fp8 Tensor Cores came with compute capability 8.9; quantize="int8" runs here'
    return ""


def loading_place(device_map: Any, semi_structured: bool | Mapping[str, Any]) -> tuple[Settings, Place]:
    """`load`'s ``semi_structured`` as settings, and the one CUDA device that its ``device_map`` names as a place.

    A ``device_map`` of None is the current CUDA device. Raises ValueError for anything that cannot work, before any
    weight is read.
    """
    settings = Settings.of({} if isinstance(semi_structured, bool) else semi_structured)
    named = (
        list(device_map.values()) if isinstance(device_map, Mapping) else ["cuda" if device_map is None else device_map]
    )
    try:
        (device,) = {torch.device(name) for name in named}
    except (RuntimeError, TypeError, ValueError):  # "auto", or several
        device = torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(
            f"device_map={device_map!r}: 2:4 layers are packed for one CUDA device, such as 'cuda:0'; to spread a "
            "model over several, load it dense with that device_map, export it and call to_semi_structured on it"
        )
    if not torch.cuda.is_available():
        raise ValueError("semi_structured packs layers for a CUDA device and there is none here: load the model dense")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return settings, Place.of(device, settings)
