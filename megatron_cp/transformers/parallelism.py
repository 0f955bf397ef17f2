"""accelerate's `ParallelismConfig`, for a trainer that uses this package's context parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from megatron_cp.errors import ArgumentError

_NAME = "args.parallelism_config"
_ALONE = (
    f"one process, and no {_NAME}: this trainer runs without context parallelism. For N ranks say "
    "ParallelismConfig(cp_size=N) and start N processes, as torchrun --standalone --nproc-per-node N does (without "
    "GPUs accelerate launch --num_processes N starts one). ParallelismConfig() says that one rank is meant."
)


class Parallelism(ParallelismConfig):
    """accelerate's `ParallelismConfig`, without the requirements of torch's own context parallelism.

    Trainers make one of the configuration that they are given. TRL's GRPOConfig and RLOOConfig refuse accelerate's, and
    take `parallelism_config=Parallelism(cp_size=2)`.

    While `is_hidden`, `cp_enabled` is False, so that accelerate does not require FSDP on GPUs and TRL does not refuse
    packing. Several processes on CPUs are accepted as ranks.
    """

    is_hidden = True

    @property
    def cp_enabled(self) -> bool:
        """True if accelerate and TRL are to see context parallelism."""
        return self.cp_size > 1 and not self.is_hidden

    def build_device_mesh(self, device_type: str) -> Any:
        with self._shown():
            return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Any) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            with self._shown():
                super()._validate_accelerator(accelerator)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        before, self.is_hidden = self.is_hidden, False
        try:
            yield
        finally:
            self.is_hidden = before


def checked_parallelism(args: TrainingArguments, config: ParallelismConfig | None) -> Parallelism | None:
    """Returns the trainer's configuration, or the one that `accelerate launch` set; None for one process without one.

    Raises:
        ArgumentError: several processes without a configuration of their parallelism, sizes that do not multiply to
            their number, or one process with several GPUs.
    """
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    if args.n_gpu > 1:
        launch = f"torchrun --standalone --nproc-per-node {args.n_gpu}"
        remedy = f"Start a process for each GPU: {launch}, or accelerate launch."
        raise ArgumentError("args.n_gpu", args.n_gpu, "1: a process of its own for each GPU", remedy)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 == args.world_size:
        remedy = "Without GPUs, accelerate makes a group of the processes only with use_cpu=True."
        raise ArgumentError("args.use_cpu", args.use_cpu, f"True, for {started} processes on CPUs", remedy)
    ranks, asked = args.world_size, 1 if config is None else config.total_size
    if ranks > 1 and asked == 1:
        remedy = (
            f"Every rank would have whole sequences, without context parallelism. Set {_NAME} = "
            f"ParallelismConfig(cp_size={ranks}); torchrun needs no flag for it, on CPUs and GPUs. For data "
            f"parallelism only, set ParallelismConfig(dp_replicate_size={ranks})."
        )
        raise ArgumentError(_NAME, "no parallelism", f"sizes of the {ranks} processes", remedy)
    if config is None:
        warnings.warn(_ALONE, stacklevel=2)
        return None
    if asked != ranks:
        raise ArgumentError(_NAME, _sizes(config), f"sizes that multiply to the {ranks} processes", _fit(config, ranks))
    return Parallelism(**{each.name: getattr(config, each.name) for each in dataclasses.fields(ParallelismConfig)})


def _sizes(config: ParallelismConfig) -> str:
    return ", ".join(f"{name}_size={size}" for name, size in config._sizes.items() if size > 1)


def _fit(config: ParallelismConfig, ranks: int) -> str:
    if config.cp_size < ranks and not ranks % config.cp_size:
        return f"For {ranks // config.cp_size} replicas of {config.cp_size} ranks say dp_shard_size too: " + (
            f"ParallelismConfig(dp_shard_size={ranks // config.cp_size}, cp_size={config.cp_size})."
        )
    return f"Start as many processes; on one host: torchrun --standalone --nproc-per-node {config.total_size}."
