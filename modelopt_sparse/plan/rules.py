"""Rules: options for the layers that a glob matches."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rule:
    """Layers whose name matches ``glob`` (and whose type is ``type_name``, if given) get ``options``; None = dense."""

    glob: str
    options: Mapping[str, Any] | None
    type_name: str | None = None

    def matches(self, name: str, module: torch.nn.Module) -> bool:
        of_type = self.type_name is None or self.type_name in (base.__name__ for base in type(module).__mro__)
        return of_type and fnmatch.fnmatchcase(name, self.glob)


def parse_rules(rules: Any) -> tuple[Rule, ...]:
    """``{glob: options}``, ``{class: {glob: options}}`` (ModelOpt), or a list of (glob, options) or Rules."""
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
    """ModelOpt's ``{"nn.Linear": {"*": {}, "*lm_head*": None}}``: there the last match wins, so the order turns."""
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
        rules += [_as_rule(item, type_name) for item in reversed(list(globs.items()))]
        rules.append(Rule("*", None, type_name))  # what no glob of the class matches stays dense in ModelOpt
    return tuple(rules)
