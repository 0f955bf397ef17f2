"""The work of the ranks as data: numpy and integers only, no torch in here.

`Plan` is what the ranks do for one layer on one batch: `steps`, in order. `attention` says which keys meet which
queries and how they get there, `recurrence` how segments of a linear layer continue one another, `transport` how
messages travel, and `describe` prints all of it. `planner/` makes plans, `executor/` runs them.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
