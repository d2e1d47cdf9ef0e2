"""Beyond one layer at a time: permutation, reconstruction, distillation."""
