"""Runs a function of rows on a few rows at a time, so that what it makes of all rows is never there at once.

The logits of a vocabulary, or the activations of an MLP, are many times the size of the rows that they are made of.
`sum_in_chunks` is for losses: it computes their gradients chunk by chunk in the forward, at no more operations; in fp16
in the backward, which runs the function again.
`rows_in_chunks` is for results of a row each: its backward runs the function again.

Gradients of parameters are summed over the chunks in at least float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.no_compile import no_compile, no_compile_backward

Function = Callable[..., Any]


@no_compile
def sum_in_chunks(
    function: Function, rows: Tensor, *beside: Tensor, parameters: Sequence[Tensor], chunk_rows: int
) -> Tensor:
    """Returns the sum over chunks of a function that returns a scalar, such as a loss that is a sum over rows.

    Args:
        function: takes some rows, and those of the tensors beside them.
        rows: `[t, ...]`, differentiable.
        beside: `[t, ...]` each, such as labels; not differentiable.
        parameters: all other tensors whose gradients the function has.
        chunk_rows: the rows of a chunk.
    """
    chunks = _Chunks.of(function, beside, rows, chunk_rows)
    if chunks.has_fp16(rows):
        # Small gradients vanish in fp16 without the factor of a gradient scaler, which only backward has.
        def in_first_row(rows: Tensor, *beside: Tensor) -> Tensor:
            return functional.pad(function(rows, *beside)[None], (0, len(rows) - 1))

        shares: Tensor = rows_in_chunks(in_first_row, rows, *beside, parameters=parameters, chunk_rows=chunk_rows)
        return shares.sum()
    inputs = [rows, *parameters] if torch.is_grad_enabled() else [each.detach() for each in (rows, *parameters)]
    # What a chunk saves is used at once, and gradients of the sum first in backward: hooks that send what is saved to
    # the host would only cost time.
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        found: Tensor = _Sum.apply(chunks, *inputs)
    return found


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


@no_compile
def rows_in_chunks(
    function: Function, rows: Tensor, *beside: Tensor, parameters: Sequence[Tensor], chunk_rows: int,
    adds_itself: Callable[[Tensor], bool] | None = None,
) -> Any:  # fmt: skip
    """Returns `[t, ...]` of a function that returns a tensor, or several, with a row for each; see `sum_in_chunks`.

    Args:
        adds_itself: asked in backward, after a chunk: True of a parameter to whose sum of gradients the function's
            backward has added the chunk's, so that what it returned stands for a gradient, and is not summed.
    """
    found: Any = _Rows.apply(_Chunks.of(function, beside, rows, chunk_rows, adds_itself), rows, *parameters)
    return found


@dataclass
class _Chunks:
    """A function, and how it is run: its tensors beside the rows, autocast, and random numbers from the same state."""

    function: Function
    beside: tuple[Tensor, ...]
    chunk_rows: int
    device: torch.device
    autocast: dict[str, Any]
    adds_itself: Callable[[Tensor], bool] | None = None
    random: Tensor | None = None

    @classmethod
    def of(
        cls, function: Function, beside: tuple[Tensor, ...], rows: Tensor, chunk_rows: int,
        adds_itself: Callable[[Tensor], bool] | None = None,
    ) -> _Chunks:  # fmt: skip
        kind = rows.device.type
        autocast = {
            "device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)
        }  # fmt: skip
        return cls(function, beside, chunk_rows, rows.device, autocast, adds_itself)

    def has_fp16(self, rows: Tensor) -> bool:
        """True if the function computes in fp16."""
        return torch.float16 in (rows.dtype, self.autocast["dtype"] if self.autocast["enabled"] else None)

    def ranges(self, rows: Tensor) -> Iterator[slice]:
        """Yields the rows of each chunk; a chunk without rows if there are none, which has gradients of zero."""
        return (slice(begin, begin + self.chunk_rows) for begin in range(0, max(len(rows), 1), self.chunk_rows))

    def run(self, rows: Tensor, at: slice) -> Any:
        return self.function(rows, *(each[at] for each in self.beside))

    def keep_random(self) -> None:
        """Notes the state from which the forward draws random numbers."""
        module = _random_of(self.device)
        self.random = module.get_rng_state(self.device) if module is torch.cuda else torch.get_rng_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Makes backward run the function as forward did."""
        module = _random_of(self.device)
        own = [self.device] if module is torch.cuda else []
        with torch.random.fork_rng(own), torch.autocast(**self.autocast), torch.enable_grad():
            assert self.random is not None
            if module is torch.cuda:
                torch.cuda.set_rng_state(self.random, self.device)
            else:
                torch.set_rng_state(self.random)
            yield


