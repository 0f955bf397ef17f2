"""`RanksMixin`: what our mixins for transformers' and TRL's trainers share, and which classes may be made with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor
from transformers import Trainer

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.transformers.additions import NEFTUNE, Share, check_additions
from megatron_cp.transformers.enable import ContextParallel, enable_context_parallel
from megatron_cp.transformers.parallelism import Parallelism, checked_parallelism
from megatron_cp.transformers.sources import refers_to

_SHIFTS = "It would shift labels that are already shifted. The model's own loss does not shift them again."
OWN_LOSS = (
    "A rank has only some of the tokens, and losses are summed over the ranks: a mean, a shift of labels, or a "
    "term that is not a sum over tokens would be wrong. For a loss of your own, write the loop: parallel.shard, "
    "then token_log_probs or parallel.gather."
)


class _OfTensorParallelism:
    """A mesh whose dimension "tp" has the context-parallel ranks, as far as accelerate's data loaders read it."""

    mesh_dim_names = ("tp",)

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def __getitem__(self, name: str) -> Any:
        return self._ranks


class RanksMixin:
    """Shares a model over the ranks of a group, and gives gradients of a known loss, in the mixins of all trainers."""

    accelerator: Any
    args: Any
    model: Any
    get_tp_size: Callable[[], int]
    state: Any
    _trl_trainers: tuple[str, ...]
    _is_trl = False  # its loss is not the model's, but of log-probabilities

    def __init_subclass__(cls, **named: Any) -> None:
        """Refuses classes when they are defined, which is before TRL's configurations refuse context parallelism."""
        super().__init_subclass__(**named)
        cls._is_trl = any(_room(base) == "trl" for base in cls.__mro__)
        _check_bases(cls)

    def __init__(
        self, *args: Any, layout: str = "balanced", scheme: str = "auto", linear_mode: str = "auto",
        cp_options: Mapping[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **named)
        config = self.accelerator.parallelism_config
        if config is not None:
            config.is_hidden = False
        self._check_arguments()
        # Where each rank is a replica, the group has one rank: None would mean all ranks.
        self._group = self._mesh["cp"].get_group() if self._mesh is not None else None
        self._ranks = self._group or ThreadGroup.create(1)[0]
        self._options = {"layout": layout, "scheme": scheme, "linear_mode": linear_mode, **(cp_options or {})}
        self.context_parallel = self._enabled(self.accelerator.unwrap_model(self.model))
        self._share: Share | None = None  # the loss of this rank's tokens, as compute_loss returned it

    def _enabled(self, model: Any) -> ContextParallel:
        check_additions(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        return enable_context_parallel(model, self._ranks, **self._options)

    def call_model_init(self, trial: Any = None) -> Any:
        """Returns a new model, as each training with `model_init` makes one, with context parallelism too."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        if hasattr(self, "context_parallel"):  # else the trainer is being made
            self.context_parallel = self._enabled(model)
        return model

    # -- accelerate -------------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**named)  # type: ignore[misc]
        self._asked = args["parallelism_config"] = checked_parallelism(self.args, args.get("parallelism_config"))
        return args

    def create_accelerator_and_postprocess(self) -> None:
        """Stops accelerate from changing the model and TRL from refusing packing; metrics see each batch once."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # accelerate would refuse windows and linear layers here, or exchange the attention.
        self.accelerator._prepare_cp = lambda *prepared: prepared
        self._differentiate, self.accelerator.backward = self.accelerator.backward, self._backward
        config, asked = self.accelerator.parallelism_config, self._asked
        if (None if config is None else config._sizes) != (None if asked is None else asked._sizes):
            remedy = "accelerate keeps the configuration of a process's first Accelerator: make this trainer before it."
            raise ArgumentError("args.parallelism_config", asked, f"{config}", remedy)
        if config is not None:  # an earlier trainer, or Accelerator, may have made it
            config.__class__, config.is_hidden = Parallelism, True
        self._mesh = self.accelerator.torch_device_mesh if config is not None and config.cp_size > 1 else None
        if self._mesh is not None and self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            ranks = self._mesh["cp"]  # accelerate gives DeepSpeed's ranks of this name the same batches, and no others
            self.accelerator._prepare_device_mesh = lambda: _OfTensorParallelism(ranks)
        if self._mesh is not None:
            self._sums_shares, self._gather_of_all = False, self.accelerator.gather_for_metrics
            self.accelerator.gather_for_metrics = self._gather_for_metrics
            objects = self.args.eval_use_gather_object
            self.gather_function = functools.partial(self._gather_for_metrics, use_gather_object=objects)

    def _gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Gathers as accelerate does, but once for each group of ranks; a loss's counts are summed over the group."""
        assert self._mesh is not None
        if use_gather_object:
            return self._gather_of_all(data if self.context_parallel.rank == 0 else data[:0], True)
        axis, state = self._mesh.mesh_dim_names.index("cp"), self.accelerator.gradient_state
        ranks = self._mesh.mesh.movedim(axis, -1).reshape(-1, self.context_parallel.cp_size)  # [replicas, cp]
        remainder = state.remainder if state.end_of_dataloader else 0  # items of the last batch before it was filled up

        def gather_replicas(values: Tensor) -> Tensor:
            gathered = self.accelerator.gather(values)
            rows = gathered.unflatten(0, (ranks.numel(), -1))[ranks.to(gathered.device)]
            found = (rows.sum(1) if self._sums_shares else rows[:, 0]).flatten(0, 1)
            return found[:remainder] if remainder > 0 else found

        return recursively_apply(gather_replicas, data, error_on_other_type=True)

    # -- batches and losses ----------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        return self._batches_on_host(super().get_train_dataloader)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **named: Any) -> Any:
        return self._batches_on_host(super().get_eval_dataloader, *args, **named)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **named: Any) -> Any:
        return self._batches_on_host(super().get_test_dataloader, *args, **named)  # type: ignore[misc]

    def _backward(self, loss: Tensor, **named: Any) -> None:
        """Differentiates a loss as accelerate does, if it is this rank's share, perhaps over steps of accumulation."""
        self._check_loss(loss, getattr(self, "current_gradient_accumulation_steps", 1))
        self._differentiate(loss, **named)
        self._share = None  # which would keep its graph

    def _check_loss(self, loss: Tensor, steps: int = 1) -> None:
        """Refuses a loss that is not the share of this rank that `compute_loss` has returned."""
        if self._share is None or not self._share.is_of(loss, steps):
            raise another_loss()

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Divides the count by the group's size, since the sum over ranks counts a batch once for every rank."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.context_parallel.cp_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Returns this rank's part of the batch's operations."""
        whole: float = super().floating_point_ops(inputs)  # type: ignore[misc]
        return whole / self.context_parallel.cp_size

    def _batches_on_host(self, make: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Makes a data loader of accelerate's that leaves batches on the host."""
        places, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return make(*args, **named)
        finally:
            self.accelerator.device_placement = places

    def _check_arguments(self) -> None:
        if self.accelerator.num_processes > 1 and not self.args.average_tokens_across_devices:
            remedy = "Ranks have different numbers of labels: the loss is divided by that of all."
            raise ArgumentError("args.average_tokens_across_devices", False, "True", remedy)
        self._check_losses()
        if self.args.neftune_noise_alpha is not None:
            raise ArgumentError("args.neftune_noise_alpha", self.args.neftune_noise_alpha, "None", NEFTUNE)
        if getattr(self.args.accelerator_config, "dispatch_batches", None):
            remedy = "Batches stay on the host until they are sharded: each process reads its own."
            raise ArgumentError("args.accelerator_config.dispatch_batches", True, "None or False", remedy)
        if self.args.use_liger_kernel:
            remedy = "For a loss without all logits: cp_options={'logit_rows': 1024}."
            raise ArgumentError("args.use_liger_kernel", True, "False", remedy)

    def _check_losses(self) -> None:
        if self.args.label_smoothing_factor:
            raise ArgumentError("args.label_smoothing_factor", self.args.label_smoothing_factor, "0", _SHIFTS)
        for name in ("label_smoother", "compute_loss_func"):
            if getattr(self, name, None) is not None:
                raise ArgumentError(name, "a function", "None", _SHIFTS)


# The mixin for each of TRL's trainers that is not SFTTrainer, or what to do without one.
_MIXINS = dict.fromkeys(("DPOTrainer", "KTOTrainer"), "ContextParallelPreferenceMixin")
_MIXINS |= dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), "ContextParallelGRPOMixin")
_REMEDIES = {
    "SFTTrainer": "Its loss is the model's own: ContextParallelMixin is for it.",
    "RewardTrainer": (
        "Its scores are of whole rows. Write the loop: enable_context_parallel(model.base_model, group), then "
        "model.score of the gathered row of each document's last token, and the pairs' loss over parallel.cp_size."
    ),
}
_LOOP = (
    "Its batches are prompts or rows with a score. Write the loop: batch = parallel.shard(...), then "
    "logits = model(**batch, num_items_in_batch=batch.num_items).logits, "
    "parallel.gather(token_log_probs(logits, batch), batch, same_loss=True), and their loss."
)


