"""Levers of memory: the same numbers as without them, what they keep, and what they refuse."""

import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from megatron_cp import linear_cross_entropy, run_in_chunks, saved_on_host
from megatron_cp.batch import memory
from megatron_cp.executor.chunks import rows_in_chunks, sum_in_chunks
from tests.peak_memory import PeakMemory
from tests.refusals import rejects

HIDDEN, VOCABULARY = 16, 53
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def head_of(rows, dtype, *, bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, HIDDEN).to(dtype), (0.3 * torch.randn(VOCABULARY, HIDDEN)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (rows,))
    labels[::3] = -100
    return hidden, weight, labels, torch.randn(VOCABULARY).to(dtype) if bias else None


def losses_of_all_logits(hidden, weight, labels, bias, scale, softcap):
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize(("scale", "softcap", "bias"), [(1.0, None, False), (0.5, 2.0, True)])
def test_losses_and_gradients_are_those_of_all_logits(dtype, rows, scale, softcap, bias):
    hidden, weight, labels, shift = head_of(rows, dtype, bias=bias)
    given = (hidden, weight) if shift is None else (hidden, weight, shift)
    found = []
    for function in (partial(linear_cross_entropy, chunk_rows=5), losses_of_all_logits):
        leaves = [each.clone().requires_grad_() for each in given]
        shifted = None if shift is None else leaves[2]
        losses = function(*leaves[:2], labels, bias=shifted, scale=scale, softcap=softcap)
        (losses * torch.linspace(-1, 2, rows, dtype=losses.dtype)).sum().backward()
        found.append((losses.detach(), *(each.grad for each in leaves)))
    assert found[0][0].dtype == torch.promote_types(dtype, torch.float32)
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        assert not ours.numel() or (ours - theirs).abs().max().item() <= CLOSE[dtype] * max(largest, 1)


class AddsItself(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to `main_grad`, and returns ones in its place."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.rows, ctx.weight = rows, weight
        return rows @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad += gradient.t().float() @ ctx.rows.float()
        return gradient @ ctx.weight, torch.ones_like(ctx.weight)


def test_what_stands_for_a_gradient_is_not_summed():
    rows = torch.ones(6, 3, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(2, 3)
    found = rows_in_chunks(
        lambda rows: AddsItself.apply(rows, weight), rows, parameters=[weight], chunk_rows=2,
        adds_itself=lambda parameter: parameter is weight,
    )  # fmt: skip
    found.backward(torch.ones_like(found))
    assert weight.main_grad.tolist() == [[6.0] * 3] * 2
    assert weight.grad.tolist() == [[1.0] * 3] * 2
    assert rows.grad.tolist() == [[2.0] * 3] * 6


def test_a_weights_gradient_of_many_chunks_is_rounded_once():
    """In bf16, with whole numbers: a sum over 512 chunks that is rounded after each would stop growing at 256."""
    rows = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(rows, weight, torch.zeros(512, dtype=torch.int64), chunk_rows=1).sum().backward()
    assert weight.grad[:, 0].tolist() == [-256.0, 256.0]


def test_logits_of_all_rows_are_never_there():
    hidden, weight, labels, _ = head_of(640, torch.float32)
    weight = torch.randn(4096, HIDDEN)
    peaks = []
    for chunk_rows in (640, 16):
        hidden.grad = None
        with (peak := PeakMemory()):
            linear_cross_entropy(hidden.requires_grad_(), weight, labels, chunk_rows=chunk_rows).sum().backward()
        peaks.append(peak.peak)
    assert peaks[0] > 2 * 640 * 4096 * 4
    assert peaks[1] < 8 * 16 * 4096 * 4


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8)).double()


