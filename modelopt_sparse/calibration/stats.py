"""Statistics of layer inputs, summed up while a part of the model runs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.batches import TokenMasks
from modelopt_sparse.layers import Layer
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.plan import LayerPlan


class SharingChanged(Exception):
    """Layers that shared an input in one call did not in another."""


class LayerInputs:
    """Calls ``see(layer, inputs, keep)`` for every input of the given layers while it is entered.

    ``keep`` is the token mask that fits the input. Each call of the model is announced by `begin`.
    """

    def __init__(
        self,
        targets: Sequence[LayerPlan],
        in_encoder: Callable[[nn.Module], bool],
        blocks: Sequence[nn.Module],
        see: Callable[[Layer, tuple[Tensor, ...], Tensor | None], None],
    ) -> None:
        self._layers: dict[nn.Module, list[Layer]] = {}
        for target in targets:
            for observed in target.layer.observed:
                self._layers.setdefault(observed, []).append(target.layer)
        self._in_encoder = in_encoder
        self._blocks = blocks
        self._see = see
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
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._foreign = []

    def _on_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        del block
        given = [*args, *kwargs.values()]
        self._foreign = [x for x in given[1:] if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]

    def _on_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._inside:  # an adapter is running the module to see behind it
            return
        self._inside = True
        try:
            for layer in self._layers[module]:
                inputs = layer.kind.inputs(module, args, kwargs)
                with torch.no_grad():
                    self._see(layer, inputs, self._keep(layer, inputs[0]))
        finally:
            self._inside = False

    def _keep(self, layer: Layer, x: Tensor) -> Tensor | None:
        """The token mask of one input, shaped like its leading dimensions; None if every token is real."""
        encoder_side = self._in_encoder(layer.owner) or any(
            x.data_ptr() == other.data_ptr() and x.shape == other.shape for other in self._foreign
        )
        mask = self._masks.encoder if encoder_side else self._masks.decoder
        if mask is None:
            return None
        mask = mask.to(x.device)
        if x.shape[:-1] == mask.shape:
            return mask
        if x.dim() == 2 and x.shape[0] == mask.numel():
            return mask.flatten()
        raise ValueError(
            f"layer {layer.name!r} gets an input of shape {list(x.shape)}, and the token mask has shape "
            f"{list(mask.shape)}: which of its rows are padding cannot be told; give batches without padding, or set "
            "count_padding=True to let padding into the statistics"
        )


class Collector:
    """Sums up `Stats` for layers; those that get the same input in every call share one.

    The first layer to see an input leads its group. With ``share=False`` every layer sums for itself.
    """

    def __init__(self, *, needs: dict[str, str], share: bool) -> None:
        self._needs = needs  # layer name -> what its method needs
        self._share = share
        self._sums: dict[str, _Sum] = {}
        self._leader_of: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._seen: dict[tuple, str] = {}
        self._alive: list[tuple[Tensor, ...]] = []

    def see(self, layer: Layer, inputs: tuple[Tensor, ...], keep: Tensor | None) -> None:
        key = (*(_identity(x) for x in inputs), layer.kind.signature(layer.owner))
        leader = self._seen.setdefault(key, layer.name) if self._share else layer.name
        if self._leader_of.setdefault(layer.name, leader) != leader:
            raise SharingChanged
        self._calls[layer.name] = self._calls.get(layer.name, 0) + 1
        self._alive.append(inputs)
        if leader == layer.name:
            total = self._sums.setdefault(leader, _Sum())
            for rows in layer.kind.rows(layer.owner, inputs, keep):
                total.add(rows, gram=self._gram_needed())

    def end_call(self) -> None:
        """The model's call is over: tensors may be freed, and followers must have kept up with their leader."""
        self._seen.clear()
        self._alive.clear()
        if any(self._calls[name] != self._calls[leader] for name, leader in self._leader_of.items()):
            raise SharingChanged

    def groups(self) -> list[tuple[list[str], Stats]]:
        """(names of layers with one input, their statistics), in call order."""
        members: dict[str, list[str]] = {}
        for name, leader in self._leader_of.items():
            members.setdefault(leader, []).append(name)
        return [(names, self._sums[leader].stats()) for leader, names in members.items()]

    def _gram_needed(self) -> bool:
        return "gram" in self._needs.values()


class _Sum:
    """A running sum in float32, or float64 for float64 inputs."""

    def __init__(self) -> None:
        self.tokens = 0
        self.square_sums: Tensor | None = None
        self.gram: Tensor | None = None

    def add(self, rows: Tensor, *, gram: bool) -> None:
        rows = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
        self.tokens += rows.shape[-2]
        if gram:
            if self.gram is None:
                self.gram = rows.new_zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1])
            if rows.dim() == 2:
                self.gram.addmm_(rows.mT, rows)
            else:
                self.gram.baddbmm_(rows.mT, rows)
        else:
            squares = rows.square().sum(-2)
            self.square_sums = squares if self.square_sums is None else self.square_sums + squares

    def stats(self) -> Stats:
        if self.gram is not None:
            return Stats(self.tokens, self.gram.diagonal(dim1=-2, dim2=-1).clone(), self.gram)
        assert self.square_sums is not None
        return Stats(self.tokens, self.square_sums)


def _identity(x: Tensor) -> tuple:
    """What makes two inputs the same while both are alive: the object, and that nothing wrote to it in between."""
    return (id(x), 0 if x.is_inference() else x._version)
