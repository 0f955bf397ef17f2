"""Linear attention over a packed batch whose tokens are spread over ranks.

`gated_delta_net`, `kimi_delta_attention`, `mamba2` and `causal_conv1d` have the operations. They are written once for
every mode on top of `on_rank`, which computes one rank's share: whole documents on its heads, or all heads of its
tokens. `activations` and `reductions` have nonlinearities and sums whose bits do not depend on the number of heads of a
rank. `gates/` computes the inputs of a rule, and `kernels/` has the backends, of which `reference` reads like the
equations. docs/linear-layers.md has the derivation.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
