from .enable import ContextParallel as ContextParallel
from .enable import enable_context_parallel as enable_context_parallel
