"""Beyond one layer at a time: permutation, reconstruction, distillation, and what a smaller model keeps."""
