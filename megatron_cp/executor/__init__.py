"""Runs plans. The only code that talks to a process group.

`run` is the loop over a plan's steps, `groups` are the ranks that talk (torch.distributed or threads), `transports` how
messages travel between them and where they land, `communicator` what starts them. `launch` starts local ranks for
checks and tests. `head_exchange`, `gather` and `relayout` are the differentiable moves, `attend`, `halo` and `scan`
those with local work between them, `kernels` what local work has in common.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
