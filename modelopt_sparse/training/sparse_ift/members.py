"""Members of Sparse-IFT that replace one layer by several (arXiv 2303.11525): Parallel, Factorized, Doped.

Din and Dout are a layer's inputs and outputs; of a convolution Din counts kernel positions too.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.training.sparse_ift.wide import rebuilt

KINDS: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Activation = Callable[[], nn.Module] | None


class Parallel(nn.Module):
    """k layers of the same shape beside each other, each with its own non-linearity, added up.

    With one branch, or without an activation, nothing is applied to a branch.
    """

    def __init__(self, layer: nn.Module, count: int, activation: Activation) -> None:
        super().__init__()
        self.branches = nn.ModuleList(rebuilt(layer) for _ in range(count))
        self.activation = nn.Identity() if activation is None or count == 1 else activation()

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.branches
        total = self.activation(first(x))
        for branch in others:
            total = total + self.activation(branch(x))
        return total


class Factorized(nn.Module):
    """Two layers with a width of ``rank`` between them, and a non-linearity there."""

    def __init__(self, layer: nn.Module, rank: int, activation: Activation) -> None:
        super().__init__()
        self.first, self.second = factors_of(layer, rank, bias=True)
        self.activation = nn.Identity() if activation is None else activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Doped(nn.Module):
    """A sparse layer, plus two dense ones with a width of ``rank`` between them. Only ``sparse`` is to carry a mask."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.sparse = rebuilt(layer)
        self.first, self.second = factors_of(layer, rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.sparse(x) + self.second(self.first(x))


def factors_of(layer: nn.Module, rank: int, *, bias: bool) -> tuple[Any, Any]:
    """Two layers with ``rank`` channels between them; of a convolution the first has its kernel, the second one place.
    ``bias``: the second has the bias that the layer has."""
    bias = bias and layer.bias is not None
    if not isinstance(layer, Convolution):
        return rebuilt(layer, out_features=rank, bias=False), rebuilt(layer, in_features=rank, bias=bias)
    one = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    return rebuilt(layer, out_channels=rank, bias=False), rebuilt(layer, in_channels=rank, bias=bias, **one)


def why_not(layer: nn.Module) -> str:
    """Why a layer cannot be replaced by a member, or "" if it can."""
    if type(layer) not in KINDS:
        return f"{type(layer).__name__} is no Linear or convolution of torch's own"
    return "a grouped convolution" if isinstance(layer, Convolution) and layer.groups > 1 else ""


# sizes ----------------------------------------------------------------------------------------------------------------


def member_of(
    layer: nn.Module, member: str, level: float, activation: Activation
) -> tuple[nn.Module, str, list[str], float]:
    """(what replaces a layer, the same in words, its parts that carry masks, their level). At level 0 a layer may stay
    as it is."""
    inputs, outputs = sides(layer)
    dense = inputs * outputs
    if member == "parallel":
        count = branches_for(level)
        parts = [f"branches.{i}" for i in range(count)]
        return Parallel(layer, count, activation), f"{count} in parallel", parts, 1 - 1 / count
    rank = rank_of_factors(layer, level) if member == "factorized" else rank_of_doping(layer, level)
    if level == 0 or rank == 0:
        return layer, "itself", [], 0.0
    if member == "factorized":
        new_level = 1 - dense / (rank * (inputs + outputs))
        return Factorized(layer, rank, activation), f"factors of rank {rank}", ["first", "second"], new_level
    return Doped(layer, rank), f"itself and rank {rank}", ["sparse"], rank * (inputs + outputs) / dense


def sides(layer: nn.Module) -> tuple[int, int]:
    """(Din, Dout) of a layer."""
    weight = layer.get_parameter("weight")
    return weight.numel() // weight.shape[0], weight.shape[0]


def branches_for(level: float) -> int:
    """k = 1 / (1 - level). Raises ValueError, which names the nearest levels that work, unless k is whole."""
    count = 1 / (1 - level)
    if abs(count - round(count)) > 1e-6 * count:
        lower, upper = 1 - 1 / math.floor(count), 1 - 1 / math.ceil(count)
        raise ValueError(
            f"Sparse Parallel at level {level:g} would have {count:.2f} branches: the nearest levels that work are "
            f"{lower:.6g} and {upper:.6g}"
        )
    return round(count)


def rank_of_factors(layer: nn.Module, level: float) -> int:
    """d = Din Dout / ((Din + Dout) (1 - level)), rounded up."""
    inputs, outputs = sides(layer)
    return math.ceil(round(inputs * outputs / ((inputs + outputs) * (1 - level)), 6))


def rank_of_doping(layer: nn.Module, level: float) -> int:
    """d = level Din Dout / (Din + Dout), rounded down."""
    inputs, outputs = sides(layer)
    return math.floor(round(level * inputs * outputs / (inputs + outputs), 6))


# one layer again ------------------------------------------------------------------------------------------------------


def fold(model: nn.Module) -> list[str]:
    """Replace members by one layer each where that computes the same, in place -> names of those that cannot be: a
    non-linearity stands inside. Call `mts.export` first: sparse modules are left as they are, and folded weights are
    dense. Names of the layers end as they were before `sparse_ift`."""
    left = []
    for name, module in list(model.named_modules()):
        if isinstance(module, (Parallel, Factorized, Doped)):
            layer = merge_members(module)
            if layer is None:
                left.append(name)
            else:
                model.set_submodule(name, layer)
    return left


@torch.no_grad()
def merge_members(module: Parallel | Factorized | Doped) -> nn.Module | None:
    """One layer that computes what a member does; None if a non-linearity stands between. Weights may become dense."""
    if isinstance(module, Doped):
        layer = _copy(module.sparse)
        layer.weight += _product(module.first, module.second)
        return layer
    if not isinstance(module.activation, nn.Identity):
        return None
    if isinstance(module, Factorized):
        outputs = "out_channels" if isinstance(module.first, Convolution) else "out_features"
        sizes: dict[str, Any] = {outputs: getattr(module.second, outputs)}
        layer = rebuilt(module.first, **sizes, bias=module.second.bias is not None)
        layer.weight.copy_(_product(module.first, module.second))
        if layer.bias is not None:
            layer.bias.copy_(module.second.bias)
        return layer
    layer = _copy(module.branches[0])
    for branch in module.branches[1:]:
        layer.weight += branch.get_parameter("weight")
        if layer.bias is not None:
            layer.bias += branch.get_parameter("bias")
    return layer


def _copy(layer: nn.Module) -> Any:
    copy = rebuilt(layer)
    copy.weight.copy_(layer.get_parameter("weight"))
    if copy.bias is not None:
        copy.bias.copy_(layer.get_parameter("bias"))
    return copy


def _product(first: Any, second: Any) -> Tensor:
    """The weight of ``second`` after ``first``."""
    left = second.weight.flatten(1)
    return (left @ first.weight.flatten(1)).view(left.shape[0], *first.weight.shape[1:])
