"""What is refused before anything is done to it: models that are none, or that cannot be looked into."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def refuse_no_model(model: object) -> None:
    """Raise TypeError for what is no ``nn.Module`` at all, and ValueError for modules that cannot be worked on:
    ScriptModules, whose code is fixed, and lazy ones, whose weights have no shape yet."""
    if isinstance(model, str):
        raise TypeError(
            f"the model is a string, {model!r}: give the model itself, such as "
            f"AutoModelForCausalLM.from_pretrained({model!r}); sparsify_checkpoint takes names and folders"
        )
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"the model is {kind}: give an instance of torch.nn.Module")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a ScriptModule, whose weights and code are fixed: sparsify the module that it was made "
                "from, and script or trace it afterwards"
            )
        lazy = [key for key, parameter in module.named_parameters(recurse=False) if is_lazy(parameter)]
        if lazy:
            raise ValueError(
                f"{where} is a {type(module).__name__} whose {lazy[0]!r} has no shape yet: run the model once on an "
                "input, then sparsify it"
            )
