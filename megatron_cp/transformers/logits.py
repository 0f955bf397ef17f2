"""Logits that are computed a few rows at a time, when a loss or log-probabilities are computed from them.

A head that is told so returns its input rows as `ChunkedLogits`. The model's forward may scale them or cap them with a
tanh, which is noted and done to each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.chunks import rows_in_chunks, sum_in_chunks
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.torch_private import leaves, register_node

# Functions that act on each logit by itself.
_DONE_TO_EACH = frozenset(("mul", "__rmul__", "div", "true_divide", "tanh", "float", "to", "contiguous", "detach"))
_FULL = "Without logit_rows the head computes the logits of all rows; out.logits.full() returns those of this call."


class ChunkedLogits:
    """The logits `[1, t, vocabulary]` of this rank's rows, which are not computed yet.

    Attributes:
        shape: of the logits.
        dtype, device: of the rows that they are computed from.
    """

    def __init__(self, head: nn.Module, rows: Tensor, chunk_rows: int, done: tuple[Any, ...] = ()) -> None:
        self._head, self._rows, self._chunk_rows, self._done = head, rows, chunk_rows, done
        self.dtype, self.device = rows.dtype, rows.device

    @property
    def shape(self) -> torch.Size:
        weight: Any = self._head.weight
        return torch.Size([*self._rows.shape[:-1], len(weight)])

    def sum_of(self, function: Callable[..., Tensor], *beside: Tensor) -> Tensor:
        """Returns the sum over chunks of a function of their logits `[n, vocabulary]`, which returns a scalar."""
        return self._run(sum_in_chunks, function, beside)

    def rows_of(self, function: Callable[..., Tensor], *beside: Tensor) -> Tensor:
        """Returns `[1, t, ...]`: for each row what a function returns of logits `[n, vocabulary]`."""
        return self._run(rows_in_chunks, function, beside)[None]

    def at(self, places: Tensor) -> ChunkedLogits:
        """Returns the logits of some rows `[p]`."""
        return ChunkedLogits(self._head, self._rows[:, places], self._chunk_rows, self._done)

    def full(self) -> Tensor:
        """Returns all logits."""
        return self.rows_of(lambda logits: logits)

    def _run(self, run: Callable[..., Tensor], function: Callable[..., Tensor], beside: Sequence[Tensor]) -> Tensor:
        if not isinstance(self._head, ChunksRows):
            raise ArgumentError("logits", "those of an enabled model", "their use outside of parallel.disabled()")
        done = self._done
        made: list[Tensor] = []
        scales = [x for _, args, _ in done for x in args if isinstance(x, Tensor) and x.requires_grad]

        def logits_of(stock: Callable[..., Tensor]) -> Tensor:
            # It lives until backward, so it must not keep `self` with its rows.
            def of_chunk(rows: Tensor, *others: Tensor) -> Tensor:
                logits = stock(rows)
                for func, args, named in done:
                    logits = func(*(logits if x is _PLACE else x for x in args), **named)
                return function(logits, *others)

            parameters = [*self._head.parameters(), *scales]
            made.append(run(of_chunk, self._rows[0], *beside, parameters=parameters, chunk_rows=self._chunk_rows))
            return made[0]

        found: Tensor = self._head(HeadCall(logits_of))
        if found.data_ptr() != made[0].data_ptr():  # hooks of ZeRO-3 return another view
            raise ArgumentError("logit_rows", "a head whose hooks change what it returns", "hooks that read it", _FULL)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = next(x for x in leaves((args, kwargs or {})) if isinstance(x, cls))
        return own._noted(func.__name__, func, args, kwargs or {})

    def _noted(self, name: str, func: Any, args: Sequence[Any], named: dict[str, Any]) -> ChunkedLogits:
        others = [x for x in (*args, *named.values()) if x is not self]
        is_scale = all(not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] == x.numel() for x in others)
        if name not in _DONE_TO_EACH or not is_scale or not any(x is self for x in args):
            given = f"a call of {name} with logits that are not computed yet"
            allowed = "losses, token_log_probs, a scale and a tanh"
            raise ArgumentError("logit_rows", given, allowed, _FULL)
        done = (func, tuple(_PLACE if x is self else x for x in args), named)
        return ChunkedLogits(self._head, self._rows, self._chunk_rows, (*self._done, done))

    def __mul__(self, other: Any) -> ChunkedLogits:
        return self._noted("mul", torch.mul, (self, other), {})

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> ChunkedLogits:
        return self._noted("div", torch.div, (self, other), {})

    def __add__(self, other: Any) -> ChunkedLogits:
        return self._noted("add", torch.add, (self, other), {})

    __radd__ = __add__

    def __eq__(self, other: object) -> Any:
        return self._noted("eq", torch.eq, (self, other), {})

    __hash__ = object.__hash__

    def __getitem__(self, place: Any) -> ChunkedLogits:
        return self._noted("getitem", Tensor.__getitem__, (self, place), {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(f"logits with logit_rows have no {name}; out.logits.full() has")
        return lambda *args, **named: self._noted(name, method, (self, *args), named)


def _from_parts(rows: Iterable[Any], context: Any) -> ChunkedLogits:
    head, *others = context
    return ChunkedLogits(head, *rows, *others)


# So FSDP2 finds the rows in a model's output, and gathers the outermost weights again when their gradient comes.
register_node(
    ChunkedLogits, lambda logits: ([logits._rows], (logits._head, logits._chunk_rows, logits._done)), _from_parts
)

_PLACE = object()  # of the logits, among the arguments of what is done to them


class HeadCall:
    """An argument of the head, in whose forward its weights are in place: calls a function with the stock forward."""

    def __init__(self, function: Callable[[Callable[..., Tensor]], Tensor]) -> None:
        self.function = function


def chunked_loss(
    function: Any, logits: ChunkedLogits, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = IGNORE_INDEX, shift_labels: Tensor | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """Returns what transformers' `ForCausalLMLoss` returns of all logits and labels that are shifted already."""
    if function is not ForCausalLMLoss or shift_labels is None:
        given = getattr(function, "__name__", type(function).__name__)
        raise ArgumentError("model.loss_function", given, "transformers' ForCausalLMLoss with logit_rows", _FULL)
    labels = shift_labels[0].to(logits.device)
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).sum()

    def of_chunk(chunk: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = ForCausalLMLoss(
            chunk, None, vocab_size, num_items_in_batch, ignore_index, shift_labels=labels, **others
        )
        return loss

    return logits.sum_of(of_chunk, labels)


def check_chunked_head(model: Any) -> None:
    """Refuses `logit_rows` for a model whose head this cannot compute in chunks."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or "forward" in vars(head):
        given = "no head" if head is None else f"a {type(head).__module__}.{type(head).__name__}"
        allowed = "a model whose output embeddings are a torch.nn.Linear"
        raise ArgumentError("logit_rows", given, allowed, "Leave logit_rows out, or enable the model before wrappers.")


ROWS = "cp_logit_rows"  # an attribute of heads: the rows of a chunk


class ChunksRows:
    """A mixin before the class of a head: its logits are computed when they are used."""

    def forward(self, rows: Any) -> Any:
        stock = super().forward  # type: ignore[misc]
        if isinstance(rows, HeadCall):
            return rows.function(stock)
        head: Any = self
        return ChunkedLogits(head, rows, vars(self)[ROWS])
