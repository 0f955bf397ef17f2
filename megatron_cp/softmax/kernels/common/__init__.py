"""What kernels of softmax attention have in common: dropout, sums of parts, calls over variable lengths."""
