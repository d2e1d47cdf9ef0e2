"""`to_semi_structured` and `to_dense`: packing a model's layers for 2:4 kernels, one by one, and the way back."""

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.distributed import is_sharded
from modelopt_sparse.model.devices import has_hook
from modelopt_sparse.model.layers import find_layers
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.plan.names import check_globs
from modelopt_sparse.reports.fold import first_few, nearest, table
from modelopt_sparse.reports.values import library_versions
from modelopt_sparse.runtime.kernels import (
    ALWAYS_SPARSE,
    BACKENDS,
    DTYPES,
    FORMATS,
    Backend,
    NotPackable,
    choose_backend,
    library_version,
    misfit,
    multiply,
    pack,
    quantize_rows,
    relative_squared_error,
    shape_misfit,
)
from modelopt_sparse.runtime.linear import SemiStructuredLinear, pack_module, unpack_module
from modelopt_sparse.runtime.timing import LIBRARIES, TIMERS, Timer, Timing, TimingCache, decide, time_layer, timing_key

# settings -------------------------------------------------------------------------------------------------------------
# The options of `to_semi_structured`, checked, and the device that layers are packed for.


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


# speed report ---------------------------------------------------------------------------------------------------------
# The report of `to_semi_structured`: which layers run 2:4, their bytes and times, and why the others stay dense.


ATTRIBUTE = "semi_structured_report"  # where a model holds its report
SPARSE, BOTH, DENSE = "2:4", "2:4 and dense", "dense"  # values of LayerSpeed.runs


