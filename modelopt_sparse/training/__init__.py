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
from modelopt_sparse.training.schedules import Constant, Cosine, Cubic, Cycling, Exp, Linear, Power
from modelopt_sparse.training.sparsity import Sparsity
from modelopt_sparse.training.targets import TrainingPlan

__all__ = [
    "GMP",
    "SET",
    "Constant",
    "Cosine",
    "Cubic",
    "Cycling",
    "DynamicSparsityAlgorithm",
    "Exp",
    "Group",
    "Linear",
    "Power",
    "RigL",
    "Sparsity",
    "SparsityAlgorithm",
    "Static",
    "TrainingPlan",
]
