"""Sparse training and Sparse-IFT from a configuration: the sections ``sparsity`` and ``sparse_ift`` of a YAML file.

All spellings of ``sparsity`` that Cerebras had are read:

| spelling | becomes |
| --- | --- |
| a number | static, at that level |
| a list of mappings | a `Group`, in that order |
| ``type`` | ``algorithm`` |
| ``schedule`` with ``freq`` or ``steps`` in it | ``update`` |
| any other ``schedule`` | ``sparsity`` |
| ``sparsity_schedule: [[step, level], ...]`` | the levels as ``sparsity``, the steps as ``update`` |
| ``param_name_patterns``: one or several regular expressions | ``include``, matched by search |
| ``param_name_patterns``: a mapping of them to options | a `Group`; the options around it are defaults |
| ``param_filter``: one or several globs | ``include``, matched whole |
| neither of these | ``include="default"`` |

``sparse_ift`` holds ``sparsity``, the level, and other arguments of `sparse_ift`; ``activation`` is the name of a class
in torch.nn, or null. Beside it ``sparsity`` says how the layers are trained: without names, and without a level. A
schedule that ends at a level (cubic, exp) leaves ``final`` out. Without ``sparsity`` masks are static.
"""

import fnmatch
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PretrainedConfig

from modelopt_sparse.reports.fold import nearest
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm
from modelopt_sparse.training.planner import DEFAULT
from modelopt_sparse.training.sparse_ift.transform import SparseIFT, names_by_level, sparse_ift
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.values import read_yaml

SECTION, IFT = "sparsity", "sparse_ift"
NAMES = ("param_name_patterns", "param_filter", "include")
IFT_OPTIONS = ("sparsity", "member", "iso", "multiple", "include", "activation")


def configure(config: Any) -> Sparsity:
    """Sparse training as a configuration says: a YAML file with a section ``sparsity``, what such a section holds (a
    mapping, a list of mappings, a level), or a mapping with that section in it.

    Other sections of a file (model, optimizer) are not looked at. ``algorithm`` is the name of any class that inherits
    from `SparsityAlgorithm`, your own included, in upper or lower case; the default is static. All other keys are
    options of that class, or stand in the table of spellings (training/configure.py, docs/sparse-training.md).

    Raises ValueError for a file without that section, and for keys, names and values that are not known.

    >>> training.configure("config.yaml").apply(model)
    >>> training.configure({"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 100}}).apply(model)
    """
    if isinstance(config, (str, Path)):
        content = _read(config)
        if IFT in content:
            raise ValueError(
                f"{str(config)!r} holds a section {IFT!r}: call training.configure_sparse_ift with it and the model"
            )
        if SECTION not in content:
            raise ValueError(
                f"{str(config)!r} holds no section {SECTION!r}, so nothing is trained sparse: a checkpoint with NaN "
                "for pruned weights has to be finalized first (modelopt-sparse finalize)"
            )
        return _of_section(content[SECTION])
    if isinstance(config, Mapping):
        inner = config.get(SECTION)
        whole_file = isinstance(inner, Mapping) and "type" not in inner
        whole_file |= isinstance(inner, list) and any(isinstance(each, Mapping) for each in inner)
        return _of_section(inner if whole_file else config)
    return _of_section(config)


