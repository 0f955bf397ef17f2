"""Linear attention over a packed batch whose tokens are spread over ranks.

`gated_delta_net`, `kimi_delta_attention`, `mamba2` and `causal_conv1d` hold the operations, written once for every mode
against `on_rank`: what one rank computes, whole documents on its heads or all heads of its tokens. `activations` are
the nonlinearities whose bits do not depend on how many heads a rank has, `reductions` the sums; `gates/` is what stands
before a rule; `kernels/` are the backends, the reference first. docs/linear-layers.md has the derivation.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
