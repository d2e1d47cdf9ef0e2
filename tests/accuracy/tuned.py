"""The run that the tests of tuning look at."""

from typing import Any

import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches
from tests.oracles.brute_force import call_model

BATCHES = 9  # of two rows: 17 steps to tune blocks on and one held back, or 14 and 4 for the whole model


def tuned_model(model: nn.Module | None = None, method: str | None = "wanda", **options: Any) -> nn.Module:
    """A model, if none is given a small Llama, made sparse in place."""
    options = {"data_loader": token_batches(BATCHES), "progress": False, **options}
    return mts.sparsify(tiny_llama() if model is None else model, method, **options)


@torch.no_grad()
def seen_by(model: nn.Module, name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """What a module is called with, and what it puts out, when the whole model runs."""
    seen = []

    def see(_: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        seen[:] = [args[0], output if isinstance(output, Tensor) else output[0]]

    with model.get_submodule(name).register_forward_hook(see):
        call_model(model, batch)
    return seen[0].double(), seen[1].double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().sum() / b.square().sum())


class Adam:
    """Its moments, and where they lead, written out."""

    def __init__(self, values: Tensor) -> None:
        self.moments, self.steps = [torch.zeros_like(values), torch.zeros_like(values)], 0

    def direction(self, gradient: Tensor) -> Tensor:
        first, second = self.moments
        self.moments, self.steps = [0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2], self.steps + 1
        first, second = (x / (1 - rate**self.steps) for x, rate in zip(self.moments, (0.9, 0.95)))
        return first / (second.sqrt() + 1e-12)
