"""Which tokens exist and which rank holds them.

Owns `Packing` (the documents of one packed batch), `Layout` (who holds which tokens), `Route` (how rows get from one
layout to another) and `Mask` (which keys a query sees). Everything here is numpy and integers on the host: no torch,
no ranks talking, no heads.
"""

from megatron_cp.layout.layout import Fragment, Layout
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.packing import IntArray, Packing
from megatron_cp.layout.route import Route

__all__ = ["Fragment", "IntArray", "Layout", "Mask", "Packing", "Route"]
