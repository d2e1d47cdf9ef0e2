"""What a call of the model that was stopped leaves behind, and how it is put back: writes to its arguments, attributes,
buffers, and torch's flags."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import Call
from modelopt_sparse.model.devices import WRAPPED_BY, flat_tensors, leaves_of, map_tensors, version

CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    *((partial(torch.is_autocast_enabled, x), partial(torch.set_autocast_enabled, x)) for x in ("cpu", "cuda")),
    *((partial(torch.get_autocast_dtype, x), partial(torch.set_autocast_dtype, x)) for x in ("cpu", "cuda")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    *((partial(getattr, CUDNN, x), partial(setattr, CUDNN, x)) for x in ("enabled", "benchmark", "deterministic")),
]
OF_A_MODULE = frozenset(vars(nn.Module())) - {"training"} | WRAPPED_BY  # never put back


class ModelState:
    """Attributes of modules, what lists, sets and dicts among them hold, attributes of objects among them such as
    configs, buffers (not what these hold), and torch's flags for the process."""

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        self._attributes = [(attrs, dict(attrs), _contents(attrs)) for attrs in map(vars, (*modules, *objects))]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        self._flags = [get() for get, _ in FLAGS]

    def put_back(self) -> None:
        for attributes, before, contents in self._attributes:
            same = len(attributes) == len(before) and all(map(is_, attributes.values(), before.values()))
            for key in () if same else (attributes.keys() | before.keys()) - OF_A_MODULE:
                if key in before:
                    attributes[key] = before[key]
                else:
                    del attributes[key]
            for value, was in contents:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(was)
        for buffers, before in self._buffers:
            buffers.clear()
            buffers.update(before)
        for (get, put), before in zip(FLAGS, self._flags):
            if get() != before:
                put(before)


def settings_of(modules: Sequence[nn.Module]) -> list[Any]:
    """What a call depends on beside its arguments and tensors, as far as it is plain: torch's flags, and each module's
    modes, attributes that are numbers or text, and number of hooks."""

    def plain(attrs: Mapping[str, Any]) -> list[Any]:
        values = [(key, value) for key, value in attrs.items() if isinstance(value, (bool, int, float, str))]
        return [*values, len(attrs["_forward_hooks"]), len(attrs["_forward_pre_hooks"])]

    return [[get() for get, _ in FLAGS], [plain(vars(module)) for module in modules]]


def objects_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Attributes of modules that have attributes themselves, each once: no modules, tensors, classes and functions."""
    attrs = [(key, value) for module in modules for key, value in vars(module).items()]
    values = {id(value): value for key, value in attrs if key not in OF_A_MODULE}
    others = (nn.Module, Tensor, type, FunctionType, MethodType, partial, ModuleType)
    return [x for x in values.values() if isinstance(getattr(x, "__dict__", None), dict) and not isinstance(x, others)]


def _contents(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Lists, sets and dicts among a module's attributes, each with a copy."""
    containers = [(key, value) for key, value in attributes.items() if type(value) in (list, set, dict)]
    return [(value, copy.copy(value)) for key, value in containers if key not in OF_A_MODULE]


def with_copied_arguments(call: Call) -> tuple[Call, Callable[[], None]]:
    """Copy a call with all arguments but tensors and modules -> (the copy, what undoes writes to its tensors)."""
    tensors = flat_tensors((call.args, call.kwargs))
    before = [(x, version(x), x.detach().clone()) for x in tensors]
    held = [x for x in leaves_of((call.args, call.kwargs)) if isinstance(x, (Tensor, nn.Module))]
    try:
        args, kwargs = copy.deepcopy((call.args, dict(call.kwargs)), {id(x): x for x in held})
    except (TypeError, RuntimeError, AttributeError):  # what cannot be copied, such as a lock, is handed on
        args, kwargs = map_tensors(lambda x: x, (call.args, dict(call.kwargs)))

    @torch.no_grad()
    def put_back() -> None:
        for x, was, values in before:
            if version(x) != was:
                x.copy_(values)

    return replace(call, args=args, kwargs=kwargs), put_back
