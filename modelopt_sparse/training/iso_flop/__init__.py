"""Sparse-IFT: models with larger and sparser layers of the same FLOPs (arXiv 2303.11525)."""
