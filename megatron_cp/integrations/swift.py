"""Context parallelism for ms-swift, in place of its sequence parallelism (Ulysses and ring attention).

    from megatron_cp.integrations.swift import register

    register()  # in a file that `swift sft --external_plugins FILE` names

`--sequence_parallel_size` is the number of ranks, which need not divide heads or tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.gather import gather
from megatron_cp.integrations import check_whole_logits, require
from megatron_cp.integrations.images import always_run_tower
from megatron_cp.layout import Layout
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.planner.batch import BatchPlan
from megatron_cp.transformers.documents import packing_of
from megatron_cp.transformers.enable import ContextParallel, enable_context_parallel
from megatron_cp.transformers.images import takes_images

_STOCK = "Only the trainer's own passes over whole batches run over the ranks: generate and score with other processes."


class ContextParallelSequenceMixin:
    """A mixin for ms-swift's `SequenceParallel`, which its trainers ask to split batches and to gather losses.

    Models run over the ranks of a group by `enable_context_parallel`: any heads, any lengths, windows, and hybrids with
    linear layers, whose documents stay apart. It takes images and videos as `ContextParallel.shard` does. Losses,
    weights of tokens and accuracies are ms-swift's own, over whole batches on every rank.

    Attributes:
        cp_options: arguments of `enable_context_parallel`, such as `{"layout": "balanced", "scheme": "auto"}`.
        context_parallel: the `ContextParallel` of the model that was prepared last.

    Raises:
        ArgumentError: padded batches, `logit_rows`, or a pass of the model that is not one over the trainer's batch.
    """

    cp_options: Mapping[str, Any] = {}
    context_parallel: ContextParallel
    device_mesh: Any
    extra_kwargs: dict[str, Any]
    num_heads: int
    rp_group: Any
    rp_rank: int
    world_size: int
    _layout: Layout
    _batches = 0
    _with_images: nn.Module | None = None

    def prepare(self, sp_size: int, model: Any, tokenizer: Any, padding_free: bool) -> None:
        """Enables a model, and shards the arguments of its calls."""
        if not padding_free:
            remedy = "Pass --packing true or --padding_free true, so that documents are end to end, without padding."
            raise ArgumentError("padding_free", False, "True", remedy)
        check_whole_logits(self.cp_options, "ms-swift")
        self.world_size, self.tokenizer, self.padding_free = sp_size, tokenizer, padding_free
        self.model_dtype = next(model.parameters()).dtype
        if self.device_mesh is None:
            # For one head all ranks are a ring, in which ms-swift takes the order of tokens from `split` and `gather`.
            self.num_heads = 1
            self._init_device_mesh()  # type: ignore[attr-defined]
        if takes_images(model):
            self._with_images = model
            _restore_forwards(model)
            always_run_tower(model)
        self.context_parallel = enable_context_parallel(model, self.rp_group, **self.cp_options)
        shard = functools.partial(self._shard_call, self.context_parallel)
        model.register_forward_pre_hook(shard, with_kwargs=True)

    def leaves_images(self, model: nn.Module) -> bool:
        """True if a model, or the one that it wraps, takes images in its own forward."""
        return self._with_images is not None and any(each is self._with_images for each in model.modules())

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Replaces labels and weights of tokens by this rank's; the model's call shards everything else."""
        positions = inputs.get("text_position_ids")
        positions = inputs.get("position_ids") if positions is None else positions
        if not isinstance(positions, Tensor) or not isinstance(inputs.get("input_ids"), Tensor):
            raise ArgumentError("inputs", sorted(inputs), "input_ids and position_ids of one packed row")
        packing = packing_of({"input_ids": inputs["input_ids"].cpu(), "position_ids": positions.cpu()})
        self._layout, self._batches = self.context_parallel.planner(packing).layout, self._batches + 1
        super().prepare_inputs(inputs)  # type: ignore[misc]
        if (labels := inputs.get("labels")) is not None:
            # Evaluation counts labels now: by this name it does not leave out the first one of every rank.
            inputs["shift_labels"] = labels

    def pad(self, tensor: Tensor, padding_value: Any, position_ids: Any = None, dim: int = 1) -> Tensor:
        """Returns the tensor as it is: ranks may hold different numbers of tokens."""
        return tensor

    def split(self, input: Tensor, dim: int, position_ids: Any = None) -> Tensor:  # noqa: A002
        """Returns this rank's tokens along `dim`; pad rows have the label -100 and the gradient 0."""
        if self.world_size == 1:
            return input
        fill = 0 if input.is_floating_point() else IGNORE_INDEX
        return self._layout.shard(input.movedim(dim, 0), self.rp_rank, pad_value=fill).movedim(0, dim).contiguous()

    @torch.no_grad()
    def gather(self, local_output: Tensor, dim: int, position_ids: Any = None) -> Tensor:
        """Returns the tokens of all ranks along `dim`, in their order; ms-swift differentiates it by `split`."""
        if self.world_size == 1:
            return local_output
        rows = local_output.movedim(dim, 0).contiguous()
        return gather(rows, self._layout, self.rp_group).movedim(0, dim).contiguous()

    def _shard_call(
        self, context: ContextParallel, model: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = named.get("input_ids")
        total = self._layout.packing.total if hasattr(self, "_layout") else 0
        if self.world_size == 1 or args or not isinstance(ids, Tensor) or ids.shape != (1, total):
            given = "no input_ids" if not isinstance(ids, Tensor) else f"a call with input_ids {list(ids.shape)}"
            raise ArgumentError("model", given, f"the trainer's batch, [1, {total}]", _STOCK)
        whole = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in named.items() if x is not None}
        for name in ("use_cache", "shift_labels"):
            whole.pop(name, None)
        whole |= {
            "lengths": self._layout.packing.lengths.tolist(),
            "cp_plans": BatchPlan(self._layout, dict.fromkeys(context.slots).keys()),
        }
        return args, dict(context.shard(whole, seed=self._batches, device=ids.device))


