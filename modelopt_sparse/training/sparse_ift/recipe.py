"""The members of Sparse-IFT that replace layers of a model: which layers, by what, at which level; and folding."""

import fnmatch
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from modelopt_sparse.reports.fold import first_few, nearest
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm, Static
from modelopt_sparse.training.configure import IFT, NAMES, SECTION, algorithm_of, content_of
from modelopt_sparse.training.planner import BLOCKS, Weight, find_weights, parse_filter, reasons
from modelopt_sparse.training.sparse_ift.members import (
    Activation,
    Doped,
    Factorized,
    Parallel,
    branches_for,
    folded,
    rank_of_doping,
    rank_of_factors,
    sides,
    why_not,
)
from modelopt_sparse.training.sparse_ift.wide import (
    IsoPlan,
    Replaced,
    live_of,
    multiplying,
    skipped_of,
    total,
    unit_of,
    uses_of,
    wide_of,
)

# replace --------------------------------------------------------------------------------------------------------------


ATTENTION = ("attn", "attention")  # in the names of modules that stay as they are unless they are asked for


def members_for(
    model: nn.Module, level: float, member: str, include: Any, activation: Activation, example: Any
) -> tuple[dict[str, nn.Module], dict[str, float], IsoPlan]:
    """(new modules by the name of the layer that they are to replace, levels by parameter, the plan): see `sparse_ift`.

    The model is left as it is.
    """
    weights = find_weights(model)
    why = _reasons(model, weights, include)
    chosen = [weight for weight in weights if not why[weight.name]]
    if not chosen:
        kinds = first_few(sorted(set(why.values())))
        raise ValueError(f"no layer of this {type(model).__name__} is to be replaced: {kinds}")
    uses = uses_of(model, weights, example)
    count = branches_for(level) if member == "parallel" else 0
    modules, levels, rows = {}, {}, []
    parameters = total(weights)
    for weight in chosen:
        name, layer = weight.name.removesuffix(".weight"), weight.holders[0][0]
        new, parts, own = _member(layer, member, level, count, activation)
        levels.update({f"{name}.{part}.weight": own for part in parts})
        masked = [new.get_submodule(part).get_parameter("weight").numel() for part in parts]
        size = sum(each.numel() for each in new.parameters() if each.dim() > 1)
        live = size - sum(masked) + sum(live_of(each, own) for each in masked)
        dense = layer.get_parameter("weight").numel()
        rows.append(Replaced(name, dense, _described(new), size, own, live, uses[weight.name]))
        if new is not layer:
            modules[name] = new
            parameters += sum(each.numel() for each in new.parameters())
            parameters -= sum(each.numel() for each in layer.parameters())
    rest = [weight for weight in weights if why[weight.name]]
    other = sum(weight.parameter.numel() * uses[weight.name] for weight in rest if multiplying(weight))
    skipped, unit = skipped_of(rest, why), unit_of(model, example)
    return modules, levels, IsoPlan(tuple(rows), skipped, total(weights), parameters, other, other, unit)


def _reasons(model: nn.Module, weights: list[Weight], include: Any) -> dict[str, str]:
    """Why layers are not replaced, by name of the parameter; "" for those that are."""
    layers = [weight for weight in weights if weight.is_layer]
    ends = {layers[0].name, layers[-1].name} if len(layers) > 2 else set()
    asked = None if include is None else parse_filter(include)
    why = reasons(model, weights, BLOCKS)
    if asked is not None and not any(asked.matches(weight.name.removesuffix(".weight")) for weight in layers):
        raise ValueError(f"{asked} matches no layer of this {type(model).__name__}")
    for weight in weights:
        name, module = weight.name.removesuffix(".weight"), weight.holders[0][0]
        if not weight.is_layer or not weight.name.endswith("weight"):
            why[weight.name] = why[weight.name] or "not a layer of its own"
        elif len(weight.holders) > 1:
            why[weight.name] = "tied"
        elif asked is not None:
            why[weight.name] = (why_not(module) or "") if asked.matches(name) else "not in include"
        elif not why[weight.name]:
            if any(word in part for part in name.lower().split(".") for word in ATTENTION):
                why[weight.name] = "a projection of attention"
            elif not isinstance(model, PreTrainedModel) and weight.name in ends:
                why[weight.name] = "the first or the last layer"
            else:
                why[weight.name] = why_not(module) or ""
    return why


