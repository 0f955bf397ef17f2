"""Small Megatron models over ranks: what the tests of the adapter share. Only ranks call this: it needs the stand-in.

Parameters are drawn by their names, whole, and assigned to tensor-parallel ranks, so that every run has the same model.
"""

import argparse
import contextlib
import dataclasses
import logging
import re
import warnings
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.layouts import layout_by_name

VOCABULARY = 64
RAGGED = (7, 1, 130, 0, 64, 2, 33)
# Microbatches of one step. The second of `ragged` has a loss mask, so that they have unlike numbers of tokens.
BATCHES = {
    "ragged": (RAGGED, (5, 0, 67, 16)),
    "tiny": ((2,), (3, 1)),  # leaves a rank out
    "aligned": ((24, 12, 96, 36), (12, 60)),  # what Megatron can shard over 2 and over 3 ranks
    "even": ((24, 24), (36, 36, 36)),
    "packs": ((23, 0, 41, 8), (24, 48)),  # whose totals it can
}

SETTINGS = {
    "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "mamba_num_heads": 6, "mamba_head_dim": 6, "mamba_state_dim": 5,
    "mamba_num_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
    "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False,
    "bias_activation_fusion": False, "use_cpu_initialization": True, "calculate_per_token_loss": True,
}  # fmt: skip
KINDS = {
    "gpt": {"num_layers": 2, "qk_layernorm": True},
    "hybrid": {"num_layers": 4},  # GG*-
    # GPTModel with layers of both kinds. Megatron's configuration allows it where tp * cp divides the key heads.
    "gpt_gdn": {"num_layers": 2, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2},
}
# Multi-latent attention: keys of 8 + 4, values of 6, which Megatron's own core attention reads from kv_channels.
LATENT = {
    "num_query_groups": None, "kv_channels": 6, "qk_layernorm": True, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "rope_type": "rope",
}  # fmt: skip
# An indexer that chooses 8 keys, and learns.
SPARSE = {
    **LATENT, "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 6, "dsa_indexer_topk": 8, "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_rotate_activation": False, "cp_comm_type": None,
}  # fmt: skip
KINDS |= {
    "dsa_mla": {"num_layers": 3, "experimental_attention_variant": "dsa", **SPARSE},
    "hybrid_dsa_mla": {"num_layers": 4, **SPARSE},  # GD+-
    "mla": {"num_layers": 2, **LATENT},
    "fused_mla": {"num_layers": 2, **LATENT},  # with one projection down to both latents
    "hybrid_mla": {"num_layers": 4, **LATENT},  # G++-
    # Mamba-2 layers, and all three kinds. Megatron refuses 6 heads and 2 groups over 4 ranks, and over 3.
    "hybrid_mamba": {"num_layers": 4},  # MM*-
    "hybrid_both": {"num_layers": 4},  # MG*-
}
PATTERNS = {
    "hybrid": "GG*-",
    "hybrid_mla": "G++-",
    "hybrid_dsa_mla": "GD+-",
    "hybrid_mamba": "MM*-",
    "hybrid_both": "MG*-",
}


def is_there(kind):
    """Returns True if this Megatron builds a model of this kind: dev's HybridModel has no latent attention."""
    from megatron_cp.megatron import compat

    return "+" not in PATTERNS.get(kind, "") or bool(compat.layers_taken({"mla_layer": None}))


def start(tp=1, cp=1, pp=1, vpp=None, ep=1, etp=None):
    """Megatron's process groups over all ranks, anew: what tp * cp * pp leaves over is data parallelism."""
    # Megatron says much in every rank that a machine without CUDA makes it say.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # All that is used, so that the stand-in reaches it.
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.models.hybrid.hybrid_model
    import megatron.core.pipeline_parallel  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_logging

    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    run_megatron_on_cpu()
    parallel_state.destroy_model_parallel()
    experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    parallel_state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp, **experts)
    model_parallel_cuda_manual_seed(1)
    # What is logged of these losses is kept by layer, and the next model may have more layers.
    moe_logging.get_moe_metrics_tracker()._metrics.clear()
    multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
    return parallel_state


def configure(kind, **changes):
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from megatron_cp.megatron.config import TransformerConfig as OurConfig
    from megatron_cp.megatron.config import with_options

    settings = SETTINGS | {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "cp_comm_type": "a2a",  # where nothing is said, the prices of all schemes take as long as the rest of a step
    }
    settings |= KINDS[kind] | changes
    # Our options are not Megatron's, and most models are to do without them.
    own = {name: settings[name] for name in vars(OurConfig)["__annotations__"] if name in settings}
    if not kind.endswith("mla"):
        # dev's own configuration takes only all_gather for local layers.
        return (OurConfig if own or settings.get("transformer_impl") == "local" else TransformerConfig)(**settings)
    config = MLATransformerConfig(**{name: value for name, value in settings.items() if name not in own})
    return with_options(config, argparse.Namespace(**own)) if own else config


