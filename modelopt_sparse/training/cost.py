"""What sparse weights cost and save: live weights, FLOPs of inference and training, bytes.

FLOPs are counted as if multiplications with zeros were skipped, which takes hardware that skips them: on CPUs and GPUs
the products of a sparse module stay dense.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.reports.text import table


@dataclass(frozen=True)
class Cost:
    """Numbers of one model and one batch.

    weights, live: how many weights there are, and how many are not pruned.
    inference, sparse_inference: FLOPs of a forward, of the dense model, and with zeros skipped. A multiplication and an
      addition count as two.
    training, sparse_training: of a training step: three forwards' worth, one for the gradients of the inputs and one
      for those of the weights; if gradients are dense on every ``dense_every``-th step, that step's share is in it
      (RigL, arXiv 1911.11134, appendix H).
    bytes_dense, bytes_csr: of the masked weights as they are, and as CSR with 32-bit indices.
    """

    weights: int
    live: int
    inference: int
    sparse_inference: int
    training: int
    sparse_training: float
    bytes_dense: int
    bytes_csr: int

    def __str__(self) -> str:
        rows = [
            ("weights", f"{self.weights:,}", f"{self.live:,}", _share(self.live, self.weights)),
            ("FLOPs of a forward", *_flops(self.inference, self.sparse_inference)),
            ("FLOPs of a training step", *_flops(self.training, self.sparse_training)),
            (
                "bytes of masked weights",
                f"{self.bytes_dense:,}",
                f"{self.bytes_csr:,} as CSR",
                _share(self.bytes_csr, self.bytes_dense),
            ),
        ]
        note = "FLOPs count as if zeros were skipped; on CPUs and GPUs the products stay dense."
        return f"{table(('', 'dense', 'sparse', 'share'), rows)}\n\n{note}"


@torch.no_grad()
def cost(model: nn.Module, *args: Any, dense_every: int | None = None, **kwargs: Any) -> Cost:
    """The cost of a sparse model on one batch, ``model(*args, **kwargs)``, which is run once.

    ``dense_every``: of RigL, every how many steps gradients are dense. FLOPs are counted by torch's FlopCounterMode:
    matrix products, convolutions and attention.

    >>> print(training.cost(model, input_ids=ids, dense_every=100))
    """
    model = unwrapped(model)
    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    by_module = counter.get_flop_counts()
    dense = counter.get_total_flops()
    saved, masked, live = 0.0, 0, 0
    dense_bytes, csr_bytes = 0, 0
    root = type(model).__name__
    seen: set[int] = set()
    for name, mask in named_masks(model):
        parameter = model.get_parameter(name)
        path = name.rpartition(".")[0]
        if parameter.dim() > 1:
            flops = sum(by_module.get(f"{root}.{path}" if path else root, {}).values())
            saved += flops * (1 - mask.count_nonzero().item() / mask.numel())
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        left = int(mask.count_nonzero())
        rows = mask.shape[0] if mask.dim() > 1 else 1
        masked += mask.numel()
        live += left
        dense_bytes += mask.numel() * parameter.element_size()
        csr_bytes += left * (parameter.element_size() + 4) + (rows + 1) * 4
    weights = sum(parameter.numel() for parameter in model.parameters())
    sparse = round(dense - saved)
    step = 3.0 * sparse
    if dense_every is not None:
        # the gradient of the weights is dense in one of so many steps; everything else stays sparse
        step = (3 * sparse * (dense_every - 1) + 2 * sparse + dense) / dense_every
    return Cost(weights, weights - masked + live, dense, sparse, 3 * dense, step, dense_bytes, csr_bytes)


def _flops(dense: float, sparse: float) -> tuple[str, str, str]:
    return f"{dense:.4g}", f"{sparse:.4g}", _share(sparse, dense)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
