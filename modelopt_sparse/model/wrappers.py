"""Wrappers around a model: that of torch.compile, DataParallel and DistributedDataParallel.

They put ``_orig_mod.`` or ``module.`` before every name, and hide the model's class and configuration.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils.other import is_compiled_module  # in accelerate.utils itself only since 1.6
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers. It has the same Parameters, and names without the wrappers' prefixes."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def refuse_wrapped_parts(model: nn.Module, done: str) -> None:
    """Raise ValueError if a part of an unwrapped model has a wrapper of its own, whose prefix would stand in the middle
    of names. ``done`` says in the message what cannot be done to the model: "pruned"."""
    for name, module in model.named_modules():
        if _inside(module) is not None:
            how = "_orig_mod" if is_compiled_module(module) else "module"
            raise ValueError(
                f"{name!r} of this {type(model).__name__} is wrapped by {type(module).__name__}, which changes the "
                f"names of its weights, so that the model cannot be {done}: put {name}.{how} in its place and wrap it "
                "again afterwards, or compile it in place with its method compile()"
            )


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """If the model is compiled, or a part of it, in place or not, nothing is while this context lasts.

    Hooks and sparse classes that come and go would have it compiled again each time.
    """
    # what nn.Module.compile() sets has no public name
    compiled = any(is_compiled_module(m) or getattr(m, "_compiled_call_impl", None) for m in model.modules())
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None if it is none."""
    if is_compiled_module(module):
        return module.get_submodule("_orig_mod")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return None
