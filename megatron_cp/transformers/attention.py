"""Planned attention for transformers' `AttentionInterface`, which models call in place of their own attention."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.latent_attention import latent_attention
from megatron_cp.softmax.sparse import sparse_attention
from megatron_cp.transformers.batch import PlannedBatch
from megatron_cp.transformers.indexers import IndexerRows
from megatron_cp.transformers.slots import is_mask_of

NAME = "megatron_cp"  # in AttentionInterface
SLOT = "cp_slot"  # an attribute of every swapped module
_BATCH = "Call the model with a batch from ContextParallel.shard: model(**parallel.shard(batch))."


def planned_batch(given: object) -> PlannedBatch:
    """Returns the value of the argument `cp_batch`."""
    if not isinstance(given, PlannedBatch):
        remedy = (
            f"{_BATCH} To generate, or without context parallelism: with parallel.disabled(). A forward of your own "
            "passes its **kwargs on."
        )
        raise ArgumentError("cp_batch", given, "what ContextParallel.shard made", remedy)
    return given


@no_compile
def planned_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cp_batch: PlannedBatch | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes softmax attention for this rank's rows by the batch's plan.

    Args:
        query, key, value: `[1, heads, t, head_dim]`, transformers' shape.
        attention_mask: must be None, since documents, windows and chunks are in the plan.
        scaling, dropout, sliding_window, softcap, s_aux: as transformers' models pass them; `s_aux` is the sinks.

    Returns:
        The output `[1, t, heads, head_dim]`, and None for the weights.

    Raises:
        ArgumentError: a call without a planned batch, or with an argument that the plan does not compute.
    """
    batch, slot = planned_batch(cp_batch), getattr(module, SLOT, None)
    if not isinstance(slot, AttentionSpec):
        raise ArgumentError("model", type(module).__name__, "a model after enable_context_parallel(model, ...)")
    if slot.topk is not None:
        attention_mask = attention_mask if isinstance(attention_mask, Tensor) else None
    _check_call(module, slot, attention_mask, sliding_window, others, batch.dealt)
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling, "softcap": softcap or 0.0, "sink": s_aux, "dropout": dropout,
        "seed": _seed(batch, module.layer_idx) if dropout else 0, "kernel": batch.kernel,
    }  # fmt: skip
    if slot.topk is not None:
        return _selected(module, slot, (q, k, v), batch, options, others.get("indices"))[None], None
    if slot.latent is not None:
        up = _up_projection(module).unflatten(0, (slot.heads, -1))
        return latent_attention(q, v[:, 0], k[:, 0], up, batch.plan(module, slot), batch.group, **options)[None], None
    (_, heads, head_dim), (_, kv_heads, value_dim) = q.shape, v.shape
    if (heads, kv_heads, head_dim, value_dim) != (slot.heads, slot.kv_heads, slot.head_dim, slot.value_head_dim):
        slot = replace(slot, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_dim)
    return attention(q, k, v, batch.plan(module, slot), batch.group, **options)[None], None


def _selected(
    module: Any, slot: AttentionSpec, rows: tuple[Tensor, ...], batch: PlannedBatch, options: dict[str, Any],
    indices: object,
) -> Tensor:  # fmt: skip
    """Computes attention to chosen keys, and leaves the choice to layers that share it."""
    for name in ("softcap", "dropout"):
        if options[name]:
            raise ArgumentError(name, options[name], "none in layers that choose keys", "sparse_attention has none.")
    if not isinstance(indices, IndexerRows) or (slot.indexer is None and indices.chosen is None):
        raise ArgumentError("indices", indices, "what this model's own indexer returns")
    q, k, v = rows
    if not k.shape[-1]:  # keys without positions, as `attention_slot` says
        q, k = functional.pad(q, (0, 1)), functional.pad(k, (0, 1))
    if slot.indexer is None:
        index: dict[str, Any] = {"chosen": indices.chosen}
    else:
        index = {"index_q": indices.queries, "index_k": indices.keys, "index_weights": indices.weights}
    up = _up_projection(module).unflatten(0, (q.shape[1], -1))
    found = sparse_attention(
        q,
        k[:, 0],
        v[:, 0],
        batch.plan(module, slot),
        batch.group,
        up=up,
        softmax_scale=options["softmax_scale"],
        **index,
    )
    indices.chosen = found.chosen
    if (sink := options["sink"]) is None:
        return found.out
    # The sink adds its exponential to the denominator.
    return (found.out * torch.sigmoid(found.lse - sink).unsqueeze(-1)).to(found.out.dtype)


def _up_projection(module: Any) -> Tensor:
    """Returns the weight of the projection from latents to keys and values, which is not called."""
    project = module.kv_b_proj
    if type(project) is not nn.Linear or project.bias is not None:
        remedy = "Where latents arrive, only its weight is used. Leave out latents=True."
        raise ArgumentError("model.kv_b_proj", type(project).__name__, "nn.Linear without bias, with latents", remedy)
    weight: Tensor = project.weight
    return weight


def _check_call(
    module: nn.Module, slot: AttentionSpec, mask: Tensor | None, window: int | None, others: dict[str, Any],
    dealt: Set[str],
) -> None:  # fmt: skip
    if mask is not None:
        remedy = "Padding and other masks do not work here: put documents end to end, and give their lengths."
        raise ArgumentError("attention_mask", list(mask.shape), "None", remedy)
    if not is_mask_of(slot.mask, window):
        name = type(module).__name__
        raise ArgumentError("sliding_window", window, f"{slot.mask}, as the configuration says of this {name}")
    if others.get("is_causal") is False:
        raise ArgumentError("is_causal", False, "causal attention")
    # A bias on the scores would change the result. Rotary phases have been applied already, and numbers for each token
    # that the batch has beside its tokens are passed to every layer.
    unknown = [
        name for name, value in others.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        and name not in {"position_embeddings", *dealt}
    ]  # fmt: skip
    if unknown:
        raise ArgumentError(unknown[0], "a tensor", "attention without it", "No scheme here adds a bias to the scores.")


def _seed(batch: PlannedBatch, layer: int) -> int:
    if batch.seed is None:
        remedy = "Call parallel.shard(batch, seed=step): then all ranks, and recomputation, drop the same weights."
        raise ArgumentError("dropout", "attention dropout, and a batch without a seed", "a seed", remedy)
    return (batch.seed * 1_000_003 + layer) % 2**62