def build(kind, *, spec=None, pattern=None, arguments=None, config=None, **changes):
    """GPTModel or HybridModel with our spec, or `spec`, and the parameters that belong to their names.

    Args:
        pattern: HybridModel's layers, if not the usual ones.
        arguments: others of the model.
        config: the model's configuration, in place of what `changes` would change in the usual one.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.experimental_attention_variant import dsa

    from megatron_cp.megatron import specs

    dsa.DSAIndexerLossLoggingHelper.tracker.clear()  # is kept by layer, and the next model may have more layers
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    config = configure(kind, **changes) if config is None else config
    common = {"vocab_size": VOCABULARY, "max_sequence_length": 256, "position_embedding_type": "rope"}
    common |= arguments or {}
    if kind.startswith("hybrid"):
        pattern = pattern or PATTERNS[kind]
        model = HybridModel(config, spec or specs.hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
    else:
        spec = spec or specs.gpt_layer_spec(config)
        model = GPTModel(config, fused(spec) if kind == "fused_mla" else spec, **common)
    fill(model, config)
    return model.to(config.params_dtype)  # Megatron's wrapper of torch's norms leaves their weights in float32


def build_stages(kind, config, *, pattern=None, mtp=False):
    """This rank's chunks of a model, one for each of its virtual pipeline stages."""
    from megatron.core import parallel_state

    from megatron_cp.megatron import specs

    chunks, stages = [], config.virtual_pipeline_model_parallel_size
    for stage in range(stages) if stages else [None]:
        arguments = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            "share_embeddings_and_output_weights": False,
            "vp_stage": stage,
        }
        spec = None
        if not kind.startswith("hybrid"):
            spec = specs.gpt_layer_spec(config, stage)
            arguments["mtp_block_spec"] = specs.gpt_mtp_block_spec(config, stage) if mtp else None
        chunks.append(build(kind, spec=spec, pattern=pattern, arguments=arguments, config=config))
    return chunks


