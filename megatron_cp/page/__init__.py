"""Results as one HTML page, whose charts plotly draws: `page.py` has the fields of a report.

The page is one file that asks the network for nothing. It knows names of quantities, and nothing of plans, runs or
checks: its callers hand it their numbers.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
