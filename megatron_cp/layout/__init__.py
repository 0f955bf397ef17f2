"""Tokens of a packed batch, and the ranks that hold them.

Owns `Packing` (the documents of one packed batch), `Layout` (the tokens that each rank holds), `Route` (the transfer of
rows from one layout to another) and `Mask` (the keys that each query sees). Everything here is numpy and integers on
the host: no torch, no communication, no heads.
"""

from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.fragments import MAX_CP_SIZE
from megatron_cp.layout.layout import Fragment, Layout
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.packing import Packing
from megatron_cp.layout.route import Route

__all__ = ["MAX_CP_SIZE", "Fragment", "IntArray", "Layout", "Mask", "Packing", "Route"]
