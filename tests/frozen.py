"""Keeps what is imported out of later garbage collections; imported last by the process whose forks are ranks.

A collection looks at all objects of a process, of which imports of torch and Megatron make a million, and
in a fork it copies the pages that they lie on.
"""

import gc

gc.collect()
gc.freeze()
