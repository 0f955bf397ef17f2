"""Tests on a GPU: results against float64 on the CPU, the exchange bit for bit, and no wait of the host.

The ranks of a case are processes that share one device, over gloo, or threads, if CUDA_TEST_RANKS says so.
"""

import os
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.head_exchange import to_heads, to_tokens
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.gates import delta
from megatron_cp.linear.gates.tensors import has_kernels
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.counters import Counters
from megatron_cp.testing.parity import Case, Problem, draw, judge, run_layer, whole
from megatron_cp.testing.poison import poisoned
from tests.limits import limit
from tests.unit_tests import test_autocast
from tests.unit_tests.exchange import test_kernel_copies
from tests.unit_tests.linear import test_gates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
# Processes share the device over gloo; threads start at once, which matters where a GPU is there for minutes.
RANKS = os.environ.get("CUDA_TEST_RANKS", "processes")
RAGGED = (7, 1, 130, 64, 2)
# For an interpreter, which runs the kernels on the emulated device: one document is longer than a recurrence's chunk.
SMALL = {"lengths": (7, 1, 70, 13, 2), "head_dim": 16, "value_head_dim": 16}
ATTENTION = Case("attention", 2, RAGGED, head_dim=64, value_head_dim=64, dtype=torch.bfloat16, kernel="varlen")
GDN = Case("gdn", 2, RAGGED, head_dim=64, value_head_dim=64, dtype=torch.float32, kernel="chunked")
# By kernel: the case, and what it may be off.
OF_LINEAR = {
    "chunked": (GDN, 1e-5, ("gdn", "kda", "mamba", "conv1d")),
    "fla": (replace(GDN, kernel="fla", dtype=torch.bfloat16), 5e-2, ("gdn", "kda")),  # multiplies in bf16 throughout
    "mamba_ssm": (replace(GDN, kernel="mamba_ssm", dtype=torch.bfloat16), 5e-2, ("mamba",)),
}
KERNELS = {
    **{name: (replace(ATTENTION, kernel=name), 2e-2) for name in ("varlen", "flash_attn", "flash_attn_3")},
    **{
        f"{kernel} of {layer} {scheme}": (replace(case, layer=layer, scheme=scheme), tolerance)
        for kernel, (case, tolerance, layers) in OF_LINEAR.items()
        for layer in layers
        for scheme in ("headwise", "chunkwise")
    },
}
IS_EMULATED = "NULLGPU" in os.environ
OPERATIONS = {"attention": attention, "gdn": gated_delta_net, "kda": kda_mixer, "mamba": mamba2_mixer}


def layer_on_device(group, case, poison):
    problem = on(DEVICE, draw(case))
    if not poison:
        results = run_layer(group, case, problem)
    else:  # on this thread, so that the backward is poisoned as well
        with poisoned(), torch.autograd.set_multithreading_enabled(False):
            results = run_layer(group, case, problem)
    assert all(tensor.device.type == DEVICE for tensor in results.values())
    return {name: tensor.cpu() for name, tensor in results.items()}


def seconds_of_ranks(seconds=120):
    """An emulated device is slower where others use the machine."""
    return limit(seconds) if IS_EMULATED else seconds


def on(device, problem, dtype=None):
    def moved(tensors):
        return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}

    return Problem(moved(problem.inputs), moved(problem.parameters), problem.output_gradient.to(device, dtype))


def assert_close(case, ranks, alone, tolerance):
    """Fails unless all results over ranks are those of one rank in float64."""
    parity = judge(case, whole(case, ranks), in_float64(alone))
    assert all(error <= tolerance for error in parity.errors.values()), f"other numbers than in float64: {parity}"


@cache
def in_float64(case):
    """Computes the same inputs on one rank of the CPU, by the reference kernel."""
    scheme = "a2a" if case.layer == "attention" else "headwise"
    alone = replace(case, cp=1, layout="contiguous", dtype=torch.float64, kernel="reference", scheme=scheme)
    return run_layer(ThreadGroup.create(1)[0], alone, on("cpu", draw(case), torch.float64))