def _random_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else torch


class _Gradients:
    """The gradients of rows and parameters, which chunks add to."""

    def __init__(
        self, wanted: Sequence[bool], rows: Tensor, parameters: Sequence[Tensor], num_chunks: int,
        adds_itself: Callable[[Tensor], bool] | None = None,
    ) -> None:  # fmt: skip
        self._parameters = [each for each, is_wanted in zip(parameters, wanted[1:], strict=True) if is_wanted]
        self._wanted = wanted
        self.rows = torch.empty_like(rows) if wanted[0] else None
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._num_chunks, self._adds_itself = num_chunks, adds_itself

    def leaf(self, rows: Tensor, at: slice) -> Tensor:
        """Returns the rows of a chunk, whose gradient `add` computes."""
        return rows[at].detach().requires_grad_(self.rows is not None)

    def add(self, results: Sequence[Tensor], gradients: Sequence[Tensor] | None, leaf: Tensor, at: slice) -> None:
        """Adds the gradients of a chunk's results."""
        inputs = [leaf, *self._parameters] if self.rows is not None else self._parameters
        used = [number for number, each in enumerate(results) if each.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if used:
            outputs = [results[number] for number in used]
            by = None if gradients is None else [gradients[number] for number in used]
            found = torch.autograd.grad(outputs, inputs, by, allow_unused=True)
        if self.rows is not None:
            first, *found = found
            if first is None:
                self.rows[at] = 0
            else:
                self.rows[at] = first
        for number, each in enumerate(found):
            if each is None:
                continue
            before = self._sums[number]
            if self._adds_itself is not None and self._adds_itself(self._parameters[number]):
                self._sums[number] = each if before is None else before
            elif before is None and self._num_chunks > 1:
                # A copy, since autograd may return one tensor for several parameters, or one number for all of them.
                self._sums[number] = each.to(accumulation_dtype(each.dtype), copy=True)
            elif before is None:
                self._sums[number] = each
            else:
                before += each

    def result(self) -> list[Tensor | None]:
        """Returns the gradient of each input, None for those that are not wanted or not used.

        Those of parameters have the type that they were summed in.
        """
        sums = iter(self._sums)
        return [self.rows, *(next(sums) if is_wanted else None for is_wanted in self._wanted[1:])]


class _Sum(torch.autograd.Function):
    """Computes the gradients beside the sum; backward multiplies them by that of the sum."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, rows: Tensor, *parameters: Tensor) -> Tensor:
        wanted, ranges = ctx.needs_input_grad[1:], list(chunks.ranges(rows))
        gradients = _Gradients(wanted, rows, parameters, len(ranges))
        total: Tensor | None = None
        for at in ranges:
            leaf = gradients.leaf(rows, at)
            with torch.set_grad_enabled(any(wanted)):
                share = chunks.run(leaf, at)
            if any(wanted):
                gradients.add((share,), None, leaf, at)
            total = share.detach() if total is None else total + share.detach()
        assert total is not None
        # Autograd frees what is saved once backward has run. An attribute would live as long as the loss.
        ctx.save_for_backward(*gradients.result())
        ctx.dtypes = [each.dtype for each in (rows, *parameters)]
        return total

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(None if each is None else _scaled(each, gradients[0], dtype) for each, dtype in found)


def _scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a product with a scalar, rounded once. With an axis the scalar keeps its own type in the product."""
    return torch.mul(value, factor.reshape([1] * value.ndim), out=value.new_empty(0, dtype=dtype))


class _Rows(torch.autograd.Function):
    """Computes rows without a graph; backward runs the function again."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, rows: Tensor, *parameters: Tensor) -> Any:
        chunks.keep_random()
        ctx.chunks = chunks
        ctx.save_for_backward(rows, *parameters)
        found: list[Tensor] = []
        for at in chunks.ranges(rows):
            result = chunks.run(rows[at], at)
            parts = _several(result)
            found = found or [part.new_empty(len(rows), *part.shape[1:]) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[at] = part
        return tuple(found) if isinstance(result, tuple) else found[0]

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        chunks = ctx.chunks
        rows, *parameters = ctx.saved_tensors
        ranges = list(chunks.ranges(rows))
        found = _Gradients(ctx.needs_input_grad[1:], rows, parameters, len(ranges), chunks.adds_itself)
        with chunks.again():
            for at in ranges:
                leaf = found.leaf(rows, at)
                found.add(_several(chunks.run(leaf, at)), [each[at] for each in gradients], leaf, at)
        results = zip(found.result(), (rows, *parameters), strict=True)
        return None, *(None if each is None else each.to(like.dtype) for each, like in results)


def _several(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
