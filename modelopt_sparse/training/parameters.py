"""One parameter while it is trained sparse: its values, its mask, its gradient, its optimizers' state."""

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.distributed import full
from modelopt_sparse.model.masking import apply_masks, update_mask, zero_state
from modelopt_sparse.model.offload import stored
from modelopt_sparse.model.zeros import dense_gradient
from modelopt_sparse.training.record import rewrite
from modelopt_sparse.training.weights import Weight


class SparseParameter:
    """A parameter that carries a mask. The model holds it, its mask and its gradient; nothing is held here.

    name: its first name in ``model.named_parameters()``.
    """

    def __init__(self, weight: Weight, algorithm: Any, model: nn.Module) -> None:
        self.name = weight.name
        self.weight = weight
        self._algorithm, self._model = algorithm, model  # for the report's entry
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter itself, as it is at present: `fully_shard` puts another in its place."""
        return self.weight.parameter

    @property
    def data(self) -> Tensor:
        """Its values. They share its memory, unless it is sharded: then they are gathered from all processes."""
        module, name = self.weight.holders[0]
        return full(stored(module, name).detach())

    @property
    def mask(self) -> Tensor:
        """Its mask (bool, True = kept), whole on every process. Assigning one changes it in place, in every module that
        holds the parameter, and zeroes the weight and its optimizers' state where it is False."""
        module, name = self.weight.holders[0]
        return module.get_buffer(f"{name}_mask")

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        for module, name in self.weight.holders:
            update_mask(module, name, mask)
        self.zero_states()
        self.write_report()

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient in all places, on steps that let gradients through; gathered if it is sharded."""
        gradient = self.parameter.grad
        return None if gradient is None else dense_gradient(full(gradient.detach()), self.mask)

    def write_report(self) -> None:
        """Bring its entry in the model's report up to date."""
        rewrite(self._model, self.weight, self._algorithm, self.mask)

    def zero(self) -> None:
        """Write +0.0 to pruned places of the weight and of its optimizers' state, whatever has written there."""
        for module, _ in self.weight.holders:
            apply_masks(module, recurse=False)
        self.zero_states()

    def zero_states(self) -> None:
        """The optimizers' half of `zero`."""
        for optimizer in self.optimizers:
            zero_state(optimizer, self.parameter, self.mask)
