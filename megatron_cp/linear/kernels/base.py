"""The interface of linear-layer kernels: their arguments and results.

Shapes, everywhere in these folders: `T` tokens, `h` heads, `g` key heads or groups, each read by consecutive heads,
`dk` and `dv` features of a key and of a value head, `c` channels. By state-space duality (Mamba-2, arXiv 2405.21060)
both families share names: C is a query, B a key and x a value; a head's state is `[dk, dv]`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_cp.executor.kernels import Kernel
from megatron_cp.executor.scan import LocalScan
from megatron_cp.layout import Packing
from megatron_cp.layout.packing import lengthened
from megatron_cp.layout.segments import LocalSegments

T = TypeVar("T")


@dataclass(frozen=True)
class LinearCall:
    """Arguments of a kernel call other than its tensors.

    Attributes:
        kind: kind of the recurrence: "gdn", "kda", "gdn2" or "mamba"; "conv1d" for a layer without one.
        packing: the pieces of documents in this rank's rows, which are whole documents headwise. States start at zero
            in each piece.
        dtype, device: type and device of the values.
        head_dim: features of a key head.
        conv_width: taps of the convolution.
        channels: all numbers of channels that the convolution is called with on any rank, so that all ranks refuse or
            none does.
        segments: chunkwise, the pieces that continue a document or are continued; None headwise.
        for_graphs: True to exclude kernels that do not support CUDA graphs.
        tables: the tables that kernels read in place of their own; see `CallTables`.
        streams: True for chunkwise layers in a CUDA graph: the only segment is all of this rank's tokens, as if the
            stream were one document, and `tables` say where documents begin.
    """

    kind: str
    packing: Packing
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    conv_width: int = 1
    channels: tuple[int, ...] = ()
    segments: LocalSegments | None = None
    for_graphs: bool = False
    tables: Mapping[str, Any] | None = None
    streams: bool = False

    def with_steps(self, steps: int) -> LinearCall:
        """Returns the call of a recurrence in which each token makes so many steps."""
        if steps == 1:
            return self
        segments = self.segments and replace(self.segments, packing=lengthened(self.segments.packing, steps))
        return replace(self, packing=lengthened(self.packing, steps), segments=segments)

    def segments_table(self, key: Any, make: Callable[[], T]) -> T:
        """Returns a table that a kernel derives from the segments, made once for all layers of a batch."""
        assert self.segments is not None
        found: T = self.segments.packing.memo((key, self.device), make)
        return found


class Delta(NamedTuple):
    """The inputs of a gated delta rule: q, k `[T, g, dk]`, v `[T, h, dv]`, beta `[T, h]`, and log decays g, <= 0.

    `g` is `[T, h]` (Gated DeltaNet) or `[T, h, dk]` (KDA). In Gated DeltaNet-2 beta is `[T, h, dk]` too: it multiplies
    the features of the key that reads the state, and values are written as they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def keys(self) -> Tensor:
        return self.k

    @property
    def values(self) -> Tensor:
        return self.v

    def piece(self, start: int, end: int) -> Delta:
        """Selects tokens."""
        return Delta(*(x[start:end] for x in self))


class StateSpace(NamedTuple):
    """The inputs of Mamba-2: x `[T, h, dv]`, dt `[T, h]` (positive), A `[h]` (negative), B and C `[T, g, dk]`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    @property
    def keys(self) -> Tensor:
        return self.B

    @property
    def values(self) -> Tensor:
        return self.x

    def piece(self, start: int, end: int) -> StateSpace:
        """Selects tokens; A belongs to the heads."""
        return StateSpace(self.x[start:end], self.dt[start:end], self.A, self.B[start:end], self.C[start:end])


Inputs = Delta | StateSpace


@dataclass(frozen=True)
class ScanWork:
    """A rule for segments in three parts: differentiable local work, the scan, and the conversion of its output.

    Attributes:
        tensors: the results of the local work, on which the scan computes.
        local: the scan.
        finish: converts the scan's output to `[T, h, dv]`.
    """

    tensors: list[Tensor]
    local: LocalScan
    finish: Callable[[Tensor], Tensor]


class RuleKernel(Kernel):
    """A differentiable kernel for the recurrence of one rank's heads over its tokens. T, h and g are at least 1.

    Attributes:
        kinds: the kinds of layers whose recurrence it computes.
    """

    kinds: tuple[str, ...]

    @abstractmethod
    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        """Computes the recurrence over each piece of `call.packing` from a state of zero.

        Args:
            inputs: the inputs of the recurrence.
            groups: for each head, the number of its key head or group.
            scale: queries are multiplied by it.

        Returns:
            `[T, h, dv]` in the type of the values.
        """

    @abstractmethod
    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        """Returns the work for segments, whose states come from other segments and are passed on."""


class ConvKernel(Kernel):
    """A differentiable kernel for the causal depthwise convolution of one rank's channels over its tokens."""

    @abstractmethod
    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes the convolution, `[T, c]`, in the type of x or a wider one, which the caller rounds.

        Args:
            x: `[T, c]`
            weight: `[c, width]`; its last column multiplies the current token.
            bias: `[c]`
            silu: True to apply SiLU.
            history: chunkwise, a function that waits for and returns `[n, width - 1, c]`: the inputs before each of the
                segments that continue a document, in the order of the rows, zero before the document. It must be
                called exactly once.
        """


class LinearKernel(RuleKernel, ConvKernel):
    """A kernel for both recurrence and convolution, which an operation accepts as its `kernel` in place of a name."""
