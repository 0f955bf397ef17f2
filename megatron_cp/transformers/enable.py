"""`enable_context_parallel` runs the layers of a transformers model over a context-parallel group."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from megatron_cp.batch.branched import LabelRows, label_rows
from megatron_cp.batch.ranks import ranks_of
from megatron_cp.batch.shard import batch_seed, prepare_plans
from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.executor.agreement import check_agreement
from megatron_cp.executor.gather import gather
from megatron_cp.executor.groups import Group, RankGroup
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.layout.packing import IntArray, SequencePacking
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.plan.transport import COLLECTIVE, Transport
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, Slot
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.transformers.additions import TokenLoss, check_additions, keep_token_loss
from megatron_cp.transformers.batch import PlannedBatch, RankTokens, ShardedBatch, slot_under
from megatron_cp.transformers.calls import REFUSED, check_arguments
from megatron_cp.transformers.documents import DOCUMENT_KEYS, check_on_host, on_host, packing_of
from megatron_cp.transformers.heads import check_head, check_loss
from megatron_cp.transformers.images import Images, without_images
from megatron_cp.transformers.logits import ChunkedLogits, check_chunked_head
from megatron_cp.transformers.swap import (
    NAME,
    check_own_forwards,
    copy_configs,
    is_swapped,
    slots_of,
    swap_in,
    swap_out,
    text_modules,
)
from megatron_cp.versions import warn_if_untested

# Vision models make masks from these arguments that are not causal, or take rows of the whole batch.
_OVERLAYS = ("block_sequence_ids", "image_embeds", "mm_encoder_outputs")
_SKIPS_LAYERS = re.compile("layer_?drop|drop_?path|stochastic_depth")
_OWN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "cp_plans")


@dataclass(frozen=True)
class BatchPlanner:
    """Plans batches from the lengths of their documents. It holds no group and pickles, so data loader workers use it.

    Attributes:
        align: every rank's number of rows is a multiple of it.
    """

    slots: tuple[Slot, ...]
    cp_size: int
    layout: str
    align: int

    def __call__(self, lengths: Packing | Iterable[int] | IntArray) -> BatchPlan:
        """Returns the plans of a batch, for `batch["cp_plans"]`."""
        packing = lengths if isinstance(lengths, Packing) else Packing(list(lengths))
        # A rank without a row would call the model with empty tensors, which not every layer of transformers takes.
        layout = layout_by_name(
            self.layout, packing, self.cp_size, align=self.align, min_rows=1, slots=self.slots
        )  # fmt: skip
        return BatchPlan(layout, dict.fromkeys(self.slots).keys())


def enable_context_parallel(
    model: PreTrainedModel,
    group: Group | None,
    *,
    layout: str = "balanced",
    scheme: str = "auto",
    linear_mode: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
    latents: bool = False,
    align: int = 1,
    hardware: Machine | str | None = None,
    topology: Topology | None = None,
    kernel: str = "auto",
    logit_rows: int | None = None,
) -> ContextParallel:
    """Makes a model's attention and linear layers run over the ranks of a group. Parameters are not changed.

    Call it before `fully_shard`, `torch.compile` and PEFT. Then, with the result as `parallel`, call on every rank
    `batch = parallel.shard(batch)` and `model(**batch)`.

    Args:
        model: a causal language model of transformers, or the model below its head. It gets a copy of its
            configuration, so that other models built from the same one do not change.
        group: the context-parallel ranks: a mesh of one dimension such as `mesh["cp"]`, or a group.
        layout: "balanced", "zigzag", "contiguous" or "auto".
        scheme: the scheme of softmax attention, as in `plan_attention`.
        linear_mode: the mode of linear layers, as in `plan_linear`, but for "redistribute". "auto" does not take it.
        ulysses_degree, head_chunks, transport, codec, hardware, topology: as in `plan_attention`.
        latents: True for multi-latent attention that gets its latents: they travel in place of keys and values, and are
            expanded on every rank that uses them; with scheme "auto", in the mode that is predicted to be fastest. See
            `latent_attention`.
        align: every rank's rows are filled up to a multiple of it.
        kernel: the kernel of attention and linear layers: "auto", or one that `megatron-cp doctor` lists. Layers that
            choose keys have none.
        logit_rows: the head computes the logits of so many rows at a time, and only where a loss or `token_log_probs`
            needs them, so that the logits of all rows are never in memory. The model then returns `ChunkedLogits`,
            whose `full()` computes all. None for logits of all rows at once.

    Raises:
        ArgumentError: the model is wrapped already, or has layers or outputs that are not computed exactly here.
    """
    warn_if_untested(transformers=transformers_version)
    _check_model(model)
    checked_flag("latents", latents)
    ranks = ranks_of(group)
    options = {
        "transport": transport, "codec": codec, "head_chunks": head_chunks, "hardware": hardware, "topology": topology,
        "item_size": model.dtype.itemsize,
    }  # fmt: skip
    attention_args = {"scheme": scheme, "ulysses_degree": ulysses_degree, "latents": latents, **options}
    linear_args = {"mode": linear_mode, **options}
    layout = require("layout", layout)
    _check_mode(linear_mode)
    planned = slots_of(model, attention_args, linear_args)
    if kernel != "auto" and any(getattr(slot, "topk", None) for slot in planned.values()):
        remedy = "They compute in torch, without kernels of their own."
        raise ArgumentError("kernel", kernel, "auto for layers that choose keys", remedy)
    planner = BatchPlanner(tuple(planned.values()), ranks.size, layout, checked_integer("align", align, 1))
    if logit_rows is not None:
        checked_integer("logit_rows", logit_rows, 1)
        check_chunked_head(model)
    return ContextParallel(model, ranks, planner, kernel, planned, logit_rows)


class ContextParallel:
    """The context parallelism of one model, made by `enable_context_parallel`.

    Attributes:
        planner: makes a batch's plans from its lengths, also in a data loader's workers.
        cp_size: size of the group.
        rank: this rank's place in the group.
    """

    def __init__(
        self, model: PreTrainedModel, ranks: RankGroup, planner: BatchPlanner, kernel: str, slots: dict[str, Slot],
        logit_rows: int | None = None,
    ) -> None:  # fmt: skip
        self.planner, self._model, self._ranks, self._kernel, self._slots = planner, model, ranks, kernel, slots
        self._logit_rows = logit_rows
        copy_configs(model)  # else other models of the same configuration would get our attention too
        self._attention = swap_in(model, slots, logit_rows)
        check_own_forwards(model)

    @property
    def cp_size(self) -> int:
        return self._ranks.size

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The specs of all layers."""
        return self.planner.slots

    @property
    def token_loss(self) -> TokenLoss:
        """The model's loss function, which keeps the loss of this rank's tokens that it returned last."""
        keep_token_loss(self._model)
        kept: TokenLoss = self._model.loss_function
        return kept

    def shard(
        self, batch: Mapping[str, Any] | SequencePacking, *, seed: int | None = None,
        device: torch.device | str | None = None, agree: bool = True,
    ) -> ShardedBatch:  # fmt: skip
        """Returns this rank's rows of a batch and the plans of every layer. Every rank passes the whole batch.

        Labels follow transformers' convention, in which `labels[i]` is the token at position i. They are shifted here,
        within each document, so the model does not shift them again. A rank's loss is its share of the batch's loss:
        divide by the number of labels on all ranks, `num_items_in_batch`.

        Args:
            batch: tensors on the host. `input_ids` `[1, total]` has the documents end to end. Their lengths come from
                all that the batch says of them: see `packing_of`. `labels` or `shift_labels`
                `[1, total]` are -100 where nothing is predicted. `position_ids` `[1, total]` or `[axes, 1, total]` and
                any other tensor `[1, total, ...]` are sharded by token. `cp_plans` comes from `planner(lengths)`.
                Items that are no tensors are passed to the model unchanged. `Packing.from_sequences(...)`, alone or as
                `lengths`, holds common beginnings of sequences once; labels are then not passed to the model, see
                `token_log_probs`.
            seed: the seed of attention dropout, such as the step's number; the same on every rank.
            device: the device of the returned rows; the model's device if None.
            agree: compares plans, tokens and all other tensors between ranks (16 bytes on the host).

        Raises:
            ArgumentError: several rows, padding, lengths on a device, or an argument that is not for training.
            PlanMismatchError: another rank has another batch.
        """
        whole = _as_mapping(batch)
        _check_batch(whole)
        check_additions(self._model)
        batch = without_images(self._model, whole)
        packing = packing_of(batch)
        ids = batch["input_ids"][0].long()
        images = Images(self._model, whole, ids, packing)
        masks = images.masks(self._mask_names())
        plans = self._plans(batch.get("cp_plans"), packing, masks)
        layout, device = plans.layout, self._device() if device is None else torch.device(device)
        mixed = batch_seed(ids, 0 if seed is None else checked_integer("seed", seed, 0))
        if agree and self.cp_size > 1:
            tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
            if images.positions is not None:
                tensors["position_ids"] = images.positions  # of lists too, such as seconds between frames
            for name, value in tensors.items():
                check_on_host(name, value)
            check_agreement(plans, self._ranks, seed=mixed, tensors=tensors)
        prepare_plans(plans, self.rank, device)

        values = {name: value for name, value in batch.items() if name not in DOCUMENT_KEYS + _OWN}
        dealt = [name for name, value in values.items() if isinstance(value, Tensor)]
        values |= {name: self._rows(_per_token(name, values[name], packing), layout) for name in dealt}
        values["input_ids"] = self._rows(ids, layout)
        values["position_ids"] = self._positions(batch, images.positions, layout)
        branched, of_labels = None, label_rows(layout, self.rank, device)
        if of_labels is None:
            labels, num_items = self._labels(batch, layout)
            if labels is not None:
                values["labels"] = values["shift_labels"] = labels
        else:
            branched, num_items = _branched_labels(batch, of_labels, self.rank)
        of_images, tower_rows = images.shard(self._model, layout, self._ranks, self._kernel, device)
        values |= of_images
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
        moved["input_ids"] = moved["input_ids"].as_subclass(RankTokens)
        moved["use_cache"] = False
        moved["cp_batch"] = PlannedBatch(
            plans, self._ranks, None if seed is None else mixed, self._kernel, num_items, of_labels, branched, dealt,
            tower_rows, masks,
        )  # fmt: skip
        return ShardedBatch(moved)

    def gather(
        self, rows: Tensor | ChunkedLogits, batch: ShardedBatch, *, same_loss: bool = False,
        are_labels: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Gathers rows `[1, t, ...]` of all ranks, such as logits or losses, into `[1, total, ...]`; differentiable.

        Args:
            rows: this rank's rows.
            batch: the batch that they are of.
            same_loss: see `megatron_cp.gather`.
            are_labels: where documents branch, True for values of labels, such as those of `token_log_probs`, which
                come in the order of the tokens that are predicted, and False for values of rows. None elsewhere.
        """
        if isinstance(rows, ChunkedLogits):
            rows = rows.full()
        if rows.ndim < 2 or rows.shape[0] != 1:
            raise ArgumentError("rows", list(rows.shape), "[1, t, ...], as the model returns them")
        layout = batch.layout
        if batch.label_rows is None:
            if are_labels:
                raise ArgumentError("are_labels", True, "None where no document branches: each row has one label")
        elif are_labels is None:
            raise ArgumentError("are_labels", None, "True for values of labels, False for rows, where documents branch")
        elif are_labels:
            layout = batch.label_rows.layout
        return gather(RankTokens.plain(rows)[0], layout, self._ranks, same_loss=same_loss)[None]

    def explain(self, batch: ShardedBatch | None = None) -> str:
        """Describes the layers, or, given a batch, the plan of every kind of layer."""
        kinds = [f"{name}: {slot}" for name, slot in self._slots.items()]
        if batch is None:
            return "\n".join(kinds)
        return "\n\n".join(plan.explain() for plan in batch.plans.plans)

    @property
    def is_enabled(self) -> bool:
        """False inside of `disabled()`."""
        return is_swapped(self._model)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Restores the stock model inside the context, so that a rank runs whole batches by itself. May be nested.

        Inside, the model is given whole batches, and refuses those of `shard`.
        """
        if not self.is_enabled:
            yield
            return
        swap_out(self._model, self._attention)
        try:
            yield
        finally:
            swap_in(self._model, self._slots, self._logit_rows)

    def _mask_names(self) -> Iterator[str]:
        return (str(slot.mask) for slot in dict.fromkeys(self.slots) if isinstance(slot, AttentionSpec))

    def _device(self) -> torch.device:
        if self._model.device.type == "meta":
            remedy = "Its weights are on another device between calls: call parallel.shard(batch, device=...)."
            raise ArgumentError("device", None, "the device on which the model runs", remedy)
        return self._model.device

    def _plans(self, given: object, packing: Packing, masks: Mapping[str, Mask]) -> BatchPlan:
        """Returns the plans of a batch, with the masks of its images in place of those that layers have in text."""
        if given is None:
            given = self.planner(packing)
        elif not isinstance(given, BatchPlan) or given.layout.packing != packing or given.cp_size != self.cp_size:
            raise ArgumentError("cp_plans", given, "what planner(lengths) made of this batch's documents")
        if not masks:
            return given
        return BatchPlan(given.layout, dict.fromkeys(slot_under(slot, masks) for slot in self.slots).keys())

    def _rows(self, stream: Tensor, layout: Layout, fill: float = 0) -> Tensor:
        """Returns this rank's rows `[1, t, ...]` of a stream `[total, ...]`."""
        return layout.shard(stream, self.rank, pad_value=fill)[None]

    def _positions(self, batch: Mapping[str, Any], of_images: Tensor | None, layout: Layout) -> Tensor:
        """Returns this rank's positions: those of images, else the batch's, else those in each document."""
        if of_images is not None:
            return _along_tokens(of_images, layout, self.rank)
        ids = batch.get("position_ids")
        if ids is None:
            return torch.from_numpy(np.asarray(layout.positions(self.rank), np.int64))[None]
        on_host("position_ids", ids)
        if ids.shape[-2:] != (1, layout.packing.total) or ids.ndim > 3:
            allowed = f"[1, {layout.packing.total}], or [axes, 1, {layout.packing.total}]"
            raise ArgumentError("position_ids", list(ids.shape), allowed)
        if layout.packing.branches is not None and ids.ndim == 2:
            own = torch.from_numpy(layout.packing.positions())
            if not torch.equal(ids[0].long(), own):
                remedy = "Leave them out, or pass packing.positions()."
                raise ArgumentError("position_ids", ids[0].tolist(), "positions along each path", remedy)
        return _along_tokens(ids.long(), layout, self.rank)

    def _labels(self, batch: Mapping[str, Any], layout: Layout) -> tuple[Tensor | None, int]:
        """Returns `[1, t]` the token that each of this rank's tokens predicts, and how many all ranks' tokens do."""
        if (shifted := batch.get("shift_labels")) is not None:
            check_loss(self._model, shifts=False)
            stream = _labels_of("shift_labels", shifted, layout.packing)
            return self._rows(stream, layout, IGNORE_INDEX), int((stream != IGNORE_INDEX).sum())
        if (labels := batch.get("labels")) is None:
            return None, 0
        check_loss(self._model, shifts=True)
        stream = _labels_of("labels", labels, layout.packing)
        counted = stream != IGNORE_INDEX
        counted[layout.packing.cu_seqlens[:-1][layout.packing.lengths > 0]] = False  # nothing predicts a first token
        return layout.labels(stream, self.rank, ignore_index=IGNORE_INDEX)[0][None], int(counted.sum())


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel) or isinstance(model, FSDPModule):
        remedy = "Call it before fully_shard, torch.compile, DistributedDataParallel and PEFT wrap the model."
        raise ArgumentError("model", type(model).__name__, "a PreTrainedModel of transformers", remedy)
    if is_swapped(model):
        raise ArgumentError("model", "a model that already runs over a group", "a model, once")
    check_head(model)
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:
        remedy = "Build the model from a configuration of its own: copy.deepcopy(config) within parallel.disabled()."
        raise ArgumentError("model.config", "the configuration of a model that is enabled", "one of its own", remedy)
    _check_layerdrop(model)
    for name in ("output_router_logits", "output_attentions", "attn_temperature_tuning"):
        if getattr(config, name, False):
            raise ArgumentError(f"model.config.{name}", True, "False", REFUSED[name])
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):  # or one for each layer type
        kind = str(each.get("rope_type", ""))
        if "dynamic" in kind or kind == "longrope":
            remedy = (
                "It chooses frequencies by the longest position of a call, but a call has only a rank's own positions."
            )
            raise ArgumentError(
                "model.config.rope_parameters", kind, "default, linear, yarn, llama3 or the like", remedy
            )


