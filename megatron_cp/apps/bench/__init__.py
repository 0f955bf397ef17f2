"""`megatron-cp bench`: a file for each benchmark, its tools, and the peers with which it compares.

`command` has the options and calls `attention`, `linear`, `exchange`, `layer`, `wire`, `packs` or `planner`, whose
`report` measures and prints. The tools know no benchmark: `timing`, `watched_kernels`, `spread`, `allocator`,
`defaults`, `peer_limits`. What is watched is an argument (a group, a kernel, a function): nothing of the library is
replaced.
"""
