"""One block from top to bottom: from the statistics of its inputs to sparse layers."""
