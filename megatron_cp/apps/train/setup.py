"""Builds Megatron's process groups, model, optimizer and learning rate from the options of a run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from types import BuiltinFunctionType
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import RankGroup
from megatron_cp.megatron import BatchGroups, TransformerConfig, specs

# Options that one of the models reads, and the other does not.
OF_GPT = ("num_layers", "experimental_attention_variant", "linear_attention_freq")
OF_HYBRID = ("hybrid_layer_pattern",)


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
    if size % options.model_parallel_size:
        tp_size, cp_size = options.tensor_model_parallel_size, options.context_parallel_size
        allowed = f"a size that with --tensor-model-parallel-size {tp_size} divides the job's {size} ranks"
        raise ArgumentError(
            "context_parallel_size", cp_size, allowed, f"Start a multiple of {tp_size * cp_size} ranks."
        )
    parallel_state.initialize_model_parallel(
        options.tensor_model_parallel_size, 1, context_parallel_size=options.context_parallel_size
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)
    return BatchGroups.make().cp


def build_training(options: TrainingOptions, vocab_size: int, cp_group: RankGroup, device: torch.device) -> Training:
    """Builds the model from its spec, with Megatron's data parallelism, optimizer and learning rate."""
    config = transformer_config(options, device)
    model = _model(options, config, vocab_size).to(device)
    if options.bf16:
        model = model.bfloat16()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=options.use_distributed_optimizer
        ),
        model,
    )
    wrapped.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            clip_grad=options.clip_grad,
            bf16=options.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(wrapped, optimizer, _scheduler(options, optimizer), cp_group, device)


def transformer_config(options: TrainingOptions, device: torch.device) -> TransformerConfig:
    """Returns Megatron's configuration of the model."""
    found, is_hybrid = resolve_spec(options.spec)
    is_local = found is specs.local_hybrid_stack_spec
    num_layers, schemes = len(layers_of(options)), options.cp_comm_type
    if len(schemes) not in (1, num_layers):
        raise ArgumentError("cp_comm_type", schemes, f"one value, or one for each of {num_layers} layers")
    unread, reader = (OF_GPT, "GPTModel") if is_hybrid else (OF_HYBRID, "HybridModel")
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in unread and value != field.default:
            raise ArgumentError(field.name, value, f"only with {reader}", "--spec chooses the other model.")
    for name in ("bf16", "use_distributed_optimizer"):
        if getattr(options, name) and device.type != "cuda":
            raise ArgumentError(name, True, f"off on {device.type}", "Megatron's optimizer for it needs CUDA.")
    own = {
        name: getattr(options, name)
        for name in (
            "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "qk_layernorm",
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
            "context_parallel_size", "tensor_model_parallel_size", "sequence_parallel", "cp_layout", "linear_cp_mode",
            "cp_head_chunks", "cp_transport", "cp_codec", "cp_hardware", "cp_search", "bf16",
            "recompute_granularity", "window_size", "window_attn_skip_freq", "softmax_type", "attention_dropout",
        )
    }  # fmt: skip
    if options.recompute_granularity == "full":
        own |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute_granularity == "selective":
        own |= {"recompute_modules": ["core_attn"]}
    if not is_hybrid:
        own |= {
            "experimental_attention_variant": options.experimental_attention_variant,
            "linear_attention_freq": options.linear_attention_freq,
        }
    sizes = options.hierarchical_context_parallel_sizes
    return TransformerConfig(
        num_layers=num_layers,
        hierarchical_context_parallel_sizes=None if sizes is None else list(sizes),
        cp_comm_type=schemes[0] if len(schemes) == 1 else list(schemes),
        normalization="RMSNorm",
        layernorm_epsilon=options.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        # Transformer Engine's layers, where it is installed, need CUDA.
        transformer_impl="local" if device.type == "cpu" or is_local else "transformer_engine",
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        **own,
    )


