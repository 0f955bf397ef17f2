"""Applications of the library, which use its public names alone.

`train` is the demonstration trainer, `estimate` plans all layers of a model, and `bench` has the benchmarks with the
peers that they compare with. `megatron-cp train`, `plan --whole` and `bench` start them.
"""
