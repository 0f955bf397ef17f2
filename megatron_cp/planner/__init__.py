"""Chooses what the ranks do for a layer on a batch, and says why. Numpy and integers only: no torch in here.

`attention` and `linear` make plans, by `checks` that they share; `batch` makes those of a microbatch, `layouts` names
layouts. `capabilities` is the table of what can be planned, and `predict/` what a plan will take.
"""
