"""Applications of the library, which use its public names alone.

`train` is the demonstration trainer, and `estimate` plans all layers of a model. `megatron-cp train` and
`plan --whole` start them.
"""
