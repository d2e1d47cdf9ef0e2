"""A pretend accelerator: a device whose tensors hold their values on the CPU.

For torch they are on another device than the CPU's: an operation that mixes the two raises, as on a GPU, and what has
to move has to be moved. So machines without a GPU can test that what meets lies on one device; not kernels, streams,
memory or how a GPU rounds.

What torch's C++ code does by itself without an operation of its own, such as setting items of a tensor, is not there.

Once entered it is the accelerator of the process for all of torch: tests that use it have a process of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from modelopt_sparse.calibration.rerun import Unknown

NAME = "pretend"


class Backend(_DummyBackendModule):
    """``free``: how many bytes of memory the device says it has left; torch's allocator holds ``reserved``, of which
    ``allocated`` are in use. ``came`` and ``went``: shapes of what moved to the device and away from it. ``waits``: how
    often the host asked for values, for which it would wait until a GPU has done all that it was given."""

    free = 1 << 40
    reserved = allocated = waits = 0

    def __init__(self) -> None:
        self.came: list[tuple[int, ...]] = []
        self.went: list[tuple[int, ...]] = []

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        del device
        return self.free, self.free + self.reserved

    def memory_reserved(self, device: torch.device) -> int:
        del device
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        del device
        return self.allocated


BACKEND = Backend()
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default}  # which take indices on the CPU, as on a GPU
ASKING = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
AS_ON_A_GPU = "Expected all tensors to be on the same device"


@cache
def the_device() -> torch.device:
    """Made when it is first asked for, so that tests on a GPU in the same file have the GPU alone."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=BACKEND)
    return torch.device(NAME, 0)


class Pretended(Tensor):
    """A tensor on the pretend device; ``inner`` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:  # accelerate makes a parameter by the class of the one before
            return nn.Parameter(inner, requires_grad)
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=the_device()
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        BACKEND.waits += 1
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        del types
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        del types
        return _run(func, args, kwargs or {})


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """While entered, tensors and modules can be moved to and from the device that is given."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    # a parameter that moves stays the same object, as it does between the CPU and a GPU
    torch.__future__.set_swap_module_params_on_conversion(True)
    BACKEND.came, BACKEND.went, BACKEND.waits = [], [], 0
    try:
        with _Mode():
            yield the_device()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _mapped(function: Callable[[Tensor], Any], x: Any) -> Any:
    """An operator's arguments or results, with other tensors: a fifth of the time of torch's tree_map."""
    if isinstance(x, Tensor):
        return function(x)
    return type(x)([_mapped(function, part) for part in x]) if isinstance(x, (tuple, list)) else x


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors: list[Tensor] = []
    _mapped(tensors.append, [*args, *kwargs.values()])
    if any(isinstance(x, Unknown) for x in tensors):
        return NotImplemented  # they know what to do
    there = [x for x in tensors if isinstance(x, Pretended)]
    here = [x for x in tensors if not isinstance(x, Pretended) and x.dim() > 0]
    if there and here and func not in MOVES | INDEXED:
        shapes = [list(x.shape) for x in there], [list(x.shape) for x in here]
        raise RuntimeError(f"{AS_ON_A_GPU}, but {func} has {NAME} {shapes[0]} and cpu {shapes[1]}")
    device = kwargs.get("device")
    if device is not None:
        goes = torch.device(device).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")} if goes else kwargs
    else:
        goes = isinstance(args[0], Pretended) if func in MOVES else bool(there)
    inner_args = _mapped(_inner, args)
    inner_kwargs = {name: _mapped(_inner, x) for name, x in kwargs.items()}
    if func is aten.histc.default:  # of integers on a GPU alone, as transformers knows
        inner_args = (inner_args[0].double(), *inner_args[1:])
    if func in MOVES:
        source = args[1] if func is aten.copy_.default else args[0]
        if isinstance(source, Pretended) != goes:
            (BACKEND.came if goes else BACKEND.went).append(tuple(source.shape))
            BACKEND.waits += not goes and device != torch.device("meta")
    picked = func is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
    BACKEND.waits += bool(there) and (func in ASKING or picked)  # by a mask: how many elements that are
    result = func(*inner_args, **inner_kwargs)
    arguments = {id(_inner(x)): x for x in tensors}

    def outer(x: Tensor) -> Tensor:
        if id(x) in arguments:  # what works in place gives its argument
            return arguments[id(x)]
        return Pretended(x) if goes else x

    return _mapped(outer, result)


def _inner(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, Pretended) else x
