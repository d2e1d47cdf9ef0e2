"""A backward pass through the whole model that holds one block at a time: blocks keep nothing but their inputs for it,
and run once more in it (Chen et al. 2016, arXiv 1604.06174)."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.devices import input_device
from modelopt_sparse.model.offload import has_hook


@contextmanager
def blocks_recomputed(run: Run) -> Iterator[None]:
    """While entered, every block that runs with gradients is recomputed in the backward pass, where it has its weights,
    read from disk or moved to the run's device, until the next one has.

    Blocks have a forward of their own meanwhile, which calls the one that they had, accelerate's hooks with it.
    """
    blocks = [block for block in run.plan.blocks if block is not run.model]
    before = [block.__dict__.get("forward") for block in blocks]
    weights = _Onloaded(run)
    try:
        for block in blocks:
            block.forward = _recomputed(block, block.forward, weights)
        yield
    finally:
        for block, forward in zip(blocks, before):
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
        weights.come_back()


def _recomputed(block: nn.Module, forward: Callable[..., Any], weights: "_Onloaded") -> Callable[..., Any]:
    def with_weights(*args: Any, **kwargs: Any) -> Any:
        weights.leave_for(block)
        return forward(*args, **kwargs)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(with_weights, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped


class _Onloaded:
    """The one block whose weights are where it runs. A backward pass through a block uses the weights that it ran with,
    so that they have to stay until the block before it runs again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._block: nn.Module | None = None
        self._home = torch.device("cpu")

    def leave_for(self, block: nn.Module) -> None:
        self.come_back()
        self._run.storage.load(block)
        device = self._run.config.device
        if device is not None and not has_hook(block) and (home := input_device(block)) != device:
            self._block, self._home = block.to(device), home

    def come_back(self) -> None:
        if self._block is not None:
            self._block.to(self._home)
        self._block = None
