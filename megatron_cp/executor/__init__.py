"""Runs plans. The only code that talks to a process group.

`plan` holds the data types and `explain` their words (no torch), `run` is the loop over a plan's steps, `groups` are
the ranks that talk (torch.distributed or threads), `launch` starts local ones for checks and tests. `exchange`,
`gather` and `relayout` are the differentiable moves, `attend`, `halo` and `scan` those with local work between them
(`kv_schedule` and `recurrence` are their data), `kernels` what local work has in common.
"""
