"""Sparse-IFT from a configuration: the sections ``sparse_ift`` and ``sparsity`` of a YAML file.

``sparse_ift`` holds ``sparsity``, the level, and other arguments of `sparse_ift`; ``activation`` is the name of a class
in torch.nn, or null. Beside it ``sparsity`` says how the layers are trained: without names, and without a level. A
schedule that ends at a level (cubic, exp) leaves ``final`` out. Without ``sparsity`` masks are static.
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

from modelopt_sparse.checks import shown
from modelopt_sparse.reports.text import refuse_unknown
from modelopt_sparse.training.algorithms import SparsityAlgorithm
from modelopt_sparse.training.config import IFT, NAMES, SECTION, algorithm_of, read_sections
from modelopt_sparse.training.iso_flop.transform import SparseIFT, names_by_level, sparse_ift
from modelopt_sparse.training.updates import KINDS, Cubic, Exp

IFT_OPTIONS = ("sparsity", "member", "iso", "multiple", "include", "activation")


def configure_sparse_ift(
    config: str | Path | Mapping[str, Any], model: nn.Module | PretrainedConfig, *, example: Any = None
) -> SparseIFT:
    """`sparse_ift` as a configuration says: a YAML file, or the mapping in it, with a section ``sparse_ift``, and
    ``sparsity`` beside it for how it is trained.

    Raises ValueError, with the model as it was, for a file without that section, and for keys and values that are not
    known.

    >>> ift = training.configure_sparse_ift("config.yaml", model)
    """
    content = read_sections(config) if isinstance(config, (str, Path)) else config
    section = content.get(IFT) if isinstance(content, Mapping) else None
    if not isinstance(section, Mapping):
        raise ValueError(f"{config!r} holds no section {IFT!r} that is a mapping such as {{sparsity: 0.75}}")
    options = dict(section)
    refuse_unknown(options, IFT_OPTIONS, f"{IFT}: ")
    if (name := options.get("activation")) is not None:
        options["activation"] = getattr(nn, str(name), None)
        if not (inspect.isclass(options["activation"]) and issubclass(options["activation"], nn.Module)):
            raise ValueError(f"{IFT}: activation={shown(name)}: give a class of torch.nn such as ReLU, or null")
    trained = _without_level(content.get(SECTION))

    def rule(level: float) -> SparsityAlgorithm:
        return algorithm_of(_at_level(trained, level), SECTION)

    level, member = options.pop("sparsity", None), options.pop("member", "wide")
    return sparse_ift(model, level, member, rule=rule, example=example, **options)


def _without_level(section: Any) -> dict[str, Any]:
    """The section ``sparsity`` beside ``sparse_ift``. Raises ValueError if it names a level or layers, or options that
    no algorithm has."""
    if section is None:
        return {"algorithm": "static"}
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} is {shown(section)}, and must be a mapping beside {IFT}")
    for key in (*NAMES, "sparsity", "sparsity_schedule"):
        if key in section and not _ends_open(section[key]):
            raise ValueError(f"{SECTION}: leave {key} out: {IFT} says which layers are sparse, and the (final) level")
    algorithm_of(_at_level(section, 0.5), SECTION)  # raises for options that are not known
    return dict(section)


def _at_level(section: Mapping[str, Any], level: float) -> dict[str, Any]:
    """A section without a level, at this one."""
    for key in ("sparsity", "schedule"):
        if _ends_open(section.get(key)):
            return {**section, key: {**section[key], "final": level}}
    return {**section, "sparsity": level}


def _ends_open(schedule: Any) -> bool:
    """Whether a schedule that ends at a level does not say at which."""
    kind = KINDS.get(str(schedule.get("type")).lower()) if isinstance(schedule, Mapping) else None
    return kind in (Cubic, Exp) and "final" not in schedule


def sparse_ift_files(
    model: nn.Module, section: Mapping[str, Any], config: Path | None
) -> tuple[SparseIFT, dict[str, str]]:
    """(`sparse_ift` of a model, which may be on the meta device; texts by the names of the files to write them to).

    section: what a section ``sparse_ift`` holds. config: a YAML file with a section ``sparsity`` for how it is trained.
    Of Sparse Wide config.json says all of the model, and the YAML file is one for ``training.configure``. Layers that
    the other members put in stand in no config: their YAML file holds both sections, for `configure_sparse_ift`.
    """
    content = {SECTION: None} if config is None else read_sections(config)
    if SECTION not in content:
        raise ValueError(f"{str(config)!r} holds no section {SECTION!r}")
    trained, member = _without_level(content[SECTION]), section.get("member", "wide")
    written: dict[str, Any] = {IFT: dict(section), SECTION: trained}
    ift = configure_sparse_ift(written, model)
    usage = "training.configure_sparse_ift(this file, model) puts the layers in, and says how they are trained"
    if member == "wide":
        usage = "training.configure(this file) trains a model of the config beside it"
        written = {SECTION: _section_of(ift, trained)}
    head = f"# Sparse-IFT, {member}, {section['sparsity']}: {usage}.\n"
    model_config: Any = ift.model.config
    text = head + yaml.safe_dump(written, sort_keys=False)
    return ift, {"config.json": model_config.to_json_string(), "recipe.yaml": text}


def _section_of(ift: SparseIFT, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The section ``sparsity`` of a wide model: an entry for each level, with globs where those match nothing else."""
    levels = {layer.name: layer.level for layer in ift.plan.layers}
    all_names = {name for name, _ in ift.model.named_parameters()} | levels.keys()
    entries = []
    for level, names in names_by_level(levels).items():
        globs = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        others = all_names - set(names)
        fits = not any(fnmatch.filter(others, glob) for glob in globs)
        entries.append({"param_filter": globs if fits else names, **_at_level(trained, level)})
    return entries
