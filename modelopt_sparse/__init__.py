"""Make PyTorch and Hugging Face models sparse, keep them sparse, save, restore and export them."""

from modelopt_sparse.calibration.own_text import write_text
from modelopt_sparse.checkpoint.restore import load, report, restore
from modelopt_sparse.checkpoint.save import save
from modelopt_sparse.checkpoint.streaming.stream import sparsify_checkpoint
from modelopt_sparse.checkpoint.verify import PatternError, Verification, verify
from modelopt_sparse.distributed import RankError
from modelopt_sparse.methods.base import Method, Solution, Stats, masked_solution, relative_error
from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.model.masking import apply_masks, attach_optimizer, named_masks, observe_gradient, set_mask
from modelopt_sparse.oneshot import export, sparsify
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.plan.planner import make_plan
from modelopt_sparse.plan.rules import Rule
from modelopt_sparse.reports.evaluate import Evaluation, evaluate
from modelopt_sparse.reports.report import Report
from modelopt_sparse.runtime.convert import semi_structured_report, to_dense, to_semi_structured
from modelopt_sparse.runtime.speed_report import SpeedReport
from modelopt_sparse.version import __version__

__all__ = [
    "NM",
    "Evaluation",
    "Method",
    "PatternError",
    "Plan",
    "RankError",
    "Report",
    "Rule",
    "Solution",
    "SparsifyConfig",
    "SpeedReport",
    "Stats",
    "Unstructured",
    "Verification",
    "__version__",
    "apply_masks",
    "attach_optimizer",
    "evaluate",
    "export",
    "load",
    "make_plan",
    "masked_solution",
    "named_masks",
    "observe_gradient",
    "relative_error",
    "report",
    "restore",
    "save",
    "semi_structured_report",
    "set_mask",
    "sparsify",
    "sparsify_checkpoint",
    "to_dense",
    "to_semi_structured",
    "verify",
    "write_text",
]
