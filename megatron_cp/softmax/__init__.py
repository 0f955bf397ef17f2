"""Softmax attention over a packed batch whose tokens are spread over ranks.

`mask` says which keys a query sees (no torch), `attention` is the operation, `kernels/` are the backends that compute
one rank's share, the reference first.
"""
