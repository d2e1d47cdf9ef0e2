"""YAML 1.2, as people write options in it."""

import re
from typing import Any

import yaml


class Yaml(yaml.SafeLoader):
    """YAML 1.2's plain values. In YAML 1.1, which yaml.SafeLoader reads, 2:4 is the number 124 and 1e-2 a string."""

    yaml_implicit_resolvers = {}  # filled below; not those of the base class


for _tag, _plain in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_plain})$"), None)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ValueError, which names ``where`` it stands, if it is none."""
    try:
        return yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from None
