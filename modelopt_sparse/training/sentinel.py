"""NaN in the place of pruned weights: how the checkpoints of Cerebras' first sparse releases say what is pruned.

A model must never run with such weights. `from_sentinel` gives masks and weights with zeros instead, and `finalize`
writes a file that holds zeros and no pattern.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from modelopt_sparse.model.masking import SUFFIX

PICKLES = (".mdl", ".pt", ".pth", ".bin", ".ckpt")


def to_sentinel(state: Mapping[str, Any], optimizer_state: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """A sparse model's state dict with NaN where its masks are False, and without the masks; nothing else changes.

    ``optimizer_state``: name of a parameter -> its state tensors by name. Those of the parameter's shape get NaN as
    well, in place.
    """
    masks = {name.removesuffix(SUFFIX): mask for name, mask in state.items() if _is_mask(name, state)}
    marked = {name: value for name, value in state.items() if not _is_mask(name, state)}
    for name, mask in masks.items():
        marked[name] = marked[name].masked_fill(~mask, torch.nan)
        for value in (optimizer_state or {}).get(name, {}).values():
            if isinstance(value, Tensor) and value.shape == mask.shape and value.is_floating_point():
                value.masked_fill_(~mask, torch.nan)
    return marked


def from_sentinel(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `to_sentinel`: zeros where there is NaN, and a mask beside every tensor that holds one.

    Raises ValueError for inf, which marks nothing: the file is damaged.
    """
    sparse: dict[str, Any] = {}
    for name, value in state.items():
        sparse[name] = value
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.isinf().any():
                raise ValueError(f"{name!r} holds inf, which marks no pruned weight: the checkpoint is damaged")
            if (pruned := value.isnan()).any():
                sparse[name] = value.masked_fill(pruned, 0)
                sparse[name + SUFFIX] = ~pruned
    return sparse


def finalize(source: str | Path, destination: str | Path) -> tuple[dict[str, Tensor], int]:
    """Copy a safetensors file, with 0 in the place of every NaN -> (the masks, by name; how many tensors there are).

    The copy knows nothing of the masks.

    Raises ValueError for any other kind of file, for a destination that exists, and for inf.
    """
    source, destination = Path(source), Path(destination)
    for path in (source, destination):
        if path.suffix in PICKLES:
            raise ValueError(
                f"{str(path)!r} looks like a pickle file, which this library neither reads nor writes; in Python:\n"
                '    state = torch.load("checkpoint.mdl", weights_only=True)\n'
                '    safetensors.torch.save_file(state["model"], "checkpoint.safetensors")'
            )
    if destination.exists():
        raise ValueError(f"{str(destination)!r} exists already: give the name of a new file")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(source)!r} cannot be read as safetensors: {error}") from None
    sparse = from_sentinel(state)
    masks = {name.removesuffix(SUFFIX): sparse.pop(name) for name in list(sparse) if _is_mask(name, sparse)}
    save_file(sparse, destination, metadata=metadata)
    return masks, len(sparse)


def _is_mask(name: str, state: Mapping[str, Any]) -> bool:
    """Whether a tensor is the mask of another one of the state dict."""
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in state and state[name].dtype == torch.bool
