"""What sparse weights cost: live weights, FLOPs of inference and training, bytes.

FLOPs are counted as if multiplications with zeros were skipped, which takes hardware that skips them: on CPUs and GPUs
the products of a sparse module stay dense.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.model.wrappers import unwrapped
from modelopt_sparse.reports.evaluate import in_eval_mode
from modelopt_sparse.reports.fold import first_few, table
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
    """A model as a dense one, and with zeros skipped and masked weights stored as CSR with 32-bit indices.

    uncounted: operators that multiply, but whose FLOPs are not known, and masked matrices that no counted product read.
    """

    dense: Numbers
    sparse: Numbers
    uncounted: tuple[str, ...] = ()

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
        note += f"\nNot counted: {first_few(self.uncounted)}." if self.uncounted else ""
        return f"{table(('', 'dense', 'sparse', 'share'), rows)}\n\n{note}"


@torch.no_grad()
def cost(model: nn.Module, *args: Any, dense_every: int | None = None, **kwargs: Any) -> Cost:
    """The cost of a sparse model on one batch, ``model(*args, **kwargs)``, which is run once.

    A training step counts as three forwards: the backward pass makes the gradients of inputs and of weights.
    ``dense_every``: of RigL, every how many steps the gradients of weights are dense; that step's share is in the step
    (arXiv 1911.11134, appendix H). FLOPs are counted by torch's formulas: matrix products, convolutions and attention.
    The model runs in evaluation mode. What has no formula (an LSTM) is named.

    >>> print(training.cost(model, input_ids=ids, dense_every=100))
    """
    model = unwrapped(model)
    masks = dict(named_masks(model))
    sparse_weights = [weight for weight in find_weights(model) if weight.name in masks]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operator with all products of attention in it
        with in_eval_mode(model), Products(sparse_weights, masks) as products:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    pruned, plain_bytes, csr_bytes = 0, 0, 0
    for weight in sparse_weights:
        mask, number = masks[weight.name], weight.parameter.element_size()
        live = int(mask.count_nonzero())
        zeros = mask.numel() - live
        pruned += zeros
        plain_bytes += mask.numel() * number
        rows = mask.flatten(0, -2).shape[0] if mask.dim() > 1 else 1
        csr_bytes += live * (number + INDEX) + (rows + 1) * INDEX
    weights = sum(parameter.numel() for parameter in model.parameters())
    dense, sparse = products.dense, round(products.sparse)
    unseen = [weight.name for weight in sparse_weights if len(weight.shape) > 1 and not products.flops[weight.name]]
    step = 3.0 * sparse
    if dense_every is not None:
        step = (3 * sparse * (dense_every - 1) + 2 * sparse + dense) / dense_every
    return Cost(
        Numbers(weights, dense, 3.0 * dense, plain_bytes),
        Numbers(weights - pruned, sparse, step, csr_bytes),
        (*sorted(products.uncounted), *unseen),
    )


class Products(TorchDispatchMode):
    """Counts FLOPs while a model runs, and whose weights they multiply: a product reads a weight's memory.

    masks: bool, by parameter name. dense, sparse: all FLOPs, and without those of zeros. flops: of each weight, by
    name. uncounted: operators that multiply and whose FLOPs are not known here.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Iterable[Weight], masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = {weight.parameter.untyped_storage()._cdata: weight for weight in weights}
        self.masks = masks
        self.dense, self.sparse = 0, 0.0
        self.flops = dict.fromkeys((weight.name for weight in self.weights.values()), 0.0)
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "_overloadpacket", func))
        formula = FORMULAS.get(name)
        if formula is None and isinstance(func, torch._ops.OpOverload):
            with self:
                if (done := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return done
        out = func(*args, **kwargs)
        if formula is None:
            self.uncounted |= {name} if MULTIPLIES.search(name) else set()
            return out
        flops, share = formula(*args, **kwargs, out_val=out), 1.0
        for read in tree_leaves((args, kwargs)):
            if isinstance(read, Tensor) and (weight := self.weights.get(read.untyped_storage()._cdata)) is not None:
                self.flops[weight.name] += flops
                if weight.name in self.masks:
                    share *= self._live_share(weight, read)
        self.dense += flops
        self.sparse += flops * share
        return out

    def _live_share(self, weight: Weight, read: Tensor) -> float:
        """The live share of a view of a weight: of one expert, or of attention's queries."""
        values = weight.parameter.detach()
        mask = torch.empty_like(values, dtype=torch.bool).copy_(self.masks[weight.name])  # strides of the weight
        view = mask.as_strided(read.shape, read.stride(), read.storage_offset() - values.storage_offset())
        return int(view.count_nonzero()) / max(1, view.numel())


def _grouped(inputs: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Tokens [T, C] that are multiplied with the matrix of their group."""
    return 2 * out_val.numel() * inputs.shape[-1]


FORMULAS = {str(operator): formula for operator, formula in flop_registry.items()}
FORMULAS["aten._scaled_dot_product_flash_attention_for_cpu"] = FORMULAS["aten._scaled_dot_product_flash_attention"]
FORMULAS |= dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), _grouped)
MULTIPLIES = re.compile(r"mm|mv|matmul|dot|conv|linear\b|attention|rnn|lstm|gru")
