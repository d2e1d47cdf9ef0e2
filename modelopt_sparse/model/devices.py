"""Devices: where a module runs, how much memory is free there, and how to run a block on another device."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from modelopt_sparse.model.nested import map_tensors
from modelopt_sparse.model.offload import execution_device, has_hook


def give_back_freed_memory() -> None:
    """Have glibc return freed memory to the system.

    By itself glibc holds on to the memory of freed tensors of middle size, more with every block that is loaded and
    dropped. Other C libraries have no such call, and nothing happens.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def input_device(model: nn.Module) -> torch.device:
    """The device that the model's inputs go to.

    It is that of the first parameter with values, else the first that a hook of accelerate runs on, else the CPU.
    """
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    for module in model.modules():
        device = execution_device(module)
        if device is not None:
            return device
    return torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Free bytes on an accelerator, including what torch has reserved and does not use; 0 if the device cannot tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


def bytes_in_use(device: torch.device) -> int:
    """Bytes of tensors on an accelerator; on the CPU, and where the device cannot tell, those of this process."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is None or not hasattr(module, "memory_allocated"):
        return psutil.Process().memory_info().rss
    return module.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The largest `bytes_in_use` of a device since this process began; of an accelerator since torch's statistics of it
    were reset, if somebody did."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is not None and hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":  # not getrusage: it carries the peak of the parent process over
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def onloaded(block: nn.Module, device: torch.device, *, resident: bool, stays: bool = False) -> Iterator[None]:
    """While entered, every call of the block runs on ``device``.

    resident: the weights stay on ``device`` until the end; otherwise they move there and back for each call.
    stays: outputs stay on ``device``; otherwise they move to the device that the block came from.

    Nothing happens to a block that is on ``device`` already, and to one that accelerate moves.
    """
    home = input_device(block)
    if home == device or has_hook(block):
        yield
        return

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not resident:
            module.to(device)
        return map_tensors(lambda x: x.to(device), args), map_tensors(lambda x: x.to(device), kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        del args
        if not resident:
            module.to(home)
        return output if stays else map_tensors(lambda x: x.to(home), output)

    # the outputs move before other hooks see them: which block's output is whose input is told by identity
    with (
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, prepend=True),
    ):
        try:
            if resident:
                block.to(device)
            yield
        finally:
            block.to(home)


# what the message of a plain RuntimeError holds if memory has run out, in the CPU's allocator, in C++'s, and in two of
# CUDA's libraries
WORDS = ("DefaultCPUAllocator: ", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation has failed, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def free_what_can_be_freed() -> None:
    """Return memory that nothing uses to the devices and to the system."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed_memory()
