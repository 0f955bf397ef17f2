"""Runs a script of Megatron's on the CPU, with ranks over gloo: to try a job on a laptop, or in CI.

  torchrun --standalone --nproc-per-node 2 examples/megatron_on_cpu.py pretrain_gpt.py FLAGS...

Megatron's code asks for CUDA in many places; `run_megatron_on_cpu` answers them. `docs/moving-a-megatron-job.md` has
the flags that such a job needs.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Runs the script that the first argument names, with the other arguments."""
    script = Path(sys.argv[1]).resolve()
    # The script imports modules beside it, Megatron's own among them, as if it had been started itself.
    sys.path[0] = str(script.parent)
    from megatron.core.datasets import utils

    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    if find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None  # they are compiled, and perhaps nothing here compiles them again
    run_megatron_on_cpu(pretrain=True)
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