def _check_bases(kind: type[RanksMixin]) -> None:
    """Refuses bases in the wrong order, and trainers of TRL that do more with a batch than this mixin computes."""
    bases = kind.__mro__
    first = next((base for base in bases if issubclass(base, Trainer) and not issubclass(base, RanksMixin)), None)
    if first is not None and bases.index(first) < bases.index(RanksMixin):
        ours = next(base.__name__ for base in bases if issubclass(base, RanksMixin) and base is not kind)
        remedy = f"Write class {kind.__name__}({ours}, {first.__name__}): Python asks the first base first."
        raise ArgumentError("bases", f"{first.__name__} before {ours}", f"{ours} first", remedy)
    _check_overrides(kind)
    trl = next((base.__name__ for base in bases if _room(base) == "trl"), None)
    allowed = kind._trl_trainers
    if trl in allowed or (trl is None and ("SFTTrainer" in allowed or first is None)):
        return
    remedy = _LOOP if trl is not None else _REMEDIES["SFTTrainer"]
    if trl in _MIXINS:
        remedy = f"Its losses need whole rows: class {kind.__name__}({_MIXINS[trl]}, {trl})."
    known = "transformers' Trainer or TRL's SFTTrainer" if "SFTTrainer" in allowed else f"TRL's {' or '.join(allowed)}"
    raise ArgumentError("trainer", trl or "a trainer that is not TRL's", known, _REMEDIES.get(trl or "", remedy))


