"""What sparse weights cost: live weights, FLOPs of inference and training, bytes.

FLOPs are counted as if multiplications with zeros were skipped, which takes hardware that skips them: on CPUs and GPUs
the products of a sparse module stay dense.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.reports.fold import table
from modelopt_sparse.training.planner import Weight, find_weights

INDEX = 4  # bytes of an index in CSR


@dataclass(frozen=True)
class Numbers:
    """weights: how many there are, or are live. inference: FLOPs of a forward; a multiplication and an addition are
    two. training: FLOPs of a training step. bytes: of the masked weights."""

    weights: int
    inference: int
    training: float
    bytes: int


@dataclass(frozen=True)
class Cost:
    """A model as a dense one, and with zeros skipped and masked weights stored as CSR with 32-bit indices."""

    dense: Numbers
    sparse: Numbers

    def __str__(self) -> str:
        titles = {
            "weights": "weights",
            "inference": "FLOPs of a forward",
            "training": "FLOPs of a training step",
            "bytes": "bytes of masked weights (sparse: CSR)",
        }
        rows = []
        for name, title in titles.items():
            dense, sparse = getattr(self.dense, name), getattr(self.sparse, name)
            rows.append((title, f"{dense:,.0f}", f"{sparse:,.0f}", f"{sparse / dense:.1%}" if dense else ""))
        note = "FLOPs count as if zeros were skipped; on CPUs and GPUs the products stay dense."
        return f"{table(('', 'dense', 'sparse', 'share'), rows)}\n\n{note}"


@torch.no_grad()
def cost(model: nn.Module, *args: Any, dense_every: int | None = None, **kwargs: Any) -> Cost:
    """The cost of a sparse model on one batch, ``model(*args, **kwargs)``, which is run once.

    A training step counts as three forwards: the backward pass makes the gradients of inputs and of weights.
    ``dense_every``: of RigL, every how many steps the gradients of weights are dense; that step's share is in the step
    (arXiv 1911.11134, appendix H). FLOPs are counted by torch's FlopCounterMode: matrix products, convolutions and
    attention.

    >>> print(training.cost(model, input_ids=ids, dense_every=100))
    """
    model = unwrapped(model)
    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    masks = dict(named_masks(model))
    sparse_weights = [weight for weight in find_weights(model) if weight.name in masks]
    uses = uses_of(model, sparse_weights, counter)
    skipped, pruned, plain_bytes, csr_bytes = 0.0, 0, 0, 0
    for weight in sparse_weights:
        mask, number = masks[weight.name], weight.parameter.element_size()
        live = int(mask.count_nonzero())
        zeros = mask.numel() - live
        pruned += zeros
        plain_bytes += mask.numel() * number
        rows = 1
        if mask.dim() > 1:
            skipped += 2 * uses[weight.name] * zeros
            rows = mask.flatten(0, -2).shape[0]
        csr_bytes += live * (number + INDEX) + (rows + 1) * INDEX
    weights = sum(parameter.numel() for parameter in model.parameters())
    dense = counter.get_total_flops()
    sparse = round(dense - skipped)
    step = 3.0 * sparse
    if dense_every is not None:
        step = (3 * sparse * (dense_every - 1) + 2 * sparse + dense) / dense_every
    return Cost(
        Numbers(weights, dense, 3.0 * dense, plain_bytes),
        Numbers(weights - pruned, sparse, step, csr_bytes),
    )


def uses_of(model: nn.Module, weights: Iterable[Weight], counter: FlopCounterMode) -> dict[str, float]:
    """How often each weight was multiplied, by name, in forwards that torch has counted."""
    counts, root = counter.get_flop_counts(), type(model).__name__
    uses = {}
    for weight in weights:
        modules = {".".join([root, *name.split(".")[:-1]]) for name in weight.holders}
        flops = sum(sum(counts.get(module, {}).values()) for module in modules)
        # torch counts the products of all weights in a module as one
        in_module = sum(each.numel() for each in weight.layer.owner.parameters(recurse=False) if each.dim() > 1)
        uses[weight.name] = flops / 2 / max(1, in_module)
    return uses
