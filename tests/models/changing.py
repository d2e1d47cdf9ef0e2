"""Blocks whose layers share inputs, or see data at all, only in some batches."""

import torch
from torch import Tensor, nn


class SharingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        apart = bool(x.flatten()[0] < 0)
        return torch.tanh(self.a(x) + self.b(x + 1 if apart else x)) * (-1 if apart else 1)


class Sharing(nn.Module):
    """Two layers that get one input, or in batches that begin with a negative number each its own."""

    kind: type[nn.Module] = SharingBlock

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([self.kind(), self.kind()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ChoosingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.choices[int(x.flatten()[0])]
        return torch.cat([x[..., :1], chosen(x).tanh()[..., 1:]], dim=-1)


class Choosing(Sharing):
    """Two blocks of three layers, of which every batch goes through the one that its first number names."""

    kind = ChoosingBlock
