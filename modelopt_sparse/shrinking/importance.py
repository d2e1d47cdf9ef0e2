"""What of a model goes: blocks, by the divergence without each; channels, by sums of what layers take in; and experts,
by sums over the tokens that the router sends to each.

Nothing is changed here but for the length of a call of the model. Shape letters: R rows, C columns (channels), K those
that stay, B batch, S sequence, T tokens, k experts chosen for each, E experts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.repair import Teacher
from modelopt_sparse.accuracy.tuning import BatchNumbers, called_with
from modelopt_sparse.calibration.blocks import BlockTask, blocks_in_call_order
from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.data import samples
from modelopt_sparse.calibration.forward import CalibrationData, NumberedCall, forward_context
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import Collector, SumsOfAllProcesses, warn_of_few_tokens, without_data
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.adapters import real_rows
from modelopt_sparse.model.devices import flat_tensors, forward_replaced
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.text import Progress
from modelopt_sparse.reports.values import Shrunk
from modelopt_sparse.shrinking.least_squares import RoutedCall, gram_scores, largest, refit, refit_experts
from modelopt_sparse.shrinking.resize import Depth, ExpertPool, Pool

SAMPLES = 8  # rows of data that blocks are chosen by
JUDGING = " (held back)"  # added to a layer's name where its inputs judge
OTHER_KIND = "the others would be of another kind at their new places"


@dataclass(frozen=True)
class Judge:
    """How far the model is from what it was. ``teacher``: what it put out then; None where that is not compared."""

    teacher: Teacher | None
    batches: BatchNumbers

    def kl(self, numbers: range | None = None) -> float:
        """The mean divergence on batches of these numbers; None: those that are held back."""
        assert self.teacher is not None  # streaming refuses what asks for it
        batches = self.batches if numbers is None else replace(self.batches, held_back=numbers)
        return batches.judged(self.teacher.divergence)

    def measure(self, step: str, shrunk: Shrunk) -> None:
        """Note the divergence after a step, where there is one."""
        if self.teacher is not None:
            shrunk.kl[step] = self.kl()

    def few(self) -> range:
        """Numbers of the last batches that do not judge, with about SAMPLES rows."""
        assert self.teacher is not None
        calls, end = self.teacher.data.calls or [], self.batches.tuned_on
        rows = max(samples(calls[0].args, calls[0].kwargs), 1) if calls else SAMPLES
        return range(max(0, end - math.ceil(SAMPLES / rows)), end)


# blocks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def skipped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """While entered, these blocks put out what they are called with, wherever else they are called."""

    def skip(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, hidden = forward(*args, **kwargs), flat_tensors((args, kwargs))[0]
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    with ExitStack() as undo:
        for block in blocks:
            undo.enter_context(forward_replaced(block, skip))
        yield


def blocks(judge: Judge, depth: Depth, gone: int, run: Run, shrunk: Shrunk) -> list[int]:
    """The places of the blocks that stay; what was tried is noted in ``shrunk``.

    One block goes after the other: each time the one without which the model's output changes least. Blocks after
    which the others would not be what they are now are left out.
    """
    stack = depth.stack
    stay = list(range(len(stack.blocks)))
    numbers = judge.few()
    for _ in range(gone):
        divergences: dict[int, float] = {}
        with Progress("choose blocks", "block", len(stay), show=run.config.progress) as bar:
            for place in stay:
                bar.update()
                rest = [other for other in stay if other != place]
                try:
                    depth.check(rest)
                except ValueError:
                    continue
                with skipped([block for i, block in enumerate(stack.blocks) if i not in rest]):
                    divergences[place] = judge.kl(numbers)
        if not divergences:
            raise ValueError(f"no block of {stack.name!r} can go: {OTHER_KIND}")
        stay.remove(min(divergences, key=lambda place: (divergences[place], place)))
        shrunk.tried.append({stack.names[place]: divergence for place, divergence in divergences.items()})
    return stay


def blocks_by_influence(
    data: CalibrationData, batches: BatchNumbers, depth: Depth, gone: int, shrunk: Shrunk
) -> list[int]:
    """The places of the blocks that stay, by one pass over the model; the influences are noted in ``shrunk``.

    Those with the least influence go, but for blocks without which the others would not be what they are now.
    """
    stack = depth.stack
    influences: dict[int, float] = {}

    def visit(task: BlockTask, inputs: Inputs, run: Run) -> None:
        if task.block in stack.blocks:
            if not isinstance(inputs, AtBlock):
                raise ValueError(f"blocks of {stack.name!r} cannot be run by themselves: give blocks_by='kl'")
            with forward_context(run):
                influences[stack.blocks.index(task.block)] = _influence(inputs, batches)
        inputs.advance()

    visit_blocks(data, "choose blocks", visit)
    shrunk.tried.append({stack.names[place]: influence for place, influence in sorted(influences.items())})
    stay = list(range(len(stack.blocks)))
    for place in sorted(influences, key=lambda place: (influences[place], place)):
        rest = [other for other in stay if other != place]
        with suppress(ValueError):
            depth.check(rest)
            stay = rest
        if len(stay) == len(stack.blocks) - gone:
            return stay
    raise ValueError(f"{gone} blocks of {stack.name!r} cannot go one after the other: {OTHER_KIND}")


def _see_first(seen: list[Tensor], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Hold the first tensor that a module is called with."""
    seen.append(flat_tensors((args, kwargs))[0])


