"""Layers over packs that `GraphTables` fills up, on some ranks and, in float64, on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import megatron_cp as cp

CAPACITY, DOCUMENTS = 120, 6
KINDS: dict[str, Any] = {
    "a2a": cp.AttentionSpec(6, 2, 16, 16, scheme="a2a"),
    "window": cp.AttentionSpec(6, 2, 16, 16, mask="window:5,0", scheme="a2a"),
    "p2p": cp.AttentionSpec(6, 2, 16, 16, scheme="p2p"),
    "gdn": cp.LinearSpec("gdn", 6, 2, 16, 16, mode="headwise"),
    "mamba": cp.LinearSpec("mamba", 6, 2, 16, 16, mode="headwise"),
    "conv1d": cp.LinearSpec("conv1d", 64, 2, 16, 16, mode="headwise"),
}
_MASKS = {"a2a": "causal", "p2p": "causal", "window": "window:5,0"}


def packs_drawn(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged packs: one document of all tokens, single tokens, and whatever is drawn."""
    random = np.random.default_rng(seed)
    packs = [[30, 1, 7], [CAPACITY - 6], [1, 1, 1, 1], [3, 5, 8, 20, 2]]
    while len(packs) < count:
        lengths = random.integers(1, 24, random.integers(1, DOCUMENTS + 1))
        if all((-(-lengths // (2 * size)) * 2 * size).sum() <= CAPACITY for size in (1, 2, 3, 5)):  # filled up
            packs.append(lengths.tolist())
    return packs


def _drawn(name: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs `[CAPACITY, ...]` and parameters, numbers of `dtype`."""
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    taps = {"conv": normal(160, 4)}
    decay = {"A_log": normal(6), "dt_bias": normal(6)}
    match name:
        case "gdn":
            return {
                "qkv": normal(CAPACITY, 160),
                "beta": normal(CAPACITY, 6),
                "alpha": normal(CAPACITY, 6),
            }, taps | decay
        case "mamba":
            return {"xBC": normal(CAPACITY, 160), "dt": normal(CAPACITY, 6)}, taps | decay | {"D": normal(6)}
        case "conv1d":
            return {"x": normal(CAPACITY, 64)}, {"weight": normal(64, 4)}
    return {name: normal(CAPACITY, heads, 16) for name, heads in (("q", 6), ("k", 2), ("v", 2))}, {}


def _called(
    name: str, inputs: list[Tensor], parameters: dict[str, Tensor], plan: cp.Plan, group: Any, **more: Any
) -> Tensor:
    match name:
        case "gdn":
            return cp.gated_delta_net(*inputs, plan, group, **parameters, **more)
        case "mamba":
            return cp.mamba2_mixer(*inputs, plan, group, **parameters, **more)
        case "conv1d":
            return cp.causal_conv1d(*inputs, parameters["weight"], None, plan, group, **more)
    return cp.attention(*inputs, plan, group, **more)


def run_on_rank(
    group: Any, packs: list[list[int]], device: torch.device, dtype: torch.dtype, names: tuple[str, ...] = tuple(KINDS)
) -> list[dict[str, Tensor]]:
    """Returns, for each pack, the streams of outputs and of gradients of inputs, from one `GraphTables`."""
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, group.size, align_documents=2 * group.size)
    found = []
    for lengths in packs:
        layout = slots.layout(lengths)
        batch = cp.shard_batch(
            np.arange(sum(lengths)), layout, group, slots=[KINDS[name] for name in names], into=slots, device=device
        )
        streams = {}
        for name in names:
            inputs, parameters = _drawn(name, dtype)
            own = [layout.shard(x, group.rank).to(device).requires_grad_() for x in inputs.values()]
            kernel = "auto" if device.type == "cpu" else "varlen" if name in _MASKS else "chunked"
            given = {key: x.to(device) for key, x in parameters.items()}
            out = _called(name, own, given, batch.plan(KINDS[name]), group, kernel=kernel)
            rows = [out.detach(), *torch.autograd.grad(out, own, torch.ones_like(out))]
            for what, x in zip(("out", *inputs), rows, strict=True):
                streams[f"{name} {what}"] = cp.gather(x.contiguous(), layout, group).cpu()
        found.append(streams)
    return found


def errors_of(found: dict[str, Tensor], lengths: list[int], size: int, dtype: torch.dtype) -> dict[str, float]:
    """Returns each stream's error against one rank in float64, as a share of its largest; padding is left out."""
    step = 2 * size
    sizes = [-(-length // step) * step for length in lengths]
    packing = cp.Packing([*sizes, CAPACITY - sum(sizes)])
    layout = cp.Layout.contiguous(packing, 1)
    errors = {}
    for name in dict.fromkeys(stream.split()[0] for stream in found):
        inputs, parameters = ({key: x.double() for key, x in part.items()} for part in _drawn(name, dtype))
        own = [x.requires_grad_() for x in inputs.values()]
        kind = KINDS[name]
        plan = kind.plan(layout) if name not in _MASKS else cp.BatchPlan(layout, [kind], lengths=[*sizes, 0]).plan(kind)
        out = _called(name, own, parameters, plan, None, kernel="reference")
        rows = [out.detach(), *torch.autograd.grad(out, own, torch.ones_like(out))]
        tokens = sum(sizes) if name in _MASKS else CAPACITY
        for what, x in zip(("out", *inputs), rows, strict=True):
            difference = found[f"{name} {what}"][:tokens].double() - x[:tokens]
            errors[f"{name} {what}"] = float(difference.abs().max() / x.abs().max())
    return errors
