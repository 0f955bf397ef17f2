"""Logits of Megatron's models that are computed a few rows at a time, where a loss is computed from them.

While a model runs with labels, its output layer returns its input as `ChunkedLogits`, and the model's loss runs the
output layer on a few rows at a time; backward runs it again. Without labels a model returns logits as before.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_cp.batch.branched import Targets
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.chunks import rows_in_chunks
from megatron_cp.megatron.layers.refusals import IN_CHUNKS


def chunk_logits(*models: nn.Module) -> None:
    """Makes one or several model chunks compute logits of `--logit-rows` rows at a time, if the flag is given.

    `megatron_cp.megatron.loss.forward_step` calls it. In a forward step of your own, call it before the model, also on
    pipeline stages without an output layer. It changes the class of a GPTModel or HybridModel, once.
    """
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, GPTModel | HybridModel) and getattr(module.config, "logit_rows", None) is not None:
            setattr(module.config, IN_CHUNKS, True)
            if not isinstance(module, ChunksLogits):
                module.__class__ = _in_chunks(type(module))


def _in_chunks(stock: type) -> type:
    return type(stock.__name__, (ChunksLogits, stock), {"__module__": stock.__module__})


class ChunksLogits:
    """A mixin before the class of a model: with labels, it never has the logits of more than `logit_rows` rows."""

    config: Any
    output_layer: Any

    def forward(self, *args: Any, **named: Any) -> Any:
        stock = super().forward  # type: ignore[misc]
        given = inspect.signature(stock).bind(*args, **named).arguments
        takes_logits = given.get("labels") is None or given.get("output_processor") is not None
        if takes_logits or not hasattr(self, "output_layer"):
            return stock(*args, **named)
        with _delayed(self.output_layer, self.config.logit_rows):
            return stock(*args, **named)

    def compute_language_model_loss(self, labels: Any, logits: Any) -> Tensor:
        """Returns losses `[b, t]` of labels `[b, t]`, or `[1, p]` of `Targets`."""
        stock = super().compute_language_model_loss  # type: ignore[misc]
        found: Tensor = logits.losses(stock, labels) if isinstance(logits, ChunkedLogits) else stock(labels, logits)
        return found

    def _scale_logits(self, logits: Any) -> Any:
        stock = super()._scale_logits  # type: ignore[misc]
        return logits.then(stock) if isinstance(logits, ChunkedLogits) else stock(logits)


@contextlib.contextmanager
def _delayed(head: Any, chunk_rows: int) -> Iterator[None]:
    """Makes an output layer return `ChunkedLogits` inside the block."""
    stock, had = head.forward, vars(head).get("forward")

    def forward(rows: Tensor, *args: Any, **named: Any) -> tuple[ChunkedLogits, None]:
        return ChunkedLogits(
            head, partial(_logits, stock, args, named), rows, chunk_rows, (*args, *named.values())
        ), None

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if had is not None:
            head.forward = had


def _logits(stock: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], rows: Tensor) -> Tensor:
    logits: Tensor = stock(rows, *args, **named)[0]
    return logits


def _is_in_main_grad(weight: Tensor) -> bool:
    """True if the product that computes the weight's gradient has added it to `main_grad`."""
    return getattr(weight, "grad_added_to_main_grad", False)


class ChunkedLogits:
    """The logits of an output layer, which are not computed yet. Functions of torch get them whole.

    Args:
        head: the output layer.
        function: returns logits `[parts * n, b, vocabulary]` of rows `[n, b, h]`: with sequence parallelism those of
            the `parts` tensor-parallel ranks, one behind the other.
        rows: `[t / parts, b, h]`.
        chunk_rows: the rows of logits that are computed at a time.
        arguments: others of the output layer.
    """

    def __init__(
        self, head: Any, function: Callable[[Tensor], Tensor], rows: Tensor, chunk_rows: int, arguments: tuple[Any, ...]
    ) -> None:
        self._head, self._function, self._rows, self._chunk_rows = head, function, rows, chunk_rows
        self._arguments = arguments

    def then(self, function: Callable[[Tensor], Tensor]) -> ChunkedLogits:
        """Returns the logits after a function of each, such as a scale."""
        before = self._function
        return ChunkedLogits(
            self._head, lambda rows: function(before(rows)), self._rows, self._chunk_rows, self._arguments
        )

    def full(self) -> Tensor:
        """Returns all logits."""
        return self._function(self._rows)

    def losses(self, loss: Callable[[Tensor, Tensor], Tensor], labels: Tensor | Targets) -> Tensor:
        """Returns losses `[b, t]`, by a function of labels `[b, n]` and logits `[n, b, vocabulary]`."""
        rows, parts = self._rows, self._parts
        if isinstance(labels, Targets):
            if parts > 1:
                remedy = "A rank has the labels of all rows, but the hidden states of its own rows only."
                raise ArgumentError("--logit-rows", self._chunk_rows, "none with --sequence-parallel and trees", remedy)
            rows, labels = rows.index_select(0, labels.rows), labels.labels[None]
        batch = len(labels)

        def of_chunk(rows: Tensor, labels: Tensor) -> Tensor:
            own = labels.transpose(0, 1).reshape(-1, batch).transpose(0, 1)
            losses = loss(own, self._function(rows))
            return losses.reshape(batch, parts, -1).permute(2, 1, 0)

        by_row = labels.reshape(batch, parts, len(rows)).permute(2, 1, 0)
        given = (each for each in self._arguments if isinstance(each, Tensor))
        found = rows_in_chunks(
            of_chunk, rows, by_row, parameters=list(dict.fromkeys([*self._head.parameters(), *given])),
            chunk_rows=max(self._chunk_rows // parts, 1), adds_itself=_is_in_main_grad,
        )  # fmt: skip
        return found.permute(2, 1, 0).reshape(batch, -1)

    def counts(self, count: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], *beside: Tensor) -> Any:
        """Returns the sums over chunks of numbers that a function counts of logits and of tensors `[b, t]` beside."""
        with torch.no_grad():
            size, parts = max(self._chunk_rows // self._parts, 1), self._parts
            by_part = [each.reshape(len(each), parts, -1) for each in beside]
            found = [
                count(
                    self._function(self._rows[at : at + size]),
                    *(each[:, :, at : at + size].flatten(1) for each in by_part),
                )
                for at in range(0, max(len(self._rows), 1), size)
            ]
        return tuple(torch.stack(each).sum(0) for each in zip(*found, strict=True))

    @property
    def _parts(self) -> int:
        return self._head.tp_group.size() if self._head.sequence_parallel else 1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(isinstance(each, cls) for each in args):
            return NotImplemented
        return func(*(each.full() if isinstance(each, cls) else each for each in args), **kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.full(), name)
