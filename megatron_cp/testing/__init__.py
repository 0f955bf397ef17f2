"""Proofs that run anywhere, shipped because users verify their own clusters with them.

`parity` compares N ranks with one, `isolation` perturbs one document, `oracles` are code that is not ours, `poison`
makes unwritten memory NaN, `counters` count collectives, copies and waits of the host.
"""

import torch

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.testing.poison import poisoned

# The modes in here look at operators from several threads at once. Of one that is new to them, torch 2.11 makes an
# entry without a lock, and fails where two threads meet: as they do where all ranks take a buffer at the same moment.
with poisoned():
    Buffers().take(1, torch.device("cpu"))