def _influence(inputs: AtBlock, batches: BatchNumbers) -> float:
    """1 - the mean cosine between the hidden states of a token before and after the block: ShortGPT's block influence
    (Men et al. 2024, arXiv 2403.03853, equation 1)."""
    own: dict[int, tuple[float, int]] = {}
    for index, call in enumerate(inputs.calls):
        states: list[Tensor] = []
        see = partial(_see_first, states)
        with inputs.block.register_forward_pre_hook(see, with_kwargs=True):
            (after,) = inputs.outputs_of([inputs.block], index)
        before = states[-1].to(after.device)
        cosines = torch.cosine_similarity(before.double(), after.double(), dim=-1)
        mask = call.numbered.masks.at(inputs.data.sides[inputs.block])
        if mask is not None and mask.shape == cosines.shape:
            cosines = cosines[mask.to(cosines.device, torch.bool)]
        own[call.numbered.number] = float((1 - cosines).sum()), cosines.numel()
    everything = replace(batches, held_back=range(batches.held_back.stop))
    return everything.judged(lambda place: own.get(place, (0.0, 0)))


# channels -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Of the channels of one layer: those that stay ``[K]``, the values ``[R, K]`` of the layer that takes them, the
    score of each, and the error of the layer's output as is and with these values."""

    pool: Pool
    stay: Tensor
    values: Tensor
    scores: Tensor
    errors: tuple[float, float]

    def full_width(self, *, refitted: bool) -> Tensor:
        """The layer's values, with zeros for the channels that go; ``refitted``: with the new values for the others."""
        old = self.pool.taker.matrix(self.pool.taker.values)
        stay = self.stay.to(old.device)
        values = self.values.to(old.device) if refitted else old[:, stay]
        return self.pool.taker.unmatrix(torch.zeros_like(old).index_copy(1, stay, values))


def with_channels(choices: Sequence[Choice], *, refitted: bool) -> AbstractContextManager[None]:
    """While entered, layers are called with zeros for the channels that go."""
    return called_with({choice.pool.taker: partial(choice.full_width, refitted=refitted) for choice in choices})


@dataclass(frozen=True)
class Criterion:
    """How it is chosen what goes. Channels and experts: by what score, whether the layer that takes channels gets
    better values, and ``fixed``, ``experts``: layer name -> the channels, or experts, that stay, chosen before.
    ``blocks``: what they are chosen by."""

    name: str
    refit: bool
    fixed: Mapping[str, Sequence[int]]
    blocks: str = "kl"
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class _Seen:
    """Sums of the inputs of a block's takers, apart for the batches that judge. place: of the present call of the model
    among this process's.

    absolute: layer name -> the sum over windows of the squared mean of |x|, ``[C]``: ModelOpt's.
    """

    collector: Collector
    sums: SumsOfAllProcesses
    judging: set[int]
    place: int = 0
    absolute: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, numbered: NumberedCall) -> None:
        self.sums.next_call()
        self.place = numbered.number

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        judges = self.place in self.judging
        self.collector.see(replace(layer, name=layer.name + JUDGING) if judges else layer, inputs, token_mask)
        x_BSC = inputs[0].detach().abs().float()
        real = torch.ones(x_BSC.shape[:-1], device=x_BSC.device) if token_mask is None else token_mask.float()
        if x_BSC.dim() == 2:
            x_BSC, real = x_BSC[None], real[None]
        means = (x_BSC * real[..., None]).sum(-2) / real.sum(-1, keepdim=True).clamp_min(1)
        sums = means.flatten(0, -2).square().sum(0)
        self.absolute[layer.name] = self.absolute.get(layer.name, torch.zeros_like(sums)) + sums


