"""`enable_context_parallel` runs a diffusion transformer over a context-parallel group."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from megatron_cp.batch.gradients import reduce_gradients
from megatron_cp.batch.ranks import ranks_of
from megatron_cp.diffusers.attend import RowAttention
from megatron_cp.diffusers.families import IMAGE, TEXT, Family, RowAxis, family_of, modules_at
from megatron_cp.diffusers.rows import PassRows, image_layout, own_range, share
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import agree_on_inputs
from megatron_cp.executor.gather import gather
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.plan.transport import COLLECTIVE, Transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.versions import warn_if_framework_untested

_Value = TypeVar("_Value")
_RANKS = "_cp_ranks"  # an attribute of models that are enabled


def enable_context_parallel(
    model: ModelMixin | DiffusionPipeline,
    group: Group | None,
    *,
    scheme: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
    hardware: Machine | str | None = None,
    topology: Topology | None = None,
    kernel: str = "auto",
    text: str = "split",
    same_loss: bool = True,
) -> ContextParallel:
    """Makes a diffusion transformer compute the rows of its image and text over the ranks of a group.

    Every rank calls the model, or the whole pipeline, with the same inputs, and gets the whole output. Any number of
    rows on any number of ranks and heads is computed exactly, without padding. Parameters are not changed.

    Args:
        model: a Flux, Wan, QwenImage, LTX, HunyuanVideo or CogVideoX transformer of diffusers, or a pipeline with
            such ones as `transformer` and `transformer_2`.
        group: the context-parallel ranks: a group, or a mesh of one dimension such as `mesh["cp"]`.
        scheme, ulysses_degree, head_chunks, transport, codec, hardware, topology: as in `plan_attention`.
        kernel: the attention kernel: "auto", or one that `megatron-cp doctor` lists.
        text: "split" gives each rank a share of the text's rows. "held" keeps all of them on every rank, where they
            are computed again; they do not travel to attentions, whose scheme is then a2a, but their output does.
        same_loss: the meaning of the output's gradient, as in `cp.gather`. True: every rank computes the same loss.

    Raises:
        ArgumentError: a model of another class or setting, or one that is enabled already.
    """
    warn_if_framework_untested("diffusers")  # whose processors are answered
    models = _models_of(model)
    families = [family_of(each) for each in models]
    if any(hasattr(each, _RANKS) for each in models):
        remedy = "Keep the context that the first call returned; it runs every pass."
        raise ArgumentError("model", "a model that already runs over a group", "a model, once", remedy)
    scheme = require("scheme", scheme)
    if text not in ("split", "held"):
        raise ArgumentError("text", text, "split or held")
    if text == "held":
        scheme, head_chunks = _only("scheme", scheme, "a2a", "auto"), _only("head_chunks", head_chunks, 1, None)
    options = {
        "scheme": scheme, "ulysses_degree": ulysses_degree, "head_chunks": head_chunks, "transport": transport,
        "codec": codec, "hardware": hardware, "topology": topology,
    }  # fmt: skip
    ranks = ranks_of(group)
    pairs = zip(models, families, strict=True)
    enabled = [_Enabled(each, family, RowAttention(ranks, options, kernel), text, same_loss) for each, family in pairs]
    return ContextParallel(enabled)


class ContextParallel:
    """The context parallelism of a model or pipeline, made by `enable_context_parallel`.

    Attributes:
        cp_size: size of the group.
        rank: this rank's place in the group.
    """

    def __init__(self, enabled: list[_Enabled]) -> None:
        self._enabled = enabled
        self.cp_size, self.rank = enabled[0].ranks.size, enabled[0].ranks.rank

    def reduce_gradients(self) -> None:
        """Sums the gradients of the parameters over the group: each rank's backward leaves its share."""
        for each in self._enabled:
            reduce_gradients(each.model, each.ranks)

    def explain(self) -> str:
        """Describes the plans that were made so far, one for each number of rows."""
        return "\n\n".join(each.attention.explain() for each in self._enabled if each.attention.plans)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the stock model inside the context, so that a rank computes all rows by itself."""
        before = [each.is_on for each in self._enabled]
        for each in self._enabled:
            each.is_on = False
        try:
            yield
        finally:
            for each, was_on in zip(self._enabled, before, strict=True):
                each.is_on = was_on


class _Enabled:
    """The hooks of one model over a group: splits its rows, computes its attentions, and gathers its output."""

    def __init__(self, model: nn.Module, family: Family, attention: RowAttention, text: str, same_loss: bool) -> None:
        self.model, self.family, self.attention, self.ranks = model, family, attention, attention.ranks
        self.holds_text = text == "held" and self.ranks.size > 1  # alone, a rank has all rows in any case
        self.same_loss, self.is_on = same_loss, True
        self._sizes: dict[str, int] = {}
        self._real_text: tuple[tuple[int, ...], ...] | None = None
        self._calls = 0
        setattr(model, _RANKS, self.ranks)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for path, arguments in family.inputs.items():
            for module in modules_at(model, path):
                hook = functools.partial(self._split_inputs, arguments)
                module.register_forward_pre_hook(hook, with_kwargs=True)
        for path, results in family.outputs.items():
            for module in modules_at(model, path):
                module.register_forward_hook(functools.partial(self._split_outputs, results))
        model.get_submodule(family.gathered).register_forward_hook(self._gather_output)
        self._layers = [module for path in family.attentions for module in modules_at(model, path)]
        for module in self._layers:
            module.processor = _parallel(module.processor, self)

    # -- hooks, in the order of a forward pass -----------------------------------------------------------------------

    @no_compile
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_on:
            return
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments  # by name
        for name in self.family.refused:
            _refuse(name, given)
        agree_on_inputs(self.ranks, type(module).__name__, given)
        self._sizes, self._calls = {}, 0
        self._real_text = self._real(given.get(self.family.text_mask or ""))

    def _split_inputs(self, arguments: Mapping[str, RowAxis], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_on:
            return None
        names = list(inspect.signature(module.forward).parameters)
        args, kwargs = list(args), dict(kwargs)
        for name, axis in arguments.items():
            if name in kwargs:
                kwargs[name] = self._split(kwargs[name], axis)
            elif (place := names.index(name)) < len(args):
                args[place] = self._split(args[place], axis)
        return tuple(args), kwargs

    def _split_outputs(self, results: Mapping[int, RowAxis], module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_on:
            return None
        return tuple(self._split(x, results[place]) if place in results else x for place, x in enumerate(output))

    @no_compile
    def _gather_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.is_on:
            return None
        if self._calls != len(self._layers):
            remedy = (
                "Set processors and fuse projections before you enable the model; caches that skip layers do not work."
            )
            given = f"{self._calls} attention layers that ran over the group, as where another processor was set"
            raise ArgumentError("model", given, f"all {len(self._layers)} of them", remedy)
        rows = self._sizes[IMAGE]
        layout = image_layout(rows, output.shape[0], self.ranks.size)
        real = int(share(rows, self.ranks.size, IMAGE)[self.ranks.rank])  # without a stand-in
        whole = gather(output[:, :real].flatten(0, 1), layout, self.ranks, same_loss=self.same_loss)
        if whole.requires_grad:  # blocks that are recomputed in backward have the rows of their own pass
            rows_of_pass = self._sizes, self._real_text
            whole.register_hook(lambda _: self._resume(*rows_of_pass))
        return whole.unflatten(0, (output.shape[0], rows))

    def _resume(self, sizes: dict[str, int], real_text: tuple[tuple[int, ...], ...] | None) -> None:
        self._sizes, self._real_text = sizes, real_text

    def _split(self, x: Any, axis: RowAxis) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(self._split(each, axis) for each in x)
        if x is None or (axis.ndim is not None and x.ndim != axis.ndim):
            return x
        size = x.shape[axis.dim]
        if size != self._sizes.setdefault(axis.stream, size):
            given = f"{x.shape[axis.dim]} rows of {axis.stream} in a tensor {list(x.shape)}"
            raise ArgumentError("model inputs", given, f"{self._sizes[axis.stream]} rows, as the tensors before it")
        if axis.stream == TEXT and self.holds_text:
            return x
        return x.narrow(axis.dim, *own_range(size, self.ranks.size, self.ranks.rank, axis.stream))

    # -- attention ---------------------------------------------------------------------------------------------------

    @no_compile
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes the attention of all rows of the pass for this rank's queries, `[batch, heads, rows, head_dim]`.

        The mask is read from the model's argument once a pass, so the layer's own, over local rows, is not used; a
        layer's mask is refused where the model has no such argument.
        """
        if dropout_p or is_causal or query.shape[2] != key.shape[2]:
            given = f"dropout {dropout_p}, is_causal {is_causal}, {query.shape[2]} queries and {key.shape[2]} keys"
            raise ArgumentError("attention", given, "attention of a pass's rows to themselves, without dropout")
        if attn_mask is not None and self.family.text_mask is None:
            raise ArgumentError(
                "attention",
                "a mask",
                "None",
                "The mask is not split over ranks. To run on one rank, use context.disabled().",
            )
        rows = self._pass(query.shape[0], query.shape[2])
        self._calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.attention(rows, q, k, v, scale).transpose(1, 2)

    def _pass(self, batch: int, local_rows: int) -> PassRows:
        """Returns the rows of the pass that an attention belongs to."""
        names = self.family.streams
        sizes = tuple((name, self._sizes.get(name, 0)) for name in names)
        rows = PassRows(batch, sizes, self.ranks.size, self.holds_text and TEXT in names, self._real_text)
        if rows.local_rows(self.ranks.rank) != local_rows:
            remedy = "megatron_cp does not know processors or hooks that add rows."
            raise ArgumentError("attention", f"{local_rows} local rows", f"this pass's {rows}", remedy)
        return rows

    def _real(self, mask: Tensor | None) -> tuple[tuple[int, ...], ...] | None:
        """Returns the real rows of text of each entry, read from the device once a pass; None if all are real."""
        if mask is None:
            return None
        real = mask.bool().cpu().numpy()
        if real.ndim != 2:
            raise ArgumentError(str(self.family.text_mask), list(mask.shape), "[batch, text rows]")
        if real.all():
            return None
        if not self.family.any_mask and (np.diff(real.astype(np.int8), axis=1) > 0).any():
            remedy = f"{type(self.model).__name__} counts its real rows, so they must come first: pad at the end."
            raise ArgumentError(str(self.family.text_mask), "a mask with holes", "real rows first", remedy)
        return tuple(tuple(np.flatnonzero(entry).tolist()) for entry in real)