def _read(path: str | Path) -> Mapping[str, Any]:
    """What a YAML file holds; nothing, if that is no mapping. Raises ValueError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as YAML: {error}") from None
    content = read_yaml(text, repr(str(path)))
    return content if isinstance(content, Mapping) else {}


# sparsity -------------------------------------------------------------------------------------------------------------


def _of_section(section: Any) -> Sparsity:
    if isinstance(section, float):
        return _algorithm({"sparsity": section}, SECTION)
    group = Group()
    if isinstance(section, Sequence) and not isinstance(section, str):
        for number, entry in enumerate(section):
            _add(group, entry, f"{SECTION}[{number}]")
        group.members()  # raises for an empty one
        return group
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION}: {section!r} is neither a level such as 0.9, a mapping, nor a list of mappings")
    patterns = section.get("param_name_patterns")
    if not isinstance(patterns, Mapping):
        return _algorithm(section, SECTION)
    around = {key: value for key, value in section.items() if key != "param_name_patterns"}
    for pattern, options in patterns.items():
        entry = {**around, **options, "param_name_patterns": pattern} if isinstance(options, Mapping) else options
        _add(group, entry, f"{SECTION}: param_name_patterns[{pattern!r}]")
    return group


def _add(group: Group, entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r}, and must be a mapping such as {{sparsity: 0.5}}")
    options = {key: value for key, value in entry.items() if key not in NAMES}
    dense = "sparsity" in options and options["sparsity"] is None
    group.add(_include(entry, where), None if dense else _algorithm(options, where, in_group=True))


def _algorithm(section: Mapping[str, Any], where: str, *, in_group: bool = False) -> SparsityAlgorithm:
    """The algorithm that a mapping describes, for the parameters that it names; ``in_group``: the group names them."""
    options = _present_spelling(section, where)
    cls = _class_of(options.pop("algorithm", "static"), where)
    if not in_group:
        options["include"] = _include(section, where)
    for key in ("param_name_patterns", "param_filter"):
        options.pop(key, None)
    known = sorted({*_options_of(cls), "algorithm", *NAMES})
    for key in options:
        if key not in known:
            raise ValueError(
                f"{where}: {cls.__name__} has no option {key!r}{nearest(key, known)}; it takes {', '.join(known)}"
            )
    if isinstance(options.get("sparsity"), int):
        raise ValueError(f"{where}: sparsity is {options['sparsity']!r}, and must be a fraction such as 0.3")
    try:
        return cls(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _present_spelling(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    options = dict(section)
    if "type" in options:
        _rename(options, "type", "algorithm", where)
    schedule = options.get("schedule")
    if schedule is not None:
        is_update = isinstance(schedule, Mapping) and not {"freq", "steps"}.isdisjoint(schedule)
        _rename(options, "schedule", "update" if is_update else "sparsity", where)
    if "sparsity_schedule" in options:
        pairs = options.pop("sparsity_schedule")
        if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{where}: sparsity_schedule is {pairs!r}, and must be a list of [step, level]")
        for key, value in (("sparsity", [level for _, level in pairs]), ("update", {"steps": [s for s, _ in pairs]})):
            if key in options:
                raise ValueError(f"{where}: give sparsity_schedule or {key}, not both")
            options[key] = value
    return options


def _rename(options: dict[str, Any], old: str, new: str, where: str) -> None:
    if new in options:
        raise ValueError(f"{where}: {old} is another word for {new} here: give one of them")
    options[new] = options.pop(old)


def _include(section: Mapping[str, Any], where: str) -> Any:
    named = [key for key in NAMES if section.get(key) is not None]
    if len(named) > 1:
        raise ValueError(f"{where}: give one of {' and '.join(named)}")
    if not named:
        return DEFAULT
    value = section[named[0]]
    if named[0] != "param_name_patterns":
        return value
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f"{where}: param_name_patterns is {value!r}: give a regular expression, several, or a mapping")
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"{where}: param_name_patterns holds no regular expression: {error}") from None


def _class_of(name: Any, where: str) -> type[SparsityAlgorithm]:
    known: dict[str, type[SparsityAlgorithm]] = {}
    waiting: list[type[SparsityAlgorithm]] = [SparsityAlgorithm]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if not inspect.isabstract(cls):
            known[cls.__name__.lower()] = cls
    if str(name).lower() not in known:
        names = sorted(known)
        raise ValueError(
            f"{where}: algorithm {name!r} is not known{nearest(name, names)}; there are {', '.join(names)}"
        )
    return known[str(name).lower()]


def _options_of(cls: type) -> set[str]:
    """Names of all options of a class, those that it hands on included."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    options = [each for one in constructors for each in list(inspect.signature(one).parameters.values())[1:]]
    return {each.name for each in options if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}


# Sparse-IFT -----------------------------------------------------------------------------------------------------------


