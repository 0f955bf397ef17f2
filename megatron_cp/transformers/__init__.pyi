from .batch import ShardedBatch as ShardedBatch
from .enable import ContextParallel as ContextParallel
from .enable import enable_context_parallel as enable_context_parallel
from .log_probs import token_log_probs as token_log_probs
from .preference import ContextParallelPreferenceMixin as ContextParallelPreferenceMixin
from .trainer import ContextParallelMixin as ContextParallelMixin
from .trainer import ContextParallelTrainer as ContextParallelTrainer
