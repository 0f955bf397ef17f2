"""Plans a layer on a batch and explains the choice. Numpy and integers only: no torch in here.

`attention` and `linear` check arguments and make plans: of an attention by a `request`, and where its scheme is left
open, `choose` compares several. `batch` plans a microbatch, `layouts` makes layouts by name, and `tiles/` assigns tiles
to ranks. `capabilities` is the table of supported options, and `predict/` predicts the time and the memory of a plan.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
