"""Make PyTorch and Hugging Face models sparse, keep them sparse, save, restore and export them.

A name is imported when it is first used (PEP 562), so that a program waits for no more than it uses.
"""

import importlib
from typing import TYPE_CHECKING

from modelopt_sparse.version import __version__

if TYPE_CHECKING:
    from modelopt_sparse import training as training
    from modelopt_sparse.calibration.own_text import write_text
    from modelopt_sparse.checkpoint.save import load, report, restore, save
    from modelopt_sparse.checkpoint.stream import sparsify_checkpoint
    from modelopt_sparse.checkpoint.verify import PatternError, Verification, verify
    from modelopt_sparse.distributed import RankError
    from modelopt_sparse.methods.base import Method, Solution, Stats, masked_solution, relative_error
    from modelopt_sparse.methods.patterns import NM, Unstructured
    from modelopt_sparse.model.masking import apply_masks, attach_optimizer, named_masks, observe_gradient, set_mask
    from modelopt_sparse.oneshot import export, sparsify
    from modelopt_sparse.plan.names import Rule
    from modelopt_sparse.plan.options import SparsifyConfig
    from modelopt_sparse.plan.plan import Plan
    from modelopt_sparse.plan.planner import make_plan
    from modelopt_sparse.reports.evaluate import Evaluation, TaskScore, TaskScores, evaluate, evaluate_tasks
    from modelopt_sparse.reports.report import Report
    from modelopt_sparse.runtime.convert import SpeedReport, semi_structured_report, to_dense, to_semi_structured

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
    "TaskScore",
    "TaskScores",
    "Unstructured",
    "Verification",
    "__version__",
    "apply_masks",
    "attach_optimizer",
    "evaluate",
    "evaluate_tasks",
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

# the same names as above, by the modules that define them
_HOMES = {
    "modelopt_sparse.calibration.own_text": ("write_text",),
    "modelopt_sparse.checkpoint.save": ("load", "report", "restore", "save"),
    "modelopt_sparse.checkpoint.stream": ("sparsify_checkpoint",),
    "modelopt_sparse.checkpoint.verify": ("PatternError", "Verification", "verify"),
    "modelopt_sparse.distributed": ("RankError",),
    "modelopt_sparse.methods.base": ("Method", "Solution", "Stats", "masked_solution", "relative_error"),
    "modelopt_sparse.methods.patterns": ("NM", "Unstructured"),
    "modelopt_sparse.model.masking": ("apply_masks", "attach_optimizer", "named_masks", "observe_gradient", "set_mask"),
    "modelopt_sparse.oneshot": ("export", "sparsify"),
    "modelopt_sparse.plan.names": ("Rule",),
    "modelopt_sparse.plan.options": ("SparsifyConfig",),
    "modelopt_sparse.plan.plan": ("Plan",),
    "modelopt_sparse.plan.planner": ("make_plan",),
    "modelopt_sparse.reports.evaluate": ("Evaluation", "TaskScore", "TaskScores", "evaluate", "evaluate_tasks"),
    "modelopt_sparse.reports.report": ("Report",),
    "modelopt_sparse.runtime.convert": ("SpeedReport", "semi_structured_report", "to_dense", "to_semi_structured"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker reads the imports above; with these it would take any name for one of ours

    def __getattr__(name: str) -> object:
        """The public name, or the package `training`, imported now."""
        if name == "training":
            return importlib.import_module("modelopt_sparse.training")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "training"})
