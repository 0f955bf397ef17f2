"""transformers' Trainer, and what derives from it such as TRL's SFTTrainer, with context parallelism.

    trainer = ContextParallelTrainer(model=model, args=args, train_dataset=..., data_collator=flattening)

with `args.parallelism_config = ParallelismConfig(cp_size=4)` of accelerate, or `accelerate launch` with
`--parallelism_config_cp_size 4`. All that is changed is this trainer's own: transformers, accelerate and TRL stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.transformers.batch import ShardedBatch
from megatron_cp.transformers.documents import packing_of
from megatron_cp.transformers.enable import enable_context_parallel

_SHIFTS = "It would shift labels that are shifted already. The model's own loss takes them as they are."


class ContextParallelMixin:
    """Before a class of transformers' trainers: `class Mine(ContextParallelMixin, SFTTrainer)`, packing included.

    Batches are one row of documents, as `DataCollatorWithFlattening` and TRL's packing make them. Losses, gradients and
    their norm are those of one rank on each document alone. The model may be of any class that
    `enable_context_parallel` takes, with LoRA or without.

    Args:
        args, named: of the trainer.
        layout, scheme, linear_mode: see `enable_context_parallel`.
        cp_options: other arguments of it.

    Attributes:
        context_parallel: what it returned.

    Raises:
        ArgumentError: a model that cannot be run so, or an argument of the trainer that would train something else.
    """

    accelerator: Any
    args: Any
    model: Any
    state: Any

    def __init__(
        self, *args: Any, layout: str = "balanced", scheme: str = "auto", linear_mode: str = "auto",
        cp_options: Mapping[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        self._hidden = contextlib.ExitStack()  # what TRL must not see while it is made
        with self._hidden:
            super().__init__(*args, **named)
        self._check_arguments()
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        mesh = self.accelerator.torch_device_mesh
        group = mesh["cp"] if mesh is not None and "cp" in (mesh.mesh_dim_names or ()) else None
        self.context_parallel = enable_context_parallel(
            model, group, layout=layout, scheme=scheme, linear_mode=linear_mode, **(cp_options or {})
        )
        self._sharded: ShardedBatch | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Has accelerate leave the model alone, and TRL not refuse to pack."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # accelerate would refuse windows and linear layers here, or exchange the attention.
        self.accelerator._prepare_cp = lambda *prepared: prepared
        config = self.accelerator.parallelism_config
        if config is not None and config.cp_enabled:
            self._hidden.enter_context(_unseen(config))

    def get_train_dataloader(self) -> Any:
        return self._on_host(super().get_train_dataloader)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **named: Any) -> Any:
        return self._on_host(super().get_eval_dataloader, *args, **named)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **named: Any) -> Any:
        return self._on_host(super().get_test_dataloader, *args, **named)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """As the trainer's, with the whole batch's logits, in the order of its tokens."""
        if inputs.get("labels") is None:
            remedy = "Evaluate with labels, or on whole batches: with trainer.context_parallel.disabled()."
            raise ArgumentError("inputs", "no labels", "a batch with labels", remedy)
        loss, logits, labels = super().prediction_step(  # type: ignore[misc]
            model, inputs, prediction_loss_only, ignore_keys
        )
        if isinstance(logits, Tensor):
            assert self._sharded is not None
            logits = self.context_parallel.gather(logits, self._sharded)
        return loss, logits, labels.to(self.args.device) if isinstance(labels, Tensor) else labels

    # -- what the trainer calls with a batch, in this order ---------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: Sequence[Mapping[str, Any]], device: torch.device) -> Any:
        """Labels that a token predicts: not those of documents' first tokens, which some collators leave in."""
        counted = [_without_first_tokens(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Batches stay on the host until they are sharded."""
        return super()._prepare_inputs(inputs) if "cp_batch" in inputs else inputs  # type: ignore[misc]

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        self._sharded = self.context_parallel.shard(inputs, seed=self.state.global_step, device=self.args.device)
        return contextlib.nullcontext, dict(self._sharded)

    def _on_host(self, make: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A data loader of accelerate's that leaves batches on the host."""
        places, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return make(*args, **named)
        finally:
            self.accelerator.device_placement = places

    def _check_arguments(self) -> None:
        if self.accelerator.num_processes > 1 and not self.args.average_tokens_across_devices:
            remedy = "Ranks have different numbers of labels: the loss is divided by that of all."
            raise ArgumentError("args.average_tokens_across_devices", False, "True", remedy)
        if self.args.label_smoothing_factor:
            raise ArgumentError("args.label_smoothing_factor", self.args.label_smoothing_factor, "0", _SHIFTS)
        if getattr(self, "compute_loss_func", None) is not None:
            raise ArgumentError("compute_loss_func", "a function", "None", _SHIFTS)
        if self.args.use_liger_kernel:
            raise ArgumentError("args.use_liger_kernel", True, "False", "Its loss is not tested with sharded labels.")


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """transformers' `Trainer` with context parallelism; see `ContextParallelMixin`."""


@contextlib.contextmanager
def _unseen(config: Any) -> Any:
    """accelerate's configuration of parallelism, as if it had no context parallelism."""
    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), {"cp_enabled": property(lambda _: False)})
    try:
        yield
    finally:
        config.__class__ = kind


def _without_first_tokens(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if batch.get("labels") is None or batch.get("shift_labels") is not None:
        return batch
    packing, labels = packing_of(batch), batch["labels"].clone()
    labels[0, torch.from_numpy(packing.cu_seqlens[:-1][packing.lengths > 0])] = IGNORE_INDEX
    return {**batch, "labels": labels}
