"""Tensors whose memory is a file, so that the system can write their pages to disk when it needs the memory."""

import errno
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def spilled(x: Tensor, folder: Path) -> Tensor:
    """A copy of a dense tensor on the CPU, of the same layout, in a file in ``folder``.

    The file is gone when the tensor is. An empty tensor, or one on another device, is returned as it is.
    """
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
    """Reserve the bytes of a file on the disk. Raises OSError if the disk is full.

    Without this, writing to the mapped file on a full disk would kill the process.
    """
    if not hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve
            raise
