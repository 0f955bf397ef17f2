"""One thread a rank: ranks are threads or processes already, and the machine has few cores."""

import torch

torch.set_num_threads(1)
