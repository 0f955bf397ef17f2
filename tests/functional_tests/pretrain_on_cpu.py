"""examples/pretrain_hybrid.py where there is no CUDA device: what a torchrun rank of test_pretrain_example.py runs."""

import importlib.util
import logging
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_hybrid.py"

if __name__ == "__main__":
    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    spec = importlib.util.spec_from_file_location("pretrain_hybrid", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run_megatron_on_cpu(pretrain=True)
    example.main()
