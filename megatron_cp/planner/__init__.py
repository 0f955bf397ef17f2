"""Chooses what the ranks do for a layer on a batch, and says why. Numpy and integers only: no torch in here.

`attention` and `linear` make plans, by `checks` that they share; `batch` makes those of a microbatch, `layouts` names
layouts. `capabilities` is the table of what can be planned, and `predict/` what a plan will take.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
