"""The values of options: a reader of YAML 1.2, and checks that name the option and say what is allowed. `grouped`."""

import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import numpy as np
import yaml

LONGEST = 300  # characters of a value in a message
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 3, LONGEST, LONGEST


def shown(value: object) -> str:
    """A value as messages show it: its repr, or the beginning of a long one."""
    text = SHORT.repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """Key -> the values that have it, in their order; keys in the order of their first values."""
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


class Stream(Iterable[Value]):
    """The values of an iterator, to be gone through any number of times. It is read no further than asked for."""

    def __init__(self, values: Iterator[Value]) -> None:
        self._rest, self._read = values, list[Value]()

    def __iter__(self) -> Iterator[Value]:
        yield from self._read
        for value in self._rest:
            self._read.append(value)
            yield value


# checks ---------------------------------------------------------------------------------------------------------------


def plain_number(value: Any) -> Any:
    """A number of numpy as Python's own; any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_whole(value: object, least: int | None = None) -> bool:
    """Whether a value is a whole number of at least ``least``. True and False are no numbers here."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float. True and False are no numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int | None = 1) -> None:
    """Raise ValueError unless the option ``name`` is a whole number of at least ``least``."""
    if not is_whole(value, least):
        kinds = {None: "a whole number", 1: "a positive whole number"}
        raise ValueError(f"{name}={shown(value)}: must be {kinds.get(least, f'a whole number of at least {least}')}")


def check_number(name: str, value: Any, interval: str) -> None:
    """Raise ValueError unless the option ``name`` is a number in an interval, such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))
    left_out = [end for end, bracket in ((low, "("), (high, ")")) if bracket in interval]
    if not is_number(value) or not low <= value <= high or value in left_out:
        raise ValueError(f"{name}={shown(value)}: must be a number in {interval}")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless the option ``name`` is one of the values."""
    if value not in allowed:
        raise ValueError(f"{name}={shown(value)}: allowed are {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless the option ``name`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be True or False")


def check_options(options: Any, where: str = "") -> None:
    """Raise ValueError unless every option of a dataclass is what its type says, if that is a whole number, True or
    False, or one of a Literal's values. ``where`` begins names. Metadata of a field: ``least``, its
    smallest number, 1 without."""
    for option in fields(options):
        name, kind, value = f"{where}{option.name}", option.type, getattr(options, option.name)
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        elif value is None and type(None) in get_args(kind):
            continue
        elif kind in (int, int | None):
            check_whole(name, value, option.metadata.get("least", 1))
        elif kind in (bool, bool | None):
            check_flag(name, value)


# YAML -----------------------------------------------------------------------------------------------------------------


class Yaml(yaml.SafeLoader):
    """yaml.SafeLoader with YAML 1.2's plain values. SafeLoader's own are YAML 1.1's: 2:4 is 124, and 1e-2 a string.

    A key that stands twice is an error."""

    yaml_implicit_resolvers = {}  # empty, not those of the base class; filled below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if (name := (key.tag, str(key.value))) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _plain in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_plain})$"), None)


def read_yaml_file(path: str | Path, option: str = "") -> Any:
    """What a YAML file holds. Raises ValueError that names it, and the ``option`` that it was given with."""
    where = f"{option} {str(path)!r}".strip()
    try:
        return read_yaml(Path(path).read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read as YAML: {error}") from None


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ValueError if it is no YAML; ``where`` says in the message where it stands."""
    try:
        return yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be options") from None
