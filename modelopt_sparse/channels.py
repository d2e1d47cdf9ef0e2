"""Channel permutation that costs nothing at run time, for N:M patterns.

The channels between two layers (the hidden ones of an MLP) may stand in any order, as long as the rows of the layers
that make them and the columns of the layer that takes them are reordered alike. Some orders put weights that should
stay into different groups of M (apex's ASP; RIA, Zhang et al. 2024, ICLR). Which layers belong together is not told by
names: it is tried, and a block that puts out something else is put back as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from modelopt_sparse.layers import HF_CONV1D, LINEAR, Layer
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.permute import channel_order, kept_share
from modelopt_sparse.modules import SUFFIX
from modelopt_sparse.offload import stored
from modelopt_sparse.patterns import NM
from modelopt_sparse.plan import LayerPlan

# what reordering both sides may change by rounding, as a share of what reordering one side alone changes: in the
# taker's output, and in the block's, where the residual stream's rounding weighs more
SAME = (0.02, 0.25)


@dataclass(frozen=True)
class Fold:
    """A layer whose columns could be reordered, with its input's statistics, and the layers before it, whose rows
    would have to be reordered alike."""

    taker: LayerPlan
    makers: tuple[Layer, ...]
    stats: Stats


@dataclass(frozen=True)
class DenseBlock:
    """A block before any of its layers is solved. ``run(layer)`` gives the layer's output and the block's in a forward
    of the block on the first calibration batch."""

    folds: list[Fold]
    run: Callable[[Layer], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Permuted:
    """A layer whose channels were reordered: the share of its squared score that the pattern would keep, before and
    after; ``undo`` puts the old order back."""

    layer: str
    before: float
    after: float
    undo: Callable[[], None]

    def __str__(self) -> str:
        return f"channels reordered: the pattern keeps {self.after:.1%} of the score, not {self.before:.1%}"


def possible_folds(stages: Sequence[Sequence[LayerPlan]]) -> Iterator[tuple[LayerPlan, tuple[Layer, ...]]]:
    """(taker, makers) for every layer whose channels may come from the layers called right before it.

    ``stages`` are the layers of a block by the input that they share, in call order. Only plain linear layers that one
    module holds and that carry no mask yet.
    """
    for before, stage in pairwise(stages):
        for taker in stage:
            columns = taker.shape[-1]
            makers = tuple(item.layer for item in before if item.shape[-2] in (columns, 2 * columns))
            fits = all(
                layer.kind in (LINEAR, HF_CONV1D)
                and not layer.twins
                and not hasattr(layer.owner, f"{layer.param}{SUFFIX}")
                for layer in (taker.layer, *makers)
            )
            if makers and fits and isinstance(taker.pattern, NM):
                yield taker, makers


@torch.no_grad()
def permute(block: DenseBlock) -> Iterator[Permuted]:
    """Reorder the channels of a block, in place, where it keeps more of the score and the block computes the same."""
    for fold in block.folds:
        layer, pattern = fold.taker.layer, fold.taker.pattern
        assert isinstance(pattern, NM)
        weight = layer.matrix(stored(layer.owner, layer.param).detach()).to(fold.stats.square_sums.device)
        score = weight.to(fold.stats.square_sums.dtype).square() * fold.stats.square_sums
        order = channel_order(score, pattern.n, pattern.m)
        before, after = (kept_share(x, pattern.n, pattern.m) for x in (score, score[:, order]))
        if after > before and _fold(fold, order, block.run):
            back = order.argsort()
            yield Permuted(fold.taker.name, before, after, lambda f=fold, b=back: _reorder(f, b))


def _fold(fold: Fold, order: Tensor, run: Callable[[Layer], tuple[Tensor, Tensor]]) -> bool:
    """Reorder both sides, and say whether the block still computes the same; if not, everything is as before.

    Reordering the columns alone has to change the output, else the batch does not reach the layer and shows nothing.
    """
    layer = fold.taker.layer

    def changes() -> list[float]:
        return [float((now.float() - then.float()).norm()) for now, then in zip(run(layer), dense)]

    dense = run(layer)
    _reorder_columns(layer, order)
    torn = changes()
    for maker in fold.makers:
        _reorder_rows(maker, order)
    whole = changes()
    if all(b > 0 and a <= share * b for a, b, share in zip(whole, torn, SAME)):
        return True
    _reorder(fold, order.argsort())
    return False


@torch.no_grad()
def _reorder(fold: Fold, order: Tensor) -> None:
    _reorder_columns(fold.taker.layer, order)
    for maker in fold.makers:
        _reorder_rows(maker, order)


def _reorder_columns(layer: Layer, order: Tensor) -> None:
    values = stored(layer.owner, layer.param)
    matrix = layer.matrix(values.detach().clone())
    values.copy_(layer.unmatrix(matrix[:, order.to(matrix.device)]))


def _reorder_rows(layer: Layer, order: Tensor) -> None:
    """Rows and bias; of a fused layer (gate and up in one) the two halves alike."""
    values = stored(layer.owner, layer.param)
    matrix = layer.matrix(values.detach().clone())
    order = order.to(matrix.device)
    rows = torch.cat([order + start for start in range(0, matrix.shape[0], len(order))])
    values.copy_(layer.unmatrix(matrix[rows]))
    if getattr(layer.owner, "bias", None) is not None:
        bias = stored(layer.owner, "bias")
        bias.copy_(bias.detach().clone()[rows.to(bias.device)])
