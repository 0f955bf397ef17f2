"""Results as one HTML page: `page` joins it, `fields` refuses bad reports, `columns` packs numbers.

The page is one file that asks the network for nothing. `page.html`, `page.css` and the scripts are its parts. It knows
names of quantities, and nothing of plans, runs or benchmarks: its callers hand it their numbers.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
