"""`megatron-cp bench`: one file a benchmark, its tools, and the peers that it compares with.

`command` has the options and calls `attention`, `linear`, `exchange`, `layer` or `wire`, whose `report` measures and
says what was found. The tools know no benchmark: `timing`, `watched_kernels`, `spread`, `allocator`, `defaults`,
`peer_limits`. What is watched is handed in (a group, a kernel, a function): nothing of the library is replaced.
"""
