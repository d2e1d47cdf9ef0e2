"""Sparse-IFT: sparse layers in the place of dense ones, at the FLOPs of the dense model."""
