"""Rules: options for the layers that a glob matches."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml

# rules ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Options for the layers that a glob matches. Of several rules that match a layer the first one counts.

    glob: a glob of layer names, such as "model.layers.*.mlp.*".
    options: "method", "pattern" and options of the method, for these layers alone; None leaves them dense.
    type_name: name of a class that the layer's module must be an instance of; None: any.
    """

    glob: str
    options: Mapping[str, Any] | None
    type_name: str | None = None

    def matches(self, name: str, module: torch.nn.Module) -> bool:
        """Whether the rule applies to the layer ``name``, whose weight ``module`` holds."""
        of_type = self.type_name is None or self.type_name in (base.__name__ for base in type(module).__mro__)
        return of_type and fnmatch.fnmatchcase(name, self.glob)


def parse_rules(rules: Any) -> tuple[Rule, ...]:
    """Rules from ``{glob: options}``, ``{class: {glob: options}}`` (ModelOpt), or a list of (glob, options) or Rules.

    Raises TypeError or ValueError for anything else.
    """
    if isinstance(rules, Mapping):
        if any(str(key).startswith("nn.") for key in rules):
            return class_rules(rules)
        rules = list(rules.items())
    return tuple(_as_rule(rule) for rule in rules)


def _as_rule(rule: Any, type_name: str | None = None) -> Rule:
    if isinstance(rule, (tuple, list)) and len(rule) == 2:
        glob, options = rule
        rule = Rule(glob, options, type_name)
    if (
        not isinstance(rule, Rule)
        or not isinstance(rule.glob, str)
        or not (rule.options is None or isinstance(rule.options, Mapping))
    ):
        raise TypeError(
            f"rule {rule!r}: a rule is a glob of layer names with a mapping of options, or with None to leave the "
            "layers dense"
        )
    return rule


def class_rules(mode_config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules from ModelOpt's ``{"nn.Linear": {"*": {}, "*lm_head*": None}}``.

    In ModelOpt the last match counts, here the first one: so the order of the globs is reversed.
    """
    rules: list[Rule] = []
    for class_name, globs in mode_config.items():
        type_name = str(class_name).removeprefix("nn.")
        if type_name == class_name or not isinstance(getattr(torch.nn, type_name, None), type):
            raise ValueError(
                f"class rules go by classes of torch.nn, such as 'nn.Linear', and {class_name!r} is none: "
                "give globs of layer names as rules={...} without classes"
            )
        if globs is None or globs == {}:
            globs = {"*": globs}
        if not isinstance(globs, Mapping):
            raise TypeError(f"class rule {class_name!r}: {globs!r} must be a mapping of globs, or None")
        rules += [_as_rule(rule, type_name) for rule in reversed(list(globs.items()))]
        rules.append(Rule("*", None, type_name))  # layers of the class that no glob matches stay dense, as in ModelOpt
    return tuple(rules)


# modelopt -------------------------------------------------------------------------------------------------------------
# ModelOpt's names for options, and its mode lists, translated to ours.


# ModelOpt's keys -> ours; the values mean the same
RENAMED: dict[str, str] = {
    "max_iter_data_loader": "max_batches",
    "hessian_damp": "damping",
    "col_block_size": "block_size",
    "verbose": "progress",
}
# keys of ModelOpt and others that have no counterpart here -> why, and what to do instead
REFUSED: dict[str, str] = {
    "calib_size": "ModelOpt never reads it; use max_batches, or num_samples with text",
    "row_block_size": "rows are independent and need no blocks; leave it out",
    "checkpoint": "ModelOpt stores nothing there; leave it out",
    "score_func": "it has no effect on sparsity; leave it out",
    "loss_func": "it has no effect on sparsity; leave it out",
    "deployment": "it has no effect on sparsity; leave it out",
}
# where `resolve_method` leaves the class rules of a ModelOpt mode list for `SparsifyConfig.make`
MODE_RULES = "rules of the mode list"


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with ModelOpt's keys renamed to ours. Raises ValueError for keys without a counterpart, and for options
    given under both names."""
    for key, instead in REFUSED.items():
        if key in options:
            raise ValueError(f"option {key!r} is not taken over from ModelOpt: {instead}")
    for old, new in RENAMED.items():
        if old in options and new in options:
            raise ValueError(f"options {old!r} and {new!r} mean the same; give one")
    return {RENAMED.get(key, key): value for key, value in options.items()}


def parse_mode(entry: Any) -> tuple[str, Mapping[str, Any] | None]:
    """An entry of a ModelOpt mode list, ``(name, mode config)`` -> name and mode config (class rules), or None."""
    if (
        isinstance(entry, (tuple, list))
        and len(entry) == 2
        and isinstance(entry[0], str)
        and (entry[1] is None or isinstance(entry[1], Mapping))
    ):
        return entry[0], entry[1]
    raise TypeError(f"mode list entry {entry!r}: give a name, or a name with class rules, ('sparsegpt', {{...}})")


# yaml loader ----------------------------------------------------------------------------------------------------------
# A YAML reader for options, with the plain values of YAML 1.2.


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
