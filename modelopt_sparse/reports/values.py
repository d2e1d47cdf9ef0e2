"""Where a model that `torch.save` wrote before 0.2 looks for the classes of its report."""

from modelopt_sparse.reports.report import BlockReport, Distilled, LayerReport, Skipped, StepReport

__all__ = ["BlockReport", "Distilled", "LayerReport", "Skipped", "StepReport"]
