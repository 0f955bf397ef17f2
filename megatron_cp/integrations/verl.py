"""Context parallelism for verl's FSDP engine, in place of its Ulysses sequence parallelism.

    from megatron_cp.integrations.verl import register

    register()  # before verl makes its engines; "fsdp" and "fsdp2" then take ours

`ulysses_sequence_parallel_size` is the number of ranks, which need not divide heads or tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.integrations import require
from megatron_cp.integrations.images import always_run_tower
from megatron_cp.transformers.batch import ShardedBatch
from megatron_cp.transformers.enable import ContextParallel, enable_context_parallel
from megatron_cp.transformers.images import takes_images
from megatron_cp.transformers.logits import ChunkedLogits

_ROLLED, _TEMPERATURE = (
    "input_ids_rmpad_rolled",
    "temperature_rmpad",
)  # verl's names, of rows that the model does not take

# Settings of verl's batches for results that are neither log-probabilities nor entropies.
_OF_ALL_LOGITS = ("calculate_sum_pi_squared", "distillation_use_topk")
_NOT_TAKEN = ("cu_seqlens", "cu_seqlens_cpu", "images_seqlens")
# Models whose attention is causal inside images without these types of tokens, which verl's data sets drop.
_TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}


class ContextParallelEngineMixin:
    """A mixin for verl's FSDP engine: `class Engine(ContextParallelEngineMixin, FSDPEngineWithLMHead)`.

    The model runs over the ranks of verl's sequence-parallel group: any heads, any lengths, windows, and hybrids with
    linear layers, whose documents stay apart. It takes images and videos as `ContextParallel.shard` does.
    Log-probabilities, entropies and the losses that verl computes from them are those of whole batches, on every rank.
    With `logit_rows` verl's functions compute log-probabilities and entropies of so many rows at a time.

    Attributes:
        cp_options: arguments of `enable_context_parallel`, such as `{"layout": "balanced", "scheme": "auto"}`.
        context_parallel: the `ContextParallel` of the model, once it is built.

    Raises:
        ArgumentError: fused kernels, static padding, `use_remove_padding=False`, images of a Gemma without types of
            tokens, FSDP1 or results of all logits with `logit_rows`, or a model whose classes another engine of the
            process has patched.
    """

    cp_options: Mapping[str, Any] = {}
    context_parallel: ContextParallel
    engine_config: Any
    compute_entropy_from_logits: Any
    ulysses_parallel_group: Any
    ulysses_sequence_parallel_size: int
    use_ulysses_sp: bool
    _kinds: frozenset[type]
    _types: str | None
    _sharded: ShardedBatch

    def _build_module(self) -> Any:
        if self.cp_options.get("logit_rows") is not None and self.engine_config.strategy != "fsdp2":
            remedy = "Its weights would not be in place where logits are computed."
            raise ArgumentError("engine.strategy", self.engine_config.strategy, "fsdp2 with logit_rows", remedy)
        # Ulysses would exchange the model's attention, and refuses heads.
        with self._without_ulysses(), _without_patches():
            module = super()._build_module()  # type: ignore[misc]
        self._kinds = frozenset(kind for each in module.modules() for kind in type(each).__mro__)
        _check_forwards(self._kinds)
        self._types = _types_of(module.config)
        ranks = self.ulysses_parallel_group or ThreadGroup.create(1)[0]
        if takes_images(module):
            always_run_tower(module)
        self.context_parallel = enable_context_parallel(module, ranks, **self.cp_options)
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        module = super()._build_fsdp_module(module)  # type: ignore[misc]
        if self.cp_options.get("logit_rows") is not None:
            # The head runs after the model's forward, and its weights are among the outermost ones if they are those of
            # the embeddings. verl shards these itself after passes without gradients.
            module.set_reshard_after_forward(False, recurse=False)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns this rank's rows of what verl's engine passes to the model, and of what it computes results from."""
        with self._without_ulysses():
            inputs, results = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if _ROLLED not in results or _TEMPERATURE not in results:
            raise ArgumentError("use_remove_padding", False, "True", "megatron_cp does not compute rows of padding.")
        if results["pad_size"]:
            raise ArgumentError("engine.pad_to_length", True, "False", "Packs of any length run without padding.")
        if "shift_labels" in inputs:
            raise ArgumentError(
                "model.use_fused_kernels", True, "False", "We have not tested them with context parallelism."
            )
        if self.cp_options.get("logit_rows") is not None:
            _check_results(micro_batch)
        _check_forwards(self._kinds)  # again, since engines may be built later
        whole = {name: x for name, x in inputs.items() if x is not None and name not in _NOT_TAKEN}
        whole |= {name: results[name][None] for name in (_ROLLED, _TEMPERATURE)}
        host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in whole.items()}
        if self._types is not None and self._types not in host and any(name.startswith("pixel") for name in host):
            remedy = "Without them its attention would be causal inside images, and verl drops them: train it on text."
            raise ArgumentError(self._types, None, f"the types of all {host['input_ids'].shape[1]} tokens", remedy)
        host["lengths"] = micro_batch["input_ids"].offsets().diff().cpu()
        self._sharded = self.context_parallel.shard(host, device=inputs["input_ids"].device)
        rows = dict(self._sharded)
        rows.pop("use_cache")  # verl passes its own
        return rows, results | {name: rows.pop(name)[0] for name in (_ROLLED, _TEMPERATURE)}

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """Returns what verl's engine computes from logits; from chunks of them with `logit_rows`."""
        if isinstance(output.logits, ChunkedLogits):
            from verl.utils.tensordict_utils import assign_non_tensor

            # With this setting verl takes log-probabilities and entropies of its fused kernels in place of logits.
            output = self._results(output.logits, output_args, micro_batch)
            micro_batch = assign_non_tensor(micro_batch.copy(), use_fused_kernels=True)
        return super().prepare_model_outputs(  # type: ignore[misc]
            output, output_args, micro_batch, logits_processor_func
        )

    def _results(self, logits: ChunkedLogits, output_args: Any, micro_batch: Any) -> SimpleNamespace:
        from verl.utils.tensordict_utils import get_non_tensor_data
        from verl.utils.torch_functional import logprobs_from_logits

        with_entropy = get_non_tensor_data(micro_batch, "calculate_entropy", False)

        def of_chunk(chunk: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
            chunk = chunk / temperatures[:, None].clamp(min=1e-8).to(chunk.dtype)
            found = [logprobs_from_logits(chunk, labels, inplace_backward=False)]
            if with_entropy:
                found.append(self.compute_entropy_from_logits(chunk))
            return torch.stack(found, -1)

        log_probs, *entropy = logits.rows_of(of_chunk, output_args[_ROLLED], output_args[_TEMPERATURE]).unbind(-1)
        return SimpleNamespace(log_probs=log_probs, entropy=entropy[0] if entropy else None)

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        """Gathers a number for each token of the pack, in its order.

        FSDP takes the mean of gradients over these ranks too, so a gradient is multiplied by their number, as verl's
        own gather does.
        """
        if tensor.requires_grad:
            tensor = tensor.detach() + self.context_parallel.cp_size * (tensor - tensor.detach())
        return self.context_parallel.gather(tensor[None], self._sharded, same_loss=True)[0]

    @contextlib.contextmanager
    def _without_ulysses(self) -> Iterator[None]:
        before = self.ulysses_sequence_parallel_size, self.use_ulysses_sp
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False
        try:
            yield
        finally:
            self.ulysses_sequence_parallel_size, self.use_ulysses_sp = before


def _types_of(config: Any) -> str | None:
    """Returns the types of tokens by which a model sees both ways inside images; None for models that see causally."""
    is_gemma4 = getattr(config, "model_type", None) == "gemma4"
    if is_gemma4 and getattr(config.get_text_config(), "use_bidirectional_attention", None) != "vision":
        return None
    return _TYPES.get(getattr(config, "model_type", ""))


def _check_results(micro_batch: Any) -> None:
    """Refuses results that verl computes from all logits, and from no fused kernel."""
    from verl.utils.tensordict_utils import get_non_tensor_data

    for name in _OF_ALL_LOGITS:
        if get_non_tensor_data(micro_batch, name, False):
            raise ArgumentError(name, True, "False with logit_rows", "Leave logit_rows out: it needs all logits.")


@contextlib.contextmanager
def _without_patches() -> Iterator[None]:
    """Keeps verl from replacing forwards of transformers' classes, for Ulysses and for batches without images.

    Its attention calls flash attention itself, and its models compare the tower's rows with their own tokens.
    """
    from verl.workers.engine.fsdp import transformer_impl

    patch = transformer_impl.apply_monkey_patch
    transformer_impl.apply_monkey_patch = lambda **_: None
    try:
        yield
    finally:
        transformer_impl.apply_monkey_patch = patch


def _check_forwards(kinds: Iterable[type]) -> None:
    """Refuses classes whose forward is verl's: patches are of a whole process."""
    for kind in kinds:
        source = str(getattr(vars(kind).get("forward"), "__module__", ""))
        if source.startswith("verl.") and not kind.__module__.startswith("verl."):
            remedy = (
                "Another engine of this process patched the class, such as a critic of the same model. Run it in "
                "processes of its own."
            )
            given = f"{kind.__name__} with the forward of {source}"
            raise ArgumentError("model", given, "the forward of transformers", remedy)


def register(**cp_options: Any) -> type:
    """Makes verl's backends "fsdp" and "fsdp2" of language models use context parallelism. Returns the engine's class.

    Args:
        cp_options: arguments of `enable_context_parallel`.
    """
    require("verl", "verl")
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = type(
        "ContextParallelEngine", (ContextParallelEngineMixin, FSDPEngineWithLMHead), {"cp_options": cp_options}
    )
    engines: dict[str, dict[Any, type]] = EngineRegistry._engines["language_model"]
    for backend in ("fsdp", "fsdp2"):
        engines[backend] = dict.fromkeys(engines[backend], engine)
    return engine
