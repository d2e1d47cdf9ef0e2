"""Where the weights of blocks and the activations between them are held while a run goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from modelopt_sparse.reports.report import Report


class Unreadable(ValueError):
    """The weights of a block cannot be read, now that they are needed."""


@dataclass(frozen=True)
class OpenBlock:
    """A block that is worked on. ``write_sparse_weights``: of a block that an earlier run has made sparse, so that only
    its output is needed; it puts that run's weights in the place of the dense ones. None: of all others."""

    write_sparse_weights: Callable[[], None] | None = None


class Storage(ABC):
    """What holds the blocks of a model. ``resident``: all at once, so that the whole model can be called at any time.
    ``spills``: activations are held on disk. ``reused``: how many blocks so far are those of a run that was stopped."""

    resident = True
    spills = False
    reused = 0

    @abstractmethod
    def open(self, block: nn.Module | None, report: Report) -> AbstractContextManager[OpenBlock]:
        """Entered for all the work on one block (None: on what is in no block), one block after the other."""

    @abstractmethod
    def load(self, module: nn.Module) -> None:
        """Make the weights of a block's ``module`` readable until another block is asked for."""

    @abstractmethod
    def hold_activations(self, x: Tensor) -> Tensor:
        """The same values, wherever activations are held from one block to the next."""

    @abstractmethod
    def check_whole_runs(self, why: str) -> None:
        """Raise ValueError if a stack cannot be calibrated by a run of the whole model for each block."""


class InMemory(Storage):
    """A model in memory: every block can be read and written at any time."""

    @contextmanager
    def open(self, block: nn.Module | None, report: Report) -> Iterator[OpenBlock]:
        del block, report
        yield OpenBlock()

    def load(self, module: nn.Module) -> None:
        del module

    def hold_activations(self, x: Tensor) -> Tensor:
        return x

    def check_whole_runs(self, why: str) -> None:
        del why
