"""Hooks that see the inputs of layers while a model, or one of its blocks, runs."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.padding import PaddingError, SideOf, TokenMasks
from modelopt_sparse.model.adapters import CONV
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.nested import flat_tensors, version
from modelopt_sparse.plan.plan import LayerPlan

See = Callable[[Layer, tuple[Tensor, ...], Tensor | None], None]


class SharingChanged(Exception):
    """Layers that shared an input in one call did not in another."""


class InputHooks:
    """Entered, it calls ``see(layer, inputs, token_mask)`` for every input of the layers.

    ``token_mask`` (bool, True = a real token) has the leading shape of the inputs; None says that all are real. `begin`
    announces each call of the model. ``after``, if it is set, is called with a hooked module once its inputs were seen.
    """

    def __init__(
        self, layer_plans: Iterable[LayerPlan], blocks: Sequence[nn.Module], side_of: SideOf, see: See
    ) -> None:
        self._layers: dict[nn.Module, list[Layer]] = {}
        for layer_plan in layer_plans:
            for module in layer_plan.layer.hooked_modules:
                self._layers.setdefault(module, []).append(layer_plan.layer)
        self._blocks = blocks
        self._padding = _PaddingOfInputs(side_of)
        self._see = see
        self.after: Callable[[nn.Module], None] = lambda module: None
        self._inside = False
        self._hooks = ExitStack()

    def begin(self, masks: TokenMasks) -> None:
        self._padding.masks = masks

    def __enter__(self) -> "InputHooks":
        padding = self._padding
        routers = {layer.router for layers in self._layers.values() for layer in layers if layer.router is not None}
        for block in self._blocks:
            self._hooks.enter_context(block.register_forward_pre_hook(padding.on_block, with_kwargs=True))
        for module in self._layers:
            self._hooks.enter_context(module.register_forward_pre_hook(self._on_layer, with_kwargs=True))
        for router in routers:
            self._hooks.enter_context(router.register_forward_hook(padding.on_router))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._padding.forget()

    def _on_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._inside:  # an adapter is running the module to see behind it
            return
        self._inside = True
        try:
            # a user's loop may run the model in inference mode, whose tensors could not be added to later
            with torch.inference_mode(False), torch.no_grad():
                for layer in self._layers[module]:
                    inputs = layer.adapter.inputs(module, args, kwargs)
                    self._see(layer, inputs, self._padding.token_mask(module, layer, inputs))
        finally:
            self._inside = False
        self.after(module)


class _PaddingOfInputs:
    """Which token mask goes with the input of a layer, in the call of the model that runs now."""

    def __init__(self, side_of: SideOf) -> None:
        self._side_of = side_of
        self.masks = TokenMasks()
        self._from_encoder: list[Tensor] = []  # what a decoder block is given beside its hidden states
        self._token_of_row: dict[nn.Module, Tensor] = {}  # router -> the token of each row that it has sorted

    def on_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        del block
        _, *others = (*args, *kwargs.values()) or (None,)
        self._from_encoder = [x for x in others if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]

    def on_router(self, router: nn.Module, args: tuple, output: Any) -> None:
        del args
        self._token_of_row[router] = output[1]

    def forget(self) -> None:
        self._from_encoder = []
        self._token_of_row.clear()

    def token_mask(self, module: nn.Module, layer: Layer, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The token mask of a layer's inputs, shaped like their leading dimensions; None if every token is real."""
        first, *others = [self._of_one(module, layer, x) for x in inputs]
        for x, mask in zip(inputs[1:], others):
            same = mask is first if mask is None or first is None else torch.equal(mask, first)
            if not same:
                raise _unmatched(layer, x, "the token mask of its queries is another one")
        return first

    def _of_one(self, module: nn.Module, layer: Layer, x: Tensor) -> Tensor | None:
        side = self._side_of(module)
        if any(x.data_ptr() == other.data_ptr() and x.shape == other.shape for other in self._from_encoder):
            side = "encoder"
        mask = getattr(self.masks, side)
        if mask is None:
            return None
        mask = mask.to(x.device)
        if layer.router is not None:
            return mask.flatten()[self._token_of_row[layer.router]]
        if layer.adapter is not CONV:  # a convolution's rows are patches
            if _without_ones(x.shape[:-1]) == _without_ones(mask.shape):  # DeepSeek's latents are [B, 1, S, C]
                return mask.view(x.shape[:-1])
            if x.dim() == 2 and x.shape[0] == mask.numel():
                return mask.flatten()
        raise _unmatched(layer, x, f"the token mask has shape {list(mask.shape)}")


def _unmatched(layer: Layer, x: Tensor, why: str) -> PaddingError:
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


def watched_outputs(run: Callable[[], Any], modules: Sequence[nn.Module]) -> tuple[Any, list[Tensor]]:
    """What ``run`` returns, and the first output tensor of each of the ``modules`` in it."""
    outputs: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = flat_tensors(output)[0]

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(see))
        returned = run()
    return returned, [outputs[module] for module in modules]
