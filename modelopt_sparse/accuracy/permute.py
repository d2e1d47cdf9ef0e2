"""Channel permutation that costs nothing at run time, for N:M patterns.

The channels between two layers (the hidden ones of an MLP; those inside of each value head) may stand in any order, as
long as the rows of the layers that make them and the columns of the layer that takes them are reordered alike. Some
orders put weights that should stay into different groups of M (apex's ASP; RIA, Zhang et al. 2024, ICLR). Which layers
belong together is not told by names: it is tried, and a block that puts out something else is put back as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.collect import sum_up
from modelopt_sparse.calibration.forward import forward_context
from modelopt_sparse.calibration.inputs import AtBlock, Inputs
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import Collector
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.channel_order import channel_order, kept_share
from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.model.adapters import HF_CONV1D, LINEAR
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.masking import SUFFIX
from modelopt_sparse.plan.plan import LayerPlan

# what reordering both sides may change by rounding, as a share of what reordering one side alone changes: in the
# taker's output, and in the block's, where the residual stream's rounding weighs more
SAME = (0.02, 0.25)


@dataclass(frozen=True)
class Fold:
    """A layer whose columns could be reordered, and layers before it whose rows would have to be reordered alike.

    ``head``: channels stay inside heads of so many, and heads of the taker that follow each other may share one of the
    maker (grouped-query attention); None: any order will do.
    """

    taker: LayerPlan
    makers: tuple[Layer, ...]
    head: int | None = None


@dataclass(frozen=True)
class Permuted:
    """The share of a layer's squared score that its pattern would keep, before and after its channels moved."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"channels reordered: the pattern keeps {self.after:.1%} of the score, not {self.before:.1%}"


@torch.no_grad()
def permute(block: BlockTask, inputs: Inputs, run: Run, undo: ExitStack) -> dict[str, Permuted]:
    """Reorder channels of a block, in place, where the pattern keeps more of the score and the block computes the same
    -> layer name -> what it gained. ``undo`` gets what puts the old orders back.

    The score is w^2 ||x||^2. Of several ways to reorder a layer the first that works is taken. A block that cannot be
    run by itself stays as it is; the report says so.
    """
    folds = list(possible_folds(run.model, block.by_input()))
    if not folds or not isinstance(inputs, AtBlock):
        return {}
    takers = list({fold.taker.name: fold.taker for fold in folds}.values())
    collector = Collector(needs={taker.name: "square_sums" for taker in takers}, share=False)
    sums = sum_up(takers, inputs, collector, run)
    stats = {names[0]: summed for names, summed in sums if isinstance(summed, Stats)}  # experts are never takers

    permuted: dict[str, Permuted] = {}
    with forward_context(run):
        for fold in folds:
            taker = fold.taker
            if taker.name in permuted or taker.name not in stats:
                continue
            pattern, square_sums = taker.pattern, stats[taker.name].with_dead_channels().square_sums
            assert isinstance(pattern, NM)
            score = taker.layer.matrix(taker.layer.values).to(square_sums).square() * square_sums
            columns, rows = _orders(fold, score, pattern)
            before, after = (kept_share(x, pattern.n, pattern.m) for x in (score, score[:, columns]))
            if after > before and _fold(fold, columns, rows, inputs, run):
                undo.callback(partial(_reorder, fold, columns.argsort(), [order.argsort() for order in rows]))
                permuted[taker.name] = Permuted(before, after)
    return permuted


def possible_folds(model: nn.Module, stages: Sequence[Sequence[LayerPlan]]) -> Iterator[Fold]:
    """What might be reordered in a block, for every layer with those called right before it.

    ``stages`` are the layers of the block by the input that they share, in call order. Only plain linear layers that
    one module holds and that carry no mask yet.
    """
    for before, stage in pairwise(stages):
        for taker in stage:
            columns = taker.shape[-1]
            if not isinstance(taker.pattern, NM) or not _movable(taker.layer):
                continue
            # a layer that makes twice as many channels is gate and up in one
            makers = tuple(maker.layer for maker in before if maker.shape[-2] in (columns, 2 * columns))
            if makers and all(map(_movable, makers)):
                yield Fold(taker, makers)
            head = getattr(model.get_submodule(taker.name.rpartition(".")[0]), "head_dim", None)
            if not isinstance(head, int) or head % taker.pattern.m:
                continue
            for maker in before:
                if maker.shape[-2] % head == 0 and columns % maker.shape[-2] == 0 and _movable(maker.layer):
                    yield Fold(taker, (maker.layer,), head)


