"""ModelOpt's names for options, and its mode lists, translated to ours."""

from collections.abc import Mapping
from typing import Any

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
