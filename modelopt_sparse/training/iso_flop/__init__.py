"""Sparse-IFT (arXiv 2303.11525): larger, sparser layers at the FLOPs of the dense ones."""
