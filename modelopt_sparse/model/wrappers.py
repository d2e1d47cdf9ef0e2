"""What is handed over as a model: the model inside its wrappers, and what is refused before anything is done to it.

The wrappers of torch.compile, DataParallel and DistributedDataParallel put ``_orig_mod.`` or ``module.`` before every
name, and hide the model's class and configuration. This file works without transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils.other import is_compiled_module  # in accelerate.utils itself only since 1.6
from torch import nn
from torch.nn.parameter import is_lazy


def full_name(path: str, name: str) -> str:
    """The name that a parameter or child of the module at ``path`` has in the model."""
    return f"{path}.{name}" if path else name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrappers. It has the same Parameters, and names without the wrappers' prefixes."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    if is_compiled_module(module):
        return module.get_submodule("_orig_mod")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return None


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """With models in evaluation mode; afterwards each module is in its mode from before."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is compiled: hooks and sparse classes that come and go would have it compiled again each time."""
    # what nn.Module.compile() sets has no public name
    if not any(is_compiled_module(m) or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_wrapped_parts(model: nn.Module, done: str) -> None:
    """Raise ValueError if a part of an unwrapped model has a wrapper of its own: its prefix stands in the middle of
    names. ``done`` is what the model cannot be: "pruned"."""
    for name, module in model.named_modules():
        if _inside(module) is not None:
            wrapper = type(module).__name__
            raise ValueError(f"{name!r} is wrapped by {wrapper}, the model cannot be {done}: unwrap it, wrap it after")


def refuse_no_model(model: object) -> None:
    """Raise TypeError for what is no ``nn.Module``, and ValueError for a module whose code or shapes cannot be used."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give an nn.Module, such as from_pretrained returns")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is a ScriptModule, whose code is fixed: take the module that it was made from")
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ValueError(f"{where} is a {type(module).__name__} without shapes yet: run the model once first")
