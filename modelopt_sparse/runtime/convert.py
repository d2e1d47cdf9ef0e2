"""`to_semi_structured` and `to_dense`: packing a model's layers for 2:4 kernels, one by one, and the way back."""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelopt_sparse.distributed import is_sharded
from modelopt_sparse.model.layers import find_layers
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.offload import has_hook
from modelopt_sparse.reports.text import first_few, nearest
from modelopt_sparse.reports.values import library_versions
from modelopt_sparse.runtime.backends import Backend, library_version
from modelopt_sparse.runtime.linear import SemiStructuredLinear, pack_module, unpack_module
from modelopt_sparse.runtime.matmul import ALWAYS_SPARSE, multiply
from modelopt_sparse.runtime.packing import DTYPES, NotPackable, misfit, pack, shape_misfit
from modelopt_sparse.runtime.quantize import quantize_rows, relative_squared_error
from modelopt_sparse.runtime.settings import Place, Settings
from modelopt_sparse.runtime.speed_report import ATTRIBUTE, BOTH, DENSE, SPARSE, LayerSpeed, SpeedReport
from modelopt_sparse.runtime.timing import Timing, TimingCache, decide, time_layer, timing_key

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
    for glob in [*(settings.include or ()), *settings.exclude]:
        if not fnmatch.filter(names, glob):
            raise ValueError(f"{glob!r} matches no layer of this {type(model).__name__}{nearest(glob, names)}")
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