class _OverRanks(TorchFunctionMode):
    """Computes the attention that a processor asks torch for over the ranks."""

    def __init__(self, model: _Enabled) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.model.attend(*args, **(kwargs or {}))


def _parallel(processor: Any, model: _Enabled) -> Any:
    """Returns a copy of an attention processor that computes its attention over the ranks.

    Its class is one made here from the stock class, with the signature from which diffusers reads what it takes.
    """
    stock = type(processor)

    @functools.wraps(stock.__call__)
    @no_compile
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.is_on:
            return stock.__call__(self, *args, **kwargs)
        with _OverRanks(model) as mode:
            found = stock.__call__(self, *args, **kwargs)
        if mode.calls != 1:
            remedy = 'Use the backend "native", which calls torch: model.set_attention_backend("native").'
            raise ArgumentError("model", f"{stock.__name__} with {mode.calls} attentions of torch", "one", remedy)
        return found

    copied = copy.copy(processor)
    copied.__class__ = type(stock.__name__, (stock,), {"__call__": call})
    return copied


def _only(name: str, given: _Value, allowed: _Value, default: _Value) -> _Value:
    """Returns the one value of an option that held text allows."""
    if given not in (allowed, default):
        raise ArgumentError(name, given, f"{allowed}, where text is held")
    return allowed


def _models_of(given: object) -> list[Any]:
    if isinstance(given, ModelMixin):
        return [given]
    named = [getattr(given, name, None) for name in ("transformer", "transformer_2")]
    found = [each for each in named if isinstance(each, ModelMixin)]
    if not isinstance(given, DiffusionPipeline) or not found:
        remedy = "Call it before fully_shard, torch.compile and PEFT wrap the model."
        raise ArgumentError("model", type(given).__name__, "a transformer of diffusers, or a pipeline with one", remedy)
    return found


def _refuse(path: str, given: Mapping[str, Any]) -> None:
    """Refuses an argument, or entries of one as `argument.prefix*`."""
    name, _, prefix = path.partition(".")
    value = given.get(name)
    if prefix and isinstance(value, Mapping):
        prefix = prefix.rstrip("*")
        name, value = next(
            ((f"{name}.{key}", each) for key, each in value.items() if key.startswith(prefix)), (name, None)
        )
    elif prefix:
        value = None
    if value is not None:
        raise ArgumentError(
            name,
            type(value).__name__,
            "None",
            "Its rows are not split over ranks. To run on one rank, use context.disabled().",
        )
