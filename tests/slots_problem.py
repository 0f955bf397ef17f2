"""Layers over packs that `GraphTables` fills up, on some ranks and, in float64, on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megatron_cp as cp
from tests.fuzz_cases import Call
from tests.fuzz_check import operate
from tests.fuzz_problem import problem_of

CAPACITY, DOCUMENTS = 120, 6
KINDS: dict[str, Any] = {
    "a2a": cp.AttentionSpec(6, 2, 16, 16, scheme="a2a"),
    "window": cp.AttentionSpec(6, 2, 16, 16, mask="window:5,0", scheme="a2a"),
    "p2p": cp.AttentionSpec(6, 2, 16, 16, scheme="p2p"),
    "all_gather": cp.AttentionSpec(6, 2, 16, 16, scheme="all_gather", head_chunks=2),
    "exact": cp.AttentionSpec(6, 2, 16, 16, scheme="exact"),
    "gdn": cp.LinearSpec("gdn", 6, 2, 16, 16, mode="headwise"),
    "mamba": cp.LinearSpec("mamba", 6, 2, 16, 16, mode="headwise"),
    "conv1d": cp.LinearSpec("conv1d", 64, 2, 16, 16, mode="headwise"),
}
CONTIGUOUS: dict[str, Any] = {  # in a contiguous layout
    "gdn chunkwise": cp.LinearSpec("gdn", 6, 2, 16, 16, mode="chunkwise"),
    "kda chunkwise": cp.LinearSpec("kda", 6, 6, 16, 16, mode="chunkwise"),
    "gdp chunkwise": cp.LinearSpec("gdp", 6, 2, 16, 16, mode="chunkwise", num_householder=2),
    "mamba chunkwise": cp.LinearSpec("mamba", 6, 2, 16, 16, mode="chunkwise"),
    "conv1d chunkwise": cp.LinearSpec("conv1d", 64, 2, 16, 16, mode="chunkwise"),
}
PRODUCTS: dict[str, Any] = {  # on a number of ranks that is a product
    name: cp.AttentionSpec(6, 2, 16, 16, scheme=name) for name in ("a2a+p2p", "a2a+all_gather", "a2a+exact")
}
MASKED = ("a2a", "window", "p2p", "all_gather", "exact", *PRODUCTS)
_SIZES: dict[str, Any] = {
    "lengths": (CAPACITY,), "heads": 6, "groups": 2, "head_dim": 16, "value_head_dim": 16, "dtype": "bfloat16",
}  # fmt: skip
CALLS = {
    **{name: Call("attention", **_SIZES) for name in MASKED},
    "gdn": Call("gated_delta_net", **_SIZES), "mamba": Call("mamba2_mixer", options=("skip",), **_SIZES),
    "conv1d": Call("causal_conv1d", **_SIZES | {"heads": 4}),
    "kda": Call("kda_mixer", **_SIZES | {"groups": 6}),
    "gdp": Call("gated_delta_product_mixer", steps=2, **_SIZES),
}  # fmt: skip


def packs_drawn(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged packs: one document of all tokens, single tokens, and whatever is drawn."""
    random = np.random.default_rng(seed)
    packs = [[30, 1, 7], [CAPACITY - 6], [1, 1, 1, 1], [3, 5, 8, 20, 2]]
    while len(packs) < count:
        lengths = random.integers(1, 24, random.integers(1, DOCUMENTS + 1))
        if all((-(-lengths // (2 * size)) * 2 * size).sum() <= CAPACITY for size in (1, 2, 3, 5)):  # filled up
            packs.append(lengths.tolist())
    return packs


def _results(
    call: Call, plan: cp.Plan, layout: cp.Layout, group: Any, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns this rank's rows of the output and of the gradients of inputs, of numbers of bfloat16."""
    problem, rank = problem_of(call, 1), 0 if group is None else group.rank
    leaves = {
        name: (x if name in problem.whole else layout.shard(x, rank)).to(device, dtype).requires_grad_()
        for name, x in problem.leaves.items()
    }
    out = operate(call, plan, group, leaves)
    inputs = [name for name in leaves if name not in problem.whole]
    gradients = torch.autograd.grad(out, [leaves[name] for name in inputs], torch.ones_like(out))
    return {"out": out.detach(), **dict(zip(inputs, gradients, strict=True))}


def run_on_rank(
    group: Any, packs: list[list[int]], device: torch.device, dtype: torch.dtype, layout_name: str = "zigzag",
    kinds: dict[str, Any] | None = None,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Returns, for each pack, the streams of outputs and of gradients of inputs, from one `GraphTables`."""
    step, known = (2 * group.size, KINDS) if layout_name == "zigzag" else (1, CONTIGUOUS)
    kinds = kinds or known
    slots = cp.GraphTables(CAPACITY, DOCUMENTS, group.size, align_documents=step, layout=layout_name)
    found = []
    for lengths in packs:
        layout = slots.layout(lengths)
        batch = cp.shard_batch(
            np.arange(sum(lengths)), layout, group, slots=list(kinds.values()), into=slots, device=device
        )
        streams = {}
        for name, kind in kinds.items():
            kernel = "auto" if device.type == "cpu" else "varlen" if name in MASKED else "chunked"
            call = replace(CALLS[name.split()[0]], kernel=kernel)
            rows = _results(call, batch.plan(kind), layout, group, device, dtype)
            streams |= {f"{name} {what}": cp.gather(x.contiguous(), layout, group).cpu() for what, x in rows.items()}
        found.append(streams)
    return found


def errors_of(
    found: dict[str, Tensor], lengths: list[int], size: int, dtype: torch.dtype, layout_name: str = "zigzag",
    kinds: dict[str, Any] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Returns each stream's error against one rank in float64, as a share of its largest; padding is left out."""
    step, known = (2 * size, KINDS) if layout_name == "zigzag" else (1, CONTIGUOUS)
    sizes = [-(-length // step) * step for length in lengths]
    layout = cp.Layout.contiguous(cp.Packing([*sizes, CAPACITY - sum(sizes)]), 1)
    errors = {}
    for name, kind in (kinds or known).items():
        is_masked = name in MASKED
        kind = replace(kind, scheme="a2a") if is_masked else kind
        plan = cp.BatchPlan(layout, [kind], lengths=[*sizes, 0]).plan(kind) if is_masked else kind.plan(layout)
        call = replace(CALLS[name.split()[0]], kernel="reference")
        tokens = sum(sizes) if is_masked else CAPACITY
        for what, x in _results(call, plan, layout, None, torch.device("cpu"), torch.float64).items():
            difference = found[f"{name} {what}"][:tokens].double() - x[:tokens]
            errors[f"{name} {what}"] = float(difference.abs().max() / x.abs().max())
    return errors
