"""The values of ``quality=``: each stands for a method and for the steps that follow it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import NM, Pattern
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.reports.text import nearest


@dataclass(frozen=True)
class Quality:
    """Defaults for what the user does not set.

    method: name of the method.
    options: options of `SparsifyConfig`, for any pattern.
    n_of_m: further options for N:M patterns.
    unstructured: further options for unstructured patterns.
    """

    method: str
    options: Mapping[str, Any]
    n_of_m: Mapping[str, Any] = field(default_factory=dict)
    unstructured: Mapping[str, Any] = field(default_factory=dict)

    def options_for(self, pattern: Pattern | None) -> dict[str, Any]:
        """The options for a pattern; None: only those for any pattern."""
        by_pattern = {} if pattern is None else self.n_of_m if isinstance(pattern, NM) else self.unstructured
        return {**self.options, **by_pattern}


BALANCED = {"epochs": 4, "masks": "auto"}
BEST = {"self_data": "auto", "reconstruct": {**BALANCED, "metric": "auto"}}
QUALITIES: dict[str, Quality] = {
    "fast": Quality("sparsegpt", {"polish": 3}),
    "balanced": Quality("alps", {"reconstruct": BALANCED}, {"permute": True}, {"allocation": "block"}),
    "best": Quality("alps", BEST, {"permute": True}, {"allocation": "block"}),
    "max": Quality("alps", {**BEST, "distill": True}, {"permute": True}, {"allocation": "block"}),
}


def quality_of(name: object, method: Method | None = None) -> Quality:
    """The quality of this name. Raises ValueError if there is none, or if ``method`` does not learn from data."""
    if not isinstance(name, str) or name not in QUALITIES:
        raise ValueError(f"quality={name!r}{nearest(name, QUALITIES)}: allowed are {', '.join(map(repr, QUALITIES))}")
    if method is not None and method.needs == "nothing" and not isinstance(method, GivenMask):
        raise ValueError(
            f"quality={name!r} is for methods that learn from calibration data, which {method.name!r} does not; leave "
            "it out, or the method, or give polish= and reconstruct= themselves"
        )
    return QUALITIES[name]