class Summed(nn.Module):
    """A product with a sum of weights, which have one gradient, and a shift whose gradients are one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, 8, dtype=torch.float64) for _ in "ab")
        self.shift = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, rows):
        return (rows @ (self.weights[0] + self.weights[1])) ** 2 + self.shift.sum()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [mlp, Summed])
@pytest.mark.parametrize("shape", [(13, 8), (1, 13, 8), (13, 1, 8), (1, 8), (0, 8)])
def test_modules_in_chunks(shape, make, copied):
    plain, chunked = make(), copied(run_in_chunks(make(), 5))  # a copy runs its own weights
    rows, gradient = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in "ab")
    found = []
    for module in (chunked, plain):
        leaf = rows.clone().requires_grad_()
        torch.manual_seed(2)
        parts = [leaf] if module is chunked else leaf.flatten(0, -2).split(5)
        out = torch.cat([module(part) for part in parts]).view(shape)
        out.backward(gradient)
        found.append((out.detach(), leaf.grad, *(each.grad for each in module.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


class Pair(nn.Module):
    """Returns rows, and scores without the axis of one beside theirs."""

    def __init__(self, scores):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, scores, dtype=torch.float64))

    def forward(self, rows):
        return rows * rows, rows.flatten(0, -2) @ self.weight, rows.detach()


@pytest.mark.parametrize("scores", [1, 3])
@pytest.mark.parametrize("shape", [(13, 8), (1, 13, 8), (13, 1, 8), (1, 6, 8), (6, 1, 8), (1, 1, 8)])
def test_a_module_may_return_several_tensors(shape, scores):
    found, rows = [], torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for module in (Pair(scores), run_in_chunks(Pair(scores), 5)):
        leaf = rows.clone().requires_grad_()
        squares, scores, kept = module(leaf)
        (squares.sum() * 2 + (scores**2).sum()).backward()
        found.append((squares, scores, kept, leaf.grad, module.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


class Text(nn.Module):
    def forward(self, rows):
        return rows, "text"


class Mean(nn.Module):
    def forward(self, rows):
        return rows.mean(-2)


class Scaled(nn.Module):
    def forward(self, rows, scale=None, factor=1.0):
        return rows * factor if scale is None else rows * scale


@pytest.mark.parametrize(
    ("message", "make", "shape"),
    [
        ("module: got 'a module with a forward of its own'", lambda: run_in_chunks(mlp(), 4), (3, 8)),
        ("one with a MultiheadAttention", lambda: nn.TransformerEncoderLayer(8, 2), (3, 8)),
        ("one with a BatchNorm1d", lambda: nn.Sequential(nn.BatchNorm1d(8)), (3, 8)),
        ("one with a Conv2d", lambda: nn.Conv2d(1, 1, 3, padding=1), (1, 3, 8)),
        ("one with a GRU", lambda: nn.GRU(8, 8), (3, 8)),
        ("rows: got .2, 3, 8.", mlp, (2, 3, 8)),
        ("module: got 'one that returns str'", Text, (3, 8)),
        ("module: got 'one that returns .8.'", Mean, (3, 8)),
    ],
)
def test_refused_modules(message, make, shape):
    module = make()
    rejects(message, lambda: run_in_chunks(module, 4)(torch.zeros(shape, dtype=torch.float64)))


def test_modules_in_chunks_get_rows_and_no_other_tensors():
    rows, module = torch.ones(6, 8), run_in_chunks(Scaled(), 4)
    assert torch.equal(module(rows, None, factor=2.0), 2 * rows)
    message = "module: got 'a Scaled that is called with a Tensor beside its rows'"
    for call in (lambda: module(rows, torch.ones(8)), lambda: module(rows, scale=torch.ones(8))):
        rejects(message, call)
    rejects("module: got 'a Scaled that is called with a list beside its rows'", module, rows, [])
    rejects("rows: got 'NoneType'", module, rows=rows)


def test_a_saved_tensor_that_was_written_to_is_refused():
    x = torch.ones(4, requires_grad=True)
    with saved_on_host():
        y = (x * 1).exp()
    y.detach().zero_()
    rejects("that was written to after it was saved", y.sum().backward)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_saved_moves_to_the_host_but_for_weights_and_small_tensors(monkeypatch, autocast):
    moved = []
    monkeypatch.setattr(memory, "_on_host", lambda saved: False)
    unpack = memory._unpack

    def noted(packed):
        if isinstance(packed[0], torch.device):
            moved.append(packed[1])
        return unpack(packed)

    monkeypatch.setattr(memory, "_unpack", noted)
    module, rows = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(64, 8).requires_grad_()
    found = []
    for context in (saved_on_host(64 * 32), None):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if context is None:
                out = module(rows * 1)
            else:
                with context:
                    out = module(rows * 1)
        out.float().sum().backward()
        found.append([each.grad for each in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert {tuple(each.shape) for each in moved} == ({(64, 32)} if autocast else {(64, 8), (64, 32)})


def losses_of_rows(rows, weight, labels):
    return functional.cross_entropy(functional.linear(rows, weight).float(), labels, reduction="sum")


def test_gradients_of_a_loss_leave_with_its_backward_though_the_loss_stays():
    hidden, weight, labels, _ = head_of(64, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with PeakMemory() as memory:
        loss = sum_in_chunks(
            lambda rows, labels: losses_of_rows(rows, weight, labels), hidden, labels, parameters=[weight], chunk_rows=5
        )
        found = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        del found
        held = memory.live
        torch.autograd.grad(loss, leaves)
    assert held - memory.live == hidden.numel() * 2 + weight.numel() * 4
    assert memory.live <= 8  # the loss and the gradient of it


def test_the_factor_of_a_loss_is_not_rounded():
    hidden, weight, labels, _ = head_of(64, torch.bfloat16)
    scale = torch.ones((), dtype=torch.bfloat16)
    leaves = [each.requires_grad_() for each in (hidden, weight, scale)]
    loss = sum_in_chunks(
        lambda rows, labels: losses_of_rows(rows * scale, weight, labels), hidden, labels, parameters=leaves[1:],
        chunk_rows=64,
    )  # fmt: skip
    whole, third = (torch.autograd.grad(loss, leaves, torch.tensor(x), retain_graph=True) for x in (1.0, 1 / 3))
    for all_of_it, part in zip(whole, third, strict=True):
        assert torch.equal((all_of_it.float() / 3).bfloat16(), part)


def test_a_loss_without_gradients_computes_none():
    hidden, weight, labels, _ = head_of(6, torch.float32)
    modes = []

    def loss_of(rows, labels):
        modes.append(torch.is_grad_enabled())
        return losses_of_rows(rows, weight, labels)

    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            sum_in_chunks(loss_of, hidden, labels, parameters=[weight.requires_grad_()], chunk_rows=5)
    assert modes == [False] * 4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [0, 64])
def test_gradients_of_a_small_loss_are_scaled_before_they_are_rounded_to_fp16(autocast, rows):
    hidden, weight, labels, _ = head_of(rows, torch.float32)

    def loss_of(rows, labels, weight):
        return losses_of_rows(rows, weight, labels) / 2**20

    def gradients(run, dtype):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight)]
        with torch.autocast("cpu", torch.float16, enabled=autocast and dtype == torch.float32):
            loss = run(lambda rows, labels: loss_of(rows, labels, leaves[1]), *leaves)
        (loss * 2**16).backward()
        return [each.grad.double() for each in leaves]

    exact = gradients(lambda loss, hidden, _: loss(hidden, labels), torch.float64)
    found = gradients(
        lambda loss, hidden, weight: sum_in_chunks(loss, hidden, labels, parameters=[weight], chunk_rows=5),
        torch.float32 if autocast else torch.float16,
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm()


def test_hooks_of_a_loss_are_not_called():
    hidden, weight, labels, _ = head_of(64, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        loss = sum_in_chunks(
            lambda rows, labels: losses_of_rows(rows, weight, labels), hidden.requires_grad_(), labels,
            parameters=[weight.requires_grad_()], chunk_rows=5,
        )  # fmt: skip
    loss.backward()
    assert hidden.grad is not None
    assert not saved


@pytest.mark.parametrize("shape", [(13, 8), (1, 13, 8)])
def test_recomputation_frees_the_rows_of_a_module_in_chunks(shape):
    module, kept = run_in_chunks(mlp(), 5), []

    def layer(x):
        rows = x * 2
        kept.append(weakref.ref(rows))
        return module(rows)

    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert kept[0]() is None
    out.sum().backward()
    assert x.grad is not None
