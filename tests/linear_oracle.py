"""The linear layers' recurrences token by token, written a second time, and kernels run over ranks to hold to them."""

import contextlib
import threading

import numpy as np
import torch

from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.scan import scan
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.segments import Segments
from megatron_cp.linear.kernels.base import Delta, LinearCall, StateSpace
from megatron_cp.linear.kernels.fla import fixed_documents
from megatron_cp.plan.recurrence import Scan


def delta_rule(inputs, groups, scale, lengths, parents=None):
    """Gated DeltaNet, arXiv 2412.06464, eq. 10, and with a decay a feature KDA, arXiv 2510.26692, eq. 1.

    With a beta a feature too: Gated DeltaNet-2, arXiv 2605.22791, whose values have been multiplied by their gates.
    """
    q, k = inputs.q[:, groups], inputs.k[:, groups]
    decays = inputs.g.exp() if inputs.g.ndim == 3 else inputs.g.exp()[..., None].expand_as(k)
    outputs, states, zero = [], [], q.new_zeros(q.shape[1], q.shape[2], inputs.v.shape[2])
    for t, before in enumerate(_tokens_before(lengths, parents)):
        state = decays[t][..., None] * (states[before] if before >= 0 else zero)
        if inputs.beta.ndim == 3:
            erased = torch.einsum("hk,hk,hkv->hv", inputs.beta[t], k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], inputs.v[t] - erased)
        else:
            error = inputs.v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("h,hk,hv->hkv", inputs.beta[t], k[t], error)
        states.append(state)
        outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


def delta_product(q, keys, values, g, betas, groups, scale, lengths):
    """DeltaProduct, arXiv 2502.10297, with the decay of Gated DeltaNet: n steps of the delta rule a token.

    Args:
        q: `[t, g, k]`
        keys, values: `[t, n, g, k]` and `[t, n, h, v]`
        g, betas: `[t, h]` and `[t, h, n]`
    """
    q, keys = q[:, groups], keys[:, :, groups]
    outputs, states, zero = [], [], q.new_zeros(q.shape[1], q.shape[2], values.shape[3])
    for t, before in enumerate(_tokens_before(lengths, None)):
        state = g[t].exp()[:, None, None] * (states[before] if before >= 0 else zero)
        for k, v, beta in zip(keys[t], values[t], betas[t].unbind(1), strict=True):
            state = state + torch.einsum("h,hk,hv->hkv", beta, k, v - torch.einsum("hk,hkv->hv", k, state))
        states.append(state)
        outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


def state_space(inputs, groups, scale, lengths, with_state=False, parents=None):
    """Mamba-2, arXiv 2405.21060, eq. 1; the state after the last token too if it is asked for."""
    b, c = inputs.B[:, groups], inputs.C[:, groups]
    outputs, states, zero = [], [], b.new_zeros(b.shape[1], b.shape[2], inputs.x.shape[2])
    for t, before in enumerate(_tokens_before(lengths, parents)):
        state = (inputs.dt[t] * inputs.A).exp()[:, None, None] * (states[before] if before >= 0 else zero)
        state = state + torch.einsum("h,hk,hv->hkv", inputs.dt[t], b[t], inputs.x[t])
        states.append(state)
        outputs.append(scale * torch.einsum("hk,hkv->hv", c[t], state))
    return (torch.stack(outputs), states[-1]) if with_state else torch.stack(outputs)


def convolution(x, weight, bias, lengths, silu):
    """Convolves each document by torch's own convolution."""
    width, outputs = weight.shape[1], []
    for document in x.split([length for length in lengths if length]):
        padded = torch.nn.functional.pad(document.t(), (width - 1, 0))
        y = torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0].t()
        outputs.append(torch.nn.functional.silu(y) if silu else y)
    return torch.cat(outputs)


