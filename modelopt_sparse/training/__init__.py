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
from modelopt_sparse.training.iso_flop import SparseIFT, fold, sparse_ift
from modelopt_sparse.training.members import Doped, Factorized, Parallel
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
    "cost",
    "distill",
    "finalize",
    "fold",
    "from_sentinel",
    "sparse_ift",
    "to_sentinel",
]
