"""The run that the tests of tuning look at."""

from typing import Any

import torch
from torch import Tensor, nn

import modelopt_sparse as mts
from tests.helpers import tiny_llama, token_batches

BATCHES = 9  # of two rows: 17 steps to tune blocks on and one held back, or 14 and 4 for the whole model


def tuned_model(model: nn.Module | None = None, method: str | None = "wanda", **options: Any) -> nn.Module:
    """A model, if none is given a small Llama, made sparse in place."""
    options = {"data_loader": token_batches(BATCHES), "progress": False, **options}
    return mts.sparsify(tiny_llama() if model is None else model, method, **options)


@torch.no_grad()
def outputs(model: nn.Module, batch: Tensor, module: str) -> Tensor:
    """What a module of the model puts out when the whole model runs."""
    found = []
    hook = model.get_submodule(module).register_forward_hook(lambda m, a, output: found.append(output))
    model(batch)
    hook.remove()
    return found[0][0] if isinstance(found[0], tuple) else found[0]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().sum() / b.square().sum())
