"""Small models, each with one thing that makes it hard to sparsify, save, restore or export."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Parts(nn.Module):
    """Parts by their names, and what ``of(module, x)`` makes of an input."""

    def __init__(self, of: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.of = of
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.of(self, x)


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


class Conjugated(nn.Module):
    """A complex buffer, its conjugate in the same memory, and another conjugate: torch conjugates when it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, turn = nn.Linear(8, 8), torch.randn(8, dtype=torch.complex64)
        self.register_buffer("turn", turn)
        self.register_buffer("back", turn.conj())
        self.register_buffer("other", torch.randn(8, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.layer(x) * self.turn + self.back * 2 + self.other)


class OwnWeight(nn.Linear):
    """A layer whose forward changes its weight on the way, and counts."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.weight.tanh(), self.bias)


class MaskName(nn.Linear):
    """A layer with an attribute where a mask would stand."""

    weight_mask = None


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


def _tied() -> nn.Module:
    """An embedding whose weight is the output head's."""
    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight

    def of(m: Any, x: Tensor) -> Tensor:
        return m.head(m.hidden(m.embed(x.abs().mul(4).long() % 16)))

    return Parts(of, embed=embed, hidden=nn.Linear(8, 8), head=head)


def _listed() -> nn.Module:
    """Parameters in a list and in a dict, that no module of a known type holds."""
    many = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
    named = nn.ParameterDict({"weight": nn.Parameter(torch.randn(8, 8))})

    def of(m: Any, x: Tensor) -> Tensor:
        return m.last(x @ m.many[0] @ m.many[1] @ m.named["weight"])

    return Parts(of, many=many, named=named, last=nn.Linear(8, 8))


def _attention(**sizes: int) -> nn.Module:
    def of(m: Any, x: Tensor) -> Tensor:
        other = x[None, ..., : m.attention.kdim]
        return m.last(m.attention(x[None], other, other, need_weights=False)[0][0])

    return Parts(of, attention=nn.MultiheadAttention(8, 2, batch_first=True, **sizes), last=nn.Linear(8, 8))


def _two(of: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """What builds a module of two layers, weight and weight_mask, whose parameters are weight.weight and such."""
    return lambda: Parts(of, weight=nn.Linear(8, 8), weight_mask=nn.Linear(8, 8))


def _with_last(of: Callable[[Any, Tensor], Any], first: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Parts(of, first=first(), last=nn.Linear(8, 8))


def _convs(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    return nn.Sequential(nn.Unflatten(1, (8, 1)), *layers, nn.Flatten())


def _of(weight: Tensor) -> nn.Module:
    """A layer whose weight lies in memory as this one does."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(weight)
    return layer


def _replaced() -> nn.Module:
    """A layer with a forward in the instance, where no mask reaches."""
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return nn.Sequential(layer, nn.Linear(8, 8))


def _in_one_memory(second: int) -> nn.Module:
    """Two weights in one storage; ``second``: the row of it that the second one begins with."""
    both = torch.randn(16, 8)
    return nn.Sequential(_of(both[:8]), _of(both[second : second + 8]))


def _columns_of_one() -> nn.Module:
    """Two weights that are columns of one matrix, each with the other between its rows."""
    both = torch.randn(8, 16)
    return nn.Sequential(_of(both[:, :8]), _of(both[:, 8:]))


# model -> what builds it, from nothing but the generator of torch
ROUND_TRIPS: dict[str, Callable[[], Any]] = {
    "one layer": lambda: nn.Linear(8, 8),
    "tied embedding": _tied,
    "shared weight": Shared,
    "one module under two names": lambda: Shared(whole=True),
    "parts and a parameter": lambda: nn.Sequential(Scaled()),
    "module called twice": lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2),
    "nested containers": lambda: Parts(
        lambda m, x: m.parts[0]["weight"][0](m.parts[0]["0"](x)),
        parts=nn.ModuleList([nn.ModuleDict({"0": nn.Linear(8, 8), "weight": nn.ModuleList([nn.Linear(8, 4)])})]),
    ),
    "lists of parameters": _listed,
    "grouped conv": lambda: _convs(nn.Conv1d(8, 16, 1, groups=2), nn.Conv1d(16, 8, 1, bias=False)),
    "depthwise conv": lambda: _convs(nn.Conv1d(8, 8, 1, groups=8), nn.Conv1d(8, 8, 1)),
    "transposed conv": lambda: _convs(nn.ConvTranspose1d(8, 8, 3, groups=2), nn.Conv1d(8, 8, 3)),
    "attention": _attention,
    "attention of other sizes": lambda: _attention(kdim=4, vdim=4),
    "bilinear": _with_last(lambda m, x: m.last(m.first(x, x)), lambda: nn.Bilinear(8, 8, 8)),
    "unused layer": _two(lambda m, x: m.weight_mask(x)),
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "buffers in one storage": Buffers,
    "complex conjugates": Conjugated,
    "weights in one storage": lambda: _in_one_memory(8),
    "weights in the columns of one": _columns_of_one,
    "a layer without outputs": _with_last(lambda m, x: torch.cat([m.first(x), m.last(x)], -1), lambda: nn.Linear(8, 0)),
    "modules named weight": _two(lambda m, x: m.weight_mask(m.weight(x))),
    "a dict comes out, with what is no tensor": _two(
        lambda m, x: {"out": m.weight(x), "nested": [m.weight_mask(x), {"steps": 3}], "nothing": None}
    ),
    "forward changes the weight": lambda: nn.Sequential(OwnWeight(8, 8), nn.Linear(8, 8)),
    "parent reads the weight": _two(lambda m, x: m.weight_mask(F.linear(x, m.weight.weight))),
    "recurrent cell": _with_last(lambda m, x: m.last(m.first(x)[0]), lambda: nn.LSTMCell(8, 8)),
    "extra state": Extra,
    "by columns": lambda: _of(torch.randn(8, 8).t()),
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
        lambda: _in_one_memory(0),
        "layer '0' and the parameter '1.weight' share memory: make them one Parameter",
    ),
    "two Parameters that overlap": (lambda: _in_one_memory(5), "layer '0' and the parameter '1.weight' share memory"),
    "expanded": (lambda: _of(torch.randn(1, 8).expand(8, 8)), "its weights share memory: clone it"),
    "on meta": (lambda: nn.Linear(8, 8, device="meta"), "on the meta device"),
}
