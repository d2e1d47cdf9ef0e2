"""Sparse training from a configuration: the ``sparsity`` section of a YAML file, in all spellings that Cerebras had.

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
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelopt_sparse.plan.yaml_loader import read_yaml
from modelopt_sparse.reports.text import nearest
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.training.weights import DEFAULT

SECTION, IFT = "sparsity", "sparse_ift"
NAMES = ("param_name_patterns", "param_filter", "include")


def configure(config: Any) -> Sparsity:
    """Sparse training as a configuration says: a YAML file with a section ``sparsity``, what such a section holds (a
    mapping, a list of mappings, a level), or a mapping with that section in it.

    Other sections of a file (model, optimizer) are not looked at. ``algorithm`` is the name of any class that inherits
    from `SparsityAlgorithm`, your own included, in upper or lower case; the default is static. All other keys are
    options of that class, or stand in the table of spellings (training/configure.py, docs/sparse-training.md).

    Raises ValueError for a file without that section, and for keys, names and values that are not known.

    >>> training.configure("recipe.yaml").apply(model)
    >>> training.configure({"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 100}}).apply(model)
    """
    if isinstance(config, (str, Path)):
        return _of_section(_section_of(Path(config)), SECTION)
    if isinstance(config, Mapping):
        inner = config.get(SECTION)
        whole_file = isinstance(inner, Mapping) and "type" not in inner
        whole_file |= isinstance(inner, list) and any(isinstance(each, Mapping) for each in inner)
        return _of_section(inner if whole_file else config, SECTION)
    return _of_section(config, SECTION)


def content_of(path: Path) -> Any:
    """What a YAML file holds. Raises ValueError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as YAML: {error}") from None
    return read_yaml(text, repr(str(path)))


def _section_of(path: Path) -> Any:
    content = content_of(path)
    if isinstance(content, Mapping) and IFT in content:
        raise ValueError(
            f"{str(path)!r} holds a section {IFT!r}, which changes layers: call training.configure_sparse_ift with it "
            "and the model"
        )
    if not isinstance(content, Mapping) or SECTION not in content:
        raise ValueError(
            f"{str(path)!r} holds no section {SECTION!r} beside model and optimizer: without one, nothing is trained "
            "sparse, and a checkpoint with NaN for pruned weights has to be finalized first (modelopt-sparse finalize)"
        )
    return content[SECTION]


def _of_section(section: Any, where: str) -> Sparsity:
    if isinstance(section, float):
        return algorithm_of({"sparsity": section}, where)
    if isinstance(section, Sequence) and not isinstance(section, str):
        group = Group()
        for number, entry in enumerate(section):
            _add(group, entry, f"{where}[{number}]")
        group.members()  # raises for an empty one
        return group
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}: {section!r} is neither a level such as 0.9, a mapping, nor a list of mappings")
    patterns = section.get("param_name_patterns")
    if isinstance(patterns, Mapping):
        shared = {key: value for key, value in section.items() if key != "param_name_patterns"}
        group = Group()
        for pattern, options in patterns.items():
            block = f"{where}: param_name_patterns[{pattern!r}]"
            if not isinstance(options, Mapping):
                raise ValueError(f"{block} is {options!r}, and must be a mapping such as {{sparsity: 0.5}}")
            _add(group, {**shared, **options, "param_name_patterns": pattern}, block)
        return group
    return algorithm_of(section, where)


def _add(group: Group, entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {entry!r}, and must be a mapping")
    include = _include(entry, where)
    rest = {key: value for key, value in entry.items() if key not in NAMES}
    if "sparsity" in rest and rest["sparsity"] is None:
        group.add(include, None)
    else:
        group.add(include, algorithm_of(rest, where, in_group=True))


def algorithm_of(section: Mapping[str, Any], where: str, *, in_group: bool = False) -> SparsityAlgorithm:
    """The algorithm that a mapping describes, for the parameters that it names; ``in_group``: the group names them."""
    options = _translated(section, where)
    name = options.pop("algorithm", "static")
    cls = _class_of(name, where)
    if not in_group:
        options["include"] = _include(section, where)
    for key in NAMES[:2]:
        options.pop(key, None)
    allowed = _options_of(cls)
    for key in options:
        if key not in allowed:
            known = [*allowed, "algorithm", *NAMES]
            raise ValueError(
                f"{where}: {cls.__name__} has no option {key!r}{nearest(key, known)}; it takes {_list(known)}"
            )
    if isinstance(options.get("sparsity"), int):
        raise ValueError(f"{where}: sparsity is {options['sparsity']!r}, and must be a fraction such as 0.3")
    try:
        return cls(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _translated(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A section in the present spelling."""
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
        raise ValueError(f"{where}: algorithm {name!r} is not known{nearest(name, names)}; there are {_list(names)}")
    return known[str(name).lower()]


def _options_of(cls: type) -> list[str]:
    """Names of all options of a class, those that it hands on included."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        own = vars(base).get("__init__")
        if own is not None:
            for parameter in list(inspect.signature(own).parameters.values())[1:]:
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    names[parameter.name] = None
    return list(names)


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names)))
