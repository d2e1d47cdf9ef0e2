"""Tensors whose memory is a file: the system takes their pages back to disk when it needs the room."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def spilled(x: Tensor, folder: Path) -> Tensor:
    """A copy of a dense tensor on the CPU, of the same layout, in a file that is gone when the tensor is. Anything else
    comes back as it is."""
    if x.device.type != "cpu" or not x.numel():
        return x
    dense = x.detach().clone()  # its storage holds its elements, each once, and nothing else
    flat = dense.as_strided((dense.numel(),), (1,))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and below it would be the end of the process
            os.posix_fallocate(file.fileno(), 0, flat.numel() * flat.element_size())
        mapped = torch.from_file(file.name, shared=True, size=flat.numel(), dtype=flat.dtype)
        mapped.copy_(flat)
    return mapped.as_strided(dense.shape, dense.stride())