def _movable(layer: Layer) -> bool:
    masked = hasattr(layer.owner, f"{layer.param}{SUFFIX}")
    return layer.adapter in (LINEAR, HF_CONV1D) and not layer.tied_modules and not masked


def _orders(fold: Fold, score: Tensor, pattern: NM) -> tuple[Tensor, list[Tensor]]:
    """The taker's columns and each maker's rows in their new order."""
    made = [layer.matrix(layer.parameter).shape[0] for layer in fold.makers]
    if fold.head is None:
        order = channel_order(score, pattern.n, pattern.m)
        return order, [torch.cat([order + start for start in range(0, size, len(order))]) for size in made]
    (heads,) = (size // fold.head for size in made)
    by_head = score.unflatten(-1, (heads, -1, fold.head))  # [R, maker's heads, taker's heads on each, channels]
    orders = [channel_order(by_head[:, k].flatten(0, 1), pattern.n, pattern.m) for k in range(heads)]
    rows = torch.cat([order + k * fold.head for k, order in enumerate(orders)])
    taken = [order for order in orders for _ in range(by_head.shape[2])]
    return torch.cat([order + k * fold.head for k, order in enumerate(taken)]), [rows]


def _fold(fold: Fold, columns: Tensor, rows: list[Tensor], inputs: AtBlock, run: Run) -> bool:
    """Reorder both sides, and say whether the block still computes the same on the first batch of all processes; if
    not, everything is as before.

    Reordering the columns alone has to change the output, else the batch does not reach the layer and shows nothing.
    """
    layer = fold.taker.layer

    def outputs() -> list[Tensor]:
        return inputs.outputs_of([layer.owner, inputs.block], 0) if inputs.calls else []

    def changes() -> list[float]:
        return [float((now.float() - then.float()).norm()) for now, then in zip(outputs(), dense)]

    before = [values.clone() for values in _values(fold)]
    same = False
    try:
        dense = outputs()
        _reorder_columns(layer, columns)
        torn = changes()
        for maker, order in zip(fold.makers, rows):
            _reorder_rows(maker, order)
        here = all(b > 0 and a <= share * b for a, b, share in zip(changes(), torn, SAME))
        # the first process that has a batch decides
        same = next(
            x for x in run.processes.all_gather("a permutation", here if inputs.calls else None) if x is not None
        )
    finally:
        if not same:  # or interrupted half way
            for values, old in zip(_values(fold), before):
                values.copy_(old)
    return same


def _values(fold: Fold) -> list[Tensor]:
    """Everything that is reordered."""
    weights = [layer.values for layer in (fold.taker.layer, *fold.makers)]
    return weights + [bias for layer in fold.makers if (bias := _bias(layer)) is not None]


def _bias(layer: Layer) -> Tensor | None:
    return None if getattr(layer.owner, "bias", None) is None else stored(layer.owner, "bias").detach()


@torch.no_grad()
def _reorder(fold: Fold, columns: Tensor, rows: list[Tensor]) -> None:
    _reorder_columns(fold.taker.layer, columns)
    for maker, order in zip(fold.makers, rows):
        _reorder_rows(maker, order)


def _reorder_columns(layer: Layer, order: Tensor) -> None:
    values = layer.values
    matrix = layer.matrix(values.clone())
    values.copy_(layer.unmatrix(matrix[:, order.to(matrix.device)]))


def _reorder_rows(layer: Layer, order: Tensor) -> None:
    values = layer.values
    matrix = layer.matrix(values.clone())
    values.copy_(layer.unmatrix(matrix[order.to(matrix.device)]))
    if (bias := _bias(layer)) is not None:
        bias.copy_(bias.clone()[order.to(bias.device)])
