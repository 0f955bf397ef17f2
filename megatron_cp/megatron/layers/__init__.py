"""The modules that replace Megatron's layers, by subclass or by spec, with the same parameter names.

It has the modules that a layer spec names, their base classes (`base`), their refusals (`refusals`), and the runs of
linear layers in a stack (`redistribution`). It must not depend on how a model is trained, and patches nothing inside
Megatron; `megatron/patches.py` does.
"""