def rule_errors(kernel, kind, lengths, groups, dk, dv, layout=None, ranks=1, fixed=False, parents=None):
    """The largest errors of a kernel's output and gradients, alone or over the ranks of a layout, in float32.

    `fixed`: with fla's tables as a CUDA graph reads them.

    States last, because a transition that went missing would not show in one that has decayed.
    """
    tokens, heads, key_heads = sum(lengths), len(groups), max(groups) + 1
    keys = (torch.nn.functional.normalize(torch.randn(tokens, key_heads, dk), dim=-1) for _ in range(2))
    values = torch.randn(tokens, heads, dv)
    if kind == "mamba":
        inputs = StateSpace(values, torch.rand(tokens, heads), -0.1 * torch.rand(heads), *keys)
    else:
        g = 0.05 * torch.nn.functional.logsigmoid(torch.randn(tokens, heads, *([] if kind == "gdn" else [dk])))
        inputs = Delta(*keys, values, g, 0.4 * torch.rand(tokens, heads, *([dk] if kind == "gdn2" else [])))
    dout = torch.randn(tokens, heads, dv)
    packing = Packing(lengths) if parents is None else Packing.tree(lengths, parents)
    oracle = state_space if kind == "mamba" else delta_rule
    exact = type(inputs)(*(x.double() for x in inputs))
    expected = _gradients(lambda x: oracle(x, groups, 0.3, lengths, parents=parents), exact, dout)
    if layout is None:
        tables = {name: torch.from_numpy(table) for name, table in fixed_documents(packing).items()}
        call = LinearCall(
            kind, packing, torch.float32, torch.device("cpu"), head_dim=dk,
            tables={"documents": tables} if fixed else None,
        )  # fmt: skip
        got = _gradients(lambda x: kernel.rule(type(x)(*map(_strided, x)), groups, 0.3, call), inputs, dout)
    else:
        got = _over_ranks(kernel, kind, inputs, groups, 0.3, getattr(Layout, layout)(packing, ranks), dout)
    return _errors(got, expected)


def conv_errors(kernel, lengths, channels, width, bias, silu, layout="contiguous", ranks=1):
    """Returns the errors of a convolution; over several ranks with the histories that a halo would send."""
    shapes = {"x": (sum(lengths), channels), "weight": (channels, width), **({"bias": (channels,)} if bias else {})}
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    dout, assigned, asked, results = torch.randn(shapes["x"]), getattr(Layout, layout)(Packing(lengths), ranks), [], []
    for dtype in (torch.float32, torch.float64):
        own = {name: x.to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}
        if dtype == torch.float64:
            out = convolution(own["x"], own["weight"], own.get("bias"), lengths, silu)
        else:
            out = _conv_over_ranks(kernel, own["x"], own["weight"], own.get("bias"), silu, assigned, asked)
        out.backward(dout.to(dtype))
        results.append({"out": out.detach(), **{name: x.grad for name, x in own.items()}})
    assert len(asked) == (ranks if ranks > 1 else 0)  # others wait for it, also where no segment waits
    return _errors(*results)


def _conv_over_ranks(kernel, x, weight, bias, silu, layout, asked):
    """Convolves rank after rank, each with a history taken from the whole stream if there are several.

    `asked` receives what each history is told in backward.
    """
    out = torch.zeros_like(x)
    segments, called = Segments.from_layout(layout), []
    for rank in range(layout.cp_size):
        rows, own = torch.from_numpy(layout.tokens(rank)), segments.local(rank)
        call = LinearCall("conv1d", own.packing, x.dtype, x.device, 0, weight.shape[1], x.shape[1], own)

        def history(own=own, rank=rank):
            reach, waiting = weight.shape[1] - 1, own.ids[own.past]
            at = torch.from_numpy(segments.start[waiting])[:, None] + torch.arange(-reach, 0)
            before = at >= torch.from_numpy(layout.packing.cu_seqlens[segments.document[waiting]])[:, None]
            found = x[at.clamp(min=0)] * before[..., None]
            found.register_hook(asked.append)
            called.append(rank)
            return found

        chunkwise = {"history": history} if layout.cp_size > 1 else {}
        y = kernel.conv(_strided(x[rows]), weight, bias, call, silu=silu, **chunkwise)
        out = out.index_copy(0, rows, y)
    assert called == (list(range(layout.cp_size)) if layout.cp_size > 1 else [])
    return out


