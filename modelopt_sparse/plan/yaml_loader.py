"""A YAML reader for options, with the plain values of YAML 1.2."""

import re
from typing import Any

import yaml


class Yaml(yaml.SafeLoader):
    """yaml.SafeLoader with YAML 1.2's plain values. SafeLoader's own are YAML 1.1's: 2:4 is 124, and 1e-2 a string."""

    yaml_implicit_resolvers = {}  # empty, not those of the base class; filled below


for _tag, _plain in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_plain})$"), None)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ValueError if it is no YAML; ``where`` says in the message where it stands."""
    try:
        return yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be options") from None
