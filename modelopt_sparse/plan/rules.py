"""Rules: options for the layers that a glob matches."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


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