def configure_sparse_ift(
    config: str | Path | Mapping[str, Any], model: nn.Module | PretrainedConfig, *, example: Any = None
) -> SparseIFT:
    """`sparse_ift` as a configuration says: a YAML file, or the mapping in it, with a section ``sparse_ift``, and
    ``sparsity`` beside it for how it is trained.

    Raises ValueError, with the model as it was, for a file without that section, and for keys and values that are not
    known.

    >>> ift = training.configure_sparse_ift("config.yaml", model)
    """
    content, where = config, "the mapping"
    if isinstance(config, (str, Path)):
        content, where = _read(config), repr(str(config))
    if not isinstance(content, Mapping) or IFT not in content:
        raise ValueError(f"{where} holds no section {IFT!r}: write for example {IFT}: {{sparsity: 0.75}}")
    section, where = content[IFT], f"{where}: {IFT}"
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} is {section!r}, and must be a mapping such as {{sparsity: 0.75, member: wide}}")
    for key in section:
        if key not in IFT_OPTIONS:
            raise ValueError(
                f"{where}: no option {key!r}{nearest(key, IFT_OPTIONS)}; it takes {', '.join(IFT_OPTIONS)}"
            )
    if "sparsity" not in section:
        raise ValueError(f"{where} needs sparsity, the level, for example 0.75")
    options = dict(section)
    if "activation" in options:
        options["activation"] = _activation(options["activation"], where)
    trained = _without_level(content.get(SECTION))

    def rule(level: float) -> SparsityAlgorithm:
        return _algorithm(_at_level(trained, level), SECTION, in_group=True)

    return sparse_ift(
        model, options.pop("sparsity"), options.pop("member", "wide"), rule=rule, example=example, **options
    )


def _activation(name: Any, where: str) -> type[nn.Module] | None:
    if name is None:
        return None
    cls = getattr(nn, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise ValueError(f"{where}: activation is {name!r}, and must be a class of torch.nn such as ReLU, or null")
    return cls


def _without_level(section: Any) -> dict[str, Any]:
    """The section ``sparsity`` beside ``sparse_ift``. Raises ValueError if it names a level or layers, or options that
    no algorithm has."""
    if section is None:
        return {"algorithm": "static"}
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} is {section!r}, and must be a mapping beside {IFT}")
    if named := [key for key in NAMES if key in section]:
        raise ValueError(f"{SECTION}: leave {named[0]} out, {IFT} says which layers are sparse")
    levels = [key for key in ("sparsity", "sparsity_schedule") if key in section and not _ends_open(section[key])]
    if levels:
        raise ValueError(f"{SECTION}: leave {levels[0]} out (of cubic and exp: final), {IFT} says the level")
    _algorithm(_at_level(section, 0.5), SECTION, in_group=True)  # raises for options that are not known
    return dict(section)


def _at_level(section: Mapping[str, Any], level: float) -> dict[str, Any]:
    """A section without a level, at this one."""
    for key in ("sparsity", "schedule"):
        if _ends_open(section.get(key)):
            return {**section, key: {**section[key], "final": level}}
    return {**section, "sparsity": level}


def _ends_open(schedule: Any) -> bool:
    """Whether a schedule that ends at a level does not say at which."""
    return isinstance(schedule, Mapping) and schedule.get("type") in ("cubic", "exp") and "final" not in schedule


def sparse_ift_files(
    model: nn.Module, section: Mapping[str, Any], config: Path | None
) -> tuple[SparseIFT, dict[str, str]]:
    """(`sparse_ift` of a model, which may be on the meta device; texts by the names of the files to write them to).

    section: what a section ``sparse_ift`` holds. config: a YAML file with a section ``sparsity`` for how it is trained.
    Of Sparse Wide config.json says all of the model, and the YAML file is one for ``training.configure``. Layers that
    the other members put in stand in no config: their YAML file holds both sections, for `configure_sparse_ift`.
    """
    trained = None
    if config is not None:
        content = _read(config)
        if SECTION not in content:
            raise ValueError(f"{str(config)!r} holds no section {SECTION!r}")
        trained = content[SECTION]
    trained = _without_level(trained)
    written: dict[str, Any] = {IFT: dict(section), SECTION: trained}
    ift = configure_sparse_ift(written, model)
    member = section.get("member", "wide")
    how = "training.configure_sparse_ift(this file, model) puts the layers in, and says how they are trained"
    if member == "wide":
        how = "training.configure(this file) trains a model of the config beside it"
        written = {SECTION: _section_of(ift, trained)}
    head = f"# Sparse-IFT, {member}, {section['sparsity']}: {how}.\n"
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
