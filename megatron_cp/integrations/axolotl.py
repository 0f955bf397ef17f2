"""Context parallelism for axolotl, as a plugin, in place of its own.

    context_parallel_size: 4
    plugins:
      - megatron_cp.integrations.axolotl.ContextParallelPlugin
    megatron_cp:  # optional: arguments of enable_context_parallel
      layout: balanced

The size need divide neither heads nor tokens. axolotl's own settings of a ring (`context_parallel:`) are refused.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from accelerate import PartialState
from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.integrations import require
from megatron_cp.transformers.additions import NEFTUNE
from megatron_cp.transformers.enable import enable_context_parallel
from megatron_cp.transformers.padding import join_documents
from megatron_cp.transformers.trainer import ContextParallelMixin

_OWN = "axolotl.integrations.context_parallel.ContextParallelPlugin"  # which axolotl always registers
_OPTIONS = [
    name for name, each in inspect.signature(enable_context_parallel).parameters.items()
    if each.kind is inspect.Parameter.KEYWORD_ONLY
]  # fmt: skip
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_RING = "context_parallel_size is the number of ranks, and megatron_cp: has all other settings."
_LOSS = "Its loss is not the model's own, and needs whole rows."
_LOSSES = (
    "reward_model", "process_reward_model", "orpo_alpha", "use_dft", "use_eaft", "diffusion",
)  # fmt: skip
_CHUNKED = ("cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy")
_REPLACES = "It replaces the models' attention, which would then see only a rank's own tokens."
_UNTRIED = "We have not tried it with context parallelism."
_REFUSED = {
    **dict.fromkeys(("context_parallel", "ring_attn_func", "heads_k_stride"), _RING),
    **dict.fromkeys(("xformers_attention", "sage_attention", "flash_optimum"), _REPLACES),
    "neftune_noise_alpha": NEFTUNE,
    "deepspeed": "Its own sequence parallelism would split batches again. Use fsdp_config.",
    "rl": "Its trainer needs whole rows: write it with ContextParallelPreferenceMixin and TRL.",
    **dict.fromkeys(_LOSSES, _LOSS),
    **dict.fromkeys(_CHUNKED, "For a loss without all logits set megatron_cp: {logit_rows: 1024}."),
    "trainer_cls": "Derive your class from ContextParallelMixin instead.",
    **dict.fromkeys(("pretraining_dataset", "streaming", "tensor_parallel_size", "expert_parallel_size"), _UNTRIED),
    "processor_type": "We have not run its data with images. Train on text, or on images with ContextParallelTrainer.",
}


class ContextParallelArgs(BaseModel):
    """The key `megatron_cp` of axolotl's configuration: arguments of `enable_context_parallel`."""

    megatron_cp: dict[str, Any] | None = None


class ContextParallelPlugin(BasePlugin):
    """A plugin of axolotl: its trainer runs the model over `context_parallel_size` ranks.

    Models may have any heads, windows, and linear layers; packed documents stay apart. Losses and gradient norms are
    those of each document alone.

    Raises:
        ArgumentError: keys of the configuration that are for axolotl's own context parallelism, or that would compute
            something else here.
    """

    def register(self, cfg: dict[str, Any]) -> None:
        """Checks the configuration as it was written, and disables axolotl's own plugin."""
        require("axolotl", "axolotl")
        check_config(cfg)
        if "WORLD_SIZE" in os.environ:  # axolotl's launcher reads the configuration too
            check_sizes(cfg)
        PluginManager.get_instance().plugins[_OWN] = BasePlugin()

    def get_input_args(self) -> str:
        return f"{__name__}.{ContextParallelArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type:
        """Returns axolotl's trainer with context parallelism."""
        check_sizes(cfg)
        from axolotl.core.trainers import AxolotlTrainer  # after axolotl has changed what it changes of transformers

        options = dict(cfg.megatron_cp or {})
        named = {name: options.pop(name) for name in ("layout", "scheme", "linear_mode") if name in options}
        init = functools.partialmethod(ContextParallelMixin.__init__, **named, cp_options=options)
        return type(
            "ContextParallelAxolotlTrainer", (_KeepsProcesses, ContextParallelMixin, AxolotlTrainer), {"__init__": init}
        )

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Refuses the trainer of another plugin: axolotl takes that of the first one that has one."""
        if not isinstance(trainer, ContextParallelMixin):
            remedy = "Remove the plugin that sets it; ContextParallelPlugin sets its own trainer."
            raise ArgumentError("plugins", type(trainer).__name__, "the trainer of ContextParallelPlugin", remedy)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Returns arguments that axolotl sets otherwise: the loss is divided by the labels of all ranks."""
        cpus = {"use_cpu": True} if cfg.device == "cpu" else {}  # else several CPUs would not be a group
        return {"average_tokens_across_devices": True, **cpus}

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]] | None:
        """Returns the collator of packed rows; rows that are not packed keep axolotl's."""
        packed = cfg.eval_sample_packing if is_eval else cfg.sample_packing
        return (PackedCollator, {}) if packed else None


class _KeepsProcesses:
    """A mixin that restores accelerate's `PartialState`, which axolotl discards before it makes the accelerator."""

    args: Any

    def _build_accelerator_args(self, **named: Any) -> Any:
        PartialState(cpu=self.args.use_cpu)
        return super()._build_accelerator_args(**named)  # type: ignore[misc]


class PackedCollator:
    """A collator that puts the documents of packed rows end to end, without padding."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: Any) -> dict[str, Any]:
        """Returns a batch of one row; `features` are documents, or lists of those of a row."""
        return join_documents(
            [each for row in features for each in ([row] if isinstance(row, Mapping) else row)]
        )  # fmt: skip


def check_config(cfg: Mapping[str, Any]) -> None:
    """Refuses keys of axolotl's configuration that context parallelism does not compute."""
    for name, remedy in _REFUSED.items():
        if (value := cfg.get(name)) and (value is True or value != 1):  # a size of one is none
            raise ArgumentError(name, value, "none", remedy)
    if (attention := cfg.get("attn_implementation")) not in (None, *_ATTENTION):
        remedy = "It replaces the attention of models in its own way."
        raise ArgumentError("attn_implementation", attention, ", ".join(_ATTENTION), remedy)
    for name in cfg.get("megatron_cp") or {}:
        if name not in _OPTIONS:
            raise ArgumentError(f"megatron_cp.{name}", cfg["megatron_cp"][name], ", ".join(_OPTIONS))


def check_sizes(cfg: Mapping[str, Any]) -> None:
    """Refuses a `context_parallel_size` that does not fit the processes, or replicas that are not said."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    named = (
        "sequence_parallel_degree" if cfg.get("sequence_parallel_degree") else "context_parallel_size"
    )  # its old name
    size = checked_integer(named, cfg.get("context_parallel_size") or cfg.get(named) or 1, 1)
    if ranks % size:
        remedy = f"Start as many processes: torchrun --standalone --nproc-per-node {size}."
        raise ArgumentError(named, size, f"a divisor of the {ranks} processes", remedy)
    shards, replicas, needed = cfg.get("dp_shard_size") or 1, cfg.get("dp_replicate_size") or 1, ranks // size
    if size > 1 and shards * replicas != needed:
        remedy = (
            f"The {ranks} processes are {needed} groups of {size}: dp_shard_size * dp_replicate_size is their number."
        )
        raise ArgumentError("dp_shard_size", shards, f"{needed}, over dp_replicate_size", remedy)
