"""Which parameters get which algorithm, and their initial masks. What cannot work is refused here, before work."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.distributed import full
from modelopt_sparse.model.masking import refuse_what_cannot_be_sparse
from modelopt_sparse.model.offload import stored
from modelopt_sparse.model.quantization import holds_codes
from modelopt_sparse.reports.text import first_few, nearest
from modelopt_sparse.reports.values import Skipped
from modelopt_sparse.training import rules
from modelopt_sparse.training.weights import DEFAULT, Filter, Row, TrainingPlan, Weight, find_weights, reasons


@dataclass(frozen=True)
class Planned:
    """The plan of a model, and what `apply` needs beside it.

    chosen: each parameter that becomes sparse, and its algorithm.
    description: of the algorithms, in plain values.
    """

    plan: TrainingPlan
    chosen: tuple[tuple[Weight, Any], ...]
    description: dict[str, Any]


def plan_training(model: nn.Module, members: Sequence[tuple[Filter, Any]]) -> Planned:
    """Decide on every parameter of a model. Raises ValueError for what could not work."""
    weights = find_weights(model)
    _check_globs(model, weights, members)
    by_choice = {
        choice: reasons(model, weights, choice)
        for choice in {include.choice for include, _ in members} | {DEFAULT}
        if choice
    }
    chosen: list[tuple[Weight, Any]] = []
    skipped: list[Skipped] = []
    for weight in weights:
        outcome = _decide(weight, members, by_choice)
        if isinstance(outcome, str):
            skipped.append(Skipped(weight.name, weight.type, weight.shape, outcome))
        else:
            refuse_what_cannot_be_sparse(weight.holders[0][0], weight.holders[0][1])
            chosen.append((weight, outcome))
    if not chosen:
        why = first_few(sorted({each.reason for each in skipped})) or "it has no parameters"
        raise ValueError(f"nothing to make sparse in this {type(model).__name__}: {why}")
    rows = _rows(chosen)
    notes = _notes(model, chosen, members, by_choice[DEFAULT])
    described = [[str(include), None if each is None else each.describe()] for include, each in members]
    return Planned(TrainingPlan(rows, tuple(skipped), notes), tuple(chosen), {"algorithms": described})


def _check_globs(model: nn.Module, weights: Sequence[Weight], members: Sequence[tuple[Filter, Any]]) -> None:
    names = [weight.name for weight in weights]
    for include, algorithm in members:
        for glob in (*include.globs, *(algorithm.exclude if algorithm is not None else ())):
            if not fnmatch.filter(names, glob):
                raise ValueError(
                    f"{glob!r} matches no parameter of this {type(model).__name__}{nearest(glob, names)}; names look "
                    f"like {', '.join(names[:3])}"
                )
        if include.regexes and not any(include.matches(name) for name in names):
            raise ValueError(
                f"{include} matches no parameter of this {type(model).__name__}; names look like {', '.join(names[:3])}"
            )


def _decide(weight: Weight, members: Sequence[tuple[Filter, Any]], by_choice: Mapping[str, dict[str, str]]) -> Any:
    """A parameter's algorithm; or, as a string, why it stays dense."""
    if getattr(weight.parameter, "requires_dense", False):
        return "requires_dense"
    if any(getattr(module, "requires_dense", False) for module, _ in weight.holders):
        return "requires_dense of its module"
    why = "no glob matches its name"
    for include, algorithm in members:
        if include.choice:
            if why := by_choice[include.choice][weight.name]:
                continue
        elif not include.matches(weight.name):
            continue
        if algorithm is None:
            return f"left dense by {include}"
        glob = next((glob for glob in algorithm.exclude if fnmatch.fnmatchcase(weight.name, glob)), None)
        return f"excluded by {glob!r}" if glob is not None else _misfit(weight, algorithm) or algorithm
    return why


def _misfit(weight: Weight, algorithm: Any) -> str | None:
    """Why an algorithm cannot take a parameter. Raises ValueError for what is a mistake."""
    parameter, kind = weight.parameter, type(algorithm).__name__
    if not parameter.is_floating_point() or holds_codes(parameter):
        return f"{str(parameter.dtype).removeprefix('torch.')} values are no weights to prune"
    if parameter.numel() == 0:
        return "it is empty"
    if any(isinstance(module, nn.Embedding) and module.sparse for module, _ in weight.holders):
        raise ValueError(
            f"{weight.name!r} is of an Embedding(sparse=True), whose gradients are sparse tensors that no mask can be "
            "put on: build it with sparse=False, or leave it dense with exclude"
        )
    if algorithm.needs_gradient and parameter.dtype == torch.float16:
        raise ValueError(
            f"{weight.name!r} is float16, which cannot hold the faint gradients that {kind} grows by: keep weights in "
            "float32 and run under autocast, or use bfloat16"
        )
    rows, columns = weight.empty_matrix().shape[-2:]
    if algorithm.pattern is not None:
        if not weight.is_layer:
            return f"{algorithm.pattern} is for weight matrices"
        if misfit := algorithm.pattern.misfit(weight.layer.columns(torch.empty(weight.shape, device="meta"))):
            return misfit
        if algorithm.scope.kind == "in_groups" and columns // algorithm.scope.groups % algorithm.pattern.m:
            raise ValueError(
                f"{weight.name!r}: {algorithm.scope.groups} groups of columns cut through groups of "
                f"{algorithm.pattern.m}: choose fewer groups"
            )
    if misfit := algorithm.scope.misfit(rows, columns):
        raise ValueError(f"{weight.name!r}: {misfit}; choose another number, or leave it out with include or exclude")
    return None


