"""Tensors whose memory is a file: the system takes their pages back to disk when it needs the room."""

import errno
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
        _reserve(file.fileno(), flat.numel() * flat.element_size())
        mapped = torch.from_file(file.name, shared=True, size=flat.numel(), dtype=flat.dtype)
        mapped.copy_(flat)
    return mapped.as_strided(dense.shape, dense.stride())


def _reserve(descriptor: int, size: int) -> None:
    """A full disk is an error here; without it, writing to the mapped file would end the process."""
    if not hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise
