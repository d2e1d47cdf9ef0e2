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
from modelopt_sparse.training.configure import configure, configure_sparse_ift
from modelopt_sparse.training.distill import distill
from modelopt_sparse.training.planner import Cost, TrainingPlan, cost
from modelopt_sparse.training.sparse_ift.members import Doped, Factorized, Parallel, fold
from modelopt_sparse.training.sparse_ift.transform import IsoPlan, SparseIFT, sparse_ift
from modelopt_sparse.training.sparsity import Sparsity, SparsityCallback, finalize, from_sentinel, to_sentinel
from modelopt_sparse.training.updates import Constant, Cosine, Cubic, Cycling, Exp, Linear, Power

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
