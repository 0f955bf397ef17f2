"""The adapter to Megatron-Core, and the only room that imports it.

Owns layer specs and modules, the sharding of batches, per-token losses, and what a small run on local ranks needs. Its
parameters, their names and their checkpoints are Megatron's. Nothing else in the package may import it but `cli`.
"""
