"""Softmax attention over a packed batch whose tokens are spread over ranks.

`attention` is the operation. `kernels/` has the backends that compute one rank's share; `reference` reads like the
equations.
"""