def _check_mode(linear_mode: str) -> None:
    if require("mode", linear_mode, name="linear_mode") == REDISTRIBUTE.name:
        remedy = "Its hidden states move around a run of layers, and a model of transformers runs layer by layer."
        raise ArgumentError("linear_mode", linear_mode, "auto, headwise or chunkwise", remedy)


def _check_layerdrop(model: PreTrainedModel) -> None:
    """Refuses layerdrop: ranks that skip different layers would hang, or mix the layers' messages."""
    config = model.config.get_text_config()
    places = {"model.config": config, **{f"model.{name}": module for name, module in text_modules(model)}}
    for place, owner in places.items():
        for name, value in vars(owner).items():
            if _SKIPS_LAYERS.search(name) and isinstance(value, int | float) and value > 0:
                remedy = "Each rank would skip different layers. Set it to 0 before you build the model."
                raise ArgumentError(f"{place}.{name}".replace("..", "."), value, "0", remedy)


def _as_mapping(batch: Mapping[str, Any] | Packing) -> Mapping[str, Any]:
    """Returns a batch of keys, also of a packing that has tokens."""
    if not isinstance(batch, Packing):
        return batch
    if not isinstance(batch, SequencePacking):
        allowed = "a packing of from_sequences, which has tokens"
        raise ArgumentError("batch", batch, allowed, "Else {'input_ids': ids, 'lengths': packing}.")
    ids = torch.from_numpy(batch.tokens.copy())[None]
    return {"input_ids": ids, "labels": ids, "lengths": batch}


