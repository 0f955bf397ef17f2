"""Softmax attention over a packed batch whose tokens are spread over ranks.

`attention` is the operation. `kernels/` has the backends that compute one rank's share; `reference` reads like the
equations.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