def fused(spec):
    """Makes Megatron's Transformer Engine spec with `mla_down_proj_fusion` out of local parts."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_cp.megatron.layers.multi_latent_attention import FusedMLASelfAttention

    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
    return spec


def fill(model, config):
    """Gives every parameter the values that belong to its name in the whole model."""
    from megatron.core import parallel_state

    size, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    for name, parameter, split in parameters_of(model, config):
        shape = list(parameter.shape)
        if split is not None:
            shape[split[0]] *= size
        values = drawn(name, shape)
        if name.endswith(("in_proj.weight", "conv1d.weight")) and not hasattr(parameter, "partition_sizes"):
            keep_dot_products_from_zero(values, size * split[1][0])
        parameter.data.copy_(share(values, split, rank, size))


def drawn(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Mamba's D: a document's first token would else get next to nothing where C B x happens to be -D x.
    if name.endswith(("norm.weight", "layer_norm_weight", "D")):
        return 1 + 0.2 * values
    if name.endswith("dt_bias"):
        return 0.3 * values - 1
    if name.endswith("A_log"):
        return 0.3 * values
    return values * shape[-1] ** -0.5


def keep_dot_products_from_zero(values, width):
    """Makes keys like queries, in a projection or convolution whose first two sections of rows, `width` each, they are.

    The first token of a document gets `beta (q.k) v`, whose size the norm after it takes out again: where q.k happens
    to be 0.004, rounding it changes gradients by 1e-5, on one rank already.
    """
    q, k = values[:width], values[width : 2 * width]
    k.mul_(0.5).add_(q)


def parameters_of(model, config):
    """Whole name, parameter, and how tensor parallelism splits it: the dimension and the local sizes of sections."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    modules = dict(model.named_modules())
    for own_name, parameter in model.named_parameters():
        name = whole_name(own_name, modules, config)
        is_whole = ".experts." in name and config.expert_tensor_parallel_size == 1
        if is_whole or not getattr(parameter, "tensor_model_parallel", False):
            yield name, parameter, None
            continue
        dimension = parameter.partition_dim
        sizes = [parameter.shape[dimension]]
        owner = modules[own_name.rpartition(".")[0].rpartition(".")[0]]
        if hasattr(parameter, "partition_sizes"):  # as Mamba's mixer says it
            sizes = list(parameter.partition_sizes)
        elif isinstance(owner, GatedDeltaNet):
            if name.endswith("in_proj.weight"):
                sizes = list(owner.in_proj_split_sections)
            elif name.endswith("conv1d.weight"):
                sizes = [owner.qk_dim_local_tp, owner.qk_dim_local_tp, owner.v_dim_local_tp]
        elif "linear_fc1" in name and config.gated_linear_unit:
            sizes = [sizes[0] // 2] * 2
        yield name, parameter, (dimension, sizes)


def whole_name(name, modules, config):
    """The name that a parameter of this stage, and of these experts, has in the whole model."""
    from megatron.core import parallel_state

    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found:
        number = modules[found[0][:-1]].layer_number
        name = f"decoder.layers.{number - 1}.{name[found.end() :]}"
    if config.num_moe_experts:
        first = parallel_state.get_expert_model_parallel_rank() * (
            config.num_moe_experts // config.expert_model_parallel_size
        )
        name = re.sub(r"local_experts\.(\d+)\.", lambda one: f"local_experts.{first + int(one[1])}.", name)
    return name


def share(whole, split, rank, size):
    if split is None:
        return whole
    dimension, sizes = split
    sections = whole.split([local * size for local in sizes], dimension)
    return torch.cat([section.chunk(size, dimension)[rank] for section in sections], dimension)


def whole(shares, split):
    """The inverse of `share`, of numpy's arrays; where all ranks have everything, the first rank's."""
    if split is None:
        return shares[0]
    dimension, sizes = split
    sections = zip(*(np.split(one, np.cumsum(sizes)[:-1], dimension) for one in shares), strict=True)
    return np.concatenate([np.concatenate(pieces, dimension) for pieces in sections], dimension)


def layout_of(name, lengths, cp_size, align=1):
    """A layout by name; "lopsided" leaves every rank but the last without a token."""
    packing = Packing(lengths)
    if name == "lopsided":
        fragments = [[] for _ in range(cp_size - 1)] + [[(0, packing.total)]]
        return Layout.from_fragments(packing, fragments, align=align)
    return layout_by_name(name, packing, cp_size, align=align, seed=4)


def stream(index, total):
    """The token ids of a microbatch, and the loss mask that every second one has."""
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(0, VOCABULARY, (total,), generator=generator)
    mask = torch.randint(0, 2, (total,), generator=generator).float()
    return tokens, mask if index % 2 and total > 8 else None


def shards(model, lengths, layout, index, how="planned", align=1, group=None, position_ids=None):
    """This rank's share of microbatch `index`.

    Args:
        group: that holds it, if not the model's.
        position_ids: positions of several axes, of planned batches.
        how: "planned" by `shard_batch`; "megatron": Megatron's own sharding and parameters of a packed batch, each
            document in chunks; "pack": likewise, the whole pack, as with `--dataloader-inter-document-masking`;
            "unpacked": the documents, all of one length, as sequences of a batch, sharded by Megatron.
    """
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    group = parallel_state.get_context_parallel_group() if group is None else group
    tokens, mask = stream(index, sum(lengths))
    if how == "planned":
        size = group.size() if callable(group.size) else group.size
        assigned = layout_of(layout, lengths, size, align)
        given = {"loss_mask": mask, "position_ids": position_ids}
        return shard_batch(tokens, assigned, group, slots=slots_of(model), **given)
    return megatron_shards(tokens, mask, lengths, group, how)


def megatron_shards(tokens, mask, lengths, group, how):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_cp.megatron.batch import ShardedBatch

    ends = torch.tensor(lengths).cumsum(0)
    weights = torch.ones(len(tokens)) if mask is None else mask.clone()
    weights[ends - 1] = 0
    positions = torch.cat([torch.arange(length) for length in lengths])
    full = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": weights, "position_ids": positions}
    params = None
    if how == "unpacked":
        sequences = {name: values.view(len(lengths), -1) for name, values in full.items()}
        own = get_batch_on_this_cp_rank(sequences, is_hybrid_cp=False, cp_group=group)
    else:
        offsets, longest = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(), max(lengths)
        own = {name: values.unsqueeze(0) for name, values in full.items()}
        if how == "pack":
            batch = own | {"cu_seqlens": offsets[None], "max_seqlen": torch.tensor([longest]), "attention_mask": None}
            batch = get_batch_on_this_cp_rank(batch, False, group, use_per_sequence_balancing=True)
            own = {name: batch[name] for name in full}
        else:  # Megatron finds these rows with Transformer Engine
            held, chunks = [], 2 * group.size()
            for end, length in zip(ends.tolist(), lengths, strict=True):
                document = torch.arange(end - length, end).chunk(chunks)
                held += [document[group.rank()], document[chunks - 1 - group.rank()]]
            own = {name: values[:, torch.cat(held)] for name, values in own.items()}
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    return ShardedBatch(**own, packed_seq_params=params, num_tokens=int(weights.count_nonzero()), pad_rows=0)


def microbatches(model, batches, layout="zigzag", how="planned", align=1):
    """This rank's shares of its data-parallel rank's microbatches of one step."""
    from megatron.core import parallel_state

    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    assert len(BATCHES[batches]) % step == 0
    return [
        shards(model, lengths, layout, index, how, align)
        for index, lengths in list(enumerate(BATCHES[batches]))[first::step]
    ]


@dataclasses.dataclass
class Step:
    """A step of the whole batch: its loss per token, and what it leaves, whole and by name, as numpy's arrays.

    Rank 0 has `gradients`, or the parameters that an optimizer leaves, of all stages and experts; and how far the
    copies of ranks are apart that should have the same (`drift`).
    """

    loss: float
    tokens: int
    gradients: dict
    drift: dict


def train(chunks, config, batches, *, optimizes=False):
    """Runs a step over Megatron's data parallelism, its schedule and its end of a step, with an update or without."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_cp.megatron.loss import forward_step

    overlaps = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = DistributedDataParallelConfig(**(overlaps if optimizes else {}))
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = optimizer_of(config, wrapped) if optimizes else None
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step, model=wrapped, num_microbatches=len(batches), seq_length=1, micro_batch_size=1,
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
    )  # fmt: skip
    loss, tokens = loss_of(reduced)
    if optimizer is None:
        return Step(loss, tokens, *gathered(chunks, config, "main_grad"))
    optimizer.step()
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)
    return Step(loss, tokens, *gathered(chunks, config, "data"))


def loss_of(reduced):
    """Per token, and the number of tokens, of all ranks; the last stage knows them."""
    from megatron.core import parallel_state

    sums = torch.zeros(2, dtype=torch.float64)
    if reduced:
        sums = torch.stack([one["lm loss"] for one in reduced]).sum(0).double()
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (float(sums[0] / sums[1]), round(float(sums[1]))) if reduced else None)
    return next(found for found in everyone if found is not None)


@contextlib.contextmanager
def tensors_of_cuda():
    """Megatron's distributed optimizer asks a tensor for its type, and knows those of CUDA alone."""
    real = torch.Tensor.type

    def named(self, *args, **kwargs):
        return real(self, *args, **kwargs) if args or kwargs else real(self).replace("torch.", "torch.cuda.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "type", named)
        yield


def optimizer_of(config, wrapped):
    """Megatron's distributed Adam, which overlaps its messages with the step's computation."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    overlaps = {"no_sync_func": "no_sync", "grad_sync_func": "start_grad_sync", "param_sync_func": "start_param_sync"}
    for name, method in overlaps.items():
        functions = [getattr(chunk, method) for chunk in wrapped]
        setattr(config, name, functions[0] if len(wrapped) == 1 else functions)
    settings = OptimizerConfig(
        optimizer="adam", adam_eps=1.0, lr=1.0, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True,
        overlap_param_gather=True, params_dtype=config.params_dtype,
    )  # fmt: skip
    with tensors_of_cuda():
        return get_megatron_optimizer(settings, wrapped)


def gathered(chunks, config, attribute):
    """Returns, by whole names, the arrays of all ranks, stages and experts, and the distance between copies.

    Biases of experts are among them, as the end of the step leaves them. Ranks but the first return nothing.
    """
    from megatron.core import parallel_state

    tp_rank, tp_size = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
    own = {
        name: (as_numpy(getattr(parameter, attribute)).copy(), split)  # which is pickled fast
        for chunk in chunks
        for name, parameter, split in parameters_of(chunk, config)
    }
    buffers = [pair for chunk in chunks for pair in chunk.named_buffers()]
    own |= {name: (bias.numpy(), None) for name, bias in buffers if "expert_bias" in name}
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((tp_rank, own), everyone)
    found, drift = {}, {}
    if everyone is None:
        return found, drift
    for name in dict.fromkeys(name for _, one in everyone for name in one):
        shares = [[one[name] for rank, one in everyone if rank == part and name in one] for part in range(tp_size)]
        shares = [copies for copies in shares if copies]  # experts that are whole may be on ranks of one part alone
        split = shares[0][0][1]
        found[name] = whole([copies[0][0] for copies in shares], split)
        same = shares if split is not None else [[one for copies in shares for one in copies]]
        drift[name] = max(distance(one[0], copies[0][0]) for copies in same for one in copies)
    return found, drift


def as_numpy(values):
    """Returns an array, in float32 for bfloat16, which numpy does not have."""
    values = values.detach()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def distance(actual, expected):
    """`max|a - b| / max|b|`."""
    actual, expected = (np.asarray(values, dtype=np.float64) for values in (actual, expected))
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def distances(actual, expected):
    """Returns distances by name, the worst first."""
    assert actual.keys() == expected.keys()
    errors = {name: distance(actual[name], expected[name]) for name in expected}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
