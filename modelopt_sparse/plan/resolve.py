"""From what the user said to a method and validated options."""

from collections.abc import Mapping
from typing import Any

from modelopt_sparse.methods import ALIASES, METHODS
from modelopt_sparse.methods.base import NEEDS, Method
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.modelopt import MODE_RULES, parse_mode
from modelopt_sparse.plan.quality import quality_of
from modelopt_sparse.plan.rules import class_rules
from modelopt_sparse.reports.text import nearest

DEFAULT_METHOD = "sparsegpt"


def resolve(
    method: object, config: SparsifyConfig | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[Method, SparsifyConfig]:
    """What the user said -> the method and the validated config. Without a method, ``masks`` or ``quality`` choose."""
    whole = config.explicit() if isinstance(config, SparsifyConfig) else config if isinstance(config, Mapping) else {}
    masks, quality = (options.get(key, whole.get(key)) for key in ("masks", "quality"))
    if masks is not None:
        if method is not None:
            raise ValueError(f"masks= takes the place of a method, and method={method!r} is given; keep one")
        method = GivenMask()
    elif method is None:
        method = DEFAULT_METHOD if quality is None else quality_of(quality).method
    resolved, config = resolve_method(method, config)
    return resolved, SparsifyConfig.make(resolved, config, **options)


def distributed_in(config: SparsifyConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Any:
    """The option ``distributed``, before anything else is looked at: what is wrong with the rest in one process has to
    be heard by the others."""
    whole = {"distributed": config.distributed} if isinstance(config, SparsifyConfig) else config
    return options.get("distributed", whole.get("distributed") if isinstance(whole, Mapping) else None)


def resolve_method(method: object, config: Any) -> tuple[Method, Any]:
    """A name, alias, Method object or ModelOpt mode list -> the method and the config with the mode's rules added."""
    if isinstance(method, Method):
        if method.needs not in NEEDS:
            raise ValueError(f"method {method.name!r}: needs={method.needs!r}; allowed are {', '.join(NEEDS)}")
        return method, config
    if isinstance(method, list):
        if len(method) != 1:
            raise ValueError(f"a mode list names one method, this one has {len(method)}: {method!r}")
        name, mode_config = (method[0], None) if isinstance(method[0], str) else parse_mode(method[0])
        resolved, config = resolve_method(name, config)
        if not mode_config:
            return resolved, config
        if config is not None and not isinstance(config, Mapping):
            kind = type(config).__name__
            raise TypeError(f"a mode list with class rules goes with a mapping as config, not with a {kind}")
        return resolved, {**(config or {}), MODE_RULES: class_rules(mode_config)}
    if isinstance(method, str):
        name = ALIASES.get(method, method)
        if name in METHODS:
            return METHODS[name], config
        allowed = [*METHODS, *ALIASES]
        raise ValueError(f"method {method!r} is not known{nearest(method, allowed)}; allowed are {', '.join(allowed)}")
    raise TypeError(f"method is a {type(method).__name__}: give a name ({', '.join(METHODS)}) or a Method object")
