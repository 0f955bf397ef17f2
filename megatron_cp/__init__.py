"""Context parallelism for packed batches: exact for every document length and head count.

Names are imported when first used, so that a data loader can plan and shard without importing torch. They stand in
`__init__.pyi`.
"""

from megatron_cp.lazy import attach_stub

__version__ = "0.2.0.dev0"

_RENAMED = {"AttentionSlot": "AttentionSpec", "LinearSlot": "LinearSpec", "PlanSlots": "GraphTables"}

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, _RENAMED)
