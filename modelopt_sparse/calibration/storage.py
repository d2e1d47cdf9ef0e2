"""The turns of a walk: what happens before and after a block is worked on. Where the model is in memory, nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from modelopt_sparse.reports.report import Report


class Unreadable(ValueError):
    """The weights of a block cannot be read, now that its turn has come."""


class Turn:
    """One block's turn. ``done``: an earlier run has solved the block, and only its output is needed; `make_sparse`
    then puts that run's weights in the place of the dense ones."""

    done = False

    def make_sparse(self) -> None:
        raise AssertionError("no earlier run has solved this block")


class Turns:
    """A model in memory, of which every block can be read and written at any time. `streaming` has another kind, which
    reads a block's weights when its turn comes and writes them when it is over. ``spills``: what is kept is on disk."""

    spills = False

    @contextmanager
    def turn(self, block: nn.Module | None, report: Report) -> Iterator[Turn]:
        """Entered for all the work on one block (None: what is in no block), in the order of the walk."""
        del block, report
        yield Turn()

    def load(self, module: nn.Module) -> None:
        """Make the weights of a block's ``module`` readable until another block is asked for."""

    def keep(self, activations: Tensor) -> Tensor:
        """Activations that are held from one block to the next, wherever they are to be held."""
        return activations

    def check_whole_runs(self, why: str) -> None:
        """Raise ValueError if a stack cannot be calibrated by a run of the whole model for each block."""
