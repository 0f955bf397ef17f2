"""Context parallelism for NeMo Automodel's recipes with transformers' models, for packed batches too.

model:
  _target_: megatron_cp.integrations.automodel.from_pretrained
  load_fn: transformers.AutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-0.6B
  cp_size: 3
distributed:
  cp_size: 3
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.executor.groups import Group
from megatron_cp.integrations import check_whole_logits, require
from megatron_cp.transformers.enable import ContextParallel, enable_context_parallel

# Keys of Automodel's collate functions that say where documents are, or which tokens are pads.
_METADATA = (
    "attention_mask", "padding_mask", "seq_lens", "seq_lens_padded", "qkv_format", "_packed_seq_ids",
    "packed_token_indices", "cu_seqlens", "max_seqlen",
)  # fmt: skip


def from_pretrained(
    pretrained_model_name_or_path: str,
    *,
    load_fn: Callable[..., Any],
    cp_size: int,
    cp_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a causal language model of transformers for a recipe's `model._target_`, and makes it context parallel.

    Args:
        pretrained_model_name_or_path, kwargs: arguments of `load_fn`.
        load_fn: transformers' `AutoModelForCausalLM.from_pretrained`, or another function that returns such a model.
        cp_size: the recipe's `distributed.cp_size`. Ranks of a group follow each other, as in Automodel's mesh.
        cp_options: arguments of `enable_context_parallel`, such as `{"layout": "balanced", "scheme": "auto"}`.
    """
    model = load_fn(pretrained_model_name_or_path, **kwargs)
    cp_size = checked_integer("cp_size", cp_size, 1)
    if cp_size > 1:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        names = ("others", "cp")
        mesh = init_device_mesh(kind, (dist.get_world_size() // cp_size, cp_size), mesh_dim_names=names)
        own_batches(model, mesh["cp"], **cp_options or {})
    return model


def own_batches(model: Any, group: Group, **cp_options: Any) -> ContextParallel:
    """Makes a model context parallel, and Automodel's `ContextParallelSharder` ask it for its batches.

    Args:
        model: a model of transformers, before Automodel shards its parameters.
        cp_options: arguments of `enable_context_parallel`.

    Raises:
        ArgumentError: `logit_rows`, a model with context parallelism or a backend of Automodel's own, or one that
            `enable_context_parallel` refuses. In a step: other ranks, tensor parallelism, or a batch that is not known.
    """
    require("nemo_automodel", "nemo-automodel")
    from nemo_automodel._transformers.capabilities import attach_capabilities_and_validate

    for name in ("backend", "prepare_model_inputs_for_cp"):
        if hasattr(model, name):
            remedy = "Load it with transformers' own class, because Automodel's class replaces attention itself."
            given = f"{type(model).__name__}, which has `{name}`"
            raise ArgumentError("model", given, "a model of transformers", remedy)
    check_whole_logits(cp_options, "Automodel")
    parallel = enable_context_parallel(model, group, **cp_options)
    attach_capabilities_and_validate(model, None)
    model._owns_cp_attention = True  # data sets need not pad documents for it
    model.prepare_model_inputs_for_cp = partial(_sharder, parallel)
    return parallel


def _sharder(parallel: ContextParallel, batch: Any, num_chunks: int = 1) -> dict[str, Any]:  # noqa: ARG001
    from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder

    if num_chunks != 1:
        raise ArgumentError("num_chunks", num_chunks, "1", "Pipeline stages do not work with megatron_cp.")
    return {"cp_sharder": ContextParallelSharder(shard_batch=partial(_shard_batch, parallel))}


def _shard_batch(
    parallel: ContextParallel, cp_mesh: Any, tp_mesh: Any, batch: dict[str, Any], *, loss_mask: Tensor | None = None,
    padding_token_id: int = 0,  # noqa: ARG001
) -> tuple[Callable[[], Any], dict[str, Any], None]:  # fmt: skip
    """Returns this rank's rows of a batch, whose rows are laid end to end, as `ContextParallelSharder` calls it."""
    if (cp_mesh.size(), cp_mesh.get_local_rank()) != (parallel.cp_size, parallel.rank):
        raise ArgumentError("distributed.cp_size", cp_mesh.size(), f"{parallel.cp_size}, the model's cp_size")
    if tp_mesh is not None and tp_mesh.size() > 1:
        raise ArgumentError("distributed.tp_size", tp_mesh.size(), "1")
    host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items() if x is not None}
    unknown = set(host) - {"input_ids", "labels", "position_ids", "dataset_id", *_METADATA}
    if unknown or loss_mask is not None:
        given = sorted(unknown) or "a loss mask"
        raise ArgumentError("batch", given, "input_ids, labels, position_ids and what says where documents begin")
    ids, starts = host["input_ids"], _starts(host)
    edges = [*starts.flatten().nonzero()[:, 0].tolist(), ids.numel()]
    positions = host.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    whole = {"input_ids": ids, "shift_labels": host["labels"], "position_ids": positions}  # labels are shifted already
    whole = {name: x.reshape(1, -1) for name, x in whole.items()} | {"lengths": torch.tensor(edges).diff()}
    rows = dict(parallel.shard(whole, device=batch["input_ids"].device))
    rows["labels"] = rows.pop("shift_labels")
    return contextlib.nullcontext, rows, None


def _starts(host: dict[str, Any]) -> Tensor:
    """Returns truth values `[rows, tokens]`: a document begins here."""
    ids, documents = host["input_ids"], host.get("_packed_seq_ids")
    mask = host.get("attention_mask")
    if documents is None and mask is not None and mask.ndim == 2 and (mask > 1).any():
        documents = mask  # which numbers the documents of a row, and is 0 in pads
    if documents is None and mask is not None and mask.ndim == 2 and (mask[:, 1:] > mask[:, :-1]).any():
        raise ArgumentError("attention_mask", "pads before tokens", "pads at the end of a row")
    if documents is None and "position_ids" not in host and {"seq_lens", "cu_seqlens"} & set(host):
        raise ArgumentError("position_ids", None, "the positions of a pack's tokens in their documents")
    starts = torch.zeros(ids.shape, dtype=torch.bool)
    starts[:, 0] = True
    if documents is not None:
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts |= (documents == 0) & (host.get("position_ids", documents) == 0)  # pads, each a document of its own
    elif "position_ids" in host:
        starts |= host["position_ids"] == 0
    return starts
