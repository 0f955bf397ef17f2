"""Hugging Face models over a context-parallel group: `enable_context_parallel`. Needs the extra `transformers`.

The rest of the package does not import this adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_cp.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_cp.transformers.batch import ShardedBatch as ShardedBatch
    from megatron_cp.transformers.enable import ContextParallel as ContextParallel
    from megatron_cp.transformers.enable import enable_context_parallel as enable_context_parallel
    from megatron_cp.transformers.log_probs import token_log_probs as token_log_probs
    from megatron_cp.transformers.trainer import ContextParallelMixin as ContextParallelMixin
    from megatron_cp.transformers.trainer import ContextParallelTrainer as ContextParallelTrainer

_HOMES = {
    "ContextParallel": "megatron_cp.transformers.enable",
    "ContextParallelMixin": "megatron_cp.transformers.trainer",
    "ContextParallelTrainer": "megatron_cp.transformers.trainer",
    "ShardedBatch": "megatron_cp.transformers.batch",
    "enable_context_parallel": "megatron_cp.transformers.enable",
    "token_log_probs": "megatron_cp.transformers.log_probs",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