@dataclass(frozen=True)
class LayerSpeed:
    """One weight of two or more dimensions, and how its layer runs.

    name, shape, dtype: of the dense weight; the dtype as a name, "bfloat16".
    runs: "2:4", "2:4 and dense" or "dense".
    bytes, dense_bytes: what the weight takes now, and what it takes dense.
    reason: why the layer is dense, or "".
    backend, packed_dtype: the library that it is packed for, and the dtype of the packed values; "" if it is dense.
    timings: one for each token count; empty if the layer was not timed.
    weight_error, output_error: relative squared errors of a quantized layer against the unquantized one; the outputs
      are those of normally distributed inputs. None for other layers.
    notes: sentences on what did not go the usual way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    runs: str
    bytes: int
    dense_bytes: int
    reason: str = ""
    backend: str = ""
    packed_dtype: str = ""
    timings: tuple[Timing, ...] = ()
    weight_error: float | None = None
    output_error: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LayerSpeed":
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**{**values, "timings": tuple(Timing.from_dict(timing) for timing in data["timings"])})


@dataclass
class SpeedReport:
    """What `to_semi_structured` made of a model. ``print`` shows it; ``as_dict`` and ``to_json`` are for machines.

    layers: every weight of two or more dimensions, packed or dense.
    settings: the options, by name.
    device: the name of the GPU.
    versions: library -> its version.
    """

    layers: list[LayerSpeed] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def packed(self) -> list[LayerSpeed]:
        """The layers that run 2:4, those that also keep their dense weight included."""
        return [layer for layer in self.layers if layer.runs != DENSE]

    @property
    def bytes(self) -> int:
        """Bytes of all weights in the report, as they are now."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights in the report, if they were dense."""
        return sum(layer.dense_bytes for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SpeedReport":
        return cls(**{**data, "layers": [LayerSpeed.from_dict(layer) for layer in data["layers"]]})

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        shown = [layer for layer in self.layers if layer.runs != DENSE or layer.timings]
        counts = sorted({timing.tokens for layer in shown for timing in layer.timings})
        quantized = any(layer.weight_error is not None for layer in shown)
        head = ["layer", "shape", "runs", "MiB", *(f"us at {count}" for count in counts)]
        head += ["weight error", "output error"] if quantized else []
        parts = []
        if shown:
            rows = [_row(layer, counts, quantized) for layer in shown]
            parts.append(table((*head, "notes"), rows))
        by_reason: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.runs == DENSE:
                by_reason.setdefault(layer.reason, []).append(layer.name)
        if by_reason:
            parts.append("\n".join(f"stays dense: {', '.join(names)} ({why})" for why, names in by_reason.items()))
        ending = f"{len(self.packed)} of {len(self.layers)} layers run 2:4 on {self.device}, "
        ending += f"weights {_mib(self.dense_bytes)} -> {_mib(self.bytes)} MiB."
        if counts:
            ending += (
                "\nus: microseconds of a call, dense -> 2:4, each with its fastest library or algorithm; "
                f"timed {self.settings.get('timing', '')}."
            )
        elif self.packed:
            ending += "\nNot timed: 2:4 may be slower here. Name the token counts that matter with tune=."
        if quantized:
            ending += "\nErrors: ||A - B||^2 / ||B||^2 against the unquantized layer; outputs on normal inputs."
        parts.append(ending)
        return "\n\n".join(parts)


def _row(layer: LayerSpeed, counts: list[int], quantized: bool) -> tuple[str, ...]:
    timed = {timing.tokens: timing for timing in layer.timings}
    cells = [layer.name, " x ".join(map(str, layer.shape)), layer.runs]
    if layer.packed_dtype and layer.packed_dtype != layer.dtype:
        cells[-1] += f" {layer.packed_dtype}"
    cells.append(f"{_mib(layer.dense_bytes)} -> {_mib(layer.bytes)}" if layer.runs != DENSE else _mib(layer.bytes))
    for count in counts:
        timing = timed.get(count)
        cells.append(f"{timing.dense * 1e6:.1f} -> {timing.sparse * 1e6:.1f}" if timing else "")
    if quantized:
        cells += ["" if error is None else f"{error:.2e}" for error in (layer.weight_error, layer.output_error)]
    return (*cells, "; ".join(layer.notes))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


# convert --------------------------------------------------------------------------------------------------------------


ERROR_TOKENS = 256  # rows of the inputs that the output error of a quantized layer is measured on
ERROR_SEED = 20_240_813  # of those inputs; an unusual one, so that test weights are not drawn with the same seed


# the public functions -----------------------------------------------------------------------------------------------


def to_semi_structured(model: nn.Module, **options: Any) -> nn.Module:
    """Pack every Linear layer that is exactly 2:4 for Sparse Tensor Cores, in place, and return the model.

    It is for inference, on the CUDA device where the model is, and the last thing to do to the model: packed layers
    stay in their dtype (float16 or bfloat16) and on their device. `to_dense` is the way back. `semi_structured_report`
    says how each layer runs, and why others stay dense. A weight is packed only if it unpacks bit for bit. The options:

    - ``tune``: token counts such as (1, 64, 2048). Each layer is timed on them, dense against 2:4, and stays dense
      unless 2:4 is at least ``min_speedup`` (1.05) times as fast at every one of them. Without it every 2:4 layer is
      packed.
    - ``timing``: "eager", with the cost of launching from Python, or "graph", as in a CUDA graph.
    - ``keep_both``: True packs layers for which 2:4 wins at some of the counts only, and keeps their dense weights too,
      for 1.56 times the dense memory. Each count uses the faster form.
    - ``cache``: a JSON file in which timings are kept.
    - ``quantize``: "fp8" or "int8" also rounds packed layers to 8 bits; the report has the error.
    - ``include``, ``exclude``: globs of layer names. A layer that ``include`` names in full must be packable.
    - ``strict``: True: every layer that ``include`` and ``exclude`` leave must be packable.
    - ``backend``: "cusparselt" or "cutlass". Default: the first that runs here.

    Raises ValueError, with the model untouched, for unknown options, for a model that is not on a CUDA device, for
    sparse modules (export first), and for layers that cannot be packed and must be.
    """
    settings = Settings.of(options)
    _refuse_masks(model)
    _refuse_without_cuda(model)
    convert(model, settings, cache(lambda device: Place.of(device, settings) if device.type == "cuda" else None))
    return model


def to_dense(model: nn.Module) -> nn.Module:
    """Turn packed layers back into plain nn.Linear, in place, and return the model.

    The weights are bit for bit those that were packed; those of quantized layers are the rounded ones. They are new
    Parameters, on the layer's device. A model without packed layers is returned as it is.
    """
    for module in list(model.modules()):
        if isinstance(module, SemiStructuredLinear):
            unpack_module(module)
    if hasattr(model, ATTRIBUTE):
        delattr(model, ATTRIBUTE)
    return model


def semi_structured_report(model: nn.Module) -> SpeedReport:
    """How the layers of a model run since `to_semi_structured`, or ``load(folder, semi_structured=True)``.

    Raises ValueError if neither was called on it.
    """
    speed_report = getattr(model, ATTRIBUTE, None)
    if speed_report is None:
        raise ValueError(f"this {type(model).__name__} carries no report of 2:4: call to_semi_structured on it first")
    return speed_report


def pack_onto(model: nn.Module, settings: Settings, place: Place) -> nn.Module:
    """Pack a model that is on the CPU for another device, layer by layer, and then move the rest of it there."""
    convert(model, settings, lambda _: place)
    return model.to(place.device)


# conversion ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A weight of the model, the module that holds it, and why it stays dense ("": it can be packed)."""

    name: str
    module: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str = ""

    @property
    def entry(self) -> LayerSpeed:
        """The report's entry if the weight stays dense."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return LayerSpeed(self.name, self.shape, _short(self.dtype), DENSE, size, size, self.reason)


def convert(
    model: nn.Module,
    settings: Settings,
    place_of: Callable[[torch.device], Place | None],
) -> SpeedReport:
    """Pack the layers that can be packed, one by one, and attach the report to the model.

    ``place_of``: device of a weight -> the place that it is packed for, or None if it is not packed there. Errors are
    raised before the first layer changes, except for one that only packing itself can find. If packing is interrupted
    (out of memory, Ctrl-C), the layers up to then are packed, the others are dense, and the report says so.
    """
    candidates = list(_candidates(model, settings, place_of))
    _check_asked_for(model, candidates, settings)
    report = SpeedReport(
        layers=[_record(name, module) for name, module in _packed(model)],
        settings={key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
        versions=library_versions(),
    )
    timings = TimingCache(settings.cache)
    waiting = [candidate.entry for candidate in candidates]
    try:
        for index, candidate in enumerate(candidates):
            if not candidate.reason:
                place = place_of(candidate.module.get_parameter("weight").device)
                assert place is not None
                report.device = place.title
                report.versions["backend"] = library_version(place.backend)
                with torch.inference_mode(False), torch.no_grad():  # the packed tensors outlive the caller's mode
                    waiting[index] = _convert_layer(candidate, settings, place, timings)
    finally:
        report.layers += waiting
        setattr(model, ATTRIBUTE, report)
    _check_still_packed(report, settings)
    return report


def _candidates(
    model: nn.Module, settings: Settings, place_of: Callable[[torch.device], Place | None]
) -> Iterator[_Candidate]:
    """Every weight of two or more dimensions, except for those that are packed already."""
    layers, others = find_layers(model)
    uncalled = dict(_read_without_a_call(model))
    for layer in layers:
        weight = layer.parameter
        reason = _not_wanted(layer.name, settings)
        if not reason and layer.tied_modules:
            reason = "tied: another module holds the same weight"
        if not reason:
            reason = uncalled.get(layer.owner, "") or _not_eligible(layer.owner, weight, settings, place_of)
        yield _Candidate(layer.name, layer.owner, tuple(weight.shape), weight.dtype, reason)
    for other in others:
        if not isinstance(other.module, SemiStructuredLinear):
            dtype = next(p.dtype for p in other.module.parameters(recurse=False) if tuple(p.shape) == other.shape)
            reason = _not_wanted(other.name, settings) or other.reason
            yield _Candidate(other.name, other.module, other.shape, dtype, reason)


def _not_wanted(name: str, settings: Settings) -> str:
    """Why include and exclude leave a layer dense, or ""."""
    for glob in settings.exclude:
        if fnmatch.fnmatchcase(name, glob):
            return f"excluded by {glob!r}"
    if settings.include is not None and not any(fnmatch.fnmatchcase(name, glob) for glob in settings.include):
        return "not in include"
    return ""


def _read_without_a_call(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Linear layers whose parent reads the weight without calling them, each with the reason: they must stay dense."""
    for module in model.modules():
        why = f"{type(module).__name__} reads the weight without calling the layer"
        if isinstance(module, nn.TransformerEncoderLayer):
            yield from ((module.linear1, why), (module.linear2, why))
        elif "mamba" in type(module).__name__.lower():
            yield from ((child, why) for name, child in module.named_children() if name == "dt_proj")


def _not_eligible(
    module: Any, weight: nn.Parameter, settings: Settings, place_of: Callable[[torch.device], Place | None]
) -> str:
    """Why a layer's weight stays dense, or "". Cheap checks come first, the look at every weight last."""
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, not a plain nn.Linear"
    own = module.__dict__.get("forward")
    if own is not None and not has_hook(module) and getattr(own, "__func__", None) is not nn.Linear.forward:
        return "its forward was replaced on the instance"
    if is_sharded(weight):
        return "sharded over processes (DTensor)"
    if (place := place_of(weight.device)) is None:
        return f"on {weight.device}, not on a CUDA device"
    if weight.dtype not in DTYPES:
        return (
            f"dtype: {_short(weight.dtype)}, the kernels take {' and '.join(map(_short, DTYPES))}: cast the model first"
        )
    bias: Tensor | None = module.bias
    if bias is not None and bias.dtype != weight.dtype:
        return f"dtype: its bias is {_short(bias.dtype)}, its weight {_short(weight.dtype)}"
    packed_dtype = settings.packed_dtype or weight.dtype
    return shape_misfit(weight.shape, packed_dtype, place.backend) or misfit(weight.detach())


def _check_asked_for(model: nn.Module, candidates: Sequence[_Candidate], settings: Settings) -> None:
    """Raise ValueError for globs that match nothing, and for layers that cannot be packed and must be."""
    names = [candidate.name for candidate in candidates] + [name for name, _ in _packed(model)]
    check_globs([*(settings.include or ()), *settings.exclude], names, f"layer of this {type(model).__name__}")
    refused = [candidate for candidate in candidates if candidate.reason and _must_be_packed(candidate.name, settings)]
    if refused:
        named = first_few([f"{candidate.name}: {candidate.reason}" for candidate in refused])
        raise ValueError(f"{len(refused)} layers that you ask for cannot be packed 2:4: {named}")


def _must_be_packed(name: str, settings: Settings) -> bool:
    """Whether it is an error if a layer cannot be packed."""
    if name in (settings.include or ()):
        return True
    return settings.strict and not _not_wanted(name, settings)


def _check_still_packed(report: SpeedReport, settings: Settings) -> None:
    """Raise ValueError for a layer that must be packed, if packing itself found that it cannot be."""
    for layer in report.layers:
        if layer.runs == DENSE and not layer.timings and layer.reason and _must_be_packed(layer.name, settings):
            raise ValueError(f"layer {layer.name!r} cannot be packed 2:4: {layer.reason}")


def _convert_layer(candidate: _Candidate, settings: Settings, place: Place, timings: TimingCache) -> LayerSpeed:
    """Pack one layer, or leave it dense -> its entry in the report.

    The dense weight of a packed layer is freed before the next layer's is read.
    """
    module = candidate.module
    weight = module.get_parameter("weight").detach().to(place.device)
    bias = None if module.bias is None else module.bias.detach().to(place.device)
    codes, scales = weight, None
    if settings.packed_dtype is not None:
        codes, scales = quantize_rows(weight, settings.packed_dtype)
    try:
        packed = pack(codes, place.backend)
    except NotPackable as reason:
        return replace(candidate.entry, reason=str(reason))
    measured: list[Timing] = []
    choices = ALWAYS_SPARSE
    if settings.tune is not None:
        key = timing_key(place.title, place.backend, settings.timing, weight, codes.dtype, bias)
        known = timings.get(key, settings.tune)
        if known is None:
            known = time_layer(
                settings.tune,
                weight,
                bias,
                packed,
                scales,
                place.backend,
                place.timer,
                place.cache_bytes,
                place.libraries,
            )
            timings.put(key, known)
        measured = known
        decided = decide(measured, settings.min_speedup, settings.keep_both)
        if decided is None:
            return replace(candidate.entry, reason=_slower(measured, settings), timings=tuple(measured))
        choices = decided
    both = not all(choice.sparse for choice in choices)
    pack_module(module, packed, scales, place.backend, choices, keep_dense=both)
    assert isinstance(module, SemiStructuredLinear)
    module.record = replace(
        candidate.entry,
        runs=BOTH if both else SPARSE,
        bytes=module.weight_bytes,
        backend=place.backend.name,
        packed_dtype=_short(codes.dtype),
        timings=tuple(measured),
        notes=tuple(_notes(codes)),
        **({} if scales is None else _errors(packed, weight, bias, codes, scales, place.backend)),
    )
    return module.record


def _slower(timings: Sequence[Timing], settings: Settings) -> str:
    lost = [str(timing.tokens) for timing in timings if timing.speedup < settings.min_speedup]
    return f"2:4 is not {settings.min_speedup:g} times as fast at {', '.join(lost)} tokens"


def _notes(weight: Tensor) -> Iterator[str]:
    if weight.dtype in DTYPES and (count := int(((weight == 0) & torch.signbit(weight)).sum())):
        yield f"{count} weights were -0.0 and are +0.0 now"


def _errors(
    packed: tuple[Tensor, Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    backend: Backend,
) -> dict[str, float]:
    """The errors that rounding to 8 bits makes, in the weight and in the output.

    The output is computed from tensors, not by calling the module: its bias may not be on the device yet.
    """
    x = torch.randn(ERROR_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(ERROR_SEED)).to(weight)
    output = multiply(x, *packed, scales, None, bias, len(weight), backend.name, ALWAYS_SPARSE)
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return {
        "weight_error": relative_squared_error(codes.float() * scales, weight),
        "output_error": relative_squared_error(output, wanted),
    }


def _packed(model: nn.Module) -> Iterator[tuple[str, SemiStructuredLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SemiStructuredLinear))


def _record(name: str, module: SemiStructuredLinear) -> LayerSpeed:
    return replace(module.record, name=name)


def _refuse_masks(model: nn.Module) -> None:
    if names := [name for name, _ in named_masks(model)]:
        raise ValueError(
            f"{len(names)} weights are held by masks ({names[0]!r} first), which packed weights cannot be: call "
            "modelopt_sparse.export(model) first"
        )


def _refuse_without_cuda(model: nn.Module) -> None:
    devices = {parameter.device for parameter in model.parameters() if parameter.dim() >= 2}
    if any(device.type == "cuda" for device in devices) or any(_packed(model)):
        return
    where = ", ".join(sorted(map(str, devices))) or "no device, for it has no weights"
    raise ValueError(
        f"2:4 kernels run on CUDA devices and this {type(model).__name__} is on {where}: move it with "
        'model.to("cuda") first, or load it with modelopt_sparse.load(folder, semi_structured=True)'
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
