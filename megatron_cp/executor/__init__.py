"""Runs plans. The only code that talks to a process group.

`plan` holds the data types (no torch), `groups` the ranks that talk (torch.distributed or threads), `launch` starts
local ranks for checks and tests, `exchange` and `gather` are the differentiable steps, `run` is the loop over a plan.
"""
