"""Checks that run anywhere, shipped because users verify their own clusters with them.

`parity` compares N ranks with one, `kernels` a kernel with the equations, `poison` makes uninitialised memory NaN, and
`counters` count collectives, copies and waits of the host.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