@pytest.mark.parametrize(("cp", "layout", "poison"), [(2, "zigzag", False), (3, "random", False), (3, "zigzag", True)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_layer_equals_float64(kernel, cp, layout, poison):
    one_case, tolerance = KERNELS[kernel]
    case = replace(one_case, cp=cp, layout=layout)
    if case.kernel == "fla" and IS_EMULATED:
        pytest.skip("on the emulated device: Triton's interpreter is wrong in bfloat16; see test_package_kernels")
    try:
        replace(case, device=DEVICE).refuse_early()
    except ArgumentError as error:
        pytest.skip(str(error))
    ranks = run_ranks(layer_on_device, cp, case, poison, kind=RANKS, timeout=seconds_of_ranks())
    assert_close(case, ranks, one_case, tolerance)


@pytest.mark.parametrize("mask", ["causal", "window:20,0", "first:4+window:16,0", "prefix:9"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_scheme_equals_float64(scheme, mask):
    alone = replace(ATTENTION, mask=mask, scheme="a2a", learned_sink=True)
    case = replace(alone, cp=4, layout="balanced", scheme=scheme)
    ranks = run_ranks(layer_on_device, 4, case, False, kind=RANKS, timeout=seconds_of_ranks())
    assert_close(case, ranks, alone, KERNELS["varlen"][1])


# An emulated device takes minutes for KDA's kernels, and asks nothing else of autocast than Gated DeltaNet's.
@pytest.mark.parametrize("name", [name for name in test_autocast.ALL if "kda" not in name])
def test_autocast_casts_as_on_a_cpu(name):
    if name in test_autocast.WIDENED:
        test_autocast.test_inputs_of_recurrences_are_cast_to_the_widest(name, "mixed", "auto")
    else:
        test_autocast.test_lowered_inputs_are_cast_and_nothing_else_is(name, "mixed", torch.bfloat16, "auto")


def exchange_over(layout):
    partition = partition_heads(6, 2, layout.cp_size)  # with 3 ranks, some share a key head
    return Exchange(layout, Sections((Section("q", 6, 8, partition.heads), Section("k", 2, 24, partition.groups))))


def exchange_on_device(group, layout):
    """Names what is not exactly what slicing the whole stream gives: both directions, and the backward of each."""
    exchange = exchange_over(layout)
    blocks = exchange.sections.blocks
    random = torch.Generator().manual_seed(0)
    # Small integers, so that sums are exact in bfloat16.
    stream = torch.randint(-8, 9, (layout.packing.total, exchange.sections.width), generator=random).bfloat16()
    columns = stream.split([block.width for block in blocks], -1)
    local_heads, summed = [], []
    for block, column in zip(blocks, columns, strict=True):
        heads = column.unflatten(-1, (block.num_heads, block.head_dim))
        local_heads.append(heads[:, slice(*block.ranges[group.rank])])
        holders = torch.tensor([sum(lo <= head < hi for lo, hi in block.ranges) for head in range(block.num_heads)])
        summed.append((heads * holders[:, None]).flatten(1))
    own_tokens = layout.shard(torch.cat(summed, -1), group.rank)

    with poisoned(), torch.autograd.set_multithreading_enabled(False):
        local = layout.shard(stream.to(DEVICE), group.rank).requires_grad_()
        sections = to_heads(exchange, group, local)
        (d_local,) = torch.autograd.grad(sections, local, [x.detach().clone() for x in sections])
        own = [x.detach().clone().requires_grad_() for x in sections]
        tokens = to_tokens(exchange, group, *own)
        d_own = torch.autograd.grad(tokens, own, [layout.shard(x.to(DEVICE), group.rank) for x in columns])
    pairs = {
        "to heads": zip(sections, local_heads, strict=True),
        "backward of to heads": [(d_local, own_tokens)],
        "to tokens": [(torch.cat(tokens, -1), own_tokens)],
        "backward of to tokens": zip(d_own, local_heads, strict=True),
    }
    return [
        name
        for name, found in pairs.items()
        if not all(x.device.type == DEVICE and torch.equal(x.cpu(), y) for x, y in found)
    ]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize("cp", [2, 3])
def test_exchange_moves_the_very_bits(cp, layout):
    laid_out = layout_by_name(layout, Packing(RAGGED), cp)
    assert run_ranks(exchange_on_device, cp, laid_out, kind=RANKS, timeout=seconds_of_ranks()) == [[]] * cp


@pytest.mark.parametrize("codec", ["none", "fp8", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "padded"])
def test_kernels_move_the_same_bytes_as_torch(layout, codec, monkeypatch):
    """Packing and unpacking by Triton against the same by torch, with sums and chunks; see `test_kernel_copies`."""
    for number, (heads, groups, chunks) in enumerate([(6, 3, 1), (6, 2, 1), (5, 5, 2), (4, 1, 1)]):
        exchange = test_kernel_copies.exchange_of(test_kernel_copies.LAYOUTS[layout], heads, groups, chunks, codec)
        for rank in [number % 3] if IS_EMULATED else range(3):  # interpreted they all take minutes
            at = Geometry(exchange, rank, (torch.bfloat16,) * 4, None, torch.device(DEVICE))
            results = []
            for runs_on in (copies.runs_on, lambda device: False):
                # Rows that nobody writes are compared too.
                with monkeypatch.context() as patch, poisoned():
                    patch.setattr(copies, "runs_on", runs_on)
                    results.append(test_kernel_copies.everything(at, [heads * 8, groups * 14, heads]))
            for by_kernel, by_torch in zip(*results, strict=True):
                assert torch.equal(test_kernel_copies.bits(by_kernel), test_kernel_copies.bits(by_torch))


@pytest.mark.parametrize(
    "how", [{"transport": "pairwise"}, {"transport": "hierarchical"}, {"head_chunks": 2}, {"codec": "fp8"}], ids=str
)
def test_transports_and_chunks_change_no_bit(how):
    """Messages of CUDA tensors go over gloo through pinned memory; a codec is compared with itself in chunks."""
    # One scheme: auto would choose by the transport and the chunks, and others round elsewhere.
    case = replace(ATTENTION, cp=3, heads=12, groups=6, scheme="a2a")
    plain = replace(case, codec=how.get("codec", "none"))
    other = replace(case, **how) if "codec" not in how else replace(plain, head_chunks=2, transport="pairwise")
    expected, actual = (
        run_ranks(layer_on_device, 3, each, False, kind=RANKS, timeout=seconds_of_ranks()) for each in (plain, other)
    )
    for mine, theirs in zip(actual, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def steps_of(what):
    """Forward and backward on one rank whose rows are shuffled, so that nothing is skipped."""
    if what == "exchange":
        layout = layout_by_name("random", Packing(SMALL["lengths"]), 1)
        exchange, group = exchange_over(layout), ThreadGroup.create(1)[0]
        assert not exchange.is_local
        local = torch.randn(layout.packing.total, exchange.sections.width, device=DEVICE).bfloat16().requires_grad_()

        def forward():
            return to_tokens(exchange, group, *to_heads(exchange, group, local))

        return forward, [local]
    case = replace(KERNELS[what][0], cp=1, layout="random", **SMALL)
    problem, plan = on(DEVICE, draw(case)), case.plan()
    inputs = [plan.layout.shard(x, 0).requires_grad_() for x in problem.inputs.values()]
    operation = OPERATIONS[case.layer]
    return lambda: [operation(*inputs, plan, kernel=case.kernel, **problem.parameters)], inputs


@pytest.mark.parametrize(
    "what",
    [
        "exchange",
        "varlen",
        *(f"chunked of {layer} {scheme}" for layer in ("gdn", "kda", "mamba") for scheme in ("headwise", "chunkwise")),
    ],
)
def test_host_never_waits(what, monkeypatch):
    forward, inputs = steps_of(what)

    def step():
        outputs = forward()
        torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])

    step()  # makes the batch's tables
    torch.cuda.synchronize()
    counters, launches = Counters(), count_launches(monkeypatch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with counters, torch.autograd.set_multithreading_enabled(False):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Something was counted: operators that copy, and where there is nothing but an exchange, kernels that do.
    assert counters.copied or launches
    assert set(launches) in (set(), {"to_message_kernel", "from_message_kernel"})
    assert counters.host_syncs == {}


@pytest.mark.parametrize("check", test_gates.CHECKS)
def test_kernels_of_gates(check):
    """Against torch's operators, and each head's bits against those that it has among others."""
    if not copies.runs_on(torch.device(DEVICE)):
        pytest.skip("needs Triton")
    few = [test_gates.EVERY[check]] if IS_EMULATED and check in test_gates.EVERY else []  # else minutes, interpreted
    with poisoned(), torch.autograd.set_multithreading_enabled(False):
        getattr(test_gates, check)(DEVICE, *few)


def test_gates_in_float64_are_torchs():
    inputs = test_gates.delta_inputs(test_gates.DELTA[0], torch.float64, device=DEVICE)
    assert not has_kernels(*inputs)
    assert delta.normalised(*inputs[:2])[0].dtype == torch.float64


@pytest.mark.parametrize("has_gate", [True, False])
def test_mambas_gated_norm_equals_the_cpus(has_gate):
    """The norm runs by mamba_ssm's kernel or by torch's operators; the module is Megatron's, as in `norms.py`."""
    pytest.importorskip("megatron.core")
    from megatron_cp.megatron.layers.norms import GatedRMSNorm

    draw, results = torch.Generator().manual_seed(0), []
    x, z, gradient = (torch.randn(70, 48, generator=draw) for _ in range(3))
    weight = torch.randn(48, generator=draw)
    for device in ("cpu", DEVICE):
        norm = GatedRMSNorm(48, group_size=24, device=device)
        norm.weight.data.copy_(weight)
        leaves = [each.to(device).requires_grad_() for each in ((x, z) if has_gate else (x,))]
        out = norm(*leaves)
        results.append([out, *torch.autograd.grad(out, [*leaves, norm.weight], gradient.to(device))])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def count_launches(monkeypatch):
    """Counts launches of the exchange's kernels by name from now on; none if Triton is not installed."""
    launches = Counter()
    if copies.runs_on(torch.device(DEVICE)):
        from megatron_cp.exchange.kernels import triton

        launch = triton.Launch.__call__

        def counted(self, addresses):
            launches[self.kernel.fn.__name__] += 1
            return launch(self, addresses)

        monkeypatch.setattr(triton.Launch, "__call__", counted)
    return launches
