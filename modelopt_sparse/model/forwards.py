"""Whether a layer computes what its class says. Adapters are written for classes of torch, and for Conv1D of
transformers; a subclass with a forward of its own may do something else with the weight: standardize, scale or round
it, or pad its inputs. What it puts out is compared with what the class that it inherits from makes of the same input.

This file works without transformers.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.model.devices import has_hook, is_out_of_memory, stored

LIBRARIES = ("torch.nn.modules.", "transformers.pytorch_utils")
OTHER = "its forward does something else with the weight than"
# Of the norm of the product. Rounding weights and inputs to 8 bits, as quantization-aware training does, changes it by
# 1 % (integers) to 4 % (float8), bfloat16 by 0.3 %. Rounding to 4 bits changes it by 10 %, to three values by 40 %:
# what is found of the stored weight does not hold for such a one.
TOLERANCE = 0.05


def library_class(cls: type) -> Any:
    """The class of a library that a module's class ``cls`` is, or inherits from."""
    return next(base for base in cls.__mro__ if base.__module__.startswith(LIBRARIES))


def why_other(cls: type) -> str:
    """Why a layer of class ``cls`` stays dense, as the plan shows it."""
    base = library_class(cls)
    return f"{OTHER} {'nn.' * (base.__module__ != LIBRARIES[1])}{base.__name__}"


def has_own_forward(module: nn.Module, cls: type) -> bool:
    """Whether a module of class ``cls`` (without its mask) computes in code that is not the library's."""
    base, names = library_class(cls), ("forward", "_conv_forward")
    others = any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)
    return others or replaced_forward(module) is not None


def replaced_forward(module: nn.Module) -> Callable[[Tensor], Any] | None:
    """The forward that the instance has in the place of its class's, unless accelerate has put it there, or left its
    class's own there, bound, or `forwards_replaced` has for a while."""
    forward: Any = vars(module).get("forward")
    while hasattr(forward, "previous"):
        forward = forward.previous
    return None if has_hook(module) or getattr(forward, "__func__", None) is type(module).forward else forward


@torch.no_grad()
def is_other(module: Any, cls: type, x: Tensor | None = None) -> bool | None:
    """Whether a linear layer or convolution with a forward of its own makes something else of an input than the class
    of the library; of one that is made up without ``x``. None: it cannot be run alone on such an input.

    A copy of it is run, in evaluation mode. On the meta device that has made-up weights, if it holds nothing else.
    """
    random = torch.Generator().manual_seed(0)
    values = {name: stored(module, name).detach() for name, _ in module.named_parameters(recurse=False)}
    if any(value.is_meta for value in (*values.values(), *module.buffers())):
        if values.keys() - {"weight", "bias"} or [*module.buffers(), *module.children()]:
            return None
        values = {name: torch.randn(value.shape, generator=random, device="cpu") for name, value in values.items()}
    try:
        parts = copy.deepcopy({name: vars(module)[name] for name in ("_buffers", "_modules")})
        parameters = {name: nn.Parameter(value.clone(), requires_grad=False) for name, value in values.items()}
        parts["_parameters"] = {**module._parameters, **parameters}
        twin, plain = object.__new__(type(module)), object.__new__(library_class(cls))
        for instance in (twin, plain):
            vars(instance).update({**vars(module), **parts})
        # a made-up input is positive, so that a mean that is taken off the weight shows
        x = torch.rand(_shape_for(plain), generator=random, device="cpu") if x is None else x
        product = library_class(cls).forward(plain, x := x.to(parameters["weight"]))
        output = (replaced_forward(module) or type(module).forward.__get__(twin.eval()))(x)
        if output.shape != product.shape:
            return True
        error = (output - product).float()
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        return None
    # NaN and inf are for other checks
    return bool(error.nan_to_num(0, 0, 0).norm() > TOLERANCE * product.float().nan_to_num(0, 0, 0).norm())


def _shape_for(module: Any) -> tuple[int, ...]:
    """The shape of an input. A convolution's is a multiple of the stride, so that patches need no padding."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        sizes = zip(module.stride, module.dilation, module.kernel_size)
        return (2, module.in_channels, *(stride * (dilation * (kernel - 1) + 1) for stride, dilation, kernel in sizes))
    return (2, 3, module.in_features if isinstance(module, nn.Linear) else module.nx)
