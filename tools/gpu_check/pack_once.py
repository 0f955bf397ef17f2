"""Runs a pack and an unpack for `compute-sanitizer python -m tools.gpu_check.pack_once`, and checks the bits."""

from __future__ import annotations

import sys

import torch

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.messages import pack_tokens, unpack_heads
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing


def main() -> int:
    """On one rank, whose rows are shuffled."""
    device = torch.device("cuda")
    if not copies.runs_on(device):
        print("Triton is not installed: there are no kernels to check", file=sys.stderr)
        return 1
    packing = Packing([7, 1, 130])
    layout = Layout.zigzag(packing, 1)
    partition = partition_heads(6, 2, 1)
    sections = Sections((Section("q", 6, 8, partition.heads), Section("k", 2, 24, partition.groups)))
    at = Geometry(Exchange(layout, sections), 0, (torch.bfloat16,) * 2, None, device)
    stream = torch.arange(packing.total * sections.width, device=device).remainder(251).bfloat16()
    stream = stream.view(packing.total, sections.width)
    own = [layout.shard(x, 0) for x in stream.split([48, 48], 1)]
    found = torch.cat([x.flatten(1) for x in unpack_heads(pack_tokens(own, at, Buffers()), at)], 1)
    return 0 if torch.equal(found, stream) else 1


if __name__ == "__main__":
    sys.exit(main())
