"""The adapter to Megatron-Core, and the only room of the library that imports it.

On top is what a job of Megatron's own imports: specs, configuration, batches and packs, the loss, the groups, a model's
slots, and the reader of `.bin/.idx` files. `layers/` has the modules that specs name. What is exchanged inside Megatron
is in `patches.py`, and for the CPU in `cpu.py`; what differs between Megatron's releases is in `compat.py`.
Parameters, their names and their checkpoints are Megatron's. Nothing else in the package may import this room but `cli`
and `apps`.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="megatron")
