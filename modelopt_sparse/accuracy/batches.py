"""The calibration batches that something is tuned on, by numbers that all processes agree on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_sparse.calibration.data import judging
from modelopt_sparse.distributed import Processes


@dataclass(frozen=True)
class BatchNumbers:
    """The batches of all processes: the first of every rank, the second of every rank, and so on. Text that the model
    has written stands first.

    ranks: which process has each batch. own: number -> the place among this process's batches.
    held_back: the last ones, which are the user's, and only judge.
    """

    processes: Processes
    ranks: list[int]
    own: dict[int, int]
    held_back: range

    @classmethod
    def of(cls, processes: Processes, batches: int, written: int) -> "BatchNumbers":
        """``batches``: how many this process has; ``written``: how many of all processes' the model has written."""
        counts = processes.all_gather("the batches to tune by", batches)
        places = [(rank, i) for i in range(max(counts)) for rank, count in enumerate(counts) if i < count]
        own = {number: place for number, (rank, place) in enumerate(places) if rank == processes.rank}
        count = len(places)
        return cls(processes, [rank for rank, _ in places], own, range(count - judging(count - written), count))

    @property
    def tuned_on(self) -> int:
        """How many batches, the first ones, are tuned on."""
        return self.held_back.start

    def of_all(self, what: str, own: Mapping[int, float]) -> dict[int, float]:
        """Numbers of all processes' batches, from those of this one's."""
        of_ranks = self.processes.all_gather(what, dict(own))
        return {number: value for of_rank in of_ranks for number, value in of_rank.items()}

    def shared(self, number: int, own: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of one batch, in all processes, from the one that has it; ``like`` has their shapes."""
        processes, rank = self.processes, self.ranks[number]
        if processes.size == 1:
            return list(own)
        there = processes.all_gather("a gradient", [gradient is not None for gradient in own])[rank]
        if rank != processes.rank:
            own = [torch.empty_like(values) if has else None for values, has in zip(like, there)]
        gradients = [None if gradient is None else gradient.contiguous() for gradient in own]
        processes.broadcast("a gradient", [gradient for gradient in gradients if gradient is not None], rank)
        return gradients
