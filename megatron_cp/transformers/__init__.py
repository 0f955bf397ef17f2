"""Hugging Face models over a context-parallel group: `enable_context_parallel`. Needs the extra `transformers`.

The rest of the package does not import this adapter.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="transformers")
