"""One run of `sparsify`: what each of its parts needs."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelopt_sparse.calibration.storage import Storage
from modelopt_sparse.distributed import Processes
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.report import Report


@dataclass(frozen=True)
class Run:
    """``piece_sizes``: in how large pieces layers are solved, once memory has run out (see solving/pieces.py)."""

    model: nn.Module
    plan: Plan
    config: SparsifyConfig
    storage: Storage
    processes: Processes
    report: Report
    piece_sizes: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def hides_bars(self) -> bool | None:
        """tqdm's ``disable``: None leaves it to tqdm, which shows bars on a terminal."""
        return None if self.config.progress is None else not self.config.progress
