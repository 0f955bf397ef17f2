"""Megatron-FSDP over context-parallel ranks beside one rank without it: losses, gradient norms, and weights at the end.

Megatron-FSDP names CUDA where no other part of Megatron does. `without_cuda` replaces these names while a rank runs.
"""

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("einops")
import torch
import torch.distributed as dist

from megatron_cp.executor.launch import run_ranks
from tests.functional_tests import tiny_megatron as tiny
from tests.functional_tests.test_megatron_matrix import EXPERTS, PACKS
from tests.limits import limit
from tests.shared import once, selected

STEPS = 2
MODELS = {
    "gpt": ("gpt", None, {}), "gpt with experts": ("gpt", None, EXPERTS), "GG*-": ("hybrid", "GG*-", {}),
    "MM*-": ("hybrid_mamba", "MM*-", {}), "mla": ("mla", None, {}),
    "GG*-, logits of a few rows": ("hybrid", "GG*-", {"logit_rows": 7}),
    "gpt, means of microbatches": ("gpt", None, {"calculate_per_token_loss": False}),
}  # fmt: skip
SHARDED = "optim_grads_params"
# Numbers of ranks, and of context-parallel ones.
PLACES = {"cp2": (2, 2), "dp2 cp2": (4, 2), "cp3": (3, 3)}
# What is sharded; those that others stand for are thorough.
CASES = [
    *(("cp2", SHARDED, model) for model in MODELS if model not in ("gpt", "GG*-")),
    ("cp2", "optim_grads", "gpt"), ("cp2", "optim", "gpt"),
    ("dp2 cp2", SHARDED, "gpt"), ("dp2 cp2", SHARDED, "gpt, means of microbatches"),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in (
        ("cp2", SHARDED, "gpt"), ("cp2", SHARDED, "GG*-"), ("dp2 cp2", SHARDED, "GG*-"), ("cp3", SHARDED, "GG*-"),
    )),
]  # fmt: skip


class _OfTorch(type):
    def __instancecheck__(cls, one):
        return isinstance(one, torch.device)


class Device(metaclass=_OfTorch):
    """`torch.device`, in which CUDA is the CPU."""

    def __new__(cls, *args, **kwargs):
        device = args[0] if args else kwargs["type"]
        return torch.device("cpu") if str(device).startswith("cuda") else torch.device(*args, **kwargs)


def without_cuda(patch):
    """Replaces what Megatron-FSDP names of CUDA: devices of buffers, the kind of its mesh, and a copy of shapes."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    mesh = adapter.DeviceMesh

    class Mesh(mesh):
        @staticmethod
        def from_group(groups, device_type, **others):
            return mesh.from_group(groups, "cpu", **others)

    patch.setattr(adapter, "DeviceMesh", Mesh)
    patch.setattr(adapter.torch, "device", Device, raising=False)
    patch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    return adapter


def run(group, cp, places):
    """Returns, for each strategy (None for one rank without it) and model, losses, norms, and whole weights by name."""
    found = {}
    for strategy, model in places:
        with pytest.MonkeyPatch.context() as patch:
            found[strategy, model] = trained(patch, cp, strategy, model)
    return found


def trained(patch, cp, strategy, model):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_cp.megatron.loss import forward_step

    tiny.start(cp=cp)
    kind, pattern, changes = MODELS[model]
    config = tiny.configure(kind, **changes)
    (chunk,) = tiny.build_stages(kind, config, pattern=pattern)
    if strategy is None:
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), chunk)
    else:
        adapter = without_cuda(patch)
        settings = DistributedDataParallelConfig(
            use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True, overlap_param_gather=True,
            gradient_reduce_div_fusion=False,  # gloo has no such sum
        )  # fmt: skip
        wrapped = adapter.FullyShardedDataParallel(config, settings, chunk, device=torch.device("cpu"))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync if strategy is not None else None
    settings = OptimizerConfig(
        optimizer="adam", adam_eps=1.0, lr=1.0, weight_decay=0.0, clip_grad=1.0, params_dtype=config.params_dtype,
        use_distributed_optimizer=strategy is not None,
    )  # fmt: skip
    with tiny.tensors_of_cuda():
        optimizer = get_megatron_optimizer(settings, [wrapped])
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses, norms = [], []
    for _ in range(STEPS):
        batches = [tiny.shards(chunk, pack, "zigzag", index) for index, pack in list(enumerate(PACKS))[first::step]]
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step, model=[wrapped], data_iterator=iter(batches), forward_only=False,
            num_microbatches=len(batches), seq_length=1, micro_batch_size=1,
        )  # fmt: skip
        losses.append(tiny.loss_of(reduced)[0])
        norms.append(float(optimizer.step()[1]))
    return losses, norms, whole_weights(wrapped, strategy)


def whole_weights(wrapped, strategy):
    """Weights by name; those in shards are put together from all ranks, in whose order their rows are."""
    if strategy is None:
        return {name: parameter.detach().numpy().copy() for name, parameter in wrapped.module.named_parameters()}
    found = {}
    for name, one in wrapped.module.param_and_grad_buffer.optimizer_named_parameters:
        if not hasattr(one, "device_mesh"):
            found[name] = one.detach().numpy().copy()
            continue
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, one.detach().to_local().flatten().numpy().copy())
        found[name] = np.concatenate(shares).reshape(one.shape)
    return found


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Returns, by model, what one rank finds without it, and by case what its ranks find."""
    cases = [
        tuple(case[name] for name in ("place", "strategy", "model")) for case in selected(request, test_equals_one_rank)
    ]

    def launched(world, cp, places):
        return run_ranks(run, world, cp, places, kind="processes", timeout=limit(300))[0]

    def compute():
        alone, spread = launched(1, 1, [(None, model) for model in dict.fromkeys(case[-1] for case in cases)]), {}
        for name in dict.fromkeys(case[0] for case in cases):
            found = launched(*PLACES[name], [case[1:] for case in cases if case[0] == name])
            spread |= {(name, *case): numbers for case, numbers in found.items()}
        return {model: numbers for (_, model), numbers in alone.items()}, spread

    return once(tmp_path_factory, "megatron_fsdp", compute)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "strategy", "model"), CASES)
def test_equals_one_rank(place, strategy, model, runs):
    alone, spread = runs[0][model], runs[1][place, strategy, model]
    for name, expected, actual in zip(("losses", "norms"), alone, spread, strict=False):
        assert actual == pytest.approx(expected, rel=1e-5), name
    assert spread[2].keys() == alone[2].keys()
    errors = tiny.distances(spread[2], alone[2])
    assert all(error <= 1e-5 for error in errors.values()), list(errors.items())[:4]
