"""A plain module with buffers, a tie, and a module under two names."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A plain module with what a state dict can hold: buffers of several dtypes, a tie, a shared module."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.again = self.second  # one module under two names
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.second.weight
        self.head = nn.Linear(width, 5)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.head(self.tied(self.again(self.second(x)).relu()))


def net() -> Net:
    torch.manual_seed(3)
    model = Net()
    model(torch.randn(32, 8))  # BatchNorm's running statistics and its int64 counter move
    return model.eval()
