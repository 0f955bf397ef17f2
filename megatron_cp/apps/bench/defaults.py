"""Defaults of a benchmark: number of ranks, layer and batch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_cp.cli import MAX_LOCAL_RANKS
from megatron_cp.errors import ArgumentError

if TYPE_CHECKING:
    from megatron_cp.executor import TorchGroup

# Sizes of local runs without --cp. EXCHANGE_RANKS is for exchange's local part; between processes it has others.
RANKS, EXCHANGE_RANKS, WIRE_RANKS, PACK_RANKS = 2, 4, (3, 4, 5, 8), (1, 2, 4, 8)


def with_defaults(
    args: argparse.Namespace, world: TorchGroup | None, layers: Sequence[str], shapes: Mapping[str, Mapping[str, int]]
) -> argparse.Namespace:
    """Returns the options, with a layer and a batch on which ratios mean something for those that are not given.

    The first of `layers` is the default; `shapes` are defaults too, by the names of options.
    """
    import torch
    import torch.distributed as dist

    args = argparse.Namespace(**vars(args))
    args.layer = args.layer or layers[0]
    if args.layer not in layers:
        raise ArgumentError("--layer", args.layer, " or ".join(layers), "That is what this benchmark measures.")
    on_cuda = dist.get_backend() == "nccl" if world else torch.cuda.is_available()
    args.device = args.device or ("cuda" if on_cuda else "cpu")
    if args.device == "cuda" and not on_cuda:
        raise ArgumentError("--device", "cuda", "cpu", "Every rank of this job would need a CUDA device.")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.model is None:
        heads_given = args.heads is not None
        for name, value in shapes[args.layer].items():
            of_heads = name in ("heads", "kv_heads", "key_heads", "groups")
            if getattr(args, name) is None and not (of_heads and heads_given):
                setattr(args, name, value)
    if args.lengths is None and args.tokens_per_rank is None:
        args.tokens_per_rank = 2048
    if world and args.cp not in (None, world.size):
        raise ArgumentError("--cp", args.cp, f"the {world.size} ranks of this job")
    args.cp = world.size if world else args.cp or RANKS
    if not world and args.cp > MAX_LOCAL_RANKS:
        raise ArgumentError(
            "--cp", args.cp, f"at most {MAX_LOCAL_RANKS} local ranks", "Run larger sizes under torchrun."
        )
    return args
