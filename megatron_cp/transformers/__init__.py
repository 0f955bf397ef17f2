"""Hugging Face models over a context-parallel group: `enable_context_parallel`. Needs the extra `transformers`.

An adapter, as `megatron_cp.megatron` is: nothing else here imports it.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
