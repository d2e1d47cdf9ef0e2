"""ModelOpt's names for options, and its mode lists, in terms of ours."""

from collections.abc import Mapping
from typing import Any

# ModelOpt's keys -> ours, with the value translated where it differs
RENAMED: dict[str, str] = {
    "max_iter_data_loader": "max_batches",
    "hessian_damp": "damping",
    "col_block_size": "block_size",
    "verbose": "progress",
}
# ModelOpt's and other keys that have no counterpart -> what to do instead
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


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    for key, instead in REFUSED.items():
        if key in given:
            raise ValueError(f"option {key!r} is not taken over from ModelOpt: {instead}")
    for old, new in RENAMED.items():
        if old in given and new in given:
            raise ValueError(f"options {old!r} and {new!r} mean the same; give one")
    return {RENAMED.get(key, key): value for key, value in given.items()}


def parse_mode(entry: Any) -> tuple[str, Mapping[str, Any] | None]:
    """ModelOpt's ``(name, mode config)``."""
    if (
        isinstance(entry, (tuple, list))
        and len(entry) == 2
        and isinstance(entry[0], str)
        and (entry[1] is None or isinstance(entry[1], Mapping))
    ):
        return entry[0], entry[1]
    raise TypeError(f"mode list entry {entry!r}: give a name, or a name with class rules, ('sparsegpt', {{...}})")