def resolve_spec(spec: tuple[str, ...]) -> tuple[Any, bool]:
    """Returns the object that `--spec MODULE NAME` names, and True if it is a `ModuleSpec` of HybridModel.

    Otherwise it is a function for GPTModel.
    """
    module_name, name = spec
    allowed = "a module that can be imported and the name of a layer spec in it, such as megatron_cp.megatron.specs "
    allowed += "hybrid_stack_spec"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module can raise anything
        remedy = f"Cannot import {module_name!r}: {type(error).__name__}: {error}."
        raise ArgumentError("spec", " ".join(spec), allowed, remedy) from None
    found = vars(module).get(name)
    if found is None:
        raise ArgumentError("spec", " ".join(spec), allowed, f"{module_name} has no {name!r}.")
    if isinstance(found, ModuleSpec):
        return found, True
    if callable(found) and not isinstance(found, type | BuiltinFunctionType):
        return found, False
    remedy = f"{name!r} is neither a ModuleSpec for HybridModel nor a function for GPTModel."
    raise ArgumentError("spec", " ".join(spec), allowed, remedy)


def _layer_spec(spec: tuple[str, ...], config: TransformerConfig) -> Any:
    """Returns the `ModuleSpec` that `spec` names, or the layer spec that its function makes for GPTModel.

    Only ranks may call it: Megatron's functions need its process groups.
    """
    found, is_hybrid = resolve_spec(spec)
    if is_hybrid:
        is_ours = found is specs.hybrid_stack_spec
        return specs.local_hybrid_stack_spec if is_ours and config.transformer_impl == "local" else found
    allowed = "the name of a function that makes a layer spec of a TransformerConfig"
    try:
        made = found(config)
    except ArgumentError:
        raise
    except Exception as error:  # any function can be named
        remedy = f"{spec[1]}(config) raises {type(error).__name__}: {error}."
        raise ArgumentError("spec", " ".join(spec), allowed, remedy) from None
    if not isinstance(made, ModuleSpec | TransformerBlockSubmodules):
        remedy = f"{spec[1]}(config) is a {type(made).__name__}, and should be a layer spec."
        raise ArgumentError("spec", " ".join(spec), allowed, remedy)
    return made


def layers_of(options: TrainingOptions) -> list[str]:
    """Returns each layer's letters as in `--hybrid-layer-pattern`: one for HybridModel, mixer and MLP for GPTModel."""
    if not resolve_spec(options.spec)[1]:
        every = 1 if options.experimental_attention_variant is None else options.linear_attention_freq
        return ["G-" if number % every else "*-" for number in range(1, options.num_layers + 1)]
    try:
        pattern = parse_hybrid_pattern(options.hybrid_layer_pattern)
        layers = (pattern.main_pattern or "").replace("|", "")
    except ValueError as error:
        raise ArgumentError("hybrid_layer_pattern", options.hybrid_layer_pattern, _PATTERN, f"{error}.") from None
    if not layers or pattern.mtp_num_depths or "|" in options.hybrid_layer_pattern:
        raise ArgumentError("hybrid_layer_pattern", options.hybrid_layer_pattern, _PATTERN)
    return list(layers)


_PATTERN = "layers such as MG*-: M for Mamba-2, G for GatedDeltaNet, * for attention, - for an MLP"


def _model(options: TrainingOptions, config: TransformerConfig, vocab_size: int) -> GPTModel | HybridModel:
    spec = _layer_spec(options.spec, config)
    common: dict[str, Any] = {
        "config": config,
        "vocab_size": options.padded_vocab_size(vocab_size),
        "max_sequence_length": options.seq_length,
        "position_embedding_type": options.position_embedding_type,
        "rotary_base": options.rotary_base,
        "share_embeddings_and_output_weights": False,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
    if resolve_spec(options.spec)[1]:
        return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=options.hybrid_layer_pattern, **common)
    return GPTModel(transformer_layer_spec=spec, **common)


def _scheduler(options: TrainingOptions, optimizer: Any) -> OptimizerParamScheduler:
    # Megatron counts samples.
    steps = options.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters * steps,
        lr_decay_steps=(options.lr_decay_iters or options.train_iters) * steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iters * steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its own steps and style of decay
    )
