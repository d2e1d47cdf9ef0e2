"""Sparse training from a configuration: the section ``sparsity`` of a YAML file.

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
| ``add_summaries: true`` | levels in Python's logging, as INFO (`log_level`) |
"""

import inspect
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from modelopt_sparse.checks import check_flag, read_yaml_file, shown
from modelopt_sparse.reports.text import nearest, refuse_unknown
from modelopt_sparse.training.algorithms import Group, SparsityAlgorithm
from modelopt_sparse.training.planner import DEFAULT
from modelopt_sparse.training.sparsity import LOG, Sparsity
from modelopt_sparse.training.updates import KINDS

SECTION, IFT = "sparsity", "sparse_ift"
NAMES = ("param_name_patterns", "param_filter", "include")
SPELLINGS = ("algorithm", "type", "schedule", "sparsity_schedule", "add_summaries")  # keys that are no arguments


def configure(config: Any) -> Sparsity:
    """Sparse training as a configuration says: a YAML file with a section ``sparsity``, what such a section holds (a
    mapping, a list of mappings, a level), or a mapping with that section in it. A file may hold what stands in the
    section at its top level, too: a level ``sparsity`` with options beside it.

    Other sections of a file (model, optimizer) are not looked at. ``algorithm`` is the name of any class that inherits
    from `SparsityAlgorithm`, your own included, in upper or lower case; the default is static. All other keys are
    options of that class, or stand in the table of spellings (training/config.py, docs/migrating.md).

    Raises ValueError for a file without that section, and for keys, names and values that are not known.

    >>> training.configure("config.yaml").apply(model)
    >>> training.configure({"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 100}}).apply(model)
    """
    if isinstance(config, (str, Path)):
        content = read_sections(config)
        if IFT in content:
            raise ValueError(f"{str(config)!r} holds a section {IFT!r}: call training.configure_sparse_ift with it")
        if SECTION not in content:
            raise ValueError(f"{str(config)!r} holds no section {SECTION!r}, so nothing is trained sparse")
        return _of_section(_section_in(content))
    return _of_section(_section_in(config) if isinstance(config, Mapping) and SECTION in config else config)


def _section_in(content: Mapping[str, Any]) -> Any:
    """The section in a file or a mapping with a key ``sparsity``: its value; or all, if that value is only a level or a
    schedule, and options stand beside it. Sections of others are mappings and lists, so what is neither is an option.
    """
    value = content[SECTION]
    if isinstance(value, Mapping):
        return content if str(value.get("type")).lower() in KINDS else value
    if isinstance(value, (list, tuple)):
        return value if any(isinstance(entry, Mapping) for entry in value) else content
    known = {*SPELLINGS, *NAMES}.union(*map(_options_of, _classes().values()))
    beside = {key: entry for key, entry in content.items() if key != SECTION}
    are_options = [key in known or not isinstance(entry, (Mapping, list)) for key, entry in beside.items()]
    return content if any(are_options) or not beside else value


def read_sections(path: str | Path) -> Mapping[str, Any]:
    """Read a YAML file; {} if it holds no mapping. Raises ValueError if it cannot be read."""
    content = read_yaml_file(path)
    return content if isinstance(content, Mapping) else {}


# sparsity -------------------------------------------------------------------------------------------------------------


def _of_section(section: Any) -> Sparsity:
    if isinstance(section, float):
        section = {"sparsity": section}
    if isinstance(section, (list, tuple)):
        entries = {f"{SECTION}[{number}]": entry for number, entry in enumerate(section)}
    elif not isinstance(section, Mapping):
        raise ValueError(f"{SECTION}: {shown(section)} is neither a level such as 0.9, a mapping, nor a list of them")
    elif not isinstance(patterns := section.get("param_name_patterns"), Mapping):
        return algorithm_of(section, SECTION, include=_include(section, SECTION))
    else:
        entries = {
            f"{SECTION}: param_name_patterns[{pattern!r}]": {**section, **options, "param_name_patterns": pattern}
            if isinstance(options, Mapping)
            else options
            for pattern, options in patterns.items()
        }
    group = Group()
    for where, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} is {shown(entry)}, and must be a mapping such as {{sparsity: 0.5}}")
        dense = entry.get("sparsity", 0.0) is None
        group.add(_include(entry, where), None if dense else algorithm_of(entry, where))
    group.members()  # raises for an empty one
    return group


def algorithm_of(section: Mapping[str, Any], where: str, **keywords: Any) -> SparsityAlgorithm:
    """The algorithm that a mapping describes. Which parameters it names is not looked at: ``keywords`` say it."""
    options = {key: value for key, value in _present_spelling(section, where).items() if key not in NAMES}
    name, classes = options.pop("algorithm", "static"), _classes()
    if (cls := classes.get(str(name).lower())) is None:
        raise ValueError(f"{where}: algorithm {shown(name)} is not known{nearest(name, classes)}")
    summaries = options.pop("add_summaries", False)
    check_flag(f"{where}: add_summaries", summaries)
    refuse_unknown(options, list(_options_of(cls)), f"{where}: {cls.__name__}: ")
    try:
        algorithm = cls(**options, **keywords)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    if summaries:
        algorithm.add_summaries(log_level)
    return algorithm


def log_level(tag: str, value: float, step: int) -> None:
    """Write a level to Python's logging, as INFO: the writer behind a YAML file's ``add_summaries: true``."""
    LOG.info("step %d: %s %.6g", step, tag, value)


def _present_spelling(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    options = dict(section)
    schedule = options.get("schedule")
    is_update = isinstance(schedule, Mapping) and not {"freq", "steps"}.isdisjoint(schedule)
    for old, new in (("type", "algorithm"), ("schedule", "update" if is_update else "sparsity")):
        if old in options and new in options:
            raise ValueError(f"{where}: {old} is another word for {new} here: give one of them")
        if old in options:
            options[new] = options.pop(old)
    if "sparsity_schedule" in options:
        if not {"sparsity", "update"}.isdisjoint(options):
            raise ValueError(f"{where}: give sparsity_schedule, or sparsity and update")
        pairs = options.pop("sparsity_schedule")
        try:
            steps, levels = zip(*pairs, strict=True)
            if any(a >= b for a, b in pairwise(steps)):
                raise ValueError("levels would go with other steps")
        except (TypeError, ValueError):
            problem = "must be a list of [step, level], of steps that increase"
            raise ValueError(f"{where}: sparsity_schedule={shown(pairs)} {problem}") from None
        options |= {"sparsity": levels, "update": {"steps": steps}}
    return options


def _include(section: Mapping[str, Any], where: str) -> Any:
    named = {key: section[key] for key in NAMES if section.get(key) is not None}
    if len(named) > 1:
        raise ValueError(f"{where}: give one of {' and '.join(named)}")
    patterns = named.get("param_name_patterns")
    if patterns is None:
        return next(iter(named.values()), DEFAULT)
    if not isinstance(patterns, (str, list, tuple)):
        raise ValueError(f"{where}: param_name_patterns={shown(patterns)}: give regular expressions, or a mapping")
    try:
        return [re.compile(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}: param_name_patterns holds no regular expression: {error}") from None


def _options_of(cls: type[SparsityAlgorithm]) -> set[str]:
    names = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "options", "args", "kwargs"}


def _classes(base: type[SparsityAlgorithm] = SparsityAlgorithm) -> dict[str, type[SparsityAlgorithm]]:
    """All algorithms that inherit from ``base``, and itself, by name in lower case; of siblings the last counts."""
    known = {} if inspect.isabstract(base) else {base.__name__.lower(): base}
    for cls in base.__subclasses__():
        known |= _classes(cls)
    return known
