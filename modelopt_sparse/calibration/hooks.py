"""Hooks that see the inputs of layers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.padding import PaddingError, Side, TokenMasks
from modelopt_sparse.model.adapters import CONV
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.nested import version
from modelopt_sparse.plan.plan import LayerPlan


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
            for observed in target.layer.hooked_modules:
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
                    inputs = layer.adapter.inputs(module, args, kwargs)
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
        if layer.adapter is not CONV:  # a convolution's rows are patches
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


def input_key(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple:
    """What makes two layers' inputs the same while both are alive: the same objects, with nothing written to them in
    between, that meet the weights in the same way."""
    return (*((id(x), version(x)) for x in inputs), layer.adapter.signature(layer.owner))
