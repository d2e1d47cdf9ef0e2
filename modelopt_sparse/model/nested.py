"""Tensors in nested tuples, lists and mappings."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with everything in nested tuples, lists and mappings replaced."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, item) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, item) for key, item in value.items()}
        return type(value)(**mapped) if isinstance(value, ModelOutput) else mapped
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists and mappings replaced; anything else stays what it is."""
    return map_leaves(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def version(x: Tensor) -> int:
    """A number that rises whenever something writes to ``x``; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def leaves_of(value: Any) -> list[Any]:
    """Whatever nested tuples, lists and mappings hold, in order."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found
