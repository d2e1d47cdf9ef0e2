"""Devices: where a module runs, what is free there, and what it takes to run a block on another one."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelopt_sparse.model.nested import map_tensors


def give_back_freed_memory() -> None:
    """glibc keeps the memory of freed tensors of middle size in pieces, which grow with every block that comes and
    goes; other C libraries have no such call."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def input_device(model: nn.Module) -> torch.device:
    """Where the model's inputs go: its first parameter that is not offloaded, or its first hook's device."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """What is free on an accelerator, with what torch holds of it for nothing; 0 for one that does not tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


@contextmanager
def onloaded(block: nn.Module, device: torch.device, *, resident: bool, stays: bool = False) -> Iterator[None]:
    """While entered, every call of the block runs on ``device`` and gives its outputs back where the block came from
    (``stays``: leaves them there).

    ``resident``: the weights are there all the time; otherwise they move for each call. Blocks that accelerate moves by
    itself, and blocks that are on the device already, are left alone.
    """
    home = input_device(block)
    if home == device or any(hasattr(module, "_hf_hook") for module in block.modules()):
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

    # the outputs move before anybody else sees them: links between blocks are found by identity
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


# how those say it that raise a plain RuntimeError: the CPU's allocator, C++'s, and two of CUDA's libraries
WORDS = ("DefaultCPUAllocator: ", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def free_what_can_be_freed() -> None:
    """Memory that nothing uses, back to the devices and to the system."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed_memory()
