"""Context parallelism for torchtitan's models with packed (varlen) attention, which its own refuses.

    from megatron_cp.integrations.torchtitan import context_parallel
    def mine():  # in a config_registry.py of yours
        return context_parallel(llama3_debugmodel_varlen_attn())

`--parallelism.context_parallel_degree` is the number of ranks, which need not divide heads, documents or rows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from torch import Tensor

from megatron_cp.batch.shard import shard_batch
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup, ThreadGroup, rank_group
from megatron_cp.integrations import require
from megatron_cp.layout import Packing
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.softmax.attention import attention
from megatron_cp.transformers.batch import PlannedBatch


def context_parallel(config: Any, *, layout: str = "balanced", align: int = 1, **attention_options: Any) -> Any:
    """Returns a copy of a configuration whose trainer plans over `cp` ranks, and logs what whole batches give.

    Args:
        config: torchtitan's `Trainer.Config`, of a model that was made with `attn_backend="varlen"`.
        layout: "balanced", "zigzag" or "contiguous".
        align: every rank's rows are filled up to a multiple of it, and of the chunks of a chunked loss.
        attention_options: arguments of `AttentionSpec`, such as `scheme="a2a"`.

    Raises:
        ArgumentError: a layer without packed attention, such as Gated DeltaNet. The trainer refuses, when it is made,
            other parallelism than of data and context, compiled blocks, CUDA graphs and DTensor backends.
    """
    require("torchtitan", "torchtitan")
    from torchtitan.models.common.attention import VarlenAttention

    spec = dataclasses.replace(config.model_spec, model=copy.deepcopy(config.model_spec.model))
    own = _attention_class(attention_options)
    for number, layer in enumerate(spec.model.layers):
        found = list(layer.traverse(VarlenAttention.Config))
        if not found:
            remedy = (
                "megatron_cp does not replace layers of flex or SDPA attention, or linear layers such as Gated "
                "DeltaNet."
            )
            raise ArgumentError(f"model_spec.model.layers[{number}]", spec.name, 'attn_backend="varlen"', remedy)
        for _, stock, parent, name in found:
            setattr(parent, name, own.Config(window_size=stock.window_size))
    fields = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    return _trainer_class(type(config)._owner, own, layout, align).Config(**fields | {"model_spec": spec})


def _attention_class(options: dict[str, Any]) -> Any:
    from torchtitan.protocols.module import Module

    class ContextParallelAttention(Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Module.Config):  # not VarlenAttention's, for which models refuse the ranks
            window_size: tuple[int, int] = (-1, 0)

        slot: AttentionSpec | None = None  # once it has run

        def __init__(self, config: Any) -> None:
            super().__init__()
            left, right = config.window_size
            self.mask = f"window:{left},{right}" if left >= 0 or right else "causal"

        def parallelize(self, parallel_dims: Any) -> None:
            """Does nothing: torchtitan's would gather all keys, as its flex attention needs them."""

        def forward(
            self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: PlannedBatch,  # noqa: N803
            scale: float | None = None, out_transform: Any = None, enable_gqa: bool = False,
        ) -> Tensor:  # fmt: skip
            if not isinstance(attention_masks, PlannedBatch):
                raise ArgumentError("attention_masks", attention_masks, "what the trainer of context_parallel makes")
            sinks = getattr(getattr(out_transform, "__self__", None), "sinks", None)
            if out_transform is not None and sinks is None:
                raise ArgumentError("out_transform", out_transform, "None, or GPT-OSS's, which adds its sinks")
            q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
            (_, heads, head_dim), (_, kv_heads, value_dim) = q.shape, v.shape
            self.slot = AttentionSpec(heads, kv_heads, head_dim, value_dim, mask=self.mask, **options)
            plan = attention_masks.plan(self, self.slot)
            return attention(q, k, v, plan, attention_masks.group, softmax_scale=scale, sink=sinks)[None]

    return ContextParallelAttention


def _trainer_class(trainer: Any, own: Any, layout: str, align: int) -> Any:
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    class PlannedTrainer(trainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(trainer.Config):
            pass

        def __init__(self, config: Any) -> None:
            _check(config)
            super().__init__(config)
            if config.validator.enable:
                self.validator.post_dataloading_process = lambda inputs, labels, _: self._sharded(inputs, labels)

        def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> tuple[Any, ...]:
            rows = self._sharded(input_dict, labels)
            self.ntokens_seen += self._num_own_tokens
            return annotate_input_spmd_types(self.parallel_dims, *rows)

        def _sharded(self, input_dict: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            if set(input_dict) != {"input", "positions"}:
                raise ArgumentError("input_dict", sorted(input_dict), "input and positions, of text alone")
            dims = self.parallel_dims
            ranks: RankGroup = rank_group(dims.get_mesh("cp")) if dims.cp_enabled else ThreadGroup.create(1)[0]
            inputs, positions = input_dict["input"], input_dict["positions"].cpu()
            starts = positions == 0
            starts[:, 0] = True  # rows are laid end to end
            packing = Packing.from_cu_seqlens([*starts.flatten().nonzero()[:, 0].tolist(), starts.numel()])
            modules = (module for part in self.model_parts for module in part.modules() if isinstance(module, own))
            slots = list(dict.fromkeys(module.slot for module in modules if module.slot is not None))
            rows = math.lcm(align, getattr(self.config.loss, "num_chunks", 1))
            planned = layout_by_name(layout, packing, ranks.size, align=rows, min_rows=1, slots=slots)
            tokens, targets, device = inputs.flatten().cpu(), labels.flatten().cpu(), inputs.device
            batch = shard_batch(tokens, planned, ranks, slots=slots, labels=targets, device=device)
            ids = planned.shard(positions.flatten(), ranks.rank)[None].to(device)
            masks = PlannedBatch(batch.plans, ranks, None, "auto", batch.num_tokens)
            self._num_own_tokens = int(planned.token_counts[ranks.rank])  # without filling
            return batch.tokens[None], batch.labels[None], {"positions": ids, "attention_masks": masks}

    return PlannedTrainer


def _check(config: Any) -> None:
    places = config.parallelism
    for name, given, allowed in (
        ("parallelism.tensor_parallel_degree", places.tensor_parallel_degree, 1),
        ("parallelism.pipeline_parallel_degree", places.pipeline_parallel_degree, 1),
        ("parallelism.expert_parallel_degree", places.expert_parallel_degree, 1),
        ("parallelism.spmd_backend", places.spmd_backend, "spmd_types"),
        ("debug.spmd_typechecking", config.debug.spmd_typechecking, False),
        # Blocks are compiled with fullgraph=True, and an operation breaks the graph. A CUDA graph would keep a plan.
        ("compile.enable", config.compile.enable and "model" in config.compile.components, False),
        ("training.disable_cuda_graphs", config.training.disable_cuda_graphs, True),
    ):
        if given != allowed:
            raise ArgumentError(name, given, f"{allowed}, with context_parallel")
