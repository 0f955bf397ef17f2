"""Context parallelism for TRL's trainers whose losses need whole rows: DPOTrainer and KTOTrainer.

    class LongDPOTrainer(ContextParallelPreferenceMixin, DPOTrainer): ...

These trainers ask the model for log-probabilities of padded rows, prompt and answer, and compute their loss from the
sums of rows. Here the model computes its share of all rows, end to end, and returns the log-probabilities of whole rows
on every rank, so that the trainer's own loss and metrics run as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_cp.errors import ArgumentError
from megatron_cp.transformers.additions import Share
from megatron_cp.transformers.enable import ContextParallel
from megatron_cp.transformers.image_items import IMAGE_KEYS
from megatron_cp.transformers.padding import flatten_rows, restore_rows
from megatron_cp.transformers.swap import is_swapped
from megatron_cp.transformers.trainer_base import RanksMixin
from megatron_cp.versions import warn_if_framework_untested


class ContextParallelPreferenceMixin(RanksMixin):
    """A mixin for TRL's DPOTrainer and KTOTrainer: `class Mine(ContextParallelPreferenceMixin, DPOTrainer)`.

    Rows are put end to end without their padding, and every rank computes its share of them, of the policy and of the
    reference, be that another model or the policy without its adapter. Losses, their gradients and all metrics equal
    those of one rank.

    Args:
        args, named: arguments of the trainer.
        layout, scheme, linear_mode, cp_options: as in `ContextParallelMixin`.

    Raises:
        ArgumentError: a model or argument that `ContextParallelMixin` refuses, `precompute_ref_log_probs`,
            `compute_metrics`, a load-balancing loss, or a reference model under FSDP.
    """

    _trl_trainers = ("DPOTrainer", "KTOTrainer")
    _pads_left = False
    _takes_images = True

    def __init__(
        self, *args: Any, layout: str = "balanced", scheme: str = "auto", linear_mode: str = "auto",
        cp_options: Mapping[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, layout=layout, scheme=scheme, linear_mode=linear_mode, cp_options=cp_options, **named)
        if getattr(self, "compute_metrics", None) is not None:
            raise ArgumentError("compute_metrics", "a function", "None", "The trainer logs its own metrics.")
        policy = self.accelerator.unwrap_model(self.model)
        self._score_rows(
            policy.get_base_model() if hasattr(policy, "get_base_model") else policy, self.context_parallel
        )
        if (reference := getattr(self, "ref_model", None)) is not None:
            if getattr(self, "is_fsdp_enabled", False):
                remedy = "Train an adapter, peft_config=LoraConfig(...): the policy without it is the reference."
                raise ArgumentError("ref_model", "a model that FSDP has wrapped", "None under FSDP", remedy)
            reference = self.accelerator.unwrap_model(reference)
            self._score_rows(reference, self._enabled(reference))

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        warn_if_framework_untested("trl")  # whose trainers' own methods are overridden here
        if getattr(self.args, "precompute_ref_log_probs", False):
            remedy = "The reference is computed in each step, over all ranks."
            raise ArgumentError("args.precompute_ref_log_probs", True, "False", remedy)
        return super()._build_accelerator_args(**named)

    def _score_rows(self, model: PreTrainedModel, context: ContextParallel) -> None:
        """Makes the forward that TRL gave a model, which scores rows of tokens, run over the ranks."""
        score: Callable[..., Any] = model.forward

        @functools.wraps(score)
        def forward(*args: Any, fused_lm_head: bool = False, **named: Any) -> Any:
            if not fused_lm_head or not is_swapped(model):
                return score(*args, fused_lm_head=fused_lm_head, **named)
            if named.pop("output_router_logits", False):
                remedy = "A load-balancing loss is no sum over tokens: router_aux_loss_coef=0.0 trains without it."
                raise ArgumentError("args.router_aux_loss_coef", "a load-balancing loss", "0.0", remedy)
            for name in IMAGE_KEYS if not self._takes_images else ():
                if named.get(name) is not None:
                    remedy = "Generation from images has not been run with ranks that share completions."
                    raise ArgumentError(name, type(named[name]).__name__, "prompts of text alone", remedy)
            device = named["input_ids"].device
            rows = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in named.items() if name != "use_cache"}
            flat, kept = flatten_rows(rows, padded_left=self._pads_left)
            batch = context.shard(flat, seed=self.state.global_step, device=device)
            return _of_whole_rows(score(fused_lm_head=True, **batch), context, batch, kept)

        model.forward = forward

    # -- methods that the trainer calls with a batch ----------------------------------------------------------------

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        return contextlib.nullcontext, inputs  # the model shards what it is called with

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the trainer's loss; its gradient is this rank's share, times the ranks over which gradients are
        averaged.
        """
        loss = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        share = loss.detach() + self.context_parallel.cp_size * (loss - loss.detach())
        self._share = Share(share)
        return share


def _of_whole_rows(scores: Any, context: ContextParallel, batch: Any, kept: Tensor | None) -> Any:
    """Returns a model's scores of this rank's tokens, as those of all rows `[rows, width - 1]` on every rank."""
    names = [name for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
             if getattr(scores, name) is not None]  # fmt: skip
    log_probs = scores.log_probs
    stacked = torch.stack([getattr(scores, name).to(log_probs.dtype) for name in names], -1)
    whole = restore_rows(context.gather(stacked, batch, same_loss=True), kept)[:, :-1]  # nothing follows a row's last
    for name, x in zip(names, whole.unbind(-1), strict=True):
        setattr(scores, name, x.bool() if getattr(scores, name).dtype == torch.bool else x)
    scores.loss = None  # of this rank's tokens
    return scores
