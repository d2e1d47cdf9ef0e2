"""The public names and their modules: read by type checkers, and by lazy_loader when the package is imported."""

from . import training as training
from .accuracy.evaluate import evaluate as evaluate
from .budget.choose import BudgetCurve as BudgetCurve
from .calibration.own_text import write_text as write_text
from .checkpoint.save import load as load
from .checkpoint.save import pack as pack
from .checkpoint.save import report as report
from .checkpoint.save import restore as restore
from .checkpoint.save import save as save
from .checkpoint.save import unpack as unpack
from .checkpoint.stream import shrink_checkpoint as shrink_checkpoint
from .checkpoint.stream import sparsify_checkpoint as sparsify_checkpoint
from .checkpoint.verify import PatternError as PatternError
from .checkpoint.verify import Verification as Verification
from .checkpoint.verify import verify as verify
from .distributed import RankError as RankError
from .methods.base import Method as Method
from .methods.base import Solution as Solution
from .methods.base import Stats as Stats
from .methods.base import masked_solution as masked_solution
from .methods.base import relative_error as relative_error
from .methods.patterns import NM as NM
from .methods.patterns import Unstructured as Unstructured
from .model.masking import apply_masks as apply_masks
from .model.masking import attach_optimizer as attach_optimizer
from .model.masking import named_masks as named_masks
from .model.masking import set_mask as set_mask
from .oneshot import budget_curve as budget_curve
from .oneshot import export as export
from .oneshot import sparsify as sparsify
from .plan.options import Rule as Rule
from .plan.options import SparsifyConfig as SparsifyConfig
from .plan.plan import Plan as Plan
from .plan.planner import make_plan as make_plan
from .reports.evaluate import Evaluation as Evaluation
from .reports.report import Report as Report
from .reports.values import Shrunk as Shrunk
from .runtime.convert import SpeedReport as SpeedReport
from .runtime.convert import semi_structured_report as semi_structured_report
from .runtime.convert import to_dense as to_dense
from .runtime.convert import to_semi_structured as to_semi_structured
from .shrinking.plan import ShrinkPlan as ShrinkPlan
from .shrinking.plan import plan_shrink as plan_shrink
from .shrinking.shrink import shrink as shrink

__version__: str
