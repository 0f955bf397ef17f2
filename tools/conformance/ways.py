"""Ways of context parallelism, used as their own documentation says. Packages are imported where they are used.

A way of language models is called on every rank with a problem, the mesh `cp` of all ranks and `finish`. It calls the
model on its share of the row and then, where the backward pass may run, `finish(rows, places)`: the logits that it has
and their places in the stream, or None if it has the whole stream as every rank has.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
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


def ringmaster(problem: Problem, mesh: DeviceMesh, finish: Finish, *, backend: str, inner: str = "sdpa") -> None:
    """axolotl-ringmaster: Ulysses around a kernel, its ring, or its own choice among these and both (USP).

    Ring and USP compute the blocks that its own tests use on a CPU.
    """
    import ringmaster
    from ringmaster.config import RotateMethod

    config = ringmaster.RingmasterConfig(size=mesh.size(), backend=backend)
    heads = getattr(problem.model.config, "num_key_value_heads", None)
    runtime = ringmaster.setup(
        config, num_kv_heads=heads,
        device_mesh=None if backend == "auto" else mesh, device_type="cpu", inner_attn=inner,
    )  # fmt: skip
    name = runtime.attn_implementation
    if heads is not None:
        problem.model.set_attn_implementation(name)
    if backend != "ulysses" and name in ("ringmaster_ring", "ringmaster_usp"):
        from ringmaster.strategies.ring import make_ring_attention
        from ringmaster.strategies.usp import make_usp_attention
        from transformers import AttentionInterface

        make = make_ring_attention if name == "ringmaster_ring" else make_usp_attention
        AttentionInterface.register(name, make("math", "math", RotateMethod.ALLGATHER))
    ringmaster.wire_recurrent_layers(problem.model)
    with ringmaster.ContextParallelContextManager([problem.model], mesh["cp"].get_group()):
        rows = _call(problem.model, problem.input_ids.clone(), problem.position_ids.clone())[0]
        finish(rows, mesh.get_local_rank() * len(rows) + torch.arange(len(rows)))


def torch_own(problem: Problem, mesh: DeviceMesh, finish: Finish, *, prepare: bool = False) -> None:
    """torch's `context_parallel` around a model that calls SDPA; `prepare` as accelerate's `_prepare_cp` does it."""
    from torch.distributed.tensor.experimental import context_parallel

    problem.model.set_attn_implementation("sdpa")
    if prepare:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(problem.model)
    ids, positions = problem.input_ids.clone(), problem.position_ids.clone()
    places = torch.arange(ids.shape[1])[None]
    buffers = [ids, positions, places]
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
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


def diffusers_own(model: torch.nn.Module, ranks: int, *, degree: str, **options: bool) -> bool:
    """diffusers' `enable_parallelism`, with all ranks as one of its degrees. It is for outputs only."""
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
    model.enable_parallelism(config=ContextParallelConfig(**{degree: ranks}, **options))
    return False


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of context parallelism.

    Attributes:
        run: as this module says.
        package: the distribution whose version the page shows.
        module: what is imported beforehand, so that forked ranks have it.
        used: how it is used, for the page.
        ranks: sizes that it runs with.
    """

    run: Callable
    package: str
    module: str
    used: str
    ranks: tuple[int, ...] = (2, 3)


_ringmaster = partial(Way, package="axolotl-ringmaster", module="ringmaster")
_diffusers = partial(Way, package="diffusers", module="diffusers")
LANGUAGE_WAYS = {
    "ours": Way(
        ours, "megatron_cp", "megatron_cp.transformers",
        "`enable_context_parallel(model, mesh[\"cp\"])`, `parallel.shard`, `parallel.gather`",
    ),
    "ringmaster ulysses": _ringmaster(
        partial(ringmaster, backend="ulysses"),
        used="`setup(RingmasterConfig(size, backend=\"ulysses\"), inner_attn=\"sdpa\")`, `set_attn_implementation`, "
        "`wire_recurrent_layers`, `ContextParallelContextManager`; documents by `position_ids`. transformers refuses "
        "SDPA for Gemma-2 and GptOss; a flash kernel with soft caps and sinks may be right for one document",
    ),
    "ringmaster ulysses, flex": _ringmaster(
        partial(ringmaster, backend="ulysses", inner="flex_attention"),
        used="the same with `inner_attn=\"flex_attention\"`, which transformers allows for Gemma-2 and GptOss",
    ),
    "ringmaster ring": _ringmaster(
        partial(ringmaster, backend="ring"),
        used="the same with `backend=\"ring\"` and its own `math` block, which its tests use on gloo: on a CPU no "
        "block of its public choices has gradients",
    ),
    "ringmaster usp": _ringmaster(
        partial(ringmaster, backend="auto"),
        used="the same with `backend=\"auto\"` on 4 ranks: Ulysses of 2 times ring of 2 for 2 key heads",
        ranks=(4,),
    ),
    "torch": Way(
        torch_own, "torch", "torch.distributed.tensor.experimental",
        "`with context_parallel(mesh[\"cp\"], buffers=[ids, positions], ...)` around an SDPA model, defaults",
    ),
    "accelerate": Way(
        partial(torch_own, prepare=True), "accelerate", "accelerate",
        "torch's, with the hooks that `Accelerator._prepare_cp` puts on the model; the `Accelerator` itself wants FSDP",
    ),
    "verl ulysses": Way(
        verl_ulysses, "verl", "verl.models.transformers.monkey_patch",
        "`apply_monkey_patch(model, ulysses_sp_size)`, `ulysses_pad_and_slice_inputs`, flash attention, without TRL",
    ),
    "none: stock, one process": Way(
        stock, "transformers", "transformers",
        "the stock class in eager mode on the packed row, as a control. GptOss gives its masks no `position_ids`; in "
        "Qwen3-Next and Mamba-2 state goes on into the next document", (1,),
    ),
}  # fmt: skip
DIFFUSION_WAYS = {
    "ours": Way(
        diffusion_ours, "megatron_cp", "megatron_cp.diffusers",
        "`enable_context_parallel(transformer, mesh[\"cp\"])`, gradients summed over ranks",
    ),
    "diffusers ulysses": _diffusers(
        partial(diffusers_own, degree="ulysses_degree"),
        used="`transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))`, with a mesh of the "
        "CPU's; outputs only, as it is for inference",
    ),
    "diffusers ulysses_anything": _diffusers(
        partial(diffusers_own, degree="ulysses_degree", ulysses_anything=True),
        used="the same with `ulysses_anything=True`; gloo gathers rows of equal counts only, NCCL also others",
    ),
    "diffusers ring": _diffusers(
        partial(diffusers_own, degree="ring_degree"), used="the same with `ring_degree=ranks`",
    ),
    "diffusers ring_anything": _diffusers(
        partial(diffusers_own, degree="ring_degree", ring_anything=True),
        used="the same with `ring_degree=ranks, ring_anything=True`",
    ),
}  # fmt: skip
