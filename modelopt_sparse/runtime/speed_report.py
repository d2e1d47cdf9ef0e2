"""The report of `to_semi_structured`: which layers run 2:4, their bytes and times, and why the others stay dense."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from modelopt_sparse.reports.text import table
from modelopt_sparse.runtime.timing import Timing

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
