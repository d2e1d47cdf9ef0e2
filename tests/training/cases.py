"""A model with every kind of parameter that can be trained sparse, and algorithms to train it with."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.pytorch_utils import Conv1D as HFConv1D

from modelopt_sparse import training
from modelopt_sparse.model.masking import named_masks


def mixture(width: int, std: float, implementation: str = "eager") -> nn.Module:
    """Three fused experts, of which two take each token."""
    sizes = {"hidden_size": width, "intermediate_size": width, "num_local_experts": 3, "num_experts_per_tok": 2}
    experts = MixtralSparseMoeBlock(MixtralConfig(**sizes, experts_implementation=implementation))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=std)
    return experts


class Zoo(nn.Module):
    """Linear, Conv1D of transformers, a grouped convolution, attention, fused experts, an embedding tied to a head, a
    ParameterList, and a Linear whose weight is read without calling it. Eight channels; tokens [B, S] -> [B, S, 16]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.conv1d = HFConv1D(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.experts = mixture(8, std=0.3)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3)])
        self.read = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.conv1d(self.linear(x).relu())
        x = x + self.conv(x.mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.experts(x)
        x = x @ self.listed[0] + F.linear(x, self.read.weight).tanh()
        return self.head(self.norm(x))


LAYERS = ("linear.weight", "conv1d.weight", "conv.weight", "attention.in_proj_weight", "attention.out_proj.weight")
LAYERS += ("experts.experts.gate_up_proj", "experts.experts.down_proj", "read.weight")
OTHERS = ("embed.weight", "linear.bias", "listed.0", "norm.weight")


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: mask.clone() for name, mask in named_masks(model)}


def batch(step: int, size: int = 4) -> Tensor:
    return torch.randint(16, (size, 6), generator=torch.Generator().manual_seed(step))


def applied(
    sparsity: Any, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> torch.optim.Optimizer:
    """Make the model sparse -> an optimizer of all of its parameters, which the algorithm knows."""
    sparsity.apply(model)
    return sparsity.apply(optimizer(model.parameters(), **{"lr": 0.1, **options}))


def take_step(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """One step of each optimizer by the gradients of this loss alone."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def live_flops(model: nn.Module, names: Iterable[str], *args: Any, **kwargs: Any) -> float:
    """FLOPs of the layers that hold these weights, by torch's counter, times the live share of each weight."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **kwargs)
    counts, masks = counter.get_flop_counts(), dict(named_masks(model))
    paths = {name: f"{type(model).__name__}.{name.removesuffix('.weight')}" for name in names}
    live = {name: float(masks.get(name, torch.ones(1)).float().mean()) for name in paths}
    return sum(sum(counts[path].values()) * live[name] for name, path in paths.items())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """To tell the next token: token + 3."""
    return F.cross_entropy(model(tokens).flatten(0, 1), ((tokens + 3) % 16).flatten())


@dataclass(frozen=True)
class Recipe:
    """name: of the algorithm and its pattern. build: a new algorithm for the parameters ``include``. level: how many of
    a matrix [..., R, C], or of its ``scope``, are zero at the end."""

    name: str
    build: Callable[..., training.SparsityAlgorithm]
    level: float = 0.75
    pattern: str | None = None
    scope: str = "matrix"


SCOPES: dict[str, dict[str, Any]] = {
    "matrix": {},
    "row": {"scope": "row"},
    "out groups": {"balance_out_groups": 2},
    "in groups": {"balance_in_groups": 2},
}


def recipes() -> Iterator[Recipe]:
    """All algorithms, by matrix, by row, in groups and N:M."""
    for algorithm in (training.Static, training.GMP, training.SET, training.RigL):
        kind, rises = algorithm.__name__.lower(), algorithm is training.GMP
        build: Any = algorithm if algorithm is training.Static else partial(algorithm, update=3)
        level: Any = training.Cubic(0.0, 0.75, 0, 15) if rises else 0.75
        for scope, options in SCOPES.items():
            yield Recipe(f"{kind}, {scope}", partial(build, level, **options), scope=scope)
        level = training.Cubic(0.0, 0.5, 0, 15) if rises else None
        yield Recipe(f"{kind}, 2:4", partial(build, level, pattern="2:4"), 0.5, "2:4")


RECIPES = list(recipes())
