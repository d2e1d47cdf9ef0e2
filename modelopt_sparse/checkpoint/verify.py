"""`verify`: do the weights of a model, or of a folder, hold their pattern?"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.checkpoint.folder import DESCRIPTION, refuse_adapter
from modelopt_sparse.checkpoint.packed import loaded_whole, opened_folder, opened_weights
from modelopt_sparse.checkpoint.workfolder import STARTED
from modelopt_sparse.checks import grouped
from modelopt_sparse.methods.patterns import Pattern, Unstructured, parse_pattern
from modelopt_sparse.methods.scores import Magnitude
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.find import find_layers, usable
from modelopt_sparse.model.forwards import OTHER
from modelopt_sparse.model.hf import codes_in, empty_model, quantization_of, refuse_codes
from modelopt_sparse.model.layers import Layer, as_row
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.plan.planner import plan_for
from modelopt_sparse.reports.report import Report, attached_report
from modelopt_sparse.reports.text import Column, Printed, counted, first_few, paragraph, rows_of
from modelopt_sparse.reports.values import UNMASKED


@dataclass(frozen=True)
class Verified:
    """One layer that was checked.

    name: the layer's name.
    pattern: the pattern that it was held to, as text.
    zeros, size: how many of its weights are zero, and how many it has.
    problem: what is wrong, or "".
    note: that it carries no mask any more, if it was given one, or "".
    """

    name: str
    pattern: str
    zeros: int
    size: int
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class Verification(Printed):
    """What `verify` returns. ``print`` shows it as a table with equal rows folded, ``text(all_rows=True)`` all rows.

    layers: the layers that were checked, each with ``name``, ``pattern``, ``zeros``, ``size`` and ``problem``.
    files: of a folder: whether its files were compared with the SHA-256 that they were saved with, as a sentence.
    notes: sentences on layers, pruned or dense, whose zeros would not be those of the weight that their forwards use.
    """

    layers: tuple[Verified, ...]
    files: str = ""
    notes: tuple[str, ...] = ()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        count, wrong = len(self.layers), sum(bool(layer.problem) for layer in self.layers)
        zeros, size = (sum(getattr(layer, counted) for layer in self.layers) for counted in ("zeros", "size"))
        verdict = f"{wrong} of {count} layers do not hold" if wrong else f"All {count} layers hold"
        patterns = counted(layer.pattern for layer in self.layers)
        summary = f"{verdict} their pattern: {patterns}. {zeros:,} of {size:,} weights are zero. {self.files}".rstrip()
        verdicts = [", but ".join(filter(None, (layer.problem or "ok", layer.note))) for layer in self.layers]
        columns = [
            Column("pattern", [layer.pattern for layer in self.layers], "levels"),
            Column("zeros", [f"{layer.zeros / layer.size:.2%}" for layer in self.layers], "range"),
            Column("verdict", verdicts, "range"),
        ]
        rows = rows_of("layer", [layer.name for layer in self.layers], columns, all_rows=all_rows)
        notes = (paragraph(f"Note: {note}.", all_rows=all_rows) for note in self.notes)
        return "\n\n".join([paragraph(summary, all_rows=all_rows), rows, *notes])


class PatternError(ValueError):
    """Weights do not hold their pattern. ``verification`` has all layers that were checked, the good ones as well."""

    def __init__(self, verification: Verification, advice: str = "") -> None:
        self.verification = verification
        wrong = [layer for layer in verification.layers if layer.problem]
        named = first_few([f"{x.name}: {'; '.join(filter(None, (x.problem, x.note)))}" for x in wrong])
        count = f"{len(wrong)} of {len(verification.layers)}"
        super().__init__(f"{count} layers do not hold their pattern: {named}{advice}")


def verify(
    model: nn.Module | str | Path, pattern: Any = None, *, hashes: bool = True, trust_remote_code: bool = False
) -> Verification:
    """Check that every pruned layer holds its pattern, with zeros that are exactly +0.0, and agrees with its mask.

    ``pattern`` is the pattern that every pruned layer is held to. Without it each layer is held to its pattern in the
    report. The pruned layers are

    - those in the report;
    - without a report, those that carry masks;
    - without masks either, all layers that `sparsify` prunes by default.

    The files of a folder are compared with the SHA-256 in its ``sparsity.json``, unless ``hashes`` is False.

    All other masks, those of biases and embeddings too, are checked for zeros where they are False.

    Raises PatternError, a ValueError, that names the layers that fail. Raises ValueError for a folder that cannot be
    read, is damaged or is quantized, for packed layers, those that hold codes and those on the meta device, and if
    neither a pattern nor a report is there.

    >>> len(mts.verify("sparse-model", pattern="2:4").layers)
    14
    """
    asked, files, advice = None if pattern is None else parse_pattern(pattern), "", ""
    if isinstance(model, nn.Module):
        model = usable(model, "verified")
        masks, record = dict(named_masks(model)), attached_report(model)
        read: Callable[[Layer], Tensor] = attrgetter("values")
    else:
        model, read, masks, record, files = _open(Path(model), trust_remote_code, hashes)
    expected = [*_expected(model, masks, record, asked)]
    checked = list[Verified]()
    for layer, held_to in expected:
        refuse_codes(model, layer.name, weight := read(layer))
        if weight.is_meta:
            raise ValueError(f"layer {layer.name!r} is on the meta device and has no values: load the model first")
        checked.append(_look(layer, weight, masks.get(layer.parameter_name), held_to))
    unmasked = set() if record is None else record.unmasked(masks)
    checked = [replace(layer, note=UNMASKED) if layer.name in unmasked else layer for layer in checked]
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {layer.parameter_name for layer, _ in expected}
    for name in [name for name in masks if name in every and name not in known]:
        row = as_row(model, first[id(every[name])])  # tied ones are read under their first name: files hold no other
        checked.append(replace(_look(row, read(row), masks[name], None), name=name))
    verification = Verification(tuple(checked), files, _notes(model, record))
    if any(layer.problem for layer in checked):
        if not files and (count := sum(_count_masked(model, *masked) for masked in masks.items())):
            advice = f"; {count} weights were written to and not read since: mts.apply_masks(model) zeros them"
        raise PatternError(verification, advice)
    return verification


def _notes(model: nn.Module, record: Report | None) -> tuple[str, ...]:
    """What is to be said of layers whose forwards do something else with the weight, as the report or a trial says."""
    others = {skipped.name: skipped.reason for skipped in (record.skipped if record else ()) if OTHER in skipped.reason}
    others |= {layer.name: layer.why_other for layer in find_layers(model)[0] if layer.is_other()}
    return tuple(f"{first_few(names)}: {why}" for why, names in grouped(others, others.__getitem__).items())


def _count_masked(model: nn.Module, name: str, mask: Tensor) -> int:
    """How many weights of a sparse module are not +0.0 where its mask is False."""
    path, _, key = name.rpartition(".")
    return int(_occupied(stored(model.get_submodule(path), key).detach()[~mask]).sum())


def _occupied(weight: Tensor) -> Tensor:
    """Where a weight is not +0.0: kernels that look at the bits take -0.0 for a nonzero."""
    if weight.is_complex():
        return _occupied(torch.view_as_real(weight.resolve_conj())).any(-1)
    return (weight != 0) | torch.signbit(weight)


def _expected(
    model: nn.Module, masks: Mapping[str, Tensor], record: Report | None, asked: Pattern | None
) -> Iterator[tuple[Layer, Pattern]]:
    """The pruned layers, each with the pattern that it is held to; ``asked`` is the user's pattern."""
    layers = {layer.name: layer for layer in find_layers(model)[0]}
    if record is not None and record.layers:
        for entry in record.layers:
            recorded = parse_pattern(entry.pattern)
            try:
                layer = layers.get(entry.name) or as_row(model, entry.parameter)
            except AttributeError:
                kind = type(model).__name__
                raise ValueError(f"layer {entry.name!r} of the report is not in this {kind}: {UNMASKED}") from None
            if asked is not None and isinstance(recorded, Unstructured) and recorded.scope is not None:
                yield layer, asked.with_scope(recorded.scope)  # if the user's pattern leaves the scope open
            else:
                yield layer, asked or recorded
        return
    if asked is None:
        raise ValueError("there is no report that says which pattern to look for: give pattern=, for example '2:4'")
    masked = [layer for layer in layers.values() if layer.parameter_name in masks]
    if not masked:
        masked = [layer_plan.layer for layer_plan in plan_for(model, Magnitude(), SparsifyConfig(pattern=asked)).layers]
    for layer in masked:
        yield layer, asked


