"""Names: the layers that a glob means, options for them, and ModelOpt's names for options."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelopt_sparse.values import shown

# globs ----------------------------------------------------------------------------------------------------------------


def first_match(name: str, globs: Iterable[str]) -> str | None:
    """The first of the globs that matches a name, in upper and lower case; None if none does."""
    return next((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), None)


def check_globs(globs: Iterable[str], names: Sequence[str], kind: str, dense: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a glob that matches none of the names.

    kind: what has these names, such as "layer of this LlamaForCausalLM".
    dense: other names that a user may think of -> why they are not among ``names``.
    """
    for glob in globs:
        if not fnmatch.filter(names, glob):
            reasons = sorted({why for name, why in (dense or {}).items() if first_match(name, [glob])})
            only = f", only weights that stay dense: {'; '.join(reasons)}" if reasons else ""
            close = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3] or ["(there is none)"]
            raise ValueError(f"{glob!r} matches no {kind}{only}; names look like {', '.join(close)}")


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
    if isinstance(rule, Rule) and isinstance(rule.glob, str) and isinstance(rule.options, Mapping | None):
        return rule
    raise TypeError(f"rule {shown(rule)}: a rule is a glob of layer names with a mapping of options, or None (dense)")


# ModelOpt -------------------------------------------------------------------------------------------------------------

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
MODE_RULES = "rules of the mode list"  # the option under which `resolve_method` hands class rules on


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


def class_rules(mode_config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules from ModelOpt's ``{"nn.Linear": {"*": {}, "*lm_head*": None}}``.

    In ModelOpt the last match counts, here the first one: so the order of the globs is reversed.
    """
    rules: list[Rule] = []
    for class_name, globs in mode_config.items():
        type_name = str(class_name).removeprefix("nn.")
        if type_name == class_name or not isinstance(getattr(torch.nn, type_name, None), type):
            raise ValueError(f"a class is such as 'nn.Linear', and {class_name!r} is none: give rules of globs alone")
        if globs is None or globs == {}:
            globs = {"*": globs}
        if not isinstance(globs, Mapping):
            raise TypeError(f"class rule {class_name!r}: {shown(globs)} must be a mapping of globs, or None")
        rules += [_as_rule(rule, type_name) for rule in reversed(list(globs.items()))]
        rules.append(Rule("*", None, type_name))  # layers of the class that no glob matches stay dense, as in ModelOpt
    return tuple(rules)


def parse_mode(entry: Any) -> tuple[str, Mapping[str, Any] | None]:
    """An entry of a ModelOpt mode list, a name or ``(name, class rules)`` -> name and class rules, or None."""
    match entry:
        case str():
            return entry, None
        case (str() as name, None | Mapping() as rules):
            return name, rules
    raise TypeError(f"mode list entry {shown(entry)}: give a name, or a name with class rules, ('sparsegpt', {{...}})")
