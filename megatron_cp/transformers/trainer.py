"""Context parallelism for transformers' Trainer and classes that derive from it, such as TRL's SFTTrainer.

    trainer = ContextParallelTrainer(model=model, args=args, train_dataset=..., data_collator=flattening)

with `args.parallelism_config = ParallelismConfig(cp_size=4)` of accelerate, or `accelerate launch` with
`--use_parallelism_config`. Only this trainer's own methods are changed; nothing in transformers, accelerate or TRL is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers import Trainer

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.transformers.additions import Share, equal, is_scaled
from megatron_cp.transformers.batch import ShardedBatch
from megatron_cp.transformers.documents import packing_of
from megatron_cp.transformers.logits import ChunkedLogits
from megatron_cp.transformers.padding import flatten_rows, restore_rows
from megatron_cp.transformers.trainer_base import OWN_LOSS, RanksMixin, another_loss

# Outputs of models with images that have no row for each token.
_OF_IMAGES = ("image_hidden_states", "rope_deltas")


class ContextParallelMixin(RanksMixin):
    """A mixin for transformers' trainers: `class Mine(ContextParallelMixin, SFTTrainer)`. It supports packing.

    Batches are one row of documents, as `DataCollatorWithFlattening` and TRL's packing make them, or rows that are
    padded on the right, which are put end to end. Losses, gradients and their norm equal those of one rank on each
    document alone, and so do the losses of evaluations, weighted as the trainer weights its batches. The model may be
    of any class that `enable_context_parallel` takes, with or without LoRA.

    Args:
        args, named: arguments of the trainer.
        layout, scheme, linear_mode: arguments of `enable_context_parallel`.
        cp_options: other arguments of `enable_context_parallel`.

    Attributes:
        context_parallel: the `ContextParallel` that `enable_context_parallel` returned.

    Raises:
        ArgumentError: a model that is not supported, an argument of the trainer that would give another loss, a TRL
            trainer that computes more than a model's own loss, or several processes without a configuration of their
            parallelism.
    """

    model_accepts_loss_kwargs: Any
    _trl_trainers = ("SFTTrainer",)
    _sharded: ShardedBatch | None = None
    _metrics: Any  # TRL's, and its number of tokens seen
    _total_train_tokens: int
    _kept: Tensor | None = None  # bools [rows, width]: tokens of padded rows that are in the sharded batch

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Returns the trainer's own result, with the whole batch's loss and logits in the order of its tokens.

        Of models with images `image_hidden_states` and `rope_deltas` are left out.
        """
        stock = super().prediction_step  # type: ignore[misc]
        if not self.context_parallel.is_enabled:  # each rank computes the whole batch
            found: tuple[Tensor | None, Any, Any] = stock(model, inputs, prediction_loss_only, ignore_keys)
            return found
        if inputs.get("labels") is None:
            whole = "with trainer.context_parallel.disabled(): trainer.predict(...)"
            remedy = f"Evaluate with labels, or let every rank compute whole batches: {whole}."
            raise ArgumentError("inputs", "no labels", "a batch with labels", remedy)
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values"])
        loss, logits, labels = stock(model, inputs, prediction_loss_only, [*ignore_keys, *_OF_IMAGES])
        if loss is not None:
            self._check_loss(loss)
        if loss is not None and self._group is not None:
            dist.all_reduce(loss, group=self._group)
            loss = loss / self.context_parallel.cp_size
        logits = recursively_apply(self._whole, _full(logits))
        return loss, logits, labels.to(self.args.device) if isinstance(labels, Tensor) else labels

    def _whole(self, rows: Tensor) -> Tensor:
        """Gathers a model's output from all ranks, in the shape of the batch."""
        assert self._sharded is not None
        if rows.shape[:2] != self._sharded["input_ids"].shape:
            remedy = "Leave it out: ignore_keys=[...], or the model's keys_to_ignore_at_inference."
            raise ArgumentError("outputs", list(rows.shape), "tensors with a row for each token", remedy)
        return restore_rows(self.context_parallel.gather(rows, self._sharded), self._kept)

    # -- methods that the trainer calls with a batch, in this order -------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: Sequence[Mapping[str, Any]], device: torch.device) -> Any:
        """Counts labels without those of documents' first tokens, which some collators leave in."""
        counted = batch_samples
        if self.context_parallel.is_enabled:
            counted = [_without_first_tokens(flatten_rows(batch)[0]) for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Leaves batches on the host until they are sharded."""
        on_device = "cp_batch" in inputs or not self.context_parallel.is_enabled
        return super()._prepare_inputs(inputs) if on_device else inputs  # type: ignore[misc]

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        if not self.context_parallel.is_enabled:
            return contextlib.nullcontext, inputs
        flat, self._kept = flatten_rows(inputs)
        self._sharded = self.context_parallel.shard(flat, seed=self.state.global_step, device=self.args.device)
        return contextlib.nullcontext, dict(self._sharded)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns this rank's share of the loss, times the number of ranks whose gradients are averaged."""
        if not self.context_parallel.is_enabled:
            # The trainer multiplies by the number of processes. All ranks of a group have the same whole batch.
            count = None if num_items_in_batch is None else num_items_in_batch * self.context_parallel.cp_size
            whole = super().compute_loss(model, inputs, return_outputs, count)  # type: ignore[misc]
            self._share = Share(whole[0] if return_outputs else whole)
            return whole
        if "cp_batch" not in inputs:  # TRL's evaluation shards nothing
            inputs = self._prepare_context_parallel_inputs(model, inputs)[1]
        assert self._sharded is not None
        if num_items_in_batch is None:
            # TRL's evaluation, and models that take no such number, divide by the labels that are at hand, of which a
            # rank has a part or none. The loss is multiplied later by the number of all ranks, replicas included.
            replicas = self.accelerator.num_processes // self.context_parallel.cp_size // self.get_tp_size()
            num_items_in_batch = torch.tensor(self._sharded.num_items * replicas, device=self.args.device)
        self._check_losses()  # which may have been set after the trainer was made
        self._share, kept = None, self.context_parallel.token_loss
        counted = getattr(self, "_total_train_tokens", None)
        kept.value, kept.follows = None, True  # TRL computes losses of log-probabilities, without the model's function
        try:
            with self._loss_of_shares():
                found = super().compute_loss(  # type: ignore[misc]
                    model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
                )
                if counted is not None and self.model.training:
                    self._count_rows(counted, inputs)
        finally:
            node, kept.node, kept.follows = kept.node, None, False
        loss = found[0] if return_outputs else found
        if kept.value is None and not self._is_trl:
            raise ArgumentError("compute_loss", "a loss without the model's", "the model's own loss", OWN_LOSS)
        ranks = self.accelerator.num_processes // self.get_tp_size()
        if kept.value is not None and not is_scaled(loss.grad_fn, node, ranks) and not equal(loss, kept.value * ranks):
            raise another_loss()
        self._share = Share(loss)
        return found

    def _count_rows(self, before: int, inputs: Mapping[str, Any]) -> None:
        """Counts this batch's tokens again where positions may have several axes, of which TRL counts the second."""
        config = self.accelerator.unwrap_model(self.model).config
        if hasattr(config, "vision_config"):  # of all replicas; one of them may have no images now
            rows = torch.tensor(inputs["input_ids"].shape[1], device=self.args.device)
            found = int(self.accelerator.gather_for_metrics(rows).sum().item())
            self._total_train_tokens = before + found // self.get_tp_size()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]

    @contextlib.contextmanager
    def _loss_of_shares(self) -> Iterator[None]:
        accepts, self.model_accepts_loss_kwargs, self._sums_shares = self.model_accepts_loss_kwargs, True, True
        try:
            yield
        finally:
            self.model_accepts_loss_kwargs, self._sums_shares = accepts, False


def _full(outputs: Any) -> Any:
    """Returns a model's outputs with all logits in place of `ChunkedLogits`."""
    if isinstance(outputs, tuple):
        return tuple(map(_full, outputs))
    return outputs.full() if isinstance(outputs, ChunkedLogits) else outputs


def _without_first_tokens(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if batch.get("labels") is None or batch.get("shift_labels") is not None:
        return batch
    packing, labels = packing_of(batch), batch["labels"].clone()
    labels[0, torch.from_numpy(packing.cu_seqlens[:-1][packing.lengths > 0])] = IGNORE_INDEX
    return {**batch, "labels": labels}


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """transformers' `Trainer` with context parallelism; see `ContextParallelMixin`."""
