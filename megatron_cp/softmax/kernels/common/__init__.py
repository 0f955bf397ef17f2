"""Code that kernels of softmax attention share: dropout, sums of partial results, variable-length calls."""
