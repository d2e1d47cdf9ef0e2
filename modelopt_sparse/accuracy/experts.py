"""Which experts of a mixture stay, by sums over the tokens that the router sends to each.

Shape letters: T tokens, k experts chosen for each, E experts, R rows (what an expert puts out).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.choose import Criterion, calls_counted, visit_blocks
from modelopt_sparse.accuracy.refit import RoutedCall, refit_experts
from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import Inputs
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import Collector, SumsOfAllProcesses, without_data
from modelopt_sparse.methods.channels import largest
from modelopt_sparse.model.adapters import real_rows
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.resize import ExpertPool

TOKENS = 1024  # whose outputs are multiplied with each other at a time
SHARES = (0.125, 0.25, 0.375, 0.5)  # of experts, whose loss is told beside that of those which go


@dataclass
class ExpertSums:
    """Of a mixture: sums over real tokens, with the gates that the model applies, in float64.

    tokens, gates, norms, gated_norms: ``[E]``, of each expert over the tokens that are routed to it: how many, and the
    sums of its gate g, of the norm of what it puts out f, and of g times that norm. Where gates scale what experts get
    (Llama 4), f is what comes of it, and is not multiplied by g again.
    products: ``[E, E]``, the sums of the inner products of g f of two experts that the same token is routed to.
    """

    tokens: Tensor
    gates: Tensor
    norms: Tensor
    gated_norms: Tensor
    products: Tensor

    @classmethod
    def of(cls, experts: int) -> "ExpertSums":
        tokens, gates, norms, gated_norms, *products = torch.zeros(4 + experts, experts, dtype=torch.float64)
        return cls(tokens, gates, norms, gated_norms, torch.stack(products))

    def add(self, outputs_TkR: Tensor, index_Tk: Tensor, gates_Tk: Tensor, *, inside: bool = False) -> None:
        """Add some tokens; ``inside``: gates have scaled what the experts get. An index of E or more: an expert without
        weights, which is left out."""
        known_Tk = index_Tk < len(self.tokens)
        index = index_Tk.where(known_Tk, 0).cpu()
        norms_Tk, counted_Tk = outputs_TkR.norm(dim=-1), known_Tk.double()
        factors_Tk = counted_Tk if inside else gates_Tk * counted_Tk
        for total, values in (
            (self.tokens, counted_Tk),
            (self.gates, gates_Tk * counted_Tk),
            (self.norms, norms_Tk * counted_Tk),
            (self.gated_norms, norms_Tk * factors_Tk),
        ):
            total.index_add_(0, index.flatten(), values.double().flatten().cpu())
        for part in range(0, len(index), TOKENS):
            at = slice(part, part + TOKENS)
            gated = outputs_TkR[at] * factors_Tk[at, ..., None].to(outputs_TkR.dtype)
            pairs = index[at, :, None] * len(self.tokens) + index[at, None, :]
            inner = (gated @ gated.mT).double().cpu()
            self.products.view(-1).index_add_(0, pairs.flatten(), inner.flatten())

    def scores(self, criterion: str) -> Tensor:
        """The importance of each expert, larger = keep, ``[E]``.

        "frequency": its tokens. "gate": the sum of its gates. "activation": the mean norm of what it puts out. "reap":
        the mean of gate times norm (Lasby et al. 2025, REAP, arXiv 2510.13999). "reap_sum": the sum of the
        same. Experts that no token reached have 0.
        """
        per_token = self.tokens.clamp_min(1)
        return {
            "frequency": self.tokens,
            "gate": self.gates,
            "activation": self.norms / per_token,
            "reap": self.gated_norms / per_token,
            "reap_sum": self.gated_norms,
        }[criterion]

    def kept_by(self, criterion: str, groups: int, count: int, protected: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """(the ``count`` experts that stay, as many in each of ``groups``, ascending; a score for each)."""
        if criterion == "output":
            return kept_by_output(self.products, groups, count, protected)
        scores = self.scores(criterion)
        in_groups = scores.index_fill(0, torch.tensor(protected, dtype=torch.long), torch.inf).view(groups, -1)
        of_group = [largest(each, count // groups) for each in in_groups]
        return torch.cat([each + place * in_groups.shape[1] for place, each in enumerate(of_group)]), scores

    def error_without(self, stay: Tensor) -> float:
        """The relative squared error of the mixture's output without the other experts, where tokens that were routed
        to these get nothing in their place."""
        gone = torch.ones(len(self.tokens), dtype=torch.bool)
        gone[stay] = False
        return float(self.products[gone][:, gone].sum() / self.products.sum().clamp_min(1e-300))

    def error_at_random(self, gone: int) -> float:
        """The mean of that error over all choices of so many experts that go."""
        every = len(self.tokens)
        alone, together = gone / every, gone * (gone - 1) / (every * max(every - 1, 1))
        squares, total = self.products.diagonal().sum(), self.products.sum().clamp_min(1e-300)
        return float((alone * squares + together * (total - squares)) / total)


def kept_by_output(
    products_EE: Tensor, groups: int, count: int, protected: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(the ``count`` experts that stay, as many in each of ``groups``; a score for each, larger = keep).

    Greedy: each time the expert goes that adds least to the squared error of the mixture's output, with the routes and
    gates of the whole mixture. Scores are that error, relative, once an expert goes; of those that stay, if it went
    next.
    """
    experts = len(products_EE)
    in_group = torch.arange(experts) // (experts // groups)
    left = torch.ones(experts, dtype=torch.bool)
    scores, with_gone = torch.zeros(2, experts, dtype=torch.float64)
    lost, total = 0.0, float(products_EE.sum().clamp_min(1e-300))
    for _ in range(experts - count):
        full = torch.bincount(in_group[left], minlength=groups) > count // groups
        added = products_EE.diagonal() + 2 * with_gone
        may_go = (left & full[in_group]).index_fill(0, torch.tensor(protected, dtype=torch.long), False)
        going = int(added.where(may_go, torch.inf).argmin())
        lost += float(added[going])
        scores[going], left[going] = lost / total, False
        with_gone += products_EE[going]
    scores[left] = (lost + products_EE.diagonal() + 2 * with_gone)[left] / total
    return left.nonzero().squeeze(-1), scores


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of a mixture that stay ``[K]``, ascending, and what they were chosen by: a score for each, by a
    ``criterion``; without scores they were given.

    values: of their last matrices, shaped like the parameter; None: those that they have. errors: of the mixture's
    output with the smaller one's own routes, as is and with these, on the batches that judge.
    """

    pool: ExpertPool
    stay: Tensor
    scores: Tensor
    criterion: str = ""
    sums: ExpertSums | None = field(default=None, repr=False)
    values: Tensor | None = None
    errors: tuple[float, ...] = ()

    def last_in(self, block: nn.Module) -> nn.Parameter:
        """The last matrices of the mixture's experts in a block like the one that it is of."""
        path = next(span.name for span in self.pool.spans if self.pool.taker.name.endswith(f".{span.name}"))
        return block.get_parameter(path)

    @property
    def gates_gone(self) -> float:
        """The share of all gates that lay on those which go."""
        assert self.sums is not None
        gates = self.sums.gates
        return 1 - float(gates[self.stay].sum() / gates.sum().clamp_min(1e-300))

    def errors_without(self, share: float) -> tuple[float, float]:
        """The relative squared errors of the mixture's output without this share of the experts of each group: those
        that this criterion would take, and as many at random."""
        assert self.sums is not None
        groups = self.pool.groups
        gone = int(self.pool.old // groups * share) * groups
        stay, _ = self.sums.kept_by(self.criterion, groups, self.pool.old - gone)
        return self.sums.error_without(stay), self.sums.error_at_random(gone)


def some_experts(pool: ExpertPool) -> ExpertChoice:
    """As many experts as will stay, the first of each group, to try with."""
    in_groups = torch.arange(pool.old).view(pool.groups, -1)
    return ExpertChoice(pool, in_groups[:, : pool.new // pool.groups].flatten(), torch.empty(0))


def other_order(pool: ExpertPool) -> dict[tuple[str, int], Tensor]:
    """What `select` takes, for the same experts in another order within each group: a mixture is none the wiser."""
    order = torch.arange(pool.old).view(pool.groups, -1)
    return pool.cuts(order[:, torch.arange(order.shape[1]).roll(1)].flatten())


def mixed_up(pool: ExpertPool) -> dict[tuple[str, int], Tensor]:
    """The same, for the last matrices alone: those of another expert each."""
    return {key: order for key, order in other_order(pool).items() if pool.taker.name.endswith(f".{key[0]}")}


Smaller = Callable[[str, Sequence[ExpertChoice], Callable[[nn.Module], None]], AbstractContextManager[None]]


def experts(
    data: CalibrationData,
    pools: Mapping[str, Sequence[ExpertPool]],
    criterion: Criterion,
    batches: BatchNumbers,
    smaller: Smaller,
) -> dict[str, list[ExpertChoice]]:
    """Block -> what stays of the experts of each of its ``pools``. One pass over the model as it is now; with refit
    each block runs twice more.

    ``smaller(name, choices, look)``: while entered, a block that is called runs as one with these experts alone, which
    is shown to ``look`` before.
    """
    chosen: dict[str, list[ExpertChoice]] = {}

    def visit(task: BlockTask, inputs: Inputs, run: Run) -> None:
        of_layer = {pool.taker.name: pool for pool in pools.get(task.name, ())}
        if not of_layer:
            inputs.advance()
            return
        seen = _Seen({name: ExpertSums.of(pool.old) for name, pool in of_layer.items()}, run, whole=criterion.refit)
        takers = [plan for plan in task.layer_plans if plan.name in of_layer]
        with calls_counted(seen, inputs, run):
            nothing = SumsOfAllProcesses(Collector(needs={}, share=False), run)
            inputs.collect(takers, seen.see, nothing, go_on=inputs.blockwise and not criterion.refit)
        choices = [_choice(pool, seen.of_all(name), criterion) for name, pool in of_layer.items()]
        if criterion.refit:
            choices = _refitted(task, choices, seen, inputs, batches, smaller)
            inputs.advance()
        chosen[task.name] = choices

    visit_blocks(data, "choose experts", visit)
    return chosen


@dataclass
class _Seen:
    """What a pass over a block shows of its mixtures: sums by layer, and with ``whole`` what they put out each time
    that they are called, and its padding, by the place of the model's call among this process's."""

    sums: dict[str, ExpertSums]
    run: Run
    whole: bool
    place: int = 0
    outputs: dict[tuple[str, int], list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        inputs = tuple(real_rows(x, token_mask) for x in inputs)
        _, index_Tk, gates, *_ = inputs
        adapter: Any = layer.adapter
        outputs = None
        for route in adapter.routes(layer.owner, inputs, None):
            of_expert = adapter.output(layer.owner, route.expert, route.rows).float()
            if outputs is None:
                outputs = of_expert.new_zeros(index_Tk.numel(), of_expert.shape[-1])
            outputs.index_copy_(0, route.slots, of_expert)
        if outputs is None:
            return
        outputs_TkR = outputs.view(*index_Tk.shape, -1)
        gates_Tk = (gates if gates.shape == index_Tk.shape else gates.gather(1, index_Tk)).float()
        self.sums[layer.name].add(outputs_TkR, index_Tk, gates_Tk, inside=adapter.gates_inside)
        if self.whole:
            whole_TR = (outputs_TkR if adapter.gates_inside else outputs_TkR * gates_Tk[..., None]).sum(1)
            held = self.run.storage.hold_activations(whole_TR), token_mask
            self.outputs.setdefault((layer.name, self.place), []).append(held)

    def of_all(self, name: str) -> ExpertSums:
        """The sums of a layer over all processes."""
        sums, run = self.sums[name], self.run
        run.processes.all_reduce("experts", [*vars(sums).values()])
        if not sums.tokens.any():
            raise ValueError(without_data(name))
        if not torch.isfinite(sums.products).all():
            raise ValueError(f"layer {name!r}: its experts put out NaN or inf; run the model in bfloat16 or float32")
        return sums


def _refitted(
    task: BlockTask,
    choices: Sequence[ExpertChoice],
    seen: _Seen,
    inputs: Inputs,
    batches: BatchNumbers,
    smaller: Smaller,
) -> list[ExpertChoice]:
    """The choices with better values for the experts that stay, by a pass over the smaller block."""
    run = seen.run
    paths = {module: path for path, module in task.block.named_modules()} if task.block is not None else {}
    calls: dict[str, list[RoutedCall]] = {choice.pool.taker.name: [] for choice in choices}
    modules: dict[str, nn.Module] = {}

    def look(block: nn.Module) -> None:
        for choice in choices:
            layer = choice.pool.taker
            modules[layer.name] = block.get_submodule(paths[layer.owner])
            (hooked,) = layer.hooked_modules
            at = block.get_submodule(paths[hooked])
            at.register_forward_pre_hook(partial(take, layer), with_kwargs=True)

    def take(layer: Layer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (left := seen.outputs.get((layer.name, seen.place))):
            return  # no token was routed
        whole, token_mask = left.pop(0)
        rows, *routed = (real_rows(x, token_mask) for x in layer.adapter.inputs(module, args, kwargs))
        inputs = run.storage.hold_activations(rows), *routed
        call = RoutedCall.of(seen.place, modules[layer.name], layer.adapter, inputs, whole.to(rows.device))
        call.lacks = run.storage.hold_activations(call.lacks)
        calls[layer.name].append(call)

    nothing = SumsOfAllProcesses(Collector(needs={}, share=False), run)
    with calls_counted(seen, inputs, run), smaller(task.name, choices, look):
        inputs.collect([], seen.see, nothing, go_on=False)
    refitted = []
    for choice in choices:
        layer = choice.pool.taker
        values, errors = refit_experts(modules[layer.name], layer.adapter, calls[layer.name], batches, run)
        refitted.append(replace(choice, values=run.storage.hold_weights(values), errors=tuple(errors)))
    modules.clear()  # their hooks hold them
    return refitted


def _choice(pool: ExpertPool, sums: ExpertSums, criterion: Criterion) -> ExpertChoice:
    fixed = criterion.experts.get(pool.taker.name)
    if fixed is not None:
        return ExpertChoice(pool, torch.tensor(list(fixed)), torch.zeros(0), sums=sums)
    stay, scores = sums.kept_by(criterion.name, pool.groups, pool.new, pool.protected)
    return ExpertChoice(pool, stay, scores, criterion.name, sums)
