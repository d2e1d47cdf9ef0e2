"""`to_semi_structured` and `to_dense`: packs a model's layers for 2:4 kernels, one by one, and unpacks them.

`semi_structured_report` says how each layer runs, in which bytes and times, and why the others stay dense.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.checks import check_choice, check_flag, check_number, is_whole, shown
from modelopt_sparse.distributed import is_sharded
from modelopt_sparse.model.find import find_layers
from modelopt_sparse.model.forwards import replaced_forward
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.plan.options import check_globs, first_match
from modelopt_sparse.reports.report import library_versions
from modelopt_sparse.reports.text import Printed, by_reason, first_few, product_of, refuse_unknown, table
from modelopt_sparse.runtime.kernels import (
    BACKENDS,
    DTYPES,
    HELD,
    PACKED,
    NotPackable,
    SemiStructuredLinear,
    choose_backend,
    dtype_name,
    library_version,
    misfit,
    pack,
    pack_module,
    shape_misfit,
    unpack_module,
)
from modelopt_sparse.runtime.timing import Place, Timing, eager_seconds, time_layer

ATTRIBUTE = "semi_structured_report"  # where a model holds its report
SPARSE, DENSE = "2:4", "dense"  # values of LayerSpeed.runs

# options --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options of `to_semi_structured`, with their defaults. Raises ValueError for values that are not allowed."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    strict: bool = False
    tune: tuple[int, ...] | None = (1, 64, 2048)
    min_speedup: float = 1.05
    backend: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Options as users write them: one glob or token count may stand for a tuple of them, None for the default."""
        refuse_unknown(options, [option.name for option in fields(cls)])
        values: dict[str, Any] = {name: value for name, value in options.items() if value is not None or name == "tune"}
        for key in ("include", "exclude", "tune"):
            if (value := values.get(key)) is not None:
                values[key] = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        return cls(**values)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, [*BACKENDS, None])
        check_number("min_speedup", self.min_speedup, "(0, inf]")
        check_flag("strict", self.strict)
        if self.tune is not None:
            if not self.tune or not all(is_whole(count, 1) for count in self.tune):
                raise ValueError(f"tune={self.tune}: give token counts from 1, for example tune=(1, 64, 2048), or None")
            object.__setattr__(self, "tune", tuple(sorted(set(self.tune))))


def _place(device: torch.device, settings: Settings) -> Place:
    """A CUDA device as a place. Raises ValueError for a backend that does not run there."""
    backend, properties = choose_backend(device, settings.backend), torch.cuda.get_device_properties(device)
    return Place(device, backend, properties.name, eager_seconds, properties.L2_cache_size)


def loading_place(device_map: Any, semi_structured: bool | Mapping[str, Any]) -> tuple[Settings, Place]:
    """`load`'s ``semi_structured`` as settings, and the one CUDA device that its ``device_map`` names as a place.

    A ``device_map`` of None is the current CUDA device. Raises ValueError for anything that cannot work, before any
    weight is read.
    """
    if not isinstance(semi_structured, bool | Mapping):
        raise ValueError(f"semi_structured={shown(semi_structured)}: give True or a mapping of options")
    settings = Settings.of({} if isinstance(semi_structured, bool) else semi_structured)
    named = device_map.values() if isinstance(device_map, Mapping) else ["cuda" if device_map is None else device_map]
    try:
        (device,) = {torch.device(name) for name in named}
    except (RuntimeError, TypeError, ValueError):  # "auto", or several
        device = torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device_map={device_map!r}: 2:4 layers are packed for one CUDA device: give 'cuda:0' or so")
    if not torch.cuda.is_available():
        raise ValueError("semi_structured packs layers for a CUDA device and there is none here: load the model dense")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return settings, _place(device, settings)


