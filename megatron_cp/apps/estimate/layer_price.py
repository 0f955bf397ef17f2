"""`layer_seconds`: predicts the time of one layer of one microbatch on one rank of a job. No torch in here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.mixers import BF16, Gemm
from megatron_cp.apps.estimate.model_layers import FULL, OPS, SELECTIVE, Block
from megatron_cp.planner import Machine

Seconds = NDArray[np.float64]
LAYER_PARTS = (
    "attention", "linear", "products", "experts", "dispatch", "tensor", "exposed", "imbalance", "traffic",
)  # fmt: skip
AT = {name: number for number, name in enumerate(LAYER_PARTS)}
_EXPERT_TILE = 128  # rows that a grouped product of experts takes at once
# Bytes of an operand's element that is cast to FP8 with a scale of its tensor: read for the largest, read again, and
# written along rows and along columns.
_CAST = 2 + 2 + 1 + 1


def layer_seconds(block: Block, mixer: Seconds | None, hidden_size: int, tokens: int, job: Job, on: Machine) -> Seconds:
    """Returns `[2, parts]` the seconds of a layer on a rank, forward and backward, with what backward computes again.

    Args:
        block: the layer of the whole model.
        mixer: `[2, parts]` of its attention or linear layer.
        hidden_size: features of a hidden state.
        tokens: tokens of a microbatch on the rank.
        job, on: the job and the machine.
    """
    found = np.zeros((2, len(LAYER_PARTS))) if mixer is None else mixer.copy()
    rate, fp8 = 2 * on.hardware.copy, job.precision == "fp8"  # a copy reads what it writes
    wide = list(block.mixer.gemms(hidden_size)) if block.mixer is not None else []
    scores: tuple[Gemm, ...] = ()
    if block.mlp is not None:
        wide += block.mlp.dense_gemms(hidden_size)
        scores = block.mlp.score_gemms(hidden_size)
    for gemms, of in ((wide, job), (scores, replace(job, precision="bf16"))):
        for gemm in gemms:
            found[:, AT["products"]] += product_seconds(gemm, hidden_size, tokens, of, on)
    features = block.moved(hidden_size)
    moved: Seconds = BF16 * np.array([features.forward, features.backward], dtype=np.float64)
    if fp8:
        cast = wide + list(block.mlp.routed_gemms(hidden_size) if block.mlp is not None else ())
        moved += _CAST * np.array([sum(each.products * each.in_features for each in cast),
                                   sum(each.products * each.out_features for each in cast)])  # fmt: skip
    found[:, AT["traffic"]] += moved * tokens / job.tp / rate
    routed = block.mlp is not None and bool(block.mlp.experts)
    if routed:
        found += _expert_seconds(block, hidden_size, tokens, job, on)
    if job.tp > 1:  # a gather before each part and a sum after it; routed experts have theirs in the dispatch
        transfer = ring_seconds(BF16 * hidden_size * tokens, job.tp, 1, on)
        for gemm in _beside_transfers(block, hidden_size):
            product = product_seconds(gemm, hidden_size, tokens, job, on) / (1, 2)  # of backward's two, one waits
            found[:, AT["tensor"]] += _exposed(transfer, product, job) if job.tp_overlap else transfer
    if job.recompute == FULL:
        found[1] += found[0]
    elif job.recompute == SELECTIVE:
        found[1, AT["traffic"]] += BF16 * features.again * tokens / job.tp / rate
    elif job.recompute == OPS:
        found[1, AT["traffic"]] += found[0, AT["traffic"]]
        for gemm in block.repeated(hidden_size):
            found[1, AT["products"]] += product_seconds(gemm, hidden_size, tokens, job, on)[0]
    return found


def _beside_transfers(block: Block, hidden_size: int) -> list[Gemm]:
    """Returns the products behind a gather, or before a sum, of tensor parallelism."""
    found = list(block.mixer.gemms(hidden_size)) if block.mixer is not None else []
    found = [found[0], found[-1]] if found else []
    if block.mlp is not None:
        found += block.mlp.dense_gemms(hidden_size)
    return found


def _exposed(transfer: float, product: Seconds, job: Job) -> Seconds:
    """Returns the time that a transfer adds to a product with which it overlaps in `tp` pieces.

    The longer one is hidden behind nothing, and of the shorter one a piece.
    """
    longer, shorter = np.maximum(product, transfer), np.minimum(product, transfer)
    return longer + shorter / job.tp - product


def product_seconds(gemm: Gemm, hidden_size: int, tokens: int, job: Job, on: Machine) -> Seconds:
    """Returns `[2]` the seconds of a product, and of those of its input's and its weight's gradients."""
    columns, inner = gemm.out_features, gemm.in_features
    if gemm.out_features == hidden_size:
        inner = max(inner // job.tp, 1)
    else:
        columns = max(columns // job.tp, 1)
    kind, of = "fp8" if job.precision == "fp8" else None, on.hardware.product_seconds
    rows = max(tokens, 1)
    times = [of(rows, columns, inner, kind), of(rows, inner, columns, kind) + of(columns, inner, rows, kind)]
    return tokens / rows * gemm.products * np.array(times)


def _expert_seconds(block: Block, hidden_size: int, tokens: int, job: Job, on: Machine) -> Seconds:
    """Returns `[2, parts]` the seconds of routed experts and of their tokens' way there and back.

    Tokens are routed evenly. An expert has as many rows as are routed to it on all ranks of its group, rounded up to
    whole tiles. Without a rate of grouped products that of single ones counts.
    """
    found, mlp = np.zeros((2, len(LAYER_PARTS))), block.mlp
    assert mlp is not None
    sent = tokens / job.tp * mlp.experts_per_token
    local = mlp.experts / job.ep
    each = sent / local
    rows = -(-each // _EXPERT_TILE) * _EXPERT_TILE
    dense = "fp8" if job.precision == "fp8" else None
    kind = f"experts {dense}" if dense else "experts"
    beside = {name: seconds for name, *_, seconds in on.hardware.products}
    for gemm in mlp.routed_gemms(hidden_size) if tokens else ():
        shape = rows, gemm.out_features, gemm.in_features
        one = max(on.hardware.product_seconds(*shape, each) for each in {dense, kind if kind in beside else dense})
        found[:, AT["experts"]] += local * one * np.array([1.0, 2.0])
    found[:, AT["experts"]] += beside.get(kind, 0.0) * np.array([1.0, 2.0])
    copies = 2 if job.ep == 1 else 4  # to the experts' order and back; over ranks, twice
    nbytes = BF16 * hidden_size * sent
    there = copies * nbytes / on.hardware.copy + 2 * all_to_all_seconds(nbytes, job.ep, 1, on)
    found[:, AT["dispatch"]] += there
    return found


def ring_seconds(nbytes: float, ranks: int, apart: int, on: Machine) -> float:
    """Returns the seconds of an all-gather to, or a reduce-scatter of, so many bytes on each rank.

    Args:
        nbytes: bytes of the whole on each rank.
        ranks: size of the group.
        apart: the distance of neighbours among all ranks, which fill hosts.
        on: the machine. Within a host its fit of collectives counts; between hosts the bytes that enter one, over the
            cards of the group's ranks there.
    """
    if ranks == 1:
        return 0.0
    near = min(max(on.ranks_per_host // apart, 1), ranks)
    hosts = -(-ranks // near)
    if hosts == 1:
        sent, link = nbytes * (1 - 1 / ranks), on.within
        return link.latency + (ranks - 1) * link.message + sent / link.bandwidth + link.ramp * sent**0.5
    card = on.between.bandwidth * on.rails / on.ranks_per_host
    return on.between.latency + (hosts - 1) * on.between.message + nbytes * (1 - 1 / hosts) / (card * near)


def all_to_all_seconds(nbytes: float, ranks: int, apart: int, on: Machine) -> float:
    """Returns the seconds of an all-to-all in which each rank sends so many bytes; see `ring_seconds`."""
    near = min(max(on.ranks_per_host // apart, 1), ranks)
    found = 0.0
    if near > 1:
        sent, link = nbytes * (near - 1) / ranks, on.within
        found = link.latency + (near - 1) * link.message + sent / link.bandwidth + link.ramp * sent**0.5
    if ranks > near:
        card = on.between.bandwidth * on.rails / on.ranks_per_host
        far = on.between.latency + (ranks - near) * on.between.message + nbytes * (1 - near / ranks) / card
        found = max(found, far)
    return found
