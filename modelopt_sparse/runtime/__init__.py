"""2:4 execution: Linear layers whose weights are packed for Sparse Tensor Cores, by torch's semi-structured kernels."""