# the report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSpeed:
    """One weight of two or more dimensions, and how its layer runs.

    name, shape, dtype: of the dense weight; the dtype as a name, "bfloat16".
    runs: "2:4" or "dense".
    bytes, dense_bytes: what the weight takes now, and what it takes dense.
    reason: why the layer is dense, or "".
    backend: the library that it is packed for; "" if it is dense.
    timings: one for each token count; empty if the layer was not timed.
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
    timings: tuple[Timing, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class SpeedReport(Printed):
    """What `to_semi_structured` made of a model. ``print`` shows it; ``as_dict`` and ``to_json`` are for machines.

    layers: every weight of two or more dimensions, packed or dense.
    settings: the options, by name.
    device: the name of the GPU; "" before a layer could be packed.
    versions: library -> its version.
    """

    layers: list[LayerSpeed] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def packed(self) -> list[LayerSpeed]:
        """The layers that run 2:4."""
        return [layer for layer in self.layers if layer.runs != DENSE]

    @property
    def bytes(self) -> int:
        """Bytes of all weights in the report, as they are now."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights in the report, if they were dense."""
        return sum(layer.dense_bytes for layer in self.layers)

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: every layer has a line of its own."""
        shown = [layer for layer in self.layers if layer.runs != DENSE or layer.timings]
        counts = sorted({timing.tokens for layer in shown for timing in layer.timings})
        heads = ("layer", "shape", "runs", "MiB", *(f"us at {count}" for count in counts), "notes")
        reasons = {layer.name: layer.reason for layer in self.layers if layer.runs == DENSE}
        parts = [table(heads, [_row(layer, counts) for layer in shown])] if shown else []
        if reasons:
            parts.append(by_reason("stays dense", reasons, all_rows=True))
        ending = f"{len(self.packed)} of {len(self.layers)} layers run 2:4{self.device and f' on {self.device}'}, "
        ending += f"weights {_mib(self.dense_bytes)} -> {_mib(self.bytes)} MiB."
        if counts:
            ending += "\nus: microseconds of a call, dense -> 2:4, each with its fastest library or algorithm."
        elif self.packed:
            ending += "\nNot timed: 2:4 may be many times slower here. Name the token counts that matter with tune=."
        parts.append(ending)
        return "\n\n".join(parts)


def _row(layer: LayerSpeed, counts: list[int]) -> tuple[str, ...]:
    timed = {timing.tokens: timing for timing in layer.timings}
    cells = [layer.name, product_of(layer.shape), layer.runs]
    cells.append(f"{_mib(layer.dense_bytes)} -> {_mib(layer.bytes)}" if layer.runs != DENSE else _mib(layer.bytes))
    for count in counts:
        timing = timed.get(count)
        cells.append(f"{timing.dense * 1e6:.1f} -> {timing.sparse * 1e6:.1f}" if timing else "")
    return (*cells, "; ".join(layer.notes))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


# the public functions -----------------------------------------------------------------------------------------------


def to_semi_structured(model: nn.Module, **options: Any) -> nn.Module:
    """Pack every Linear layer that is exactly 2:4 for Sparse Tensor Cores, in place, and return the model.

    It is for inference, on the CUDA device where the model is, and the last thing to do to the model: packed layers
    stay in their dtype (float16 or bfloat16) and on their device. `to_dense` is the way back. `semi_structured_report`
    says how each layer runs, and why others stay dense. A weight is packed only if it unpacks bit for bit. The options:

    - ``tune``: the token counts of your calls, (1, 64, 2048) by default. Each layer is timed on them, dense against
      2:4, and stays dense unless 2:4 is at least ``min_speedup`` (1.05) times as fast at every one of them. None: every
      2:4 layer is packed untimed, for its bytes: it may be many times slower.
    - ``include``, ``exclude``: globs of layer names. A layer that ``include`` names in full must be packable.
    - ``strict``: True: every layer that ``include`` and ``exclude`` leave must be packable.
    - ``backend``: "cusparselt" or "cutlass". Default: the first that runs here.

    Raises ValueError, with the model untouched, for unknown options, for a model that is not on a CUDA device, for
    sparse modules (export first), and for layers that cannot be packed and must be.
    """
    settings = Settings.of(options)
    if names := [name for name, _ in named_masks(model)]:
        held = f"{len(names)} weights are held by masks ({names[0]!r} first)"
        raise ValueError(f"{held}: call modelopt_sparse.export(model) first, for packed weights take no masks")
    devices = {parameter.device for parameter in model.parameters() if parameter.dim() >= 2}
    if not any(device.type == "cuda" for device in devices) and not any(_packed(model)):
        where = f"this {type(model).__name__} is on {', '.join(sorted(map(str, devices))) or 'no device'}"
        raise ValueError(f'2:4 kernels run on CUDA devices and {where}: move it with model.to("cuda") first')
    convert(model, settings, cache(lambda device: _place(device, settings) if device.type == "cuda" else None))
    return model


def to_dense(model: nn.Module) -> nn.Module:
    """Turn packed layers back into plain nn.Linear, in place, and return the model.

    The weights are bit for bit those that were packed. They are new Parameters, on the layer's device. A model without
    packed layers is returned as it is.
    """
    for _, module in list(_packed(model)):
        unpack_module(module)
    vars(model).pop(ATTRIBUTE, None)
    return model


def semi_structured_report(model: nn.Module) -> SpeedReport:
    """How the layers of a model run since `to_semi_structured`, or ``load(folder, semi_structured=True)``.

    Raises ValueError if neither was called on it.
    """
    speed_report = getattr(model, ATTRIBUTE, None)
    if speed_report is None:
        raise ValueError(f"this {type(model).__name__} carries no report of 2:4: call to_semi_structured on it first")
    return speed_report


# packing a model ------------------------------------------------------------------------------------------------------

PlaceOf = Callable[[torch.device], Place | None]  # device of a weight -> where it is packed for; None: it is not packed


def convert(model: nn.Module, settings: Settings, place_of: PlaceOf) -> SpeedReport:
    """Pack the layers that can be packed, one by one, and attach the report to the model.

    Errors are raised before the first layer changes, except for one that only packing itself can find. If packing is
    interrupted (out of memory, Ctrl-C), the layers up to then are packed, the others are dense, and the report says so.
    """
    weights = list(_weights(model, settings, place_of))
    layers = [layer for _, layer in weights]
    names = [layer.name for layer in layers] + [name for name, _ in _packed(model)]
    check_globs([*(settings.include or ()), *settings.exclude], names, f"layer of this {type(model).__name__}")
    refused = [f"{x.name}: {x.reason}" for x in layers if x.reason and _must_be_packed(x.name, settings)]
    if refused:
        raise ValueError(f"{len(refused)} layers that you ask for cannot be packed 2:4: {first_few(refused)}")
    before = getattr(model, ATTRIBUTE, SpeedReport())
    report = SpeedReport(
        layers=[replace(module.record, name=name) for name, module in _packed(model)],
        settings=asdict(settings),
        device=before.device,
        versions={**before.versions, **library_versions()},
    )
    timings: dict[Any, list[Timing]] = {}  # of layers that are alike
    try:
        for index, (module, layer) in enumerate(weights):
            if not layer.reason:
                place = place_of(module.get_parameter("weight").device)
                assert place is not None
                report.device = place.title
                report.versions["backend"] = library_version(place.backend)
                with torch.inference_mode(False), torch.no_grad():  # the packed tensors outlive the caller's mode
                    layers[index] = _convert_layer(module, layer, settings, place, timings)
    finally:
        report.layers += layers
        setattr(model, ATTRIBUTE, report)
    for layer in report.layers:
        if layer.runs == DENSE and not layer.timings and layer.reason and _must_be_packed(layer.name, settings):
            raise ValueError(f"layer {layer.name!r} cannot be packed 2:4: {layer.reason}")
    return report


def _weights(model: nn.Module, settings: Settings, place_of: PlaceOf) -> Iterator[tuple[Any, LayerSpeed]]:
    """Every weight of two or more dimensions that is not packed yet: its module, and its entry in the report.

    The entry has the reason why the weight stays dense; "": it can be packed.
    """
    layers, others = find_layers(model)
    uncalled = dict(_read_without_a_call(model))
    for layer in layers:
        tied = "tied: another module holds the same weight" if layer.tied_modules else ""
        reason = _not_wanted(layer.name, settings) or tied or uncalled.get(layer.owner)
        reason = reason or _not_eligible(layer.owner, layer.parameter, place_of)
        yield layer.owner, _dense(layer.name, layer.parameter, reason)
    for dense in others:
        if not isinstance(dense.module, SemiStructuredLinear):
            weight = next(p for p in dense.module.parameters(recurse=False) if tuple(p.shape) == dense.shape)
            yield dense.module, _dense(dense.name, weight, _not_wanted(dense.name, settings) or dense.reason)


def _dense(name: str, weight: Tensor, reason: str) -> LayerSpeed:
    """The report's entry of a weight that stays dense."""
    shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
    return LayerSpeed(name, shape, dtype, DENSE, weight.nbytes, weight.nbytes, reason)


