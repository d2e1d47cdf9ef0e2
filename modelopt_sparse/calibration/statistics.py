"""Statistics of layer inputs, summed up while the model runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelopt_sparse.calibration.gram import add_product, completed
from modelopt_sparse.calibration.hooks import SharingChanged, input_key
from modelopt_sparse.calibration.routed import DeferredStats, ExpertSums, RoutedTokens
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.experts import Route, RoutedAdapter
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.plan import LayerPlan

# (names of layers with one input, their statistics), in call order
Groups = list[tuple[list[str], Stats | DeferredStats]]


@dataclass(frozen=True)
class SharedInput:
    """Layers with one input, and its statistics; None where their methods need none."""

    layer_plans: list[LayerPlan]
    stats: Stats | DeferredStats | None


@dataclass(frozen=True)
class InputFacts:
    """What a report says of a layer's input: how many tokens it had in all and by expert, what the error of the layer
    is measured with (see `reports.report.ERROR_FROM`), and how many of its channels (those of all its matrices) were
    zero in all of them. ``square_sums``: ``[..., C]``, of its channels."""

    tokens: int
    expert_tokens: list[int]
    error_from: str
    channels: int = 0
    dead: int = 0
    square_sums: Tensor | None = None

    @classmethod
    def of(cls, stats: Stats | DeferredStats | None) -> "InputFacts":
        if stats is None:
            return cls(0, [], "weights")
        formed = isinstance(stats, DeferredStats) or stats.gram is not None
        counts = [] if stats.counts is None else stats.counts.tolist()
        sums = stats.filled_square_sums() if isinstance(stats, DeferredStats) else stats.square_sums
        dead = int((sums == 0).sum())
        return cls(stats.tokens, counts, "gram" if formed else "square_sums", sums.numel(), dead, sums)


@dataclass
class _CallOfModel:
    """What was seen in one call of the model. Inputs are held, so that no id is taken twice."""

    leader_of_input: dict[tuple, str] = field(default_factory=dict)
    inputs_of_layer: dict[str, list[tuple]] = field(default_factory=dict)
    alive: list[tuple[Tensor, ...]] = field(default_factory=list)


class Collector:
    """Sums up `Stats` for layers; those that get the same input in every call share one.

    needs: layer name -> what its method needs.
    share: False lets every layer sum for itself. The first layer to see an input leads those that share it.
    deferred: layers of experts whose Gram matrices are formed later, from their tokens.
    all_tokens: layer name -> experts that are to see all tokens, in the place of those that are routed to them.
    """

    def __init__(
        self,
        *,
        needs: Mapping[str, str],
        share: bool,
        deferred: Collection[str] = (),
        all_tokens: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._needs = needs
        self._share = share
        self._deferred = deferred
        self._all_tokens = all_tokens
        self._sums: dict[str, RunningSum | ExpertSums | RoutedTokens] = {}
        self._leader_of: dict[str, str] = {}
        self._call = _CallOfModel()

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        key = input_key(layer, inputs)
        leader = self._call.leader_of_input.setdefault(key, layer.name) if self._share else layer.name
        if self._leader_of.setdefault(layer.name, leader) != leader:
            raise SharingChanged
        self._call.inputs_of_layer.setdefault(layer.name, []).append(key)
        self._call.alive.append(inputs)
        if leader != layer.name:
            return
        if isinstance(layer.adapter, RoutedAdapter):
            self._add_routed(layer, layer.adapter, inputs, token_mask)
        else:
            total = self._sums.setdefault(leader, RunningSum())
            assert isinstance(total, RunningSum)
            for rows in layer.adapter.rows(layer.owner, inputs, token_mask):
                total.add(rows, gram="gram" in self._needs.values())

    def _add_routed(
        self, layer: Layer, adapter: RoutedAdapter, inputs: tuple[Tensor, ...], token_mask: Tensor | None
    ) -> None:
        gram = self._needs[layer.name] == "gram"
        total = self._sums.get(layer.name)
        if total is None:
            deferred = gram and layer.name in self._deferred
            total = RoutedTokens.empty(layer, inputs[0]) if deferred else ExpertSums.empty(layer, inputs[0], gram=gram)
            self._sums[layer.name] = total
        assert not isinstance(total, RunningSum)
        if isinstance(total, RoutedTokens) and token_mask is None:
            inputs = tuple(x.clone() for x in inputs)  # the model may write to its own
        if self._all_tokens is None:
            for route in adapter.routes(layer.owner, inputs, token_mask):
                total.add(route)
        else:
            for expert in self._all_tokens[layer.name]:
                total.add(Route(expert, adapter.all_tokens(layer.owner, inputs, token_mask, expert)))

    def end_call(self) -> None:
        """The model's call is over: followers must have seen what their leader saw, and tensors may be freed."""
        seen = self._call.inputs_of_layer
        if any(seen.get(name) != seen.get(leader) for name, leader in self._leader_of.items()):
            raise SharingChanged
        self._call = _CallOfModel()

    def take(self) -> Groups:
        """The statistics up to now. Sums begin anew after that."""
        members: dict[str, list[str]] = {}
        for name, leader in self._leader_of.items():
            members.setdefault(leader, []).append(name)
        sums, self._sums = self._sums, {}
        return [(names, sums[leader].stats()) for leader, names in members.items() if leader in sums]


class RunningSum:
    """A running sum in float32, or float64 for float64 inputs."""

    def __init__(self) -> None:
        self.tokens = 0
        self.square_sums: Tensor | None = None
        self.gram: Tensor | None = None

    def add(self, rows: Tensor, *, gram: bool) -> None:
        rows = rows.detach()
        self.tokens += rows.shape[-2]
        if gram:
            self.gram = add_product(self.gram, rows)
        else:
            squares = rows.to(torch.promote_types(rows.dtype, torch.float32)).square().sum(-2)
            self.square_sums = squares if self.square_sums is None else self.square_sums + squares

    def stats(self) -> Stats:
        if self.gram is not None:
            gram = completed(self.gram)
            return Stats(self.tokens, gram.diagonal(dim1=-2, dim2=-1).clone(), gram)
        assert self.square_sums is not None
        return Stats(self.tokens, self.square_sums)
