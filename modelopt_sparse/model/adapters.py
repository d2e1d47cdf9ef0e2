"""What a kind of layer knows: how its weight is a matrix, and what meets it. The kinds stand in layers.py and
experts.py."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Kind(ABC):
    """How one type of weight is a matrix, and where its input is seen. Stateless; one instance per kind."""

    title: str

    def matrix(self, module: Any, weight: Tensor) -> Tensor:
        """Weight as the module holds it -> ``[..., R, C]`` (a view where the layout allows it)."""
        del module
        return weight

    def unmatrix(self, module: Any, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        del module
        return matrix

    def columns(self, module: Any, weight: Tensor) -> int:
        """Consecutive input channels that an N:M group may span."""
        return self.matrix(module, weight).shape[-1]

    @abstractmethod
    def inputs(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """The tensors that meet the weight in one call of the observed module."""

    def rows(self, module: Any, inputs: tuple[Tensor, ...], keep: Tensor | None) -> Iterator[Tensor]:
        """Inputs as chunks of rows ``[..., T, C]``; ``keep`` (bool, the input's leading shape) drops padding tokens."""
        del module
        (x,) = inputs
        yield x.reshape(-1, x.shape[-1]) if keep is None else x[keep]

    def signature(self, module: Any) -> tuple:
        """Layers with the same input share statistics only if their signatures are equal."""
        del module
        return ()
