"""Channel permutation that costs nothing at run time, for N:M patterns.

The channels between two layers (the hidden ones of an MLP; those inside of each value head) may stand in any order, as
long as the rows of the layers that make them and the columns of the layer that takes them are reordered alike. Some
orders put weights that should stay into different groups of M (apex's ASP; RIA, Zhang et al. 2024, ICLR). Which layers
belong together is not told by names: it is tried, and a block that hands on something else is put back as it was.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import le
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.fisher import users_first
from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.dense import BlockTask
from modelopt_sparse.calibration.forward import forward_context
from modelopt_sparse.calibration.stats import sum_up
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import NM
from modelopt_sparse.model.devices import dense_rows, flat_tensors, stored
from modelopt_sparse.model.layers import HF_CONV1D, LINEAR, Layer
from modelopt_sparse.model.masking import SUFFIX
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.run import Run

# what reordering both sides may change by rounding, as a share of what reordering one side alone changes: in the
# consumer's output, and in the block's, where the residual stream's rounding weighs more; with 32 bits a tenth of it;
# for all else that the block hands on the first of these, as a share of its own size
SAME = (0.02, 0.25)

IN_ORDER = "keeps the order of its channels"
PERMUTATION_ROWS = 32  # of calibration data tell the size of channels well enough

Move = tuple[Layer, int, Tensor]  # the dimension of a layer's matrix that is reordered (0: rows), and the new order


class ValueHeads(NamedTuple):
    """The rows of a producer that make the channels of so many value heads: ``size`` of each, those of head k from
    ``first + k * stride`` on."""

    number: int
    size: int
    first: int
    stride: int


@dataclass(frozen=True)
class Permutation:
    """A layer whose columns could be reordered, and layers before it whose rows would have to be reordered alike.

    ``heads``: channels stay inside of these, and consecutive heads of the consumer may share one of the producer
    (grouped-query attention); None: any order will do.
    """

    consumer: LayerPlan
    producers: tuple[Layer, ...]
    heads: ValueHeads | None = None


@torch.no_grad()
def permute(block: BlockTask, inputs: Inputs, run: Run, undo: ExitStack) -> dict[str, str]:
    """Reorder channels of a block, in place, where the pattern keeps more of the score and the block computes the same
    -> layer name -> what the report says of it. ``undo`` gets what puts the old orders back.

    The score is w^2 ||x||^2. Of several ways to reorder a layer the first that works is taken. What one block has shown
    not to work is not tried in others of its type. A block that cannot be run by itself stays as it is; the report says
    so.
    """
    candidates = list(possible_permutations(run.model, block.by_input()))
    if not candidates or not isinstance(inputs, AtBlock) or not inputs.once:
        return {}
    by_name = {candidate.consumer.name: candidate.consumer for candidate in candidates}
    consumers = [replace(consumer, needs="square_sums") for consumer in by_name.values()]
    # of data in a forward_loop nobody knows which is the user's
    some = inputs if inputs.data.calls is None else inputs.only(users_first(inputs.data, PERMUTATION_ROWS))
    with _reached(inputs.block) as reached:
        sums = sum_up(consumers, some, run, share=False)
    stats = {names[0]: summed for names, summed in sums if isinstance(summed, Stats)}  # experts are never consumers

    permuted: dict[str, str] = {}
    with forward_context(run):
        modules = [consumer.layer.owner for consumer in consumers]
        # calls that together reach all modules that any of them reaches
        shown = [number for number, of_call in enumerate(reached) if of_call.difference(*reached[:number])]
        if len(reached) != len(some.calls):  # some go another way than in the dense model
            shown = range(len(some.calls))
        dense = {number: _put_out(modules, some, number) for number in shown}
        silent = _silent(inputs.block, reached, run)
        for candidate in candidates:
            consumer = candidate.consumer
            names = (layer.name.removeprefix(block.name) for layer in (consumer.layer, *candidate.producers))
            kind = type(inputs.block), *names, candidate.heads
            if consumer.name in permuted or consumer.name not in stats or kind in run.fixed_orders:
                continue
            sizes = {consumer.shape[-1], *(layer.matrix(layer.values).shape[0] for layer in candidate.producers)}
            if takers := [name for name, numbers in silent.items() if not numbers.isdisjoint(sizes)]:
                problem = f"none of {PERMUTATION_ROWS} rows comes to {takers[0]!r}, which may take them"
                if not any(IN_ORDER in note for note in run.report.notes):
                    text = f"{consumer.name!r} {IN_ORDER}: {problem} (said once, of the first such layer)"
                    run.report.notes.append(text)
                continue
            pattern, square_sums = consumer.pattern, stats[consumer.name].with_dead_channels().square_sums
            assert isinstance(pattern, NM)
            score = consumer.layer.matrix(consumer.layer.values).to(square_sums).square() * square_sums
            moves = _moves(candidate, score, pattern, run.processes)
            before, after = (kept_fraction(x, pattern.n, pattern.m) for x in (score, score[:, moves[0][2]]))
            if not after > before:
                continue
            moved = _moved(moves, some, dense, run)
            if moved is False:
                run.fixed_orders.add(kind)
            if moved:
                undo.callback(_reorder, [(layer, dim, order.argsort()) for layer, dim, order in moves])
                permuted[consumer.name] = (
                    f"channels reordered: the pattern keeps {after:.1%} of the score, not {before:.1%}"
                )
    return permuted


def possible_permutations(model: nn.Module, stages: Sequence[Sequence[LayerPlan]]) -> Iterator[Permutation]:
    """Yield the permutations to try in a block: for every layer that has its input alone, with layers called before it,
    the nearest first.

    ``stages`` are the layers of the block by the input that they share, in call order. Only plain linear layers that
    one module holds, with their biases, and that carry no mask yet. Layers that share an input cannot take another
    order of it each.
    """
    holders = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    movable = partial(_movable, holders)
    for index, (consumer, *others) in enumerate(stages):
        columns = consumer.shape[-1]
        if others or not isinstance(consumer.pattern, NM) or not movable(consumer.layer):
            continue
        for before in reversed(stages[:index]):
            for producer in reversed(before):  # values mostly come after queries and keys
                if movable(producer.layer):
                    for heads in _value_heads(model, consumer, producer):
                        yield Permutation(consumer, (producer.layer,), heads)
            # a layer that makes twice as many channels is gate and up in one
            producers = tuple(producer.layer for producer in before if producer.shape[-2] in (columns, 2 * columns))
            if producers and all(map(movable, producers)):
                yield Permutation(consumer, producers)


# names in attention modules, for the size of a value head
HEAD_SIZES = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


def _value_heads(model: nn.Module, consumer: LayerPlan, producer: LayerPlan) -> Iterator[ValueHeads]:
    """Where value heads may be in a producer: it makes nothing else; or they stand behind all queries and keys (as many
    keys as values), or each behind its own, or behind its key."""
    parents = [model.get_submodule(layer_plan.name.rpartition(".")[0]) for layer_plan in (consumer, producer)]
    sizes = (getattr(parent, name, None) for parent in parents for name in HEAD_SIZES)
    size, columns, rows = next((x for x in sizes if isinstance(x, int)), 0), consumer.shape[-1], producer.shape[-2]
    assert isinstance(consumer.pattern, NM)
    if not size or size % consumer.pattern.m or columns % size:
        return
    number = (rows - columns) // (2 * size)
    places = [(number, rows - number * size, size)] if rows > columns else [(rows // size, 0, size)]
    places += [(n, rows // n - size, rows // n) for n in (number, columns // size) if rows > columns and n]
    for number, first, stride in places:
        if number and columns % (number * size) == 0:
            yield ValueHeads(number, size, first, stride)


def _movable(holders: Mapping[Any, int], layer: Layer) -> bool:
    """``holders``: how many modules hold a Parameter. A bias moves along with the rows."""
    masked, bias = hasattr(layer.owner, f"{layer.param}{SUFFIX}"), getattr(layer.owner, "bias", None)
    alone = not layer.tied_modules and (bias is None or holders[bias] == 1)
    return layer.adapter in (LINEAR, HF_CONV1D) and alone and not masked


def _moves(permutation: Permutation, score: Tensor, pattern: NM, processes: Processes) -> list[Move]:
    """The new order of the consumer's columns, and of each producer's rows."""
    made, heads = [layer.matrix(layer.parameter).shape[0] for layer in permutation.producers], permutation.heads
    if heads is None:
        columns = channel_order(score, pattern.n, pattern.m, processes)
        rows = [torch.cat([columns + start for start in range(0, size, len(columns))]) for size in made]
    else:
        # [R, value heads, consumer's heads on each, size]
        by_head = score.unflatten(-1, (heads.number, -1, heads.size))
        orders = processes.dealt_out(
            "the order of channels in heads",
            lambda k: channel_order(by_head[:, k].flatten(0, 1), pattern.n, pattern.m).cpu(),
            range(heads.number),
        )
        rows = [torch.arange(made[0], device="cpu")]
        for k, order in enumerate(orders):
            begin = heads.first + k * heads.stride
            rows[0][begin : begin + heads.size] = begin + order
        taken = [order for order in orders for _ in range(by_head.shape[2])]
        columns = torch.cat([order + k * heads.size for k, order in enumerate(taken)])
    moves = ((producer, 0, order) for producer, order in zip(permutation.producers, rows))
    return [(permutation.consumer.layer, 1, columns), *moves]


@contextmanager
def _reached(block: nn.Module) -> Iterator[list[set[nn.Module]]]:
    """Gather, while entered, the modules with parameters that each call of the block reaches."""
    calls, reached = list[set[nn.Module]](), set[nn.Module]()
    with ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(lambda *_: reached.clear()))
        for _, module in _with_parameters(block):
            hooks.enter_context(module.register_forward_pre_hook(lambda module, _: reached.add(module)))
        hooks.enter_context(block.register_forward_hook(lambda *_: calls.append({*reached})))
        yield calls


def _with_parameters(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in block.named_modules() if [*module.parameters(recurse=False)]]


def _silent(block: nn.Module, reached: Sequence[set[nn.Module]], run: Run) -> dict[str, set[int]]:
    """Modules that no call of any process has reached -> the sizes of their parameters."""
    local = {name for name, module in _with_parameters(block) if any(module in modules for modules in reached)}
    names = set[str]().union(*run.processes.all_gather("the modules that calls reach", local))
    silent = [(name, module) for name, module in _with_parameters(block) if name not in names]
    return {name: {size for p in module.parameters(recurse=False) for size in p.shape} for name, module in silent}


def _put_out(modules: Sequence[nn.Module], inputs: AtBlock, number: int) -> dict[nn.Module, list[Tensor]]:
    """What some modules of the block, if the call reaches them, and the block put out in a call; of the block also all
    other tensors that it puts out or finds in its arguments, which later blocks may read: such as values that they
    share."""
    outputs: dict[nn.Module, list[Tensor]] = {}

    def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = flat_tensors((output, args, kwargs)) if module is inputs.block else flat_tensors(output)[:1]
        outputs[module] = [*map(dense_rows, tensors)]

    with ExitStack() as hooks:
        for module in (*modules, inputs.block):
            hooks.enter_context(module.register_forward_hook(see, with_kwargs=True))
        inputs.outputs_of([], number)
    return outputs


Shown = Mapping[int, Mapping[nn.Module, Sequence[Tensor]]]  # number of a call -> what `_put_out` gives of it


def _moved(moves: list[Move], inputs: AtBlock, dense: Shown, run: Run) -> bool | None:
    """Reorder both sides, and say whether all that the block hands on stays the same in the calls that ``dense`` has,
    of all processes; if not, everything is as before.

    Reordering the columns alone, which is the first move, has to change the output of a call, else it shows nothing.
    None: no call shows anything.
    """
    consumer, before = moves[0][0].owner, [(x, x.clone()) for layer, dim, _ in moves for x in _reordered(layer, dim)]
    same: bool | None = False
    try:
        _reorder(moves[:1])
        torn = {number: _changes(consumer, inputs, number, dense) for number in dense}
        _reorder(moves[1:])
        local = [_is_same(consumer, inputs, number, dense, changes) for number, changes in torn.items()]
        verdicts = {verdict for of_one in run.processes.all_gather("a permutation", local) for verdict in of_one}
        same = False not in verdicts and (True in verdicts or None)
    finally:
        if not same:  # or interrupted half way
            for values, old in before:
                values.copy_(old)
    return same


def _changes(consumer: nn.Module, inputs: AtBlock, number: int, dense: Shown) -> list[float]:
    """How much of a call is other than in the dense block: the consumer's output, if the call reaches it, and all that
    the block hands on. inf: it has another shape, or is not there, where tokens are routed otherwise."""
    outputs = _put_out([consumer], inputs, number)
    modules = [module for module in (consumer, inputs.block) if module in dense[number]]
    pairs = [pair for module in modules for pair in zip_longest(outputs.get(module, ()), dense[number][module])]
    alike = [x is not None and y is not None and x.shape == y.shape for x, y in pairs]
    apart = ((x.float() - y.float()).masked_fill(x == y, 0) for (x, y), same in zip(pairs, alike) if same)
    return [float(next(apart).norm()) if same else math.inf for same in alike]


def _is_same(consumer: nn.Module, inputs: AtBlock, number: int, dense: Shown, torn: Sequence[float]) -> bool | None:
    """Whether a call is as it was, with both sides reordered; None where it shows nothing. ``torn``: its changes with
    one side reordered."""
    tensors = [x for module in (consumer, inputs.block) for x in dense[number].get(module, ())]
    exact = 1.0 if any(x.element_size() == 2 for x in tensors) else 0.1
    bounds = [exact * SAME[0] * float(x.float().norm()) for x in tensors]
    if is_reached := consumer in dense[number]:
        bounds[:2] = [exact * share * x for share, x in zip(SAME, torn)]
    if is_reached and not all(torn[:2]):
        return None
    unchanged = math.isfinite(sum(torn)) and all(map(le, _changes(consumer, inputs, number, dense), bounds))
    return unchanged and (is_reached or None)


@torch.no_grad()
def _reorder(moves: list[Move]) -> None:
    for layer, dim, order in moves:
        weight, *bias = _reordered(layer, dim)
        weight.copy_(layer.unmatrix(layer.matrix(weight).index_select(dim, order.to(weight.device))))
        for values in bias:
            values.copy_(values[order.to(values.device)])


def _reordered(layer: Layer, dim: int) -> list[Tensor]:
    """The tensors of a layer that are reordered: its weight and, along with rows, the bias."""
    has_bias = dim == 0 and getattr(layer.owner, "bias", None) is not None
    return [layer.values, *([stored(layer.owner, "bias").detach()] if has_bias else [])]


# orders ---------------------------------------------------------------------------------------------------------------
# How much of a score n:m keeps depends on which input channels share a group of m.
# Shape letters: R rows (out features), C columns (input channels), G groups of m consecutive columns.


SMALL = 1e-4  # the last round adds less than this share of the kept score


def channel_order(score: Tensor, n: int, m: int, processes: Processes | None = None, block: int = 64) -> Tensor:
    """Score ``[R, C]`` (larger = keep, additive) -> order ``[C]``: ``score[:, order]`` keeps more under n:m.

    ``order[i]`` is the channel that moves to place i. It is found in two steps:

    1. Channels sorted by their total score are dealt out in serpentine order, so that every group gets one of each
       quantile (RIA's heuristic, Zhang et al. 2024).
    2. Channels of different groups swap places where that raises the kept score. In each round the groups are dealt
       into parts of about ``block`` columns at random, and swaps stay within a part. That bounds the work of a round to
       O(C * block * R), on tensors that fit into the processor's cache. The ``processes`` share the parts.

    Raises ValueError if C is not a multiple of m.
    """
    columns = score.shape[-1]
    if columns % m:
        raise ValueError(f"a score of shape {list(score.shape)}: {columns} channels are not a multiple of {m}")
    if n >= m:
        return torch.arange(columns, device=score.device)
    score = score.float()
    chunks = list(score.sum(0).argsort(descending=True, stable=True).view(m, -1))
    groups = torch.stack([chunk.flip(0) if index % 2 else chunk for index, chunk in enumerate(chunks)], dim=1)
    kept_score = gained = kept_fraction(score[:, groups.flatten()], n, m) * float(score.sum())
    groups, score_CR, random = groups.cpu(), score.T.contiguous(), torch.Generator().manual_seed(0)
    parts = -(-columns // block)
    size = len(groups) // parts  # a round leaves out what remains
    while gained > SMALL * kept_score:
        dealt = torch.randperm(len(groups), generator=random, device="cpu")[: parts * size].view(parts, size)
        swapped = (processes or Processes()).dealt_out(
            "an order of channels", lambda part: _swapped(groups[part], score_CR, n), dealt
        )
        groups[dealt] = torch.stack([new_groups for new_groups, _ in swapped])
        gained = sum(gain for _, gain in swapped)
    return groups.flatten().to(score.device)


def _swapped(groups: Tensor, score_CR: Tensor, n: int) -> tuple[Tensor, float]:
    """Swap channels between groups ``[G, m]`` (on the CPU) -> (the groups, what the kept score gains).

    The best swap is made, then the best one among the groups not yet touched, and so on: swaps of disjoint groups add
    up exactly.
    """
    (size, m), gained = groups.shape, 0.0
    scores = score_CR[groups.flatten().to(score_CR.device)]
    gain = _swap_gains(scores, n, m).view(size, m, size, m).transpose(1, 2).flatten(2)
    # a GPU would wait for the host at every swap, and its kernels would take longer to start than to run
    best, which = (tensor.cpu() for tensor in gain.max(-1))
    best.fill_diagonal_(0)  # within a group nothing changes
    while (most := float(best.max())) > 0:
        g, h = divmod(int(best.argmax()), size)
        i, j = divmod(int(which[g, h]), m)
        groups[g, i], groups[h, j] = groups[h, j].clone(), groups[g, i].clone()
        gained += most
        best[[g, h]] = 0
        best[:, [g, h]] = 0
    return groups, gained


def _swap_gains(score_CR: Tensor, n: int, m: int) -> Tensor:
    """``[C, R]`` in groups of m -> ``[C, C]``: how much the kept score gains if channels i and j swap places.

    Take a row in which channel i leaves its group and another one comes, with the scores x_i and y. Then the group
    keeps max(y, rival) in place of max(x_i, cut), where cut is the n-th largest score of the group, and rival the n-th
    largest without x_i. Summed over the rows, max(u, v) is half of sum u + sum v + sum |u - v|. The last of these sums
    is a distance, which can be computed without a tensor [C, C, R].
    """
    grouped = score_CR.unflatten(0, (-1, m))
    ranked = grouped.clone()
    for turn in range(m):  # neighbours in turns: for many small groups far faster than `sort`
        first, second = ranked[:, turn % 2 : m - 1 : 2], ranked[:, turn % 2 + 1 :: 2]
        larger, smaller = torch.maximum(first, second), torch.minimum(first, second)
        first.copy_(larger)
        second.copy_(smaller)
    cut = ranked[:, n - 1 : n]
    rival = torch.where(grouped >= cut, ranked[:, n : n + 1], cut).flatten(0, 1)
    leaves = torch.maximum(grouped, cut).flatten(0, 1).sum(-1)
    comes = (rival.sum(-1)[:, None] + score_CR.sum(-1) + torch.cdist(rival, score_CR, p=1)) / 2
    change = comes - leaves[:, None]
    return change + change.T


def kept_fraction(score: Tensor, n: int, m: int) -> float:
    """The fraction of a score ``[R, C]`` that n:m keeps: the n largest of every m consecutive columns."""
    largest = score.unflatten(-1, (-1, m)).topk(n).values
    return float(largest.sum(dtype=torch.float64) / score.sum(dtype=torch.float64))
