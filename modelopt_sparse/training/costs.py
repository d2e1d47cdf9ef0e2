"""What a sparse model costs: live weights, bytes, and FLOPs as if multiplications with zeros were skipped.

That takes hardware that skips them: on CPUs and GPUs the products of a sparse module stay dense.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from modelopt_sparse.checks import check_whole
from modelopt_sparse.model.devices import count_nonzero, flat_tensors, unwrapped
from modelopt_sparse.reports.text import first_few, table
from modelopt_sparse.run import calibrating
from modelopt_sparse.training.planner import SparseParameter, find_weights

INDEX_BYTES = 4  # bytes of an index in CSR


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


def cost(model: nn.Module, *args: Any, dense_every: int | None = None, **kwargs: Any) -> Cost:
    """The cost of a sparse model on one batch, ``model(*args, **kwargs)``, which is run once.

    A training step counts as three forwards: the backward pass makes the gradients of inputs and of weights.
    ``dense_every``: of RigL, every how many steps the gradients of weights are dense; that step's share is in the step
    (arXiv 1911.11134, appendix H). FLOPs are counted by torch's formulas: matrix products, convolutions and attention.
    The model runs in evaluation mode. What has no formula (an LSTM) is named.

    >>> print(training.cost(model, input_ids=ids, dense_every=100))
    """
    if dense_every is not None:
        check_whole("dense_every", dense_every)
    model = unwrapped(model)
    sparse_weights = [weight for weight in find_weights(model) if weight.is_sparse]
    with counting(model, sparse_weights) as products:
        model(*args, **kwargs)
    pruned, plain_bytes, csr_bytes = 0, 0, 0
    for weight in sparse_weights:
        mask, size = weight.mask, weight.parameter.element_size()
        live = count_nonzero(mask)
        pruned += mask.numel() - live
        plain_bytes += mask.numel() * size
        csr_bytes += live * (size + INDEX_BYTES) + (math.prod(mask.shape[:-1]) + 1) * INDEX_BYTES
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


@contextmanager
def counting(model: nn.Module, weights: Iterable[SparseParameter]) -> Iterator["Products"]:
    """The products of the model's calls within. Not in use is an operator of torch that holds all those of a block."""
    mha = torch.backends.mha
    with ExitStack() as contexts, calibrating(model), Products(weights) as products:
        contexts.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        yield products


class Products(TorchDispatchMode):
    """Counts FLOPs while a model runs, and whose weights they multiply: a product reads a weight's memory.

    dense, sparse: all FLOPs, and without those of zeros. flops: of each weight, by name. uncounted: operators that
    multiply and whose FLOPs are not known here.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Iterable[SparseParameter]) -> None:
        super().__init__()
        self.weights = {weight.parameter.untyped_storage()._cdata: weight for weight in weights}
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
        flops, live = formula(*args, **kwargs, out_val=out), 1.0
        for read in flat_tensors((args, kwargs)):
            weight = self.weights.get(read.untyped_storage()._cdata)
            if weight is not None and read.dim() > 1:  # a bias is added
                self.flops[weight.name] += flops
                live *= _live_share(weight, read) if weight.is_sparse else 1.0
        self.dense += flops
        self.sparse += flops * live
        return out


def _live_share(weight: SparseParameter, read: Tensor) -> float:
    """The live share of a view of a weight: of one expert, or of attention's queries."""
    values = weight.parameter.detach()
    mask = torch.empty_like(values, dtype=torch.bool).copy_(weight.mask)  # strides of the weight
    view = mask.as_strided(read.shape, read.stride(), read.storage_offset() - values.storage_offset())
    return count_nonzero(view) / max(1, view.numel())


def _grouped(inputs: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Tokens [T, C] that are multiplied with the matrix of their group."""
    return 2 * out_val.numel() * inputs.shape[-1]


FORMULAS = {str(operator): formula for operator, formula in flop_registry.items()}
FORMULAS["aten._scaled_dot_product_flash_attention_for_cpu"] = FORMULAS["aten._scaled_dot_product_flash_attention"]
FORMULAS |= dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), _grouped)
MULTIPLIES = re.compile(r"mm|mv|matmul|dot|conv|linear\b|attention|rnn|lstm|gru")
