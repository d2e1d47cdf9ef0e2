"""Whether a layer computes what its class says. Adapters are written for classes of torch, and for Conv1D of
transformers; a subclass with a forward of its own may do something else with the weight: standardize, scale or round
it, or pad its inputs.

Its output is compared with that of the class that it inherits from. This file works without transformers.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.model.devices import flat_tensors, has_hook, is_out_of_memory, stored

LIBRARIES = ("torch.nn.modules.", "transformers.pytorch_utils")
COMPUTING = ("forward", "_conv_forward")  # the methods in which their layers compute
# Of the norm of an output. Rounding weights and inputs to 8 bits, as quantization-aware training does, changes it by
# 1 % (integers) to 4 % (float8), bfloat16 by 0.3 %. Four bits change it by 10 %, ternary weights by 40 %: what is
# found of the stored weight does not hold for such a one.
TOLERANCE = 0.05


def library_class(cls: type) -> type:
    """The class of a library that a module's class ``cls`` is, or inherits from."""
    return next(each for each in cls.__mro__ if each.__module__.startswith(LIBRARIES))


def has_own_forward(module: nn.Module, cls: type) -> bool:
    """Whether a module of class ``cls`` (without a mask) computes in code that is not the library's. What accelerate
    puts around a forward does not count."""
    base, own = library_class(cls), vars(module).get("forward")
    replaced = own is not None and not has_hook(module) and getattr(own, "__func__", None) is not type(module).forward
    others = [name for name in COMPUTING if getattr(cls, name, None) is not getattr(base, name, None)]
    return base is not nn.Module and (replaced or bool(others))


def why_other(cls: type) -> str:
    """Why a layer of class ``cls`` stays dense, as the plan shows it."""
    base = library_class(cls)
    return f"{OTHER} {'nn.' if base.__module__.startswith('torch') else ''}{base.__name__}"


OTHER = "its forward does something else with the weight than"


def of_library(module: nn.Module, cls: type, x: Tensor) -> Tensor | None:
    """What the library's class makes of an input with the module's present values; None if it does not take it."""
    base = library_class(cls)
    methods = {name: getattr(base, name) for name in COMPUTING if hasattr(base, name)}
    plain = _sharing(module, type(cls.__name__, (cls,), methods))
    vars(plain).pop("forward", None)
    vars(plain)["_parameters"] = _values(module)
    try:
        return plain.forward(x.to(next(plain.parameters()).device))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None


def is_close(output: Any, product: Tensor | None) -> bool:
    """Whether what a module has put out is a product, but for rounding."""
    if product is None or not (made := flat_tensors(output)) or made[0].shape != product.shape:
        return False
    product = product.float()
    error = (made[0].to(product) - product).nan_to_num(0, 0, 0)  # other checks see NaN and inf
    return bool(error.norm() <= TOLERANCE * product.nan_to_num(0, 0, 0).norm())


@torch.no_grad()
def is_other_alone(module: nn.Module, cls: type) -> bool | None:
    """Whether a module of class ``cls``, run alone on an input made up for it, puts out something else than the
    library's class. None: it cannot be run alone.

    A copy of it is run, in evaluation mode. On the meta device it has made-up weights, if it holds nothing else.
    """
    if not has_own_forward(module, cls):
        return False
    random = torch.Generator().manual_seed(0)
    twin, values = _sharing(module, type(module)), _values(module)
    if any(x is not None and x.is_meta for x in (*values.values(), *module.buffers())):
        if values.keys() - {"weight", "bias"} or [*module.buffers(), *module.children()]:
            return None
        values = {name: x if x is None else torch.randn(x.shape, generator=random) for name, x in values.items()}
    if has_hook(module):
        vars(twin).pop("forward", None)
    try:
        # a module may write to what it holds
        own = {name: x if x is None else nn.Parameter(x.detach().clone(), False) for name, x in values.items()}
        vars(twin)["_parameters"] = own
        vars(twin).update(copy.deepcopy({name: vars(module)[name] for name in ("_buffers", "_modules")}))
        weight = next(twin.parameters())
        # positive, so that a mean that is taken off the weight shows
        x = torch.rand(_shape_for(twin), generator=random).to(weight)
        return not is_close(twin.eval().forward(x), of_library(twin, cls, x))
    except Exception as error:  # it wants other arguments, or other inputs
        if is_out_of_memory(error):
            raise
        return None


def _sharing(module: nn.Module, cls: type) -> Any:
    """A module of class ``cls`` with all that this one holds."""
    other = object.__new__(cls)
    vars(other).update(vars(module))
    return other


def _values(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own parameters, as far as they are there."""
    return {name: x if x is None else stored(module, name) for name, x in module._parameters.items()}


def _shape_for(module: Any) -> tuple[int, ...]:
    """The shape of an input; of convolutions a multiple of the stride, which patches need no padding for. Raises
    AttributeError for what is no linear layer and no convolution."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return (2, 3, module.in_features if isinstance(module, nn.Linear) else module.nx)
    sizes = zip(module.stride, module.dilation, module.kernel_size)
    return (2, module.in_channels, *(stride * (dilation * (kernel - 1) + 1) for stride, dilation, kernel in sizes))
