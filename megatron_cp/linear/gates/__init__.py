"""The work between a layer's convolution and its rule: norms of queries and keys, decays, write strengths, steps.

A layer's gates are one autograd function: `delta` for Gated DeltaNet and KDA, `steps` for Mamba-2. On CUDA it is one
Triton kernel for each direction (`triton_kernels`, launched by `triton`), since torch's operators would be dozens of
launches of a few microseconds. Elsewhere, and for float64, it uses operators of torch whose bits do not depend on
shapes.
"""
