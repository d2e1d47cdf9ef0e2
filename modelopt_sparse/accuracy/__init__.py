"""Beyond one layer at a time: allocation, permutation, reconstruction and distillation."""
