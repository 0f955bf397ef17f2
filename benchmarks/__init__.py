"""Measurements of an operation beside its limits and its peers, run from a clone as `python -m benchmarks NAME`.

`__main__` has the options and calls `exchange`, `layer`, `schemes`, `wire` or `planner`. The modules `timing`,
`watched`, `ranks` and `layer_step` know no benchmark, and `peers` has megatron-core's own code. What is watched is an
argument (a group, a kernel, a function): nothing of the library is replaced.
"""
