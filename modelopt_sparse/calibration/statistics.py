"""Statistics of layer inputs, summed up while a part of the model runs."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from modelopt_sparse.calibration.gram import add_product, completed
from modelopt_sparse.calibration.hooks import SharingChanged, input_key
from modelopt_sparse.calibration.routed import ExpertSum, KeptRows, KeptStats
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.experts import Route, RoutedAdapter
from modelopt_sparse.model.layers import Layer


class Collector:
    """Sums up `Stats` for layers; those that get the same input in every call share one.

    The first layer to see an input leads its group. With ``share=False`` every layer sums for itself. ``everyone``:
    layer name -> experts that are to see all tokens, whatever is routed to them, in place of the routing. ``kept``:
    layers of experts whose Gram matrices are formed later.
    """

    def __init__(
        self,
        *,
        needs: Mapping[str, str],
        share: bool,
        kept: Collection[str] = (),
        everyone: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._needs = needs  # layer name -> what its method needs
        self._kept = kept
        self._everyone = everyone
        self._share = share
        self._sums: dict[str, _Sum | ExpertSum | KeptRows] = {}
        self._leader_of: dict[str, str] = {}
        self._seen: dict[tuple, str] = {}  # input -> leader, in this call of the model
        self._inputs_of: dict[str, list[tuple]] = {}  # layer name -> its inputs in this call of the model
        self._alive: list[tuple[Tensor, ...]] = []

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        key = input_key(layer, inputs)
        leader = self._seen.setdefault(key, layer.name) if self._share else layer.name
        if self._leader_of.setdefault(layer.name, leader) != leader:
            raise SharingChanged
        self._inputs_of.setdefault(layer.name, []).append(key)
        self._alive.append(inputs)
        if leader != layer.name:
            return
        if isinstance(layer.adapter, RoutedAdapter):
            self._add_routed(layer, layer.adapter, inputs, keep)
        else:
            total = self._sums.setdefault(leader, _Sum())
            assert isinstance(total, _Sum)
            for rows in layer.adapter.rows(layer.owner, inputs, keep):
                total.add(rows, gram=self._gram_needed())

    def _add_routed(self, layer: Layer, kind: RoutedAdapter, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        gram = self._needs[layer.name] == "gram"
        total = self._sums.get(layer.name)
        if total is None:
            kept = gram and layer.name in self._kept
            total = KeptRows.empty(layer, inputs[0]) if kept else ExpertSum.empty(layer, inputs[0], gram=gram)
            self._sums[layer.name] = total
        assert not isinstance(total, _Sum)
        if isinstance(total, KeptRows) and keep is None:
            inputs = tuple(x.clone() for x in inputs)  # the model may write to its own
        if self._everyone is None:
            for route in kind.routes(layer.owner, inputs, keep):
                total.add(route)
        else:
            for expert in self._everyone[layer.name]:
                total.add(Route(expert, kind.all_tokens(layer.owner, inputs, keep, expert)))

    def end_call(self) -> None:
        """The model's call is over: followers must have seen what their leader saw, and tensors may be freed."""
        seen = self._inputs_of
        if any(seen.get(name) != seen.get(leader) for name, leader in self._leader_of.items()):
            raise SharingChanged
        self._seen.clear()
        self._inputs_of.clear()
        self._alive.clear()

    def take(self) -> list[tuple[list[str], Stats | KeptStats]]:
        """(names of layers with one input, their statistics), in call order. Sums begin anew after that."""
        members: dict[str, list[str]] = {}
        for name, leader in self._leader_of.items():
            members.setdefault(leader, []).append(name)
        sums, self._sums = self._sums, {}
        return [(names, sums[leader].stats()) for leader, names in members.items() if leader in sums]

    def _gram_needed(self) -> bool:
        return "gram" in self._needs.values()


class _Sum:
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
