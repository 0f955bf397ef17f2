"""Linear attention over a packed batch whose tokens are spread over ranks.

`gated_delta_net` holds the operations, `activations` the nonlinearities whose bits do not depend on how many heads a
rank has, `kernels/` the backends that compute one rank's share, the reference first.
"""