def _member(
    layer: nn.Module, member: str, level: float, count: int, activation: Activation
) -> tuple[nn.Module, list[str], float]:
    """(what stands for a layer, its parts that carry masks, their level)."""
    inputs, outputs = sides(layer)
    dense = inputs * outputs
    if member == "parallel":
        return Parallel(layer, count, activation), [f"branches.{i}" for i in range(count)], 1 - 1 / count
    if member == "factorized":
        if level == 0:
            return layer, [], 0.0
        rank = rank_of_factors(layer, level)
        return Factorized(layer, rank, activation), ["first", "second"], 1 - dense / (rank * (inputs + outputs))
    rank = rank_of_doping(layer, level)
    if rank == 0:
        return layer, [], 0.0
    return Doped(layer, rank), ["sparse"], rank * (inputs + outputs) / dense


def _described(module: nn.Module) -> str:
    if isinstance(module, Parallel):
        return f"{len(module.branches)} in parallel"
    if isinstance(module, Factorized):
        return f"factors of rank {module.first.get_parameter('weight').shape[0]}"
    if isinstance(module, Doped):
        return f"itself and rank {module.first.get_parameter('weight').shape[0]}"
    return "itself"


def fold(model: nn.Module) -> list[str]:
    """Replace members by one layer each where that computes the same, in place -> names of those that cannot be: a
    non-linearity stands inside. Call `mts.export` first: sparse modules are left as they are, and folded weights are
    dense. Names of the layers end as they were before `sparse_ift`."""
    left = []
    for name, module in list(model.named_modules()):
        if isinstance(module, (Parallel, Factorized, Doped)):
            layer = folded(module)
            if layer is None:
                left.append(name)
            else:
                model.set_submodule(name, layer)
    return left


# transform ------------------------------------------------------------------------------------------------------------
# Sparse-IFT from one knob, the level: the model, its sparse training, and the plan.


MEMBERS = ("wide", "parallel", "factorized", "doped")
ISO = ("layers", "model")


@dataclass(frozen=True)
class SparseIFT:
    """What `sparse_ift` returns: the model, the sparse training that makes it iso-FLOP, and the plan.

    >>> ift.sparsity.apply(ift.model)
    >>> ift.sparsity.apply(optimizer)
    """

    model: nn.Module
    sparsity: Group
    plan: IsoPlan