def _look(layer: Layer, weight: Tensor, mask: Tensor | None, pattern: Pattern | None) -> Verified:
    """One layer as it is. Without a pattern only its mask is looked at."""
    zeros, held_to = int((weight == 0).sum()), "its mask" if pattern is None else str(pattern)
    return Verified(layer.name, held_to, zeros, weight.numel(), _problem(layer, weight, mask, pattern))


def _problem(layer: Layer, weight: Tensor, mask: Tensor | None, pattern: Pattern | None) -> str:
    occupied = _occupied(weight)
    if pattern is not None:
        if misfit := pattern.misfit(layer.columns(weight)):
            return misfit
        if count := pattern.count_nonzero_wrong(layer.matrix(occupied)):
            return f"more nonzeros than {pattern} allows, where -0.0 counts as one ({count} times)"
    if mask is not None:
        if count := int(occupied[~mask.to(occupied.device)].sum()):
            return f"not +0.0 where the mask is False (entries: {count})"
        if pattern is not None and (count := pattern.count_nonzero_wrong(layer.matrix(mask))):
            return f"more entries kept by the mask than {pattern} allows ({count} times)"
    return ""


def _open(
    folder: Path, trust_remote_code: bool, hashes: bool
) -> tuple[nn.Module, Callable[[Layer], Tensor], Mapping[str, Tensor], Report | None, str]:
    """(a folder's model, a function that reads a layer's weight, its masks, its report if there is one, what is known
    of its files as a sentence).

    The model has no values if its weights can be read from the files one by one.
    """
    described = (folder / DESCRIPTION).is_file()
    if not described and folder.suffix == ".partial" and (folder / STARTED).is_file():
        raise ValueError(f"{str(folder)!r} is what a stopped run has done so far: start it again, and verify that")
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} holds no config.json: restore it into its model and verify that")
    refuse_adapter(folder)
    model = empty_model(folder, trust_remote_code=trust_remote_code)
    if quantization_of(getattr(model, "config", None)) is not None:
        raise ValueError(
            f"{str(folder)!r} is {codes_in(model)}: load it dequantized with transformers, verify the model"
        )
    if described:
        description, masks, weights, problems = opened_folder(folder, hashes=hashes)
        if weights is None or problems:
            raise ValueError(f"{str(folder)!r} is damaged: {first_few(problems)}")
        record, files = description.report, "The SHA-256 of the files was not looked at."
        if hashes:
            files = "The files are those that were saved, by their SHA-256."
    else:
        masks, weights, record = dict[str, Tensor](), opened_weights(folder), None
        files = f"There is no {DESCRIPTION} to compare the files with."
    if weights.keys() >= {layer.parameter_name for layer in find_layers(model)[0]}:
        return model, lambda layer: weights[layer.parameter_name].get_tensor(layer.parameter_name), masks, record, files
    # transformers stores this architecture under other names than it has in memory, and maps them when it loads
    model = loaded_whole(type(model), folder, weights, dtype="auto", trust_remote_code=trust_remote_code)
    return model, lambda layer: layer.parameter.detach(), masks, record, files