def _first_levels(chosen: Sequence[tuple[Weight, Any]]) -> dict[str, float]:
    """The level of each parameter at step 0, by name."""
    levels: dict[str, float] = {}
    for algorithm in dict.fromkeys(algorithm for _, algorithm in chosen):
        shapes = {weight.name: weight.kernel_shape() for weight, own in chosen if own is algorithm}
        levels.update(algorithm.levels(shapes, 0))
    return levels


def _rows(chosen: Sequence[tuple[Weight, Any]]) -> tuple[Row, ...]:
    levels = _first_levels(chosen)
    rows = []
    for weight, algorithm in chosen:
        options = algorithm.describe()
        pattern, scope = algorithm.pattern, algorithm.scope
        zeros = _zeros_at(weight, algorithm, levels[weight.name])
        rows.append(
            Row(
                weight.name,
                weight.type,
                weight.shape,
                options["algorithm"],
                str(getattr(algorithm.sparsity, "value", options["sparsity"])),
                str(scope) if pattern is None else f"{pattern}, {scope}",
                zeros,
                weight.parameter.numel(),
            )
        )
    return tuple(rows)


def _zeros_at(weight: Weight, algorithm: Any, level: float) -> int:
    """How many zeros a parameter has at a level, if its mask goes by the level (not by "from_zeros" or a function)."""
    parameter = weight.parameter
    matrix = weight.empty_matrix()
    if algorithm.pattern is not None and not algorithm.magnitude_first:
        return algorithm.pattern.zeros_in(matrix.shape)
    if algorithm.pattern is not None:
        level = min(level, algorithm.pattern.sparsity)
    scopes = algorithm.scope.within(matrix)
    return parameter.numel() // scopes.shape[-1] * (scopes.shape[-1] - rules.keep_count(scopes, level))


def _notes(
    model: nn.Module,
    chosen: Sequence[tuple[Weight, Any]],
    members: Sequence[tuple[Filter, Any]],
    default: Mapping[str, str],
) -> tuple[str, ...]:
    """Sentences that are worth a warning."""
    notes = []
    everything = [algorithm for include, algorithm in members if include == Filter() and algorithm is not None]
    unusual = [weight.name for weight, algorithm in chosen if algorithm in everything and default[weight.name]]
    if unusual:
        kinds = sorted({default[name] for name in unusual})
        notes.append(
            f"{type(everything[0]).__name__} takes every parameter, {len(unusual)} among them that mostly stay dense "
            f"({first_few(kinds)}; {first_few(unusual, 3)}): include='default' leaves those dense, include='blocks' "
            "takes what sparsify prunes"
        )
    open_scopes = {
        type(algorithm).__name__
        for _, algorithm in chosen
        if algorithm.asks_for_scope and not algorithm.scope_is_chosen
    }
    if isinstance(model, PreTrainedModel) and open_scopes:
        notes.append(
            f"{' and '.join(sorted(open_scopes))} without a scope counts per matrix, as published; on language models "
            "RigL then lost to Static in our measurements, and did better with scope='row' (docs/sparse-training.md)"
        )
    return tuple(notes)


# initial masks --------------------------------------------------------------------------------------------------------


def initial_masks(planned: Planned) -> dict[str, Tensor]:
    """The masks of all chosen parameters at step 0, by name, shaped like the parameters.

    NaN in a weight marks a pruned place (docs/sparse-training.md). Raises ValueError for inf, and for meta tensors.
    """
    masks = {}
    levels = _first_levels(planned.chosen)
    for weight, algorithm in planned.chosen:
        module, name = weight.holders[0]
        values = full(stored(module, name).detach())
        if values.is_meta:
            raise ValueError(f"{weight.name!r} is on the meta device and has no values: load the model first")
        if values.isinf().any():
            raise ValueError(f"{weight.name!r} holds inf, so the weights are damaged: load them again")
        masks[weight.name] = _initial_mask(weight, algorithm, values, levels[weight.name])
    return masks


@torch.no_grad()
def zero_sentinels(weight: Weight) -> None:
    """Write 0 in the place of NaN: some of these places may grow again."""
    module, name = weight.holders[0]
    values = stored(module, name)
    values.masked_fill_(values.isnan(), 0)


def _initial_mask(weight: Weight, algorithm: Any, values: Tensor, level: float) -> Tensor:
    layer = weight.layer
    present = layer.mask
    if values.isnan().any():
        finite = layer.matrix(~values.isnan())
        present = finite if present is None else present & finite
        values = values.nan_to_num(0.0)
    matrix = layer.matrix(values)
    generator = rules.generator_for(algorithm.seed, weight.name, "init")
    if algorithm.pattern is not None and algorithm.magnitude_first:
        alive = torch.ones_like(matrix, dtype=torch.bool) if present is None else present
        mask = rules.largest_magnitudes(
            matrix,
            alive,
            level,
            lambda: rules.uniform(matrix, generator),
            scope=algorithm.scope,
            pattern=algorithm.pattern,
        )
    else:
        mask = rules.initial_mask(
            matrix,
            level,
            algorithm.init_method,
            generator,
            present=present,
            scope=algorithm.scope,
            pattern=algorithm.pattern,
        )
    return layer.unmatrix(mask).contiguous()