def sparse_ift(
    model_or_config: nn.Module | PretrainedConfig,
    sparsity: float,
    member: str = "wide",
    *,
    rule: Callable[[float], SparsityAlgorithm] = Static,
    iso: str = "layers",
    multiple: int = 1,
    include: Any = None,
    activation: Activation = nn.ReLU,
    example: Any = None,
) -> SparseIFT:
    """A model with larger, sparser layers of the same FLOPs, to be trained from scratch.

    model_or_config: a model; a config of transformers for "wide", which then gives a model on the meta device: build
      yours from ``ift.model.config``. A model on meta stays there.
    sparsity: the level, in [0, 1), which says how much larger layers become.
    member: what becomes larger. All but "wide" replace layers of the model in place, with new random weights:
      "wide": a new model of the same class, ``sqrt(1 / (1 - level))`` times as wide, with random weights. Of a model
        of transformers the config is scaled. In any other model Linear, convolutions, embeddings and norms are made
        wider; what it reads and gives keeps its size, and the layers there stay dense.
      "parallel": 1 / (1 - level) layers beside each other, each with its own non-linearity, added up.
      "factorized": two layers with a non-linearity between them.
      "doped": the layer, sparse, plus two dense ones of low rank.
    rule: level -> sparsity algorithm, for each level that occurs: ``lambda level: SET(level, update=100)``.
    iso: "layers": the level of each layer is solved so that its FLOPs are those of the dense one. "model" (wide): one
      level for all, so that those of the whole model are, its head included.
    multiple: widths are rounded up to a multiple of this.
    include: globs of layers to replace. The default is all of the blocks but attention's projections; a model without
      blocks keeps its first and its last layer.
    activation: a class of non-linearities for "parallel" and "factorized"; None: none.
    example: an input of the model, a tuple of positional arguments or a mapping of keywords, which the model is run on.
      FLOPs are then those of this input, else of a token. Sparse Wide needs it for a model that is not of transformers,
      and ``iso="model"`` for convolutions.

    Raises ValueError, with the model as it was, for a level or a model that does not work, and names the nearest levels
    that do.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity!r}: the level must be in [0, 1), for example 0.75; at 1 nothing is left")
    if member not in MEMBERS:
        raise ValueError(f"member={member!r}: allowed are {', '.join(MEMBERS)}")
    if iso not in ISO:
        raise ValueError(f"iso={iso!r}: allowed are {', '.join(ISO)}")
    level = float(sparsity)
    if member == "wide":
        if include is not None:
            raise ValueError("include is for the members that replace layers; Sparse Wide widens the whole model")
        wide, plan = wide_of(model_or_config, level, iso, multiple, example)
        return SparseIFT(wide, _group({layer.name: layer.level for layer in plan.layers}, rule), plan)
    model = model_or_config
    if not isinstance(model, nn.Module):
        raise ValueError(f"member {member!r} replaces layers of a model: build it from the config first")
    if iso == "model" or multiple != 1:
        raise ValueError(f"member {member!r} is iso-FLOP layer by layer: iso='model' and multiple are for 'wide'")
    modules, levels, plan = members_for(model, level, member, include, activation, example)
    group = _group(levels, rule)
    for name, module in modules.items():  # nothing has changed up to here
        model.set_submodule(name, module)
    return SparseIFT(model, group, plan)


def _group(levels: Mapping[str, float], rule: Callable[[float], SparsityAlgorithm]) -> Group:
    """One algorithm for each level that occurs; weights at level 0 stay dense."""
    by_level: dict[float, list[str]] = {}
    for name, level in levels.items():
        if level > 0:
            by_level.setdefault(level, []).append(name)
    group = Group()
    for level, names in by_level.items():
        group.add(names, rule(level))
    return group


# recipe ---------------------------------------------------------------------------------------------------------------
# Sparse-IFT from a configuration: the section ``sparse_ift`` of a YAML file, beside ``sparsity``.
#
# | key | what |
# | --- | --- |
# | ``sparsity`` | the level, which has to be there |
# | ``member``, ``iso``, ``multiple``, ``include`` | as in `sparse_ift` |
# | ``activation`` | the name of a class in torch.nn, or null for none |
#
# The section ``sparsity`` beside it says how the sparse layers are trained. It names no layers and no level: those are
# Sparse-IFT's. A schedule that ends at a level (cubic, exp) leaves ``final`` out. Without that section masks are
# static.


OPTIONS = ("sparsity", "member", "iso", "multiple", "include", "activation")


def configure_sparse_ift(
    config: str | Path | Mapping[str, Any], model: nn.Module | PretrainedConfig, *, example: Any = None
) -> SparseIFT:
    """`sparse_ift` as a configuration says: a YAML file, or the mapping in it, with a section ``sparse_ift``, and
    ``sparsity`` beside it for how it is trained.

    Raises ValueError, with the model as it was, for a file without that section, and for keys and values that are not
    known.

    >>> ift = training.configure_sparse_ift("recipe.yaml", model)
    """
    content = _read(config)
    where = IFT if isinstance(config, Mapping) else f"{str(config)!r}: {IFT}"
    section = content[IFT]
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} is {section!r}, and must be a mapping such as {{sparsity: 0.75, member: wide}}")
    for key in section:
        if key not in OPTIONS:
            raise ValueError(f"{where}: no option {key!r}{nearest(key, OPTIONS)}; it takes {', '.join(OPTIONS)}")
    if "sparsity" not in section:
        raise ValueError(f"{where} needs sparsity, the level, for example 0.75")
    options = dict(section)
    if "activation" in options:
        options["activation"] = _activation(options["activation"], where)
    rule = rule_of(content.get(SECTION))
    return sparse_ift(
        model, options.pop("sparsity"), options.pop("member", "wide"), rule=rule, example=example, **options
    )


def _read(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        content, where = content_of(Path(config)), repr(str(config))
    else:
        content, where = config, "this mapping"
    if not isinstance(content, Mapping) or IFT not in content:
        raise ValueError(f"{where} holds no section {IFT!r}: write for example {IFT}: {{sparsity: 0.75}}")
    return content


def _activation(name: Any, where: str) -> type[nn.Module] | None:
    if name is None:
        return None
    cls = getattr(nn, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise ValueError(f"{where}: activation is {name!r}, and must be a class of torch.nn such as ReLU, or null")
    return cls


# how it is trained ----------------------------------------------------------------------------------------------------


class Rule:
    """How layers are trained at a level, from a section ``sparsity`` without level and names; None: static."""

    def __init__(self, section: Mapping[str, Any] | None) -> None:
        self.section: dict[str, Any] = {"algorithm": "static"} if section is None else dict(section)

    def __call__(self, level: float) -> SparsityAlgorithm:
        return algorithm_of(self.at(level), SECTION, in_group=True)

    def at(self, level: float) -> dict[str, Any]:
        """The section for one level, which stands in it."""
        key = next((key for key in ("sparsity", "schedule") if _ends_open(self.section.get(key))), None)
        if key is None:
            return {**self.section, "sparsity": level}
        return {**self.section, key: {**self.section[key], "final": level}}


def _ends_open(schedule: Any) -> bool:
    """Whether a schedule that ends at a level does not say at which."""
    return isinstance(schedule, Mapping) and schedule.get("type") in ("cubic", "exp") and "final" not in schedule


def rule_of(section: Any) -> Rule:
    """A section ``sparsity`` without level and names -> how layers are trained at a level. Raises ValueError for a
    section that says more, or that no algorithm can be made of."""
    if section is None:
        return Rule(None)
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{SECTION} is {section!r}, and must be a mapping beside {IFT}: it says how its layers are trained"
        )
    if named := [key for key in NAMES if key in section]:
        raise ValueError(f"{SECTION}: leave {named[0]} out, {IFT} says which layers are sparse")
    levels = [key for key in ("sparsity", "sparsity_schedule") if key in section and not _ends_open(section[key])]
    if levels:
        raise ValueError(
            f"{SECTION}: leave {levels[0]} out, {IFT} says at which level; of a cubic or exp schedule leave out final"
        )
    rule = Rule(section)
    rule(0.5)  # raises for options that are not known
    return rule


def sparse_ift_files(
    model: nn.Module, section: Mapping[str, Any], recipe: Path | None
) -> tuple[SparseIFT, dict[str, str]]:
    """(`sparse_ift` of a model, which may be on the meta device; texts by the names of the files to write them to).

    section: what a section ``sparse_ift`` holds. recipe: a YAML file with a section ``sparsity`` for how it is trained.
    Of Sparse Wide the config says all of the model, and the recipe is one of sparse training, for
    ``training.configure``. Layers that the other members put in stand in no config: their recipe holds both sections,
    for `configure_sparse_ift`.
    """
    rule = rule_of(None if recipe is None else _rule_in(recipe))
    content: dict[str, Any] = {IFT: dict(section), SECTION: rule.section}
    ift = configure_sparse_ift(content, model)
    if section.get("member", "wide") == "wide":
        levels = {layer.name: layer.level for layer in ift.plan.layers}
        others = [name for name, _ in ift.model.named_parameters() if name not in levels]
        how = "training.configure(this file) trains a model of the config beside it"
        content = {SECTION: _section_for(levels, others, rule)}
    else:
        how = "training.configure_sparse_ift(this file, model) puts the layers in, and says how they are trained"
    head = f"# Sparse-IFT, {section.get('member', 'wide')}, {section['sparsity']}: {how}.\n"
    config: Any = ift.model.config
    return ift, {"config.json": config.to_json_string(), "recipe.yaml": head + yaml.safe_dump(content, sort_keys=False)}


def _rule_in(path: Path) -> Any:
    content = content_of(path)
    if not isinstance(content, Mapping) or SECTION not in content:
        raise ValueError(f"{str(path)!r} holds no section {SECTION!r}: how layers are trained, without their level")
    return content[SECTION]


def _section_for(levels: Mapping[str, float], others: list[str], rule: Rule) -> list[dict[str, Any]]:
    """The section ``sparsity`` of a recipe: one entry for each level, with globs where those match nothing else.

    levels: of parameters, by name. others: names of all other parameters.
    """
    by_level: dict[float, list[str]] = {}
    for name, level in levels.items():
        if level > 0:
            by_level.setdefault(level, []).append(name)
    entries = []
    for level, names in by_level.items():
        globs = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        rest = [name for name in (*others, *levels) if name not in names]
        fits = not any(fnmatch.fnmatchcase(name, glob) for name in rest for glob in globs)
        entries.append({"param_filter": globs if fits else names, **rule.at(level)})
    return entries
