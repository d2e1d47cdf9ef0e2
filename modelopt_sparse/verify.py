"""Does a model or a folder really hold its pattern? Looks at the weights themselves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from modelopt_sparse.checkpoint import DESCRIPTION, model_class, read_description, weight_reader
from modelopt_sparse.config import SparsifyConfig
from modelopt_sparse.layers import Layer, find_layers
from modelopt_sparse.methods.magnitude import Magnitude
from modelopt_sparse.modules import named_masks
from modelopt_sparse.offload import stored
from modelopt_sparse.patterns import Pattern, parse_pattern
from modelopt_sparse.plan import plan_for, table
from modelopt_sparse.report import ATTRIBUTE, Report


@dataclass(frozen=True)
class Verified:
    """One layer that was looked at: its pattern, the zeros found in its weight, and what is wrong (or "")."""

    name: str
    pattern: str
    zeros: int
    size: int
    problem: str = ""


@dataclass(frozen=True)
class Verification:
    """The layers that were looked at; ``print`` shows a table."""

    layers: tuple[Verified, ...]

    def __str__(self) -> str:
        rows = [
            (item.name, item.pattern, f"{item.zeros / item.size:.2%}", item.problem or "ok") for item in self.layers
        ]
        return table(("layer", "pattern", "zeros", "verdict"), rows)


def verify(model: nn.Module | str | Path, pattern: Any = None) -> Verification:
    """Check that every pruned layer holds its pattern, zeros being exactly +0.0, and agrees with its mask.

    ``pattern`` is asked of every pruned layer; without it each layer is held to the pattern in its report. The pruned
    layers are those in the report; a model or folder without one is held to ``pattern`` in every default target.
    Raises ValueError naming the layers that fail; returns what was found.
    """
    asked = None if pattern is None else parse_pattern(pattern)
    if isinstance(model, nn.Module):
        masks = dict(named_masks(model))
        record = getattr(model, ATTRIBUTE, None)

        def read(layer: Layer, /) -> Tensor:
            return stored(layer.owner, layer.param).detach()
    else:
        model, read, record = _open(Path(model))
        masks = {}
    found = [
        _look(layer, read(layer), masks.get(layer.parameter_name), held_to)
        for layer, held_to in _expected(model, record, asked)
    ]
    wrong = [item for item in found if item.problem]
    if wrong:
        first = "; ".join(f"{item.name}: {item.problem}" for item in wrong[:5])
        raise ValueError(f"{len(wrong)} of {len(found)} layers do not hold their pattern: {first}")
    return Verification(tuple(found))


def _expected(model: nn.Module, record: Report | None, asked: Pattern | None) -> Iterator[tuple[Layer, Pattern]]:
    if record is not None and record.layers:
        layers = {layer.name: layer for layer in find_layers(model)[0]}
        for entry in record.layers:
            if entry.name not in layers:
                raise ValueError(f"layer {entry.name!r} of the report is not in this {type(model).__name__}")
            yield layers[entry.name], asked or parse_pattern(entry.pattern)
        return
    if asked is None:
        raise ValueError("there is no report that says which pattern to look for: give pattern=, for example '2:4'")
    for target in plan_for(model, Magnitude(), SparsifyConfig(pattern=asked)).layers:
        yield target.layer, asked


def _look(layer: Layer, weight: Tensor, mask: Tensor | None, pattern: Pattern) -> Verified:
    matrix = layer.matrix(weight)
    zeros = int((matrix == 0).sum())
    problem = pattern.misfit(layer.columns(weight)) or ""
    if not problem and (count := pattern.count_nonzero_wrong(matrix)):
        problem = f"{count} places with more nonzeros than {pattern} allows"
    elif torch.signbit(matrix[matrix == 0]).any():
        problem = "holds -0.0, which some 2:4 kernels take for a nonzero"
    elif mask is not None and weight[~mask.to(weight.device)].count_nonzero():
        problem = "is not zero where its mask is False"
    return Verified(layer.name, str(pattern), zeros, matrix.numel(), problem)


def _open(folder: Path) -> tuple[nn.Module, Callable[[Layer], Tensor], Report | None]:
    """A folder's model without values, a function that reads a layer's weight, and its report if it has one."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} holds no config.json, so nothing says which axis of a weight its inputs lie along: "
            "restore it into its model and verify that"
        )
    record = Report.from_dict(read_description(folder)["report"]) if (folder / DESCRIPTION).is_file() else None
    config = AutoConfig.from_pretrained(folder)
    architecture = model_class(folder)
    with torch.device("meta"):
        model = architecture(config)
    names, from_file = weight_reader(folder)
    if all(layer.parameter_name in names for layer in find_layers(model)[0]):
        return model, lambda layer: from_file(layer.parameter_name), record
    # transformers stores this architecture under other names than it has in memory, and knows the way back
    model = architecture.from_pretrained(folder, dtype="auto")
    return model, lambda layer: layer.parameter.detach(), record
