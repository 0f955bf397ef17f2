from .kernels import KERNELS as KERNELS
from .kernels import AttentionCall as AttentionCall
from .kernels import AttentionKernel as AttentionKernel
from .kernels import Tiles as Tiles
from .on_rank import AttentionOnRank as AttentionOnRank
from .on_rank import attention_call as attention_call
from .options import checked_options as checked_options
