"""Small models, each with one thing that makes it hard to sparsify, save, restore or export."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Tied(nn.Module):
    """An embedding whose weight is the output head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(x.abs().mul(4).long() % 16)))


class Shared(nn.Module):
    """Two modules hold one weight; ``whole``: one module stands under two names."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        if whole:
            self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Scaled(Shared):
    """Its parts have the names of those that sparse_ift makes of a layer, and it has a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Nested(nn.Module):
    """Layers in lists in dicts in lists, with names that have no letters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleDict({"0": nn.Linear(8, 8), "weight": nn.ModuleList([nn.Linear(8, 4)])})])

    def forward(self, x: Tensor) -> Tensor:
        part: Any = self.parts[0]
        return part["weight"][0](part["0"](x))


class Listed(nn.Module):
    """Parameters in a list and in a dict, that no module of a known type holds."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.named = nn.ParameterDict({"weight": nn.Parameter(torch.randn(8, 8))})
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.many[0] @ self.many[1] @ self.named["weight"])


class Attention(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        other = x[..., : self.attention.kdim]
        return self.last(self.attention(x[None], other[None], other[None], need_weights=False)[0][0])


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Bilinear(8, 8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.both(x, x))


class Unused(nn.Module):
    """A layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class NamedWeight(nn.Module):
    """Modules named weight and weight_mask, whose parameter is weight.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.weight_mask = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight_mask(self.weight(x))


class Buffers(nn.Module):
    """Two buffers in one storage; ``of_weight``: a buffer that is a part of a weight's memory."""

    def __init__(self, of_weight: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        both = torch.randn(16)
        self.register_buffer("low", both[:8])
        self.register_buffer("high", self.layer.weight.detach()[0] if of_weight else both[4:12])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.low) * self.high


class NoOutputs(nn.Module):
    """A layer of no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.last = nn.Linear(8, 0), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.none(x), self.last(x)], -1)


class Outputs(nn.Module):
    """A dict comes out, with what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": self.layer(x), "nested": [x, {"steps": 3}], "nothing": None}


class OwnWeight(nn.Linear):
    """A layer whose forward changes its weight on the way, and counts."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.weight.tanh(), self.bias)


class MaskName(nn.Linear):
    """A layer with an attribute where a mask would stand."""

    weight_mask = None


class Parent(nn.Module):
    """A parent that reads its child's weight and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.child.weight))


class Recurrent(nn.Module):
    """Two matrices in a module of no prunable type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTMCell(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0])


class Extra(nn.Module):
    """A tensor as extra state, a scalar parameter, and one without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))
        self.none, self.shift = nn.Parameter(torch.empty(0, 8)), torch.randn(8)

    def get_extra_state(self) -> Tensor:
        return self.shift

    def set_extra_state(self, state: Tensor) -> None:
        self.shift = state

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.shift


def _convs(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    return nn.Sequential(nn.Unflatten(1, (8, 1)), *layers, nn.Flatten())


def _transposed() -> nn.Module:
    """A weight that lies in memory by columns."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def _replaced() -> nn.Module:
    """A layer with a forward in the instance, where no mask reaches."""
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return nn.Sequential(layer, nn.Linear(8, 8))


def _in_one_memory(*, overlap: bool) -> nn.Module:
    """Two weights in one storage: one behind the other, or the same values."""
    model, both = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)
    model[0].weight, model[1].weight = nn.Parameter(both[:8]), nn.Parameter(both[:8] if overlap else both[8:])
    return model


def _expanded() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.randn(1, 8).expand(8, 8))
    return layer


# model -> what builds it, from nothing but the generator of torch
ROUND_TRIPS: dict[str, Callable[[], Any]] = {
    "one layer": lambda: nn.Linear(8, 8),
    "tied embedding": Tied,
    "shared weight": Shared,
    "one module under two names": lambda: Shared(whole=True),
    "parts and a parameter": lambda: nn.Sequential(Scaled()),
    "module called twice": lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2),
    "nested containers": Nested,
    "lists of parameters": Listed,
    "grouped conv": lambda: _convs(nn.Conv1d(8, 16, 1, groups=2), nn.Conv1d(16, 8, 1, bias=False)),
    "depthwise conv": lambda: _convs(nn.Conv1d(8, 8, 1, groups=8), nn.Conv1d(8, 8, 1)),
    "transposed conv": lambda: _convs(nn.ConvTranspose1d(8, 8, 3, groups=2), nn.Conv1d(8, 8, 3)),
    "attention": Attention,
    "attention of other sizes": lambda: Attention(kdim=4, vdim=4),
    "bilinear": Bilinear,
    "unused layer": Unused,
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "buffers in one storage": Buffers,
    "weights in one storage": lambda: _in_one_memory(overlap=False),
    "a layer without outputs": NoOutputs,
    "modules named weight": NamedWeight,
    "a dict comes out": Outputs,
    "forward changes the weight": lambda: nn.Sequential(OwnWeight(8, 8), nn.Linear(8, 8)),
    "parent reads the weight": Parent,
    "recurrent cell": Recurrent,
    "extra state": Extra,
    "by columns": _transposed,
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16(),
}
# model -> (what builds it, words of the one error that refuses it)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no layers": (lambda: nn.Sequential(nn.ReLU()), "no weight matrices"),
    "nothing fits": (lambda: nn.Linear(6, 8), "6 input channels are not a multiple of 4"),
    "no inputs": (lambda: nn.Linear(0, 8), "no weights"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), "run the model once first"),
    "scripted child": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8)),
        "module '0' is a Script",
    ),
    "wholly scripted": (lambda: torch.jit.script(nn.Linear(8, 8)), "take the module that it was made from"),
    "wholly parametrized": (lambda: weight_norm(nn.Linear(8, 8)), "remove_parametrizations first"),
    "attribute of the mask's name": (lambda: MaskName(8, 8), "attribute 'weight_mask', where the mask belongs"),
    "forward in the instance": (_replaced, "was replaced on the instance"),
    "buffer in a weight": (lambda: Buffers(of_weight=True), "share memory"),
    "two Parameters of one memory": (
        lambda: _in_one_memory(overlap=True),
        "layer '0' and the parameter '1.weight' share memory: make them one Parameter",
    ),
    "expanded": (_expanded, "its weights share memory: clone it"),
    "on meta": (lambda: nn.Linear(8, 8, device="meta"), "on the meta device"),
}
