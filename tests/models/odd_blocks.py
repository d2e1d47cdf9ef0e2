"""Blocks for `Stacked` whose layers share weights or inputs, wholly or in part."""

from torch import Tensor, nn

from tests.models.stacked import Block, Stacked


class TwinBlock(Block):
    """Two modules that hold one Parameter, and see two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.second(self.first(x).relu()))


class TwinsAcross(Stacked):
    """Blocks 0 and 2 share the weight of ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class ModuleAcross(Stacked):
    """Blocks 0 and 2 share the module ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


class Mixing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(16, 16), nn.Linear(16, 16)


class Again(Mixing):
    """Calls one layer twice, with two inputs, of which the first is another layer's as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(x) + self.mix(x)
        return super().forward(self.mix(y.relu()))


class SameTwice(Mixing):
    """Both layers are called twice; but one of them with the same input."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        return super().forward(self.mix(x) + self.mix(y) + self.other(x) + self.other(x))


class Sometimes(Mixing):
    """Layers share an input in large batches only."""

    def forward(self, x: Tensor) -> Tensor:
        y = x if len(x) > 5 else x * 2
        return super().forward(self.mix(x) + self.other(y))


class WrittenBetween(Mixing):
    """The second layer gets the tensor of the first one, with something else in it by then."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        z = self.mix(y)
        return super().forward(self.other(y.add_(z)) + z)