def _check_batch(batch: Mapping[str, Any]) -> None:
    if not isinstance(batch, Mapping):
        raise ArgumentError("batch", f"a {type(batch).__name__}", "a mapping, such as {'input_ids': ids}")
    if "cp_batch" in batch:
        raise ArgumentError("batch", "this rank's rows, sharded before", "a whole batch", "Shard each batch once.")
    for name in _OVERLAYS:
        if batch.get(name) is not None:
            remedy = "Leave it out. Images are given as pixel_values, and the model makes everything else from them."
            raise ArgumentError(name, type(batch[name]).__name__, "None", remedy)
    check_arguments(batch)


def _along_tokens(positions: Tensor, layout: Layout, rank: int) -> Tensor:
    """Returns a rank's rows of positions `[..., total]`, whose last axis is that of tokens."""
    return layout.shard(positions.movedim(-1, 0), rank).movedim(0, -1).contiguous()


def _per_token(name: str, value: Tensor, packing: Packing) -> Tensor:
    check_on_host(name, value)
    if value.ndim < 2 or value.shape[:2] != (1, packing.total):
        allowed = f"[1, {packing.total}, ...], a number or more for each token"
        raise ArgumentError(name, list(value.shape), allowed, "Leave out a tensor that has no value for each token.")
    return value[0]


def _labels_of(name: str, labels: Tensor, packing: Packing) -> Tensor:
    """Returns `[total]` int64 labels; fractions, which are no tokens, are refused."""
    on_host(name, labels)
    return _per_token(name, labels, packing).long()


def _branched_labels(batch: Mapping[str, Any], rows: LabelRows, rank: int) -> tuple[Tensor | None, int]:
    """Returns `[p]` the labels of a rank's rows where documents branch, and the number of labels in all documents."""
    packing = rows.layout.packing
    assert packing.branches is not None
    if batch.get("shift_labels") is not None:
        raise ArgumentError("shift_labels", "labels", "labels where documents branch", "A token may predict several.")
    if (labels := batch.get("labels")) is None:
        return None, 0
    first = torch.from_numpy(packing.branches.predecessors < 0)  # nothing predicts it
    stream = _labels_of("labels", labels, packing).masked_fill(first, IGNORE_INDEX)
    count = int((packing.copies() * (stream != IGNORE_INDEX).numpy()).sum())
    return rows.layout.shard(stream, rank).to(rows.rows.device), count
