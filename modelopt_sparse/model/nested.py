"""Tensors in nested tuples, lists and mappings."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf of its nested tuples, lists and mappings replaced by ``function(leaf)``.

    A torch.Size is a leaf, although it is a tuple: it holds nothing but integers.
    """
    if isinstance(value, torch.Size):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, entry) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, entry) for entry in value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, entry) for key, entry in value.items()}
        return type(value)(**mapped) if isinstance(value, ModelOutput) else mapped
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in nested tuples, lists and mappings replaced by ``function(tensor)``."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def version(x: Tensor) -> int:
    """A number that rises whenever something writes to ``x``; always 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    return tensors


def leaves_of(value: Any) -> list[Any]:
    """Every leaf of nested tuples, lists and mappings, in order."""
    leaves: list[Any] = []
    map_leaves(leaves.append, value)
    return leaves