def _not_wanted(name: str, settings: Settings) -> str:
    """Why include and exclude leave a layer dense, or ""."""
    if (glob := first_match(name, settings.exclude)) is not None:
        return f"excluded by {glob!r}"
    return "not in include" if settings.include is not None and first_match(name, settings.include) is None else ""


def _read_without_a_call(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Linear layers whose parent reads the weight without calling them, each with the reason: they must stay dense."""
    for module in model.modules():
        why = f"{type(module).__name__} reads the weight without calling the layer"
        if isinstance(module, nn.TransformerEncoderLayer):
            yield from ((module.linear1, why), (module.linear2, why))
        elif "mamba" in type(module).__name__.lower():
            yield from ((child, why) for name, child in module.named_children() if name == "dt_proj")


def _not_eligible(module: Any, weight: nn.Parameter, place_of: PlaceOf) -> str:
    """Why a layer's weight stays dense, or "". Cheap checks come first, the look at every weight last."""
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, not a plain nn.Linear"
    if replaced_forward(module) is not None:
        return "its forward was replaced on the instance"
    if taken := [name for name in (*PACKED, *HELD) if hasattr(module, name)]:
        return f"it has an attribute {taken[0]!r}, where its packed form belongs"
    if is_sharded(weight):
        return "sharded over processes (DTensor)"
    if (place := place_of(weight.device)) is None:
        return f"on {weight.device}, not on a CUDA device"
    if weight.dtype not in DTYPES:
        taken = " and ".join(map(dtype_name, DTYPES))
        return f"dtype: {dtype_name(weight.dtype)}, the kernels take {taken}: cast the model first"
    bias: Tensor | None = module.bias
    if bias is not None and bias.dtype != weight.dtype:
        return f"dtype: its bias is {dtype_name(bias.dtype)}, its weight {dtype_name(weight.dtype)}"
    return shape_misfit(weight.shape, weight.dtype, place.backend) or misfit(weight.detach())


def _must_be_packed(name: str, settings: Settings) -> bool:
    """Whether it is an error if a layer cannot be packed."""
    return name in (settings.include or ()) or (settings.strict and not _not_wanted(name, settings))


def _convert_layer(
    module: Any, dense: LayerSpeed, settings: Settings, place: Place, timings: dict[Any, list[Timing]]
) -> LayerSpeed:
    """Pack one layer, or leave it dense -> its entry in the report, ``dense`` if nothing changes.

    A layer that is timed is packed if 2:4 is at least ``min_speedup`` times as fast as the faster of the dense
    libraries at every token count. A count that was not timed runs as the largest timed one below it. The dense weight
    of a packed layer is freed before the next layer's is read.
    """
    weight = module.get_parameter("weight").detach().to(place.device)
    bias = None if module.bias is None else module.bias.detach().to(place.device)
    try:
        packed = pack(weight, place.backend)
    except NotPackable as reason:
        return replace(dense, reason=str(reason))
    measured: list[Timing] = []
    if settings.tune is not None:
        key = place.title, weight.shape, weight.dtype, bias is None
        if key not in timings:
            timings[key] = time_layer(settings.tune, weight, bias, packed, place)
        measured = timings[key]
        if lost := [str(timing.tokens) for timing in measured if timing.speedup < settings.min_speedup]:
            slower = f"2:4 is not {settings.min_speedup:g} times as fast at {', '.join(lost)} tokens"
            return replace(dense, reason=slower, timings=tuple(measured))
    choices = [number for timing in measured for number in (timing.tokens, *timing.algorithm)]
    pack_module(module, packed, place.backend, choices)
    assert isinstance(module, SemiStructuredLinear)
    negative = int(((weight == 0) & torch.signbit(weight)).sum())
    module.record = replace(
        dense,
        runs=SPARSE,
        bytes=sum(tensor.nbytes for tensor in packed if tensor is not None),
        backend=place.backend.name,
        timings=tuple(measured),
        notes=(f"{negative} weights were -0.0 and are +0.0 now",) if negative else (),
    )
    return module.record


def _packed(model: nn.Module) -> Iterator[tuple[str, SemiStructuredLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SemiStructuredLinear))
