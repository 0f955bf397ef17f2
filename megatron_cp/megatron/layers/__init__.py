"""What stands in for Megatron's layers, by subclass or by spec, under its parameters' names.

Owns the modules that a layer spec names, what they have in common (`base`), what they refuse (`refusals`), and the runs
of linear layers in a stack (`redistribution`). It must not know how a model is trained, nor exchange anything inside
Megatron: that is `megatron/patches.py`.
"""