def channels(
    data: CalibrationData,
    pools: Mapping[str, Sequence[Pool]],
    judge: Judge,
    criterion: Criterion,
) -> dict[str, list[Choice]]:
    """Block -> what stays of the channels of each of its ``pools``. One pass over the model as it is now."""
    choices: dict[str, list[Choice]] = {}

    def visit(task: BlockTask, inputs: Inputs, run: Run) -> None:
        chosen = {pool.taker.name: pool for pool in pools.get(task.name, ())}
        takers = [plan for plan in task.layer_plans if plan.name in chosen]
        if not takers:
            inputs.advance()
            return
        sums = _sums(takers, inputs, judge.batches, run)
        of_block = [_choice(chosen[name], *of_layer, criterion) for name, of_layer in sums.items()]
        choices[task.name] = [replace(each, values=run.storage.hold_weights(each.values)) for each in of_block]

    visit_blocks(data, "choose channels", visit)
    return choices


def visit_blocks(data: CalibrationData, title: str, visit: Callable[[BlockTask, Inputs, Run], None]) -> None:
    """Call ``visit`` for block by block, which lets the calls go on, and changes nothing; its weights can be read."""
    run = replace(data.run, config=replace(data.run.config, reconstruct=None))
    tasks = blocks_in_call_order(run, replace(data, run=run))
    with Progress(title, "block", len(tasks), show=run.config.progress) as bar:
        for task in tasks:
            bar.say(task.name, run.memory_in_use())
            inputs = task.inputs()
            if task.block is not None:
                run.storage.load(task.block)
            with inputs.on_device():
                visit(task, inputs, run)
            bar.update()


def any_channels(pool: Pool) -> Choice:
    """Some of the channels, to try with."""
    stay = torch.randperm(pool.span.old, generator=torch.Generator().manual_seed(0))[: pool.span.new].sort().values
    return Choice(pool, stay, torch.empty(0), torch.empty(0), (0.0, 0.0))


