"""Statistics of layer inputs, summed up while a part of the model runs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.data import PaddingError, TokenMasks, version
from modelopt_sparse.calibration.gram import add_product, completed
from modelopt_sparse.calibration.routed import ExpertSum, KeptRows, KeptStats
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.model.experts import Route, RoutedKind
from modelopt_sparse.model.layers import CONV, Layer
from modelopt_sparse.plan.plan import LayerPlan

Side = Literal["encoder", "decoder", "image"]  # the fields of TokenMasks


class SharingChanged(Exception):
    """Layers that shared an input in one call did not in another."""


class LayerInputs:
    """Calls ``see(layer, inputs, keep)`` for every input of the given layers while it is entered.

    ``keep`` is the token mask that fits the input. Each call of the model is announced by `begin`.
    """

    def __init__(
        self,
        targets: Sequence[LayerPlan],
        side_of: Callable[[nn.Module], Side],
        blocks: Sequence[nn.Module],
        see: Callable[[Layer, tuple[Tensor, ...], Tensor | None], None],
    ) -> None:
        self._layers: dict[nn.Module, list[Layer]] = {}
        for target in targets:
            for observed in target.layer.observed:
                self._layers.setdefault(observed, []).append(target.layer)
        self._token_of: dict[nn.Module, Tensor] = {}  # router -> the token of each row that it has sorted
        self._routers = {target.layer.router for target in targets if target.layer.router is not None}
        self._side_of = side_of
        self._blocks = blocks
        self._see = see
        self.seen: Callable[[nn.Module], None] = lambda module: None  # told of a module when its inputs have been seen
        self._masks = TokenMasks()
        self._foreign: list[Tensor] = []  # what a decoder block gets from the encoder
        self._inside = False
        self._hooks = ExitStack()

    def begin(self, masks: TokenMasks) -> None:
        self._masks = masks

    def __enter__(self) -> "LayerInputs":
        for block in self._blocks:
            self._hooks.enter_context(block.register_forward_pre_hook(self._on_block, with_kwargs=True))
        for module in self._layers:
            self._hooks.enter_context(module.register_forward_pre_hook(self._on_layer, with_kwargs=True))
        for router in self._routers:
            self._hooks.enter_context(router.register_forward_hook(self._on_router))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._foreign = []
        self._token_of.clear()

    def _on_router(self, router: nn.Module, args: tuple, output: Any) -> None:
        del args
        self._token_of[router] = output[1]

    def _on_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        del block
        given = [*args, *kwargs.values()]
        self._foreign = [x for x in given[1:] if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]

    def _on_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._inside:  # an adapter is running the module to see behind it
            return
        self._inside = True
        try:
            # a user's loop may run the model in inference mode, whose tensors could not be added to later
            with torch.inference_mode(False), torch.no_grad():
                for layer in self._layers[module]:
                    inputs = layer.kind.inputs(module, args, kwargs)
                    self._see(layer, inputs, self._keep(module, layer, inputs))
        finally:
            self._inside = False
        self.seen(module)

    def _keep(self, module: nn.Module, layer: Layer, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The token mask of a layer's input, shaped like its leading dimensions; None if every token is real."""
        first, *others = [self._keep_one(module, layer, x) for x in inputs]
        for x, keep in zip(inputs[1:], others):
            same = keep is first if keep is None or first is None else torch.equal(keep, first)
            if not same:
                raise self._unmatched(layer, x, "the token mask of its queries is another one")
        return first

    def _keep_one(self, module: nn.Module, layer: Layer, x: Tensor) -> Tensor | None:
        side = self._side_of(module)
        if any(x.data_ptr() == other.data_ptr() and x.shape == other.shape for other in self._foreign):
            side = "encoder"
        mask = getattr(self._masks, side)
        if mask is None:
            return None
        mask = mask.to(x.device)
        if layer.router is not None:
            return mask.flatten()[self._token_of[layer.router]]
        if layer.kind is not CONV:  # a convolution's rows are patches
            if _without_ones(x.shape[:-1]) == _without_ones(mask.shape):  # DeepSeek's latents are [B, 1, S, C]
                return mask.view(x.shape[:-1])
            if x.dim() == 2 and x.shape[0] == mask.numel():
                return mask.flatten()
        raise self._unmatched(layer, x, f"the token mask has shape {list(mask.shape)}")

    def _unmatched(self, layer: Layer, x: Tensor, why: str) -> PaddingError:
        return PaddingError(
            f"layer {layer.name!r} gets an input of shape {list(x.shape)}, and {why}: which of its rows are padding "
            "cannot be told; give batches without padding, or set count_padding=True to let padding into the "
            "statistics"
        )


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


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
        if isinstance(layer.kind, RoutedKind):
            self._add_routed(layer, layer.kind, inputs, keep)
        else:
            total = self._sums.setdefault(leader, _Sum())
            assert isinstance(total, _Sum)
            for rows in layer.kind.rows(layer.owner, inputs, keep):
                total.add(rows, gram=self._gram_needed())

    def _add_routed(self, layer: Layer, kind: RoutedKind, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
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


def input_key(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple:
    """What makes two layers' inputs the same while both are alive: the same objects, with nothing written to them in
    between, that meet the weights in the same way."""
    return (*((id(x), version(x)) for x in inputs), layer.kind.signature(layer.owner))
