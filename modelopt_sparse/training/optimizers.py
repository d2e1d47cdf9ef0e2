"""Optimizers that train a sparse model: which of them can, and when they have made a step."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from modelopt_sparse.training.parameters import SparseParameter


class Steps:
    """One optimizer, the sparse parameters that it holds, and how many steps it has made."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: list[SparseParameter], count: int) -> None:
        self.optimizer, self.held, self.count = optimizer, held, count

    def was_skipped(self) -> bool:
        """Whether a GradScaler told a fused optimizer, inside of its step, that gradients overflowed."""
        overflow = getattr(self.optimizer, "found_inf", None)
        return isinstance(overflow, Tensor) and bool(overflow.item())


def checked(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of accelerate's wrapper. Raises ValueError for one that cannot train sparse models."""
    while isinstance(optimizer, AcceleratedOptimizer):
        if any(base.__name__.startswith("DeepSpeed") for base in type(optimizer).__mro__):
            break
        optimizer = optimizer.optimizer
    if any("deepspeed" in f"{base.__module__}.{base.__name__}".lower() for base in type(optimizer).__mro__):
        raise ValueError(
            "DeepSpeed keeps weights and gradients in buffers of its own, where masks do not reach them: train with "
            "DistributedDataParallel or fully_shard (FSDP2)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, so it has no hooks to hold masks with: give the "
            "optimizer that it wraps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls its closure several times in a step and mixes all parameters, pruned ones too: use SGD, Adam, "
            "AdamW, Adafactor or Muon"
        )
    return optimizer


def held_by(optimizer: torch.optim.Optimizer, sparse_params: Iterable[SparseParameter]) -> list[SparseParameter]:
    """Those of the sparse parameters that an optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [sparse for sparse in sparse_params if id(sparse.parameter) in held]
