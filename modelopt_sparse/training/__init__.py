"""Sparse training: masks that are made before training, or move while a model trains."""

from modelopt_sparse.training.algorithms import (
    GMP,
    SET,
    DynamicSparsityAlgorithm,
    Group,
    RigL,
    SparsityAlgorithm,
    Static,
)
from modelopt_sparse.training.callback import SparsityCallback
from modelopt_sparse.training.configure import configure
from modelopt_sparse.training.cost import Cost, cost
from modelopt_sparse.training.distill import distill
from modelopt_sparse.training.iso_flop.members import Doped, Factorized, Parallel
from modelopt_sparse.training.iso_flop.plan import IsoPlan
from modelopt_sparse.training.iso_flop.recipe import configure_sparse_ift
from modelopt_sparse.training.iso_flop.replace import fold
from modelopt_sparse.training.iso_flop.transform import SparseIFT, sparse_ift
from modelopt_sparse.training.schedules import Constant, Cosine, Cubic, Cycling, Exp, Linear, Power
from modelopt_sparse.training.sentinel import finalize, from_sentinel, to_sentinel
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.training.weights import TrainingPlan

__all__ = [
    "GMP",
    "SET",
    "Constant",
    "Cosine",
    "Cost",
    "Cubic",
    "Cycling",
    "Doped",
    "DynamicSparsityAlgorithm",
    "Exp",
    "Factorized",
    "Group",
    "IsoPlan",
    "Linear",
    "Parallel",
    "Power",
    "RigL",
    "SparseIFT",
    "Sparsity",
    "SparsityAlgorithm",
    "SparsityCallback",
    "Static",
    "TrainingPlan",
    "configure",
    "configure_sparse_ift",
    "cost",
    "distill",
    "finalize",
    "fold",
    "from_sentinel",
    "sparse_ift",
    "to_sentinel",
]
