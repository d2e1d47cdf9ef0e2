"""The slow oracle of fewer experts: a whole model whose router gives some of them no chance."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class _WithoutChance(TorchFunctionMode):
    """Logits that are made with some weights are -inf at some places."""

    def __init__(self, places: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.linear and args[1].data_ptr() in self.places:
            made = made.index_fill(-1, self.places[args[1].data_ptr()], -torch.inf)
        return made


@contextmanager
def without_experts(model: nn.Module, small: nn.Module, kept: Mapping[str, list[int]]) -> Iterator[None]:
    """While entered, routers of the whole ``model`` never choose experts that are not ``kept`` (layer of a mixture's
    last matrices -> experts). Routers and correction biases are what has another size in the ``small`` model."""
    sizes = {name: value.shape for name, value in small.state_dict(keep_vars=True).items()}
    places: dict[int, torch.Tensor] = {}
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, value in model.state_dict().items():
        if value.shape == sizes[name] or value.dim() > 2:
            continue
        layer = max(kept, key=lambda each: _common(each, name))
        experts = model.get_parameter(layer if layer.endswith("_proj") else f"{layer}.weight").shape[0]
        gone = torch.tensor([expert for expert in range(experts) if expert not in kept[layer]])
        if value.dim() == 2 and value.shape[0] >= experts:
            places[value.data_ptr()] = gone
        elif "bias" in name and not name.endswith(("down_proj_bias", "up_proj_bias")):
            before.append((value, value.clone()))
            value[..., gone] = -torch.inf
    try:
        with _WithoutChance(places), torch.no_grad():
            yield
    finally:
        for value, values in before:
            value.copy_(values)


def _common(name: str, other: str) -> int:
    """How many parts two names begin with in common."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(name.split("."), other.split("."))))
