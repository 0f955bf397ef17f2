"""Ways of context parallelism, used as their own documentation says. Packages are imported where they are used.

A way of language models is called on every rank with a problem, the mesh `cp` of all ranks and `finish`. It calls the
model on its share of the row and then, where the backward pass may run, `finish(rows, places)`: the logits that it has
and their places in the stream, or None if it has the whole stream as every rank has.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from types import MethodType

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tools.conformance.models import Problem

Finish = Callable[[torch.Tensor, torch.Tensor | None], None]


def ours(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """`megatron_cp.transformers`, as docs/transformers.md says."""
    from megatron_cp.transformers import enable_context_parallel

    parallel = enable_context_parallel(problem.model, mesh["cp"])
    batch = parallel.shard({"input_ids": problem.input_ids, "lengths": list(problem.lengths)})
    logits = problem.model(**batch).logits
    finish(parallel.gather(logits, batch, same_loss=True)[0], None)


def stock(problem: Problem, _mesh: None, finish: Finish) -> None:
    """The stock class on one process with the packed row: what a collator without padding gives it."""
    finish(_call(problem.model, problem.input_ids, problem.position_ids)[0], None)


def _call(model, ids, positions):
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def _ringmaster(problem, mesh, finish, backend, *, inner="sdpa", blocks=False):
    import ringmaster
    from ringmaster.config import RotateMethod

    config = ringmaster.RingmasterConfig(size=mesh.size(), backend=backend)
    heads = getattr(problem.model.config, "num_key_value_heads", None)
    runtime = ringmaster.setup(
        config, num_kv_heads=heads,
        device_mesh=None if backend == "auto" else mesh, device_type="cpu", inner_attn=inner,
    )  # fmt: skip
    if heads is not None:
        problem.model.set_attn_implementation(runtime.attn_implementation)
    if blocks and runtime.attn_implementation == "ringmaster_ring":
        from ringmaster.strategies.ring import make_ring_attention
        from transformers import AttentionInterface

        attention = make_ring_attention("math", "math", RotateMethod.ALLGATHER)
        AttentionInterface.register(runtime.attn_implementation, attention)
    elif blocks and runtime.attn_implementation == "ringmaster_usp":
        from ringmaster.strategies.usp import make_usp_attention
        from transformers import AttentionInterface

        attention = make_usp_attention("math", "math", RotateMethod.ALLGATHER)
        AttentionInterface.register(runtime.attn_implementation, attention)
    ringmaster.wire_recurrent_layers(problem.model)
    with ringmaster.ContextParallelContextManager([problem.model], mesh["cp"].get_group()):
        rows = _call(problem.model, problem.input_ids.clone(), problem.position_ids.clone())[0]
        finish(rows, mesh.get_local_rank() * len(rows) + torch.arange(len(rows)))


def ringmaster_ulysses(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """axolotl-ringmaster's Ulysses around SDPA."""
    _ringmaster(problem, mesh, finish, "ulysses")