def _gradients(function, inputs, dout):
    """`{"out": ..., name: gradient}` of a function of named tensors."""
    own = {name: x.detach().clone().requires_grad_() for name, x in inputs._asdict().items()}
    out = function(type(inputs)(**own))
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{name: x.grad for name, x in own.items()}}


def _over_ranks(kernel, kind, inputs, groups, scale, layout, dout):
    """Runs a kernel that computes segments, on threads as ranks.

    One rank computes at a time, because neither Triton's interpreter nor a stand-in need be safe to share.
    """
    turn, values = threading.Lock(), inputs.x if isinstance(inputs, StateSpace) else inputs.v
    keys = inputs.B if isinstance(inputs, StateSpace) else inputs.k
    step = Scan(layout, len(groups), keys.shape[2], values.shape[2], dense=not isinstance(inputs, StateSpace))

    def rank_main(group):
        with turn:
            return compute(_InTurn(group, turn))

    def compute(group):
        rows, own = torch.from_numpy(layout.tokens(group.rank)), Segments.from_layout(layout).local(group.rank)
        call = LinearCall(kind, own.packing, values.dtype, values.device, keys.shape[2], segments=own)
        leaves = {
            name: (x if x.ndim == 1 else x[rows]).detach().clone().requires_grad_()
            for name, x in inputs._asdict().items()
        }
        work = kernel.work(type(inputs)(**leaves), groups, scale, call)
        out = work.finish(scan(step, group, work.local, *work.tensors))
        out.backward(dout[rows].to(out.dtype))
        return rows, out.detach(), {name: x.grad for name, x in leaves.items()}

    found = {
        "out": torch.zeros_like(dout, dtype=values.dtype),
        **{n: torch.zeros_like(x) for n, x in inputs._asdict().items()},
    }
    for rows, out, grads in run_ranks(rank_main, layout.cp_size):
        found["out"][rows] = out
        for name, grad in grads.items():
            if grad.ndim == 1:
                found[name] += grad
            else:
                found[name][rows] = grad
    return found


def _errors(got, expected):
    """The largest error of each over the largest entry, which counts as 1e-3 at least."""
    return {
        name: float((got[name] - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        for name, exact in expected.items()
    }


class _InTurn(RankGroup):
    """A group whose ranks hold a lock except while they talk."""

    def __init__(self, group, turn):
        self.group, self.turn = group, turn
        self.rank, self.size = group.rank, group.size

    @contextlib.contextmanager
    def others(self):
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def start_all_to_all(self, *args):
        with self.others():
            return _Pending(self, self.group.start_all_to_all(*args))

    def start_all_gather(self, *args):
        raise NotImplementedError

    start_messages = barrier = start_all_gather


class _Pending(Pending):
    def __init__(self, group, pending):
        self.group, self.pending = group, pending

    def wait(self):
        with self.group.others():
            self.pending.wait()


def _strided(x):
    """A copy that lies in memory as slices of an exchange buffer do: not densely."""
    return torch.stack([x, x], -1)[..., 0]


def _tokens_before(lengths, parents):
    """Returns the token before each one in its document, or in its path if there are parents; -1 for first tokens."""
    ends = np.cumsum(lengths)
    before = np.arange(ends[-1] if len(ends) else 0) - 1
    for segment, (length, parent) in enumerate(zip(lengths, parents or [-1] * len(lengths), strict=True)):
        while parent >= 0 and not lengths[parent]:
            parent = parents[parent]
        if length:
            before[ends[segment] - length] = ends[parent] - 1 if parent >= 0 else -1
    return before.tolist()
