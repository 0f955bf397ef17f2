"""Small Megatron models over every kind of parallelism, their parameters and gradients by names in the whole model.

Only ranks call this, as `tiny_megatron`, whose models, parameters and batches these are.
"""

import contextlib
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

from tests.functional_tests import tiny_megatron as tiny


def build(kind, config, *, pattern=None, mtp=False):
    """This rank's chunks of a model, one for each of its virtual pipeline stages."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_cp.megatron import specs

    common = {"vocab_size": tiny.VOCABULARY, "max_sequence_length": 256, "position_embedding_type": "rope"}
    chunks = []
    stages = config.virtual_pipeline_model_parallel_size
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "share_embeddings_and_output_weights": False,
            "vp_stage": vp_stage,
        }
        if kind.startswith("hybrid"):
            model = HybridModel(config, specs.hybrid_stack_spec, hybrid_layer_pattern=pattern, **common, **ends)
        else:
            spec = specs.gpt_layer_spec(config, vp_stage)
            ahead = specs.gpt_mtp_block_spec(config, vp_stage) if mtp else None
            model = GPTModel(config, spec, mtp_block_spec=ahead, **common, **ends)
        tiny.fill(model, config, parameters_of(model, config))
        chunks.append(model.to(config.params_dtype))
    return chunks


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


def parameters_of(model, config):
    """The whole name of each parameter, it, and how tensor parallelism splits it."""
    modules = dict(model.named_modules())
    for name, parameter, split in tiny.parameters_of(model, config):
        yield whole_name(name, modules, config), parameter, split


def step(config, chunks, batches, *, align=None, optimizes=False, looks_ahead=True, groups=()):
    """Loss, gradients and drift of one step over Megatron's schedule; with an optimizer the parameters that it leaves.

    Rank 0 has the gradients and drift of all ranks.

    Args:
        align: of the layouts, if not as the configuration asks for.
        groups: numbers of ranks that share a batch, if not those of Megatron's groups.
        looks_ahead: else batches do not tell what lies ahead, so that multi-token prediction is Megatron's own.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_cp.megatron.batch import layout_options
    from megatron_cp.megatron.loss import forward_step

    overlaps = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = DistributedDataParallelConfig(**(overlaps if optimizes else {}))
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = optimizer_of(config, wrapped) if optimizes else None
    if optimizes:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
        config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            setattr(config, name, getattr(config, name)[0] if len(wrapped) == 1 else getattr(config, name))
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    first, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    group = None
    if groups:
        first, size, group = own_group(groups)
    align = layout_options(config)["align"] if align is None else align
    own = [tiny.shards(chunks[0], lengths, "zigzag", index, align=align, group=group)
           for index, lengths in list(enumerate(batches))[first::size]]  # fmt: skip
    if not looks_ahead:
        own = [dataclasses.replace(one, packed_seq_params=dataclasses.replace(one.packed_seq_params, stream=None))
               for one in own]  # fmt: skip
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(own) for _ in wrapped] if len(wrapped) > 1 else iter(own),
        model=wrapped, num_microbatches=len(own), seq_length=1, micro_batch_size=1,
    )  # fmt: skip
    loss = loss_of(reduced)
    if optimizer is None:
        return loss, *gathered(chunks, config, "main_grad")
    optimizer.step()
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)
    return loss, *gathered(chunks, config, "data")


def own_group(sizes):
    """Returns the index of this rank's group, the number of groups, and the group; creates all groups in rank order."""
    from megatron_cp.megatron.groups import BatchGroups

    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    mine = next(number for number, end in enumerate(ends[1:]) if dist.get_rank() < end)
    return mine, len(sizes), BatchGroups.make().part(range(ends[mine], ends[mine + 1]))


def loss_of(reduced):
    """Per token, of all ranks; the last stage knows it."""
    from megatron.core import parallel_state

    sums = torch.zeros(2, dtype=torch.float64)
    if reduced:
        sums = torch.stack([one["lm loss"] for one in reduced]).sum(0).double()
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, float(sums[0] / sums[1]) if reduced else None)
    return next(loss for loss in everyone if loss is not None)


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
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

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
        name: (getattr(parameter, attribute).detach().numpy().copy(), split)
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
        found[name] = tiny.whole([copies[0][0] for copies in shares], split)
        same = shares if split is not None else [[one for copies in shares for one in copies]]
        drift[name] = max(tiny.distance(one[0], copies[0][0]) for copies in same for one in copies)
    return found, drift
