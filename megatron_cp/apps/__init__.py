"""Applications of the library, which use its public names alone.

`train` is the demonstration trainer, and `estimate` predicts a whole model's step. `megatron-cp train` and
`plan --whole` start them.
"""
