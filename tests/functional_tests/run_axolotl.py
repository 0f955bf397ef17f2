"""Trains by axolotl on the ranks of torchrun, on CPUs: `run_axolotl.py CONFIGURATION LOG`."""

import json
import os
import sys
from pathlib import Path


def main(configuration, log):
    sys.modules["fla"] = None  # where it is installed, transformers calls its kernels on CPUs too
    import axolotl.utils.trainer
    from accelerate import PartialState
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.loaders.model import ModelLoader
    from axolotl.train import train

    # On several ranks axolotl takes for granted that there is CUDA.
    PartialState(cpu=True)
    axolotl.utils.trainer.check_cuda_p2p_ib_support = lambda: True
    ModelLoader.use_parallel_config = None
    cfg = load_cfg(configuration)
    cfg.device_map = None
    trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))[2]
    if os.environ.get("RANK", "0") == "0":
        Path(log).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:])
