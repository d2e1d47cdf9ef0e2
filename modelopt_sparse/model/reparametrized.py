"""Weights that torch computes from other parameters in each forward: what they are called, and how to end that."""

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

# class of a parametrization -> what people call it
KNOWN = {"_WeightNorm": "weight norm", "_SpectralNorm": "spectral norm", "_Orthogonal": "an orthogonal parametrization"}


def reparametrization(module: nn.Module, param: str) -> str | None:
    """Why a parameter is no weight of its own, and what to call first; None for any other parameter."""
    if isinstance(module, ParametrizationList):
        classes = [type(parametrization).__name__ for parametrization in module]
        names = " and ".join(KNOWN.get(name, f"the parametrization {name}") for name in classes)
        return f"its weight is computed by {names}: call torch.nn.utils.parametrize.remove_parametrizations first"
    buffers = dict(module.named_buffers(recurse=False))
    whole, _, part = param.rpartition("_")
    if part == "orig" and f"{whole}_mask" in buffers:
        return f"pruned by torch.nn.utils.prune: call torch.nn.utils.prune.remove(module, {whole!r}) first"
    if part == "orig" and f"{whole}_u" in buffers:
        return "its weight is computed by spectral norm: call torch.nn.utils.remove_spectral_norm first"
    if part in ("g", "v") and {f"{whole}_g", f"{whole}_v"} <= dict(module.named_parameters(recurse=False)).keys():
        return "its weight is computed by weight norm: call torch.nn.utils.remove_weight_norm first"
    return None
