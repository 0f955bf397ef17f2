"""The local halves of a head exchange in one launch each, on CUDA.

`pieces` makes a table that maps bytes of the messages to bytes of the tensors; it needs no Triton. `triton` has the
kernels that read the table. Knows neither heads nor layouts, only rows of bytes.
"""
