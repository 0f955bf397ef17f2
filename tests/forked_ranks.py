"""Processes that fork from one which has imported torch and Megatron: of most rank processes the import is most.

CUDA cannot be used after a fork, so that there they are spawned, as users' ranks are; an emulated device can.
"""

import multiprocessing
import os

import torch

# None of ours, so that every checkout of this repository tests its own.
_PRELOADED = (
    "hypothesis",
    "matplotlib.figure",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.pipeline_parallel",
    "megatron.core.ssm.gated_delta_net.common",
    "megatron.training",
    "numpy",
    "pytest",
    "torch.distributed",
)


def forking_context():
    """The context of multiprocessing in which a process is a fork; one server of forks lives as long as this process.

    A fork has the environment of when the first one was made.
    """
    if torch.cuda.is_available() and "NULLGPU" not in os.environ:
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    return multiprocessing.get_context("forkserver")