# Methods that turn a batch into a loss. The mixin's work is lost where one of them does not call the next.
_CHAINED = (
    "training_step", "compute_loss", "get_batch_samples", "_get_num_items_in_batch",
    "_prepare_context_parallel_inputs",
)  # fmt: skip


def _check_overrides(kind: type[RanksMixin]) -> None:
    """Refuses a method of a trainer that computes a loss, or counts labels, without the trainer's own method."""
    bases = kind.__mro__
    below = bases.index(RanksMixin) if kind._is_trl else len(bases)
    for place, base in enumerate(bases):
        for name in _CHAINED if _room(base) not in ("transformers", "trl", _room(RanksMixin)) else ():
            if (method := vars(base).get(name)) is None:
                continue
            if not refers_to(method, name):
                allowed = f"one that calls super().{name}"
                raise ArgumentError(f"{base.__name__}.{name}", "a method of its own", allowed, OWN_LOSS)
            if name == "compute_loss" and place > below:  # TRL's losses are compared with what the mixin returns alone
                remedy = f"Override it in {kind.__name__}: its result is compared with super().compute_loss."
                raise ArgumentError(f"{base.__name__}.{name}", f"a method below {kind.__name__}", "none there", remedy)


def another_loss() -> ArgumentError:
    """Returns the error for a loss that is not what the mixin's `compute_loss` has returned."""
    allowed = "what super().compute_loss returns"
    return ArgumentError("compute_loss", "another loss than the model's", allowed, OWN_LOSS)


def _room(kind: type) -> str:
    return kind.__module__.split(".")[0]
