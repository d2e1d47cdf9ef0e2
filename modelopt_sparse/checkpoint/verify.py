"""Does a model or a folder really hold its pattern? Looks at the weights themselves."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.checkpoint.format import DESCRIPTION, read_description, read_masks, weight_files, weight_reader
from modelopt_sparse.methods.magnitude import Magnitude
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.model.hf import empty_model, unloaded
from modelopt_sparse.model.layers import Layer, find_layers, refuse_packed
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.offload import stored
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import Report, attached_report
from modelopt_sparse.reports.text import first_few, table


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
        wrong = sum(bool(item.problem) for item in self.layers)
        ending = f"{wrong} of {len(rows)} layers do not hold" if wrong else f"All {len(rows)} layers hold"
        return f"{table(('layer', 'pattern', 'zeros', 'verdict'), rows)}\n\n{ending} their pattern."


class PatternError(ValueError):
    """What `verify` raises when weights do not hold their pattern; ``verification`` has all that it looked at."""

    def __init__(self, verification: Verification) -> None:
        self.verification = verification
        wrong = [item for item in verification.layers if item.problem]
        named = first_few([f"{item.name}: {item.problem}" for item in wrong])
        super().__init__(f"{len(wrong)} of {len(verification.layers)} layers do not hold their pattern: {named}")


def verify(model: nn.Module | str | Path, pattern: Any = None, *, trust_remote_code: bool = False) -> Verification:
    """Check that every pruned layer holds its pattern, zeros being exactly +0.0, and agrees with its mask.

    ``pattern`` is asked of every pruned layer; without it each layer is held to the pattern in its report. The pruned
    layers are those in the report; without a report those that carry masks; a model or folder with neither is held to
    ``pattern`` in every default target. Raises ValueError naming the layers that fail; returns what was found.
    """
    asked = None if pattern is None else parse_pattern(pattern)
    if isinstance(model, nn.Module):
        refuse_packed(model, "verified")
        masks, record = dict(named_masks(model)), attached_report(model)

        def read(layer: Layer, /) -> Tensor:
            return stored(layer.owner, layer.param).detach()
    else:
        model, read, masks, record = _open(Path(model), trust_remote_code)
    found = tuple(
        _look(layer, read(layer), masks.get(layer.parameter_name), held_to)
        for layer, held_to in _expected(model, masks, record, asked)
    )
    if any(item.problem for item in found):
        raise PatternError(Verification(found))
    return Verification(found)


def _expected(
    model: nn.Module, masks: Mapping[str, Tensor], record: Report | None, asked: Pattern | None
) -> Iterator[tuple[Layer, Pattern]]:
    layers = {layer.name: layer for layer in find_layers(model)[0]}
    if record is not None and record.layers:
        for entry in record.layers:
            if entry.name not in layers:
                raise ValueError(f"layer {entry.name!r} of the report is not in this {type(model).__name__}")
            yield layers[entry.name], _held_to(parse_pattern(entry.pattern), asked)
        return
    if asked is None:
        raise ValueError("there is no report that says which pattern to look for: give pattern=, for example '2:4'")
    masked = [layer for layer in layers.values() if layer.parameter_name in masks]
    if not masked:
        masked = [target.layer for target in plan_for(model, Magnitude(), SparsifyConfig(pattern=asked)).layers]
    for layer in masked:
        yield layer, asked


def _held_to(recorded: Pattern, asked: Pattern | None) -> Pattern:
    """The pattern asked for, an unstructured one in the scope it was made with unless another is asked for."""
    if isinstance(recorded, Unstructured) and recorded.scope is not None and asked is not None:
        return asked.with_scope(recorded.scope)
    return asked or recorded


def _look(layer: Layer, weight: Tensor, mask: Tensor | None, pattern: Pattern) -> Verified:
    matrix = layer.matrix(weight)
    problem = pattern.misfit(layer.columns(weight)) or _breach(layer, weight, mask, pattern)
    return Verified(layer.name, str(pattern), int((matrix == 0).sum()), matrix.numel(), problem)


def _breach(layer: Layer, weight: Tensor, mask: Tensor | None, pattern: Pattern) -> str:
    occupied = (weight != 0) | torch.signbit(weight)  # kernels that look at the bits take -0.0 for a nonzero
    if count := pattern.count_nonzero_wrong(layer.matrix(occupied)):
        only_signs = "" if pattern.count_nonzero_wrong(layer.matrix(weight)) else ", with -0.0 counted as one"
        return f"{_scopes(pattern, count)} more nonzeros than {pattern} allows{only_signs}"
    if mask is not None and (count := int(occupied[~mask.to(weight.device)].sum())):
        return f"{count} {'entry is' if count == 1 else 'entries are'} not +0.0 where the mask is False"
    if mask is not None and (count := pattern.count_nonzero_wrong(layer.matrix(mask))):
        return f"{_scopes(pattern, count)} more entries kept by the mask than {pattern} allows"
    return ""


def _scopes(pattern: Pattern, count: int) -> str:
    if isinstance(pattern, NM):
        return f"{count} group of {pattern.m} holds" if count == 1 else f"{count} groups of {pattern.m} hold"
    scope = pattern.scope or "matrix"
    plural = {"row": "rows", "matrix": "matrices"}[scope]
    return f"{count} {scope} holds" if count == 1 else f"{count} {plural} hold"


def _open(
    folder: Path, trust_remote_code: bool
) -> tuple[nn.Module, Callable[[Layer], Tensor], Mapping[str, Tensor], Report | None]:
    """A folder's model without values, a function that reads a layer's weight, its masks, and its report if any."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} holds no config.json, so nothing says which axis of a weight its inputs lie along: "
            "restore it into its model and verify that"
        )
    masks: dict[str, Tensor] = {}
    record = None
    if (folder / DESCRIPTION).is_file():
        description = read_description(folder)
        problems: list[str] = []
        masks, record = read_masks(folder, description, problems), description.report
        if problems:
            raise ValueError(f"{str(folder)!r} has damaged masks: {'; '.join(problems)}")
    model = empty_model(folder, trust_remote_code=trust_remote_code)
    names, from_file = weight_reader(folder, weight_files(folder))
    if names.issuperset(layer.parameter_name for layer in find_layers(model)[0]):

        def read(layer: Layer, /) -> Tensor:
            weight = from_file(layer.parameter_name)
            assert weight is not None
            return weight

        return model, read, masks, record
    # transformers stores this architecture under other names than it has in memory, and knows the way back
    options = {"dtype": "auto", "trust_remote_code": trust_remote_code, "output_loading_info": True}
    model, found = type(model).from_pretrained(folder, **options)  # type: ignore[attr-defined]
    if problems := unloaded(found):
        raise ValueError(f"{str(folder)!r} does not hold a whole {type(model).__name__}: {first_few(problems)}")
    return model, lambda layer: layer.parameter.detach(), masks, record
