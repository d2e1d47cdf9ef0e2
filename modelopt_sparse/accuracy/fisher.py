"""The Fisher metric: which directions of a block's output the model's predictions depend on.

With labels y drawn from the model's own predictions and g the gradient of -log p(y) by a block's output, the mean of
g g^T is the block of the Fisher information that belongs to that output: a small change d of the output moves the
predictions by d^T E[g g^T] d / 2 nats (Amari 1998; used for pruning by Theis et al. 2018, arXiv 1801.05787).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelopt_sparse.accuracy.tuning import only_these_require_grad
from modelopt_sparse.calibration.data import samples
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.own_text import drawn
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.devices import flat_tensors, has_hook, input_device

# a backward pass that holds one block at a time -----------------------------------------------------------------------
# Blocks keep nothing but their inputs for it, and run once more in it (Chen et al. 2016, arXiv 1604.06174).


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


# the metric -----------------------------------------------------------------------------------------------------------


SAMPLES = 32  # rows of calibration data in all processes, at least one call of each
PLAIN = 0.1  # share of the plain squared error in the metric: no direction counts for nothing


def with_metrics(data: CalibrationData) -> CalibrationData:
    """Data that knows the metric of each block's output, if `reconstruct` asks for one: by one forward and one backward
    of the dense model over the first rows of the user's data.

    Raises ValueError for a model that gives no logits; with metric="auto" the report says why errors are plain.
    """
    run = data.run
    options = run.config.reconstruct
    if options is None or options.metric == "plain":
        return data
    if data.calls is None:
        why = "a forward_loop calls the model in its own way"
    elif informations := _informations(data):
        return replace(data, metrics={block: metric(fisher) for block, fisher in informations.items()})
    else:
        why = f"the output of a {type(run.model).__name__} has no logits"
    if options.metric == "fisher":
        raise ValueError(f"reconstruct's metric='fisher': {why}: leave it out")
    run.report.notes.append(f"reconstruct's metric is the plain squared error: {why}")
    return data


def _informations(data: CalibrationData) -> dict[nn.Module, Tensor]:
    """The Fisher information of each block's output, up to one factor; {} of a model that gives no logits."""
    run = data.run
    sums: dict[nn.Module, Tensor] = {}
    numbers = _first_of_the_users(data)
    call_masks: list[TokenMasks] = []

    def after_block(block: nn.Module, args: tuple, output: Any) -> None:
        state = flat_tensors(output)[0]
        if state.dim() not in (2, 3) or not torch.is_grad_enabled():
            return
        if not state.requires_grad:  # nothing before it asks for gradients
            state.requires_grad_(True)

        def add(gradient: Tensor) -> None:
            rows = gradient.detach().flatten(0, -2).float()
            product = rows.T @ rows
            sums[block] = sums[block] + product if block in sums else product

        state.register_hook(add)

    def after_model(model: nn.Module, args: tuple, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.requires_grad:
            number = numbers[len(call_masks) - 1] * run.processes.size + run.processes.rank - data.own
            # each call has random numbers of its own, so that any number of processes draws the same labels
            labels = torch.Generator().manual_seed((run.config.seed * 1_000_003 + number) % 2**63)
            rows, token_mask = logits.flatten(0, -2), call_masks[-1].decoder
            places = torch.rand(len(rows), generator=labels, dtype=torch.float64).to(rows.device)
            # -log p(y) of all real tokens, summed up, with y drawn from the predictions
            each = nn.functional.cross_entropy(rows.float(), drawn(rows.detach(), places), reduction="none")
            if token_mask is not None and token_mask.numel() == len(each):
                each = each[token_mask.flatten().to(each.device, torch.bool)]
            each.sum().backward()

    with ExitStack() as hooks:
        hooks.enter_context(only_these_require_grad(run.model, {}))
        hooks.enter_context(blocks_recomputed(run))
        for block in run.plan.blocks:
            hooks.enter_context(block.register_forward_hook(after_block))
        hooks.enter_context(run.model.register_forward_hook(after_model))
        hooks.enter_context(torch.enable_grad())
        data.run_model(call_masks.append, numbers=numbers)
    blocks = [block for block in run.plan.blocks if block in sums]
    run.processes.all_reduce("the Fisher information of blocks", [sums[block] for block in blocks])
    return {block: sums[block] for block in blocks}


def metric(fisher: Tensor) -> Tensor:
    """R [D, D], symmetric, of a Fisher information up to a factor: ``|(y - goal) R|^2`` is the error of an output. A
    mean direction counts as in the plain squared error."""
    size, trace = fisher.shape[0], float(fisher.double().trace())
    identity = torch.eye(size, dtype=torch.float64, device=fisher.device)
    share = fisher.double() * (size / trace) if trace > 0 else identity
    values, vectors = torch.linalg.eigh((1 - PLAIN) * share + PLAIN * identity)
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def _first_of_the_users(data: CalibrationData) -> list[int]:
    """The numbers of this process's first calls that are not text of the model's own, about SAMPLES rows in all
    processes."""
    assert data.calls is not None
    processes, rows, numbers = data.run.processes, 0, []
    for number in range(-(-max(0, data.own - processes.rank) // processes.size), len(data.calls)):
        if rows * processes.size >= SAMPLES:
            break
        numbers.append(number)
        rows += samples(data.calls[number].args, data.calls[number].kwargs)
    return numbers
