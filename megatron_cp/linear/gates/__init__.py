"""What stands between a layer's convolution and its rule: norms of queries and keys, decays, write strengths, steps.

Each layer's are one autograd function: `delta` of Gated DeltaNet and KDA, `steps` of Mamba-2. On CUDA it is one Triton
kernel each way (`triton_kernels`, launched by `triton`), since as operators they would be dozens of launches of a few
microseconds; elsewhere, and for float64, a few operators of torch, whose bits depend on no shape.
"""
