"""One run of `sparsify`: what each of its parts needs."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelopt_sparse.calibration.storage import Storage
from modelopt_sparse.distributed import Processes
from modelopt_sparse.model.devices import bytes_in_use, input_device
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

    def so_far(self) -> list[str]:
        """What stands behind the bar: the last error, the memory in use, and blocks of a stopped run."""
        error, reused = "", self.storage.reused
        if self.report.blocks:
            error = f"error {self.report.blocks[-1].error_after:.4f} of the block before"
        elif self.report.layers and self.report.layers[-1].errors:
            error = f"error {self.report.layers[-1].errors[-1]:.4f} of the layer before"
        return [error, self.memory_in_use(), f"{reused} blocks reused" if reused else ""]

    def memory_in_use(self) -> str:
        """Of this process, where the model's blocks run."""
        device = self.config.device or input_device(self.model)
        return f"{bytes_in_use(device) / 1e9:.1f} GB"
