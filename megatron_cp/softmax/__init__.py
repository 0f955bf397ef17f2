"""Softmax attention over a packed batch whose tokens are spread over ranks.

`attention` is the operation, `kernels/` are the backends that compute
one rank's share, the reference first.
"""
