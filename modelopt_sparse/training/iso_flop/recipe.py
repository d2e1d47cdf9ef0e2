"""Sparse-IFT from a configuration: the section ``sparse_ift`` of a YAML file, beside ``sparsity``.

| key | what |
| --- | --- |
| ``sparsity`` | the level, which has to be there |
| ``member``, ``iso``, ``multiple``, ``include`` | as in `sparse_ift` |
| ``activation`` | the name of a class in torch.nn, or null for none |

The section ``sparsity`` beside it says how the sparse layers are trained. It names no layers and no level: those are
Sparse-IFT's. A schedule that ends at a level (cubic, exp) leaves ``final`` out. Without that section masks are static.
"""

import fnmatch
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PretrainedConfig

from modelopt_sparse.reports.text import nearest
from modelopt_sparse.training.algorithms import SparsityAlgorithm
from modelopt_sparse.training.configure import IFT, NAMES, SECTION, algorithm_of, content_of
from modelopt_sparse.training.iso_flop.transform import SparseIFT, sparse_ift

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
