"""The modes that a model is in while it is calibrated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no caches; everything as it was afterwards, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    caches = [(c, c.use_cache) for c in configs.values() if isinstance(getattr(c, "use_cache", None), bool)]
    try:
        model.eval()
        for module_config, _ in caches:
            module_config.use_cache = False
        with torch.no_grad():
            yield
    finally:
        for module_config, use_cache in caches:
            module_config.use_cache = use_cache
        for module, training in modes:
            module.training = training
