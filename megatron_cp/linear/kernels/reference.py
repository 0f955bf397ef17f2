"""The recurrences by the equations, token by token, and the convolution tap by tap.

    gdn    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T   (Gated DeltaNet, arXiv 2412.06464, eq. 10)
    kda    the same with a decay for each feature of the key, Diag(exp(g_t))     (Kimi Linear, arXiv 2510.26692, eq. 1)
    gdn2   S_t = (I - k_t (beta_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t v_t^T   (Gated DeltaNet-2, arXiv 2605.22791)
    mamba  S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T                            (Mamba-2, arXiv 2405.21060, eq. 1)

with the state S `[dk, dv]` zero where a document starts and the output `o_t = scale S_t^T q_t` (C for q in mamba).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.scan import LocalScan
from megatron_cp.linear.activations import silu as apply_silu
from megatron_cp.linear.kernels.base import ConvKernel, Delta, Inputs, LinearCall, RuleKernel, ScanWork, StateSpace
from megatron_cp.linear.kernels.common.products import product


class ReferenceRule(RuleKernel):
    """The equations above, one token after another."""

    name = "reference"
    package = "torch"
    kinds = ("gdn", "kda", "gdn2", "mamba")

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        outputs = []
        for start, end in call.packing.spans():
            piece = inputs.piece(start, end)
            outputs.append(recurrence(piece, groups, scale, _no_state(piece, groups))[0])
        return torch.cat(outputs).to(call.dtype)

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        local = _Replay(type(inputs), groups, scale, call)
        return ScanWork(list(inputs), local, lambda out: out.to(call.dtype))


def recurrence(inputs: Inputs, groups: list[int], scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a piece of a document from a state `[h, dk, dv]`.

    Returns:
        The outputs `[T, h, dv]` and the state after the piece.
    """
    acc_dtype = state.dtype
    if isinstance(inputs, StateSpace):
        q, k, v = inputs.C, inputs.B, inputs.x.to(acc_dtype) * inputs.dt.to(acc_dtype)[..., None]
        decay = (inputs.dt.to(acc_dtype) * inputs.A.to(acc_dtype)).exp()
    else:
        q, k, v = inputs.q, inputs.k, inputs.v.to(acc_dtype)
        decay = inputs.g.to(acc_dtype).exp()
    q, k = (
        torch.stack([x[:, group] for group in groups], 1).to(acc_dtype) for x in (q, k)
    )  # one key head a value head
    decay = decay.unflatten(-1, (-1, 1)) if decay.ndim == 3 else decay[..., None, None]  # a number, or one a feature
    outputs = []
    for t in range(len(v)):
        state = decay[t] * state
        update = v[t, :, None, :]
        if isinstance(inputs, Delta):
            beta = inputs.beta.to(acc_dtype)[t]
            if beta.ndim == 2:  # a number a feature
                update = update - product((beta * k[t])[:, None, :], state)
            else:
                read = product(k[t, :, None, :], state)  # S^T k, as rows
                update = beta[:, None, None] * (update - read)
        state = state + k[t, :, :, None] * update
        outputs.append(product(scale * q[t, :, None, :], state).squeeze(1))
    return torch.stack(outputs), state


class _Replay(LocalScan):
    """The scan by the recurrence, which is computed again wherever one of its results is needed.

    M is the result of the recurrence from the unit matrix with values of zero.
    """

    def __init__(self, kind: type[Inputs], groups: list[int], scale: float, call: LinearCall) -> None:
        assert call.segments is not None
        self.kind, self.groups, self.scale, self.segments = kind, groups, scale, call.segments
        offsets = call.segments.packing.cu_seqlens.tolist()
        self.spans = list(itertools.pairwise(offsets)) if call.segments.ids.size else []
        self.past, self.future = call.segments.past.tolist(), call.segments.future.tolist()

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        inputs = self.kind(*tensors)
        zero = _no_state(inputs, self.groups)
        constants, transitions = [zero[None][:0]], []
        for (start, end), past, future in zip(self.spans, self.past, self.future, strict=True):
            piece = inputs.piece(start, end)
            if future:
                constants.append(self._run(piece, zero)[1][None])
            if future and past and isinstance(piece, StateSpace):
                transitions.append((piece.dt.to(zero.dtype) * piece.A.to(zero.dtype)).sum(0).exp()[None, :, None, None])
            elif future and past and isinstance(piece, Delta):
                unit = torch.eye(zero.shape[1], dtype=zero.dtype, device=zero.device).expand(len(zero), -1, -1)
                silent = piece._replace(v=piece.v.new_zeros(*piece.v.shape[:-1], zero.shape[1]))
                transitions.append(self._run(silent, unit)[1][None])
        return torch.cat(constants), torch.cat(transitions) if transitions else zero.new_empty(0), None

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, _ = self._all(self.kind(*tensors), states)
        return out, [states]

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        if not len(kept[0]):
            return kept[0], None
        with torch.enable_grad():
            states = kept[0].detach().requires_grad_()
            out, _ = self._all(self.kind(*tensors), states)
            return torch.autograd.grad(out, states, gradient)[0], None

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            out, after = self._all(self.kind(*leaves), kept[0])
            pairs = [(out, gradient), (after, states)] if len(states) else [(out, gradient)]
            outputs, wanted = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, leaves, wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]

    def _all(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of all segments, and the states after those with a future."""
        zero = _no_state(inputs, self.groups)
        waiting = iter(states)
        outputs, after = [], [zero[None][:0]]
        for (start, end), past, future in zip(self.spans, self.past, self.future, strict=True):
            out, state = self._run(inputs.piece(start, end), next(waiting) if past else zero)
            outputs.append(out)
            if future:
                after.append(state[None])
        return torch.cat(outputs), torch.cat(after)

    def _run(self, piece: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence(piece, self.groups, self.scale, state)


def _no_state(inputs: Inputs, groups: list[int]) -> Tensor:
    acc_dtype = accumulation_dtype(inputs.values.dtype)
    return inputs.values.new_zeros(len(groups), inputs.keys.shape[-1], inputs.values.shape[-1], dtype=acc_dtype)


class ReferenceConv(ConvKernel):
    """The convolution as a sum over the taps, piece by piece."""

    name = "reference"
    package = "torch"

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        acc_dtype, width = accumulation_dtype(x.dtype), weight.shape[1]
        before = None if history is None else history().to(acc_dtype)
        past = [False] * call.packing.num_documents if call.segments is None else call.segments.past.tolist()
        offsets = call.packing.cu_seqlens.tolist()
        pieces, slot = [x.new_zeros(0, x.shape[1], dtype=acc_dtype)], 0
        for (start, end), waits in zip(itertools.pairwise(offsets), past, strict=True):
            head = x.new_zeros(width - 1, x.shape[1], dtype=acc_dtype)
            if waits and before is not None:
                head, slot = before[slot], slot + 1
            padded = torch.cat([head, x[start:end].to(acc_dtype)])
            pieces.append(sum(padded[tap : tap + end - start] * weight[:, tap].to(acc_dtype) for tap in range(width)))  # type: ignore[arg-type]
        y = torch.cat(pieces)
        if before is not None and not slot:
            y = y + before.sum()  # of no elements, so that backward computes its gradient, for which other ranks wait
        y = y if bias is None else y + bias.to(acc_dtype)
        return apply_silu(y) if silu else y