def _restore_forwards(model: nn.Module) -> None:
    """Takes away forwards that ms-swift puts before those of Qwen's classes, which it keeps as `origin_forward`.

    With DeepSpeed they run the tower on images and videos together, and cut its rows by grids of the whole batch. Under
    sequence parallelism their deep features are those of whole rows.
    """
    for module in model.modules():
        kept = vars(module)
        if "origin_forward" in kept:
            kept.pop("forward", None)
        kept.pop("_deepstack_process", None)


def _leaving_images(sequence: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ms-swift's hook before a model's call, which embeds images, for all models but those that do so here.

    For a full model it runs after our hook, and would embed a rank's rows; for a model within PEFT's before it.
    """

    @functools.wraps(stock)
    def pre_forward_hook(template: Any, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, kwargs) if sequence.leaves_images(model) else stock(template, model, args, kwargs)

    return pre_forward_hook


def register(**cp_options: Any) -> Any:
    """Makes ms-swift's sequence parallelism that of `enable_context_parallel`. Returns the object that it asks.

    Args:
        cp_options: arguments of `enable_context_parallel`.

    Raises:
        ArgumentError: ms-swift has prepared a model for its own.
    """
    require("swift", "ms-swift")
    from swift.sequence_parallel import SequenceParallel, sequence_parallel
    from swift.template.base import Template

    if sequence_parallel.world_size is not None:
        raise ArgumentError("register", "a call after ms-swift prepared its model", "one before, such as in a plugin")
    sequence_parallel.__class__ = type(
        "ContextParallelSequence", (ContextParallelSequenceMixin, SequenceParallel), {"cp_options": cp_options}
    )
    Template.pre_forward_hook = _leaving_images(sequence_parallel, Template.pre_forward_hook)
    return sequence_parallel