def _sums(
    takers: Sequence[LayerPlan], inputs: Inputs, batches: BatchNumbers, run: Run
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer name -> (the Gram matrix of the batches that are fitted to, that of those that judge, ModelOpt's sums)."""
    names = [plan.name for plan in takers]
    collector = Collector(needs=dict.fromkeys([*names, *(name + JUDGING for name in names)], "gram"), share=False)
    judging_calls = {batches.own[number] for number in batches.held_back if number in batches.own}
    sums = SumsOfAllProcesses(collector, run)
    seen = _Seen(collector, sums, judging_calls)
    inputs.collect(takers, seen.see, seen.begin, go_on=True)
    groups = sums.groups() or []  # layers that share no input
    stats = {name: each for of_layer, each in groups for name in of_layer if isinstance(each, Stats)}
    run.processes.all_reduce("scores", [seen.absolute[name] for name in names])
    grams = {}
    for name in names:
        fitted, judging = stats.get(name), stats.get(name + JUDGING)
        if fitted is None or judging is None or fitted.gram is None or judging.gram is None:
            raise ValueError(without_data(name))
        if not torch.isfinite(fitted.gram).all() or not torch.isfinite(judging.gram).all():
            raise ValueError(f"layer {name!r}: its input holds NaN or inf; run the model in bfloat16 or float32")
        warn_of_few_tokens(name, fitted, run.report)
        grams[name] = fitted.gram, judging.gram, seen.absolute[name]
    return grams


def _choice(pool: Pool, fitted_CC: Tensor, judging_CC: Tensor, absolute_C: Tensor, criterion: Criterion) -> Choice:
    layer, count = pool.taker, pool.span.new
    weight_RC = layer.matrix(layer.values).to(fitted_CC.device)
    gram_CC = fitted_CC + judging_CC
    if layer.name in criterion.fixed:
        scores = torch.zeros(0)
        stay = torch.tensor(list(criterion.fixed[layer.name]), device=gram_CC.device)
    elif criterion.name == "gram":
        stay, scores = gram_scores(weight_RC, gram_CC, count)
    else:
        scores = (gram_CC.diagonal() if criterion.name == "norm" else absolute_C).sqrt()
        stay = largest(scores, count)
    values, as_is, least = refit(weight_RC, stay, fitted_CC, judging_CC)
    if not criterion.refit:
        values, least = weight_RC[:, stay], as_is
    return Choice(pool, stay.cpu(), values.to(layer.values.device), scores.cpu(), (as_is, least))


# experts --------------------------------------------------------------------------------------------------------------


TOKENS = 1024  # whose outputs are multiplied with each other at a time


@dataclass
class ExpertSums:
    """Of a mixture: sums over real tokens, with the gates that the model applies, in float64.

    tokens, gates, gated_norms: ``[E]``, of each expert over the tokens that are routed to it: how many, and the sums of
    its gate g, and of g times the norm of what it puts out f. Where gates scale what experts get (Llama 4), f is what
    comes of it, and is not multiplied by g again.
    products: ``[E, E]``, the sums of the inner products of g f of two experts that the same token is routed to.
    """

    tokens: Tensor
    gates: Tensor
    gated_norms: Tensor
    products: Tensor

    @classmethod
    def of(cls, experts: int) -> "ExpertSums":
        tokens, gates, gated_norms, *products = torch.zeros(3 + experts, experts, dtype=torch.float64)
        return cls(tokens, gates, gated_norms, torch.stack(products))

    def add(self, outputs_TkR: Tensor, index_Tk: Tensor, gates_Tk: Tensor, *, inside: bool = False) -> None:
        """Add some tokens; ``inside``: gates have scaled what the experts get. An index of E or more: an expert without
        weights, which is left out."""
        known_Tk = index_Tk < len(self.tokens)
        index = index_Tk.where(known_Tk, 0).cpu()
        counted_Tk = known_Tk.double()
        factors_Tk = counted_Tk if inside else gates_Tk * counted_Tk
        for total, values in (
            (self.tokens, counted_Tk),
            (self.gates, gates_Tk * counted_Tk),
            (self.gated_norms, outputs_TkR.norm(dim=-1) * factors_Tk),
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

        "reap": the mean of gate times norm (Lasby et al. 2025, REAP, arXiv 2510.13999). "reap_sum": their sum.
        "frequency": its tokens. Experts that no token reached have 0.
        """
        mean = self.gated_norms / self.tokens.clamp_min(1)
        return {"reap": mean, "reap_sum": self.gated_norms, "frequency": self.tokens}[criterion]

    def kept_by(self, criterion: str, groups: int, count: int, protected: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """(the ``count`` experts that stay, as many in each of ``groups``, ascending; a score for each)."""
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


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of a mixture that stay ``[K]``, ascending, and what they were chosen by: a score for each; without
    scores they were given.

    values: of their last matrices, shaped like the parameter; None: those that they have. errors: of the mixture's
    output with the smaller one's own routes, as is and with these, on the batches that judge.
    """

    pool: ExpertPool
    stay: Tensor
    scores: Tensor
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
        seen = _SeenExperts(
            {name: ExpertSums.of(pool.old) for name, pool in of_layer.items()}, run, whole=criterion.refit
        )
        takers = [plan for plan in task.layer_plans if plan.name in of_layer]
        inputs.collect(takers, seen.see, seen.begin, go_on=not criterion.refit)
        choices = [_chosen_experts(pool, seen.of_all(name), criterion) for name, pool in of_layer.items()]
        if criterion.refit:
            choices = _refitted(task, choices, seen, inputs, batches, smaller)
            inputs.advance()
        chosen[task.name] = choices

    visit_blocks(data, "choose experts", visit)
    return chosen


@dataclass
class _SeenExperts:
    """What a pass over a block shows of its mixtures: sums by layer, and with ``whole`` what they put out each time
    that they are called, and its padding, by the place of the model's call among this process's."""

    sums: dict[str, ExpertSums]
    run: Run
    whole: bool
    place: int = 0
    outputs: dict[tuple[str, int], list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)

    def begin(self, numbered: NumberedCall) -> None:
        self.place = numbered.number

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
    seen: _SeenExperts,
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

    with smaller(task.name, choices, look):
        inputs.collect([], seen.see, seen.begin, go_on=False)
    refitted = []
    for choice in choices:
        layer = choice.pool.taker
        values, errors = refit_experts(modules[layer.name], layer.adapter, calls[layer.name], batches, run)
        refitted.append(replace(choice, values=run.storage.hold_weights(values), errors=tuple(errors)))
    modules.clear()  # their hooks hold them
    return refitted


def _chosen_experts(pool: ExpertPool, sums: ExpertSums, criterion: Criterion) -> ExpertChoice:
    fixed = criterion.experts.get(pool.taker.name)
    if fixed is not None:
        return ExpertChoice(pool, torch.tensor(list(fixed)), torch.zeros(0), sums=sums)
    stay, scores = sums.kept_by(criterion.name, pool.groups, pool.new, pool.protected)
    return ExpertChoice(pool, stay, scores, sums)
