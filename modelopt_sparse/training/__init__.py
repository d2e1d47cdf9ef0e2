"""Training a sparse model."""

from modelopt_sparse.training.distill import distill

__all__ = ["distill"]
