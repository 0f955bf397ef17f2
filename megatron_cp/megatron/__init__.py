"""The adapter to Megatron-Core, and the only package here that imports it.

The modules at the top are for jobs of Megatron's own: specs, configuration, batches and packs, the loss, the groups, a
model's slots, and the reader of `.bin/.idx` files. `layers/` has the modules that specs name, and `train/` the code
that `megatron-cp train` runs on a rank. All patches of Megatron are in `patches.py`, and those for the CPU in `cpu.py`.
Parameters, their names and their checkpoints are Megatron's. Only `cli` may import this package.
"""