def ringmaster_flex(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """axolotl-ringmaster's Ulysses around FlexAttention."""
    _ringmaster(problem, mesh, finish, "ulysses", inner="flex_attention")


def ringmaster_ring(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """axolotl-ringmaster's ring, with the blocks that its own tests use on a CPU."""
    _ringmaster(problem, mesh, finish, "ring", blocks=True)


def ringmaster_auto(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """axolotl-ringmaster's own choice: Ulysses, ring or both (USP), by heads and ranks."""
    _ringmaster(problem, mesh, finish, "auto", blocks=True)


@contextlib.contextmanager
def _torch_region(problem, mesh):
    """Yields the rank's tokens, positions and places, cut by torch's `context_parallel`."""
    from torch.distributed.tensor.experimental import context_parallel

    ids, positions = problem.input_ids.clone(), problem.position_ids.clone()
    places = torch.arange(ids.shape[1])[None]
    buffers = [ids, positions, places]
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        yield ids, positions, places


def torch_own(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """torch's `context_parallel` around a model that calls SDPA."""
    problem.model.set_attn_implementation("sdpa")
    with _torch_region(problem, mesh) as (ids, positions, places):
        finish(_call(problem.model, ids, positions)[0], places[0])


def accelerate_own(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """accelerate's: torch's, with the model prepared as `Accelerator._prepare_cp` does it."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    problem.model.set_attn_implementation("sdpa")
    _attach_context_parallel_hooks(problem.model)
    with _torch_region(problem, mesh) as (ids, positions, places):
        finish(_call(problem.model, ids, positions)[0], places[0])


def verl_ulysses(problem: Problem, mesh: DeviceMesh, finish: Finish) -> None:
    """verl's Ulysses: its monkey patch of flash attention, and its own padding and slicing of the row."""
    from verl.models.transformers import monkey_patch
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs

    monkey_patch.is_trl_available = lambda: False  # it patches a class that TRL no longer has, and does not need TRL
    set_ulysses_sequence_parallel_group(mesh["cp"].get_group())
    monkey_patch.apply_monkey_patch(problem.model, ulysses_sp_size=mesh.size(), use_remove_padding=True)
    problem.model.set_attn_implementation("flash_attention_2")
    ids, positions, _ = ulysses_pad_and_slice_inputs(problem.input_ids, problem.position_ids, mesh.size())
    rows = _call(problem.model, ids, positions)[0]
    finish(rows, mesh.get_local_rank() * len(rows) + torch.arange(len(rows)))


def diffusion_ours(model: torch.nn.Module, ranks: int) -> bool:
    """`megatron_cp.diffusers`. Returns that gradients may be compared."""
    from megatron_cp.diffusers import enable_context_parallel

    enable_context_parallel(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"])
    return True


def _diffusers(model, ranks, **options):
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    def resolve(self, config):
        """Does what `_resolve_parallel_config` does, but for counting accelerators, of which a CPU has none."""
        parallel = ParallelConfig(context_parallel_config=config)
        mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        parallel.setup(torch.distributed.get_rank(), ranks, torch.device("cpu"), mesh=mesh)
        self._parallel_config = parallel
        return parallel

    model._resolve_parallel_config = MethodType(resolve, model)
    model.enable_parallelism(config=ContextParallelConfig(**options))
    return False


def diffusers_ulysses(model: torch.nn.Module, ranks: int) -> bool:
    """diffusers' `ulysses_degree`."""
    return _diffusers(model, ranks, ulysses_degree=ranks)


def diffusers_ulysses_anything(model: torch.nn.Module, ranks: int) -> bool:
    """diffusers' `ulysses_anything`."""
    return _diffusers(model, ranks, ulysses_degree=ranks, ulysses_anything=True)


def diffusers_ring(model: torch.nn.Module, ranks: int) -> bool:
    """diffusers' `ring_degree`."""
    return _diffusers(model, ranks, ring_degree=ranks)


def diffusers_ring_anything(model: torch.nn.Module, ranks: int) -> bool:
    """diffusers' `ring_anything`."""
    return _diffusers(model, ranks, ring_degree=ranks, ring_anything=True)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of context parallelism.

    Attributes:
        run: as this module says.
        package: the distribution whose version the page shows.
        module: what is imported beforehand, so that forked ranks have it.
        ranks: sizes that it runs with.
        used: how it is used, for the page.
    """

    run: Callable
    package: str
    module: str
    used: str
    ranks: tuple[int, ...] = (2, 3)


_RING = 'as above with `backend="ring"`; on a CPU no block of its public choices has gradients, so its own `math` block stands in, which its tests use on gloo'  # noqa: E501
_TORCH = '`with context_parallel(mesh["cp"], buffers=[ids, positions], ...)` around an SDPA model, defaults'
_DIFFUSERS = "`transformer.enable_parallelism(config=ContextParallelConfig({}))`; its method that makes the mesh divides by the number of accelerators, which is 0 on a CPU, and is replaced by the same without that; outputs only, as it is for inference"  # noqa: E501
LANGUAGE_WAYS = {
    "ours": Way(
        ours, "megatron_cp", "megatron_cp.transformers",
        "`enable_context_parallel(model, mesh[\"cp\"])`, `parallel.shard`, `parallel.gather`",
    ),
    "ringmaster ulysses": Way(
        ringmaster_ulysses, "axolotl-ringmaster", "ringmaster",
        "`setup(RingmasterConfig(size, backend=\"ulysses\"), inner_attn=\"sdpa\")`, `set_attn_implementation`, "
        "`wire_recurrent_layers`, `ContextParallelContextManager`; documents by `position_ids`. Its page says that any "
        "kernel can be wrapped; transformers itself refuses SDPA for Gemma-2 and GptOss, and with a flash kernel that "
        "has soft caps and sinks one document may be right. Its Gated DeltaNet wants kernels that want a GPU",
    ),
    "ringmaster ulysses, flex": Way(
        ringmaster_flex, "axolotl-ringmaster", "ringmaster",
        "as above with `inner_attn=\"flex_attention\"`, which transformers allows for Gemma-2 and GptOss",
    ),
    "ringmaster ring": Way(ringmaster_ring, "axolotl-ringmaster", "ringmaster", _RING),
    "ringmaster usp": Way(
        ringmaster_auto, "axolotl-ringmaster", "ringmaster",
        "as above with `backend=\"auto\"` on 4 ranks and no mesh, so that it makes its own: Ulysses of "
        "2 times ring of 2 for 2 key heads",
        (4,),
    ),
    "torch": Way(torch_own, "torch", "torch.distributed.tensor.experimental", _TORCH),
    "accelerate": Way(
        accelerate_own, "accelerate", "accelerate",
        "torch's, with the hooks that `Accelerator._prepare_cp` puts on the model; the `Accelerator` itself refuses a "
        "`ParallelismConfig` without FSDP",
    ),
    "verl ulysses": Way(
        verl_ulysses, "verl", "verl.models.transformers.monkey_patch",
        "`apply_monkey_patch(model, ulysses_sp_size)`, `ulysses_pad_and_slice_inputs`, flash attention; "
        "as without TRL, whose newest versions lack a class that it patches",
    ),
    "none: stock, one process": Way(
        stock, "transformers", "transformers",
        "no context parallelism: the stock class in eager mode on the packed row, as a control. GptOss gives "
        "its masks no `position_ids`; in Qwen3-Next and Mamba-2 state goes on into the next document", (1,),
    ),
}  # fmt: skip
DIFFUSION_WAYS = {
    "ours": Way(
        diffusion_ours, "megatron_cp", "megatron_cp.diffusers",
        "`enable_context_parallel(transformer, mesh[\"cp\"])`, gradients summed over ranks",
    ),
    "diffusers ulysses": Way(
        diffusers_ulysses, "diffusers", "diffusers", _DIFFUSERS.format("ulysses_degree=ranks")
    ),
    "diffusers ulysses_anything": Way(
        diffusers_ulysses_anything, "diffusers", "diffusers", "as above with `ulysses_anything=True`; gloo "
        "gathers rows of equal counts only, NCCL also others"
    ),
    "diffusers ring": Way(diffusers_ring, "diffusers", "diffusers", "as above with `ring_degree=ranks`"),
    "diffusers ring_anything": Way(
        diffusers_ring_anything, "diffusers", "diffusers", "as above with `ring_degree=ranks, ring_anything=True`"
    ),
}  # fmt: skip
