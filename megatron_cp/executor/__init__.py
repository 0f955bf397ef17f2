"""Runs plans. This is the only code that uses a process group.

`run` is the loop over a plan's steps. `groups` wraps torch.distributed or threads, `transports` are laid over a group
and carry its messages in another way, and `communicator` starts them. `launch` starts local ranks for checks and tests.
`head_exchange`, `gather` and `relayout` are differentiable moves, `attend`, `halo` and `scan` are moves with local work
in between, and `kernels` is the base of kernels.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
