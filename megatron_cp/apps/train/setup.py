"""Builds Megatron's process groups, model, optimizer and learning rate from the options of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import RankGroup
from megatron_cp.megatron import BatchGroups, TransformerConfig, specs

# Options of Megatron's configuration that have our names.
_SAME = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "qk_layernorm",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
    "context_parallel_size", "cp_layout", "linear_cp_mode", "cp_head_chunks",
    "cp_transport", "cp_codec", "cp_hardware", "cp_search", "bf16",
    "recompute_granularity", "window_size", "softmax_type",
)  # fmt: skip
_OF_OPTIMIZER = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "bf16")


@dataclass
class Training:
    """The model, optimizer, schedule of learning rates, group and device of a training run on one rank."""

    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler
    cp_group: RankGroup
    device: torch.device

    @property
    def config(self) -> Any:
        return self.model.config


def start_model_parallel(options: TrainingOptions) -> RankGroup:
    """Makes Megatron's process groups and random states.

    Returns:
        this rank's context-parallel group, able to compare plans on the host.
    """
    size = dist.get_world_size()
    if size % options.context_parallel_size:
        allowed = f"a size that divides the job's {size} ranks"
        raise ArgumentError("context_parallel_size", options.context_parallel_size, allowed)
    parallel_state.initialize_model_parallel(context_parallel_size=options.context_parallel_size)
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)
    return BatchGroups.make().cp


def build_training(options: TrainingOptions, vocab_size: int, cp_group: RankGroup, device: torch.device) -> Training:
    """Builds the model from its spec, with Megatron's data parallelism, optimizer and learning rate."""
    config = transformer_config(options, device)
    model = _model(options, config, vocab_size).to(device)
    if options.bf16:
        model = model.bfloat16()
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.broadcast_params()
    same = {name: getattr(options, name) for name in _OF_OPTIMIZER}
    settings = OptimizerConfig(optimizer="adam", min_lr=0.0, params_dtype=config.params_dtype, **same)
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(wrapped, optimizer, _scheduler(options, optimizer), cp_group, device)


def transformer_config(options: TrainingOptions, device: torch.device) -> TransformerConfig:
    """Returns Megatron's configuration of the model."""
    is_hybrid = is_of_hybrid(options)
    is_local = options.spec[1] == "local_hybrid_stack_spec"
    num_layers, schemes = len(layers_of(options)), options.cp_comm_type
    if len(schemes) not in (1, num_layers):
        raise ArgumentError("cp_comm_type", schemes, f"one value, or one for each of {num_layers} layers")
    unread, reader = ("num_layers", "GPTModel") if is_hybrid else ("hybrid_layer_pattern", "HybridModel")
    if getattr(options, unread) != getattr(TrainingOptions, unread):
        raise ArgumentError(unread, getattr(options, unread), f"only with {reader}", "--spec chooses the other model.")
    if options.bf16 and device.type != "cuda":
        raise ArgumentError("bf16", True, f"off on {device.type}", "Megatron's optimizer for bf16 needs CUDA.")
    own = {name: getattr(options, name) for name in _SAME}
    if options.recompute_granularity == "full":
        own |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute_granularity == "selective":
        own |= {"recompute_modules": ["core_attn"]}
    sizes = options.hierarchical_context_parallel_sizes
    return TransformerConfig(
        num_layers=num_layers,
        hierarchical_context_parallel_sizes=None if sizes is None else list(sizes),
        cp_comm_type=schemes[0] if len(schemes) == 1 else list(schemes),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,  # Megatron's default is 0.1
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        # Transformer Engine's layers, where it is installed, need CUDA.
        transformer_impl="local" if device.type == "cpu" or is_local else "transformer_engine",
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        **own,
    )


def is_of_hybrid(options: TrainingOptions) -> bool:
    """Returns True if the layer spec is one of HybridModel, and False if it is GPTModel's."""
    return options.spec[1] != "gpt_layer_spec"


def layers_of(options: TrainingOptions) -> list[str]:
    """Returns each layer's letters as in `--hybrid-layer-pattern`: one for HybridModel, mixer and MLP for GPTModel."""
    if not is_of_hybrid(options):
        return ["*-"] * options.num_layers
    try:
        pattern = parse_hybrid_pattern(options.hybrid_layer_pattern)
        layers = (pattern.main_pattern or "").replace("|", "")
    except ValueError as error:
        raise ArgumentError("hybrid_layer_pattern", options.hybrid_layer_pattern, _PATTERN, f"{error}.") from None
    if not layers or pattern.mtp_num_depths or "|" in options.hybrid_layer_pattern:
        raise ArgumentError("hybrid_layer_pattern", options.hybrid_layer_pattern, _PATTERN)
    return list(layers)


_VOCABULARY = 128  # the vocabulary is padded to a multiple of it, as Megatron does
_PATTERN = "layers such as MG*-: M for Mamba-2, G for GatedDeltaNet, * for attention, - for an MLP"


def _model(options: TrainingOptions, config: TransformerConfig, vocab_size: int) -> GPTModel | HybridModel:
    is_local = config.transformer_impl == "local"
    common: dict[str, Any] = {
        "config": config,
        "vocab_size": -(-vocab_size // _VOCABULARY) * _VOCABULARY,
        "max_sequence_length": options.seq_length,
        "position_embedding_type": "rope",
        "rotary_base": options.rotary_base,
        "share_embeddings_and_output_weights": False,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
    if is_of_hybrid(options):
        spec = specs.local_hybrid_stack_spec if is_local else specs.hybrid_stack_spec
        return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=options.hybrid_layer_pattern, **common)
    return GPTModel(transformer_layer_spec=specs.gpt_layer_spec(config), **common)


def _scheduler(options: TrainingOptions, optimizer: Any) -> OptimizerParamScheduler:
    # Megatron counts samples.
    steps = options.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=0.0,
        lr_warmup_steps=options.lr_warmup_iters * steps,
        lr_decay_steps=options.train_iters * steps,
        lr_decay_style="constant",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iters * steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its own steps
    )
