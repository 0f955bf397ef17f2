"""Attention in any scheme against dense softmax attention that is none of ours: what Hypothesis draws in the tests."""

import contextlib
import warnings

import numpy as np
import torch
from hypothesis import strategies as st

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan import schemes
from megatron_cp.planner.attention import plan_attention
from megatron_cp.softmax.attention import attention
from megatron_cp.testing import parity
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned
from tests import mask_oracle
from tests.limits import limit
from tests.softmax_oracle import attend, kept_by_dropout

TOLERANCE = 1e-12
SCHEMES = tuple(schemes.SCHEMES)


def draw_problem(case):
    """The case's inputs; of every third case with a sink, one head is without."""
    problem = parity.draw(case)
    if case.learned_sink and case.seed % 3 == 0:
        problem.parameters["sink"][0] = -torch.inf
    return problem


def run_rank(group, case):
    """This rank's output and gradients; of every eighth case with unwritten memory full of NaN, which takes long."""
    with poisoned() if case.seed % 8 == 0 else contextlib.nullcontext():
        return run_layer(group, case, draw_problem(case))


def over_ranks(case):
    """The whole output and gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        plan = case.plan()  # which all share while it is held
        found = parity.whole(case, run_ranks(run_rank, case.cp, case, timeout=limit(60)))
        del plan
        return found


def dense(case):
    """Computes one softmax over all keys of the stream, with torch's autograd, in float64."""
    problem, pairs = draw_problem(case), mask_oracle.pairs_of_case(case)
    leaves = {name: x.double().requires_grad_() for name, x in (problem.inputs | problem.parameters).items()}
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    kept = None
    if case.dropout:
        places = [np.arange(n) for n in pairs.shape]
        of_heads = [kept_by_dropout(*places, head, case.seed, case.dropout) for head in range(case.heads)]
        kept = torch.from_numpy(np.array(of_heads))
    out, _ = attend(
        *(leaves[name] for name in "qkv"), torch.from_numpy(np.asarray(pairs)), scale=scale, softcap=case.softcap,
        sink=leaves["sink"] if case.learned_sink else None, kept=kept, dropout=case.dropout,
    )  # fmt: skip
    gradient = problem.output_gradient.double()
    gradients = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True, materialize_grads=True)
    names = (f"d_{name}" for name in leaves)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def check(case):
    """Fails unless the case over its ranks is dense attention, output and every gradient."""
    check_results(case, over_ranks(case))


def check_results(case, actual):
    """Fails unless these are dense attention's output and gradients."""
    for name, value in dense(case).items():
        assert actual[name].shape == value.shape
        if value.numel():
            error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-1)
            assert error <= TOLERANCE, (name, float(error))


LENGTHS = st.integers(0, 1) | st.integers(2, 19)
EVERY_HEADS = ((6, 2), (7, 7), (7, 1), (4, 4), (1, 1), (12, 3))
SIZES = ((8, 8), (24, 16), (5, 3), (2, 9))


@st.composite
def masks(draw, lengths):
    """A mask as `Case.mask` has it."""
    total = sum(lengths)
    kind = draw(
        st.sampled_from(["causal", "full", "window", "first", "prefix", "chunk", "shared_question", "slices", "blocks"])
    )
    if kind in ("causal", "full"):
        return kind
    if kind in ("window", "first"):
        left, right = draw(st.integers(-1, 9)), draw(st.sampled_from([0, 0, 1, 4, -1]))
        first = f"first:{draw(st.integers(1, 5))}+" if kind == "first" else ""
        return f"{first}window:{left},{right}"
    if kind in ("prefix", "chunk"):
        return f"{kind}:{draw(st.integers(1, 12))}"
    if kind == "shared_question":
        return (kind, tuple(draw(_parts(length)) for length in lengths))
    if kind == "slices":
        return ("from_slices", tuple(draw(st.lists(_slices(total), max_size=5))))
    size = draw(st.integers(1, 9))
    cells = -(-total // size)
    table = draw(st.lists(st.lists(st.booleans(), min_size=cells, max_size=cells), min_size=cells, max_size=cells))
    return ("from_blocks", np.array(table, dtype=bool).reshape(cells, cells), size)


@st.composite
def _parts(draw, length):
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return tuple(int(part) for part in np.diff([0, *cuts, length]))


@st.composite
def _slices(draw, total):
    q, k = (sorted((draw(st.integers(0, total)), draw(st.integers(0, total)))) for _ in range(2))
    return (*q, *k, draw(st.sampled_from(["full", "causal", "inverse_causal", "both"])))


@st.composite
def cases(draw):
    cp_size = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 5, 6, 8]))
    possible = [scheme for scheme in SCHEMES if "+" not in scheme or cp_size in (4, 6, 8)]
    scheme = draw(st.sampled_from(possible))
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=5)))
    cross = draw(st.integers(0, 7)) == 0
    heads, kv_heads = draw(st.sampled_from(EVERY_HEADS))
    head_dim, value_head_dim = draw(st.sampled_from(SIZES))
    special = draw(st.sampled_from(["", "", "", "sink", "softcap", "dropout", "scale"]))
    return Case(
        "attention",
        cp_size,
        lengths,
        scheme=scheme,
        layout=draw(st.sampled_from(["zigzag", "contiguous", "random", "balanced"])),
        mask=draw(st.sampled_from(["causal", "full"])) if cross else draw(masks(lengths)),
        heads=heads,
        groups=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        learned_sink=special == "sink",
        softcap=1.5 if special == "softcap" else 0.0,
        dropout=0.3 if special == "dropout" else 0.0,
        softmax_scale=draw(st.sampled_from([-0.4, 0.0, 2.0])) if special == "scale" else None,
        head_chunks=draw(st.sampled_from([None, 1, 3 if kv_heads >= 3 and "+" not in scheme else 1]))
        if schemes.SCHEMES[scheme].chunks_keys
        else None,
        ulysses_degree=draw(st.sampled_from([None, 2])) if "+" in scheme else None,
        kv_lengths=tuple(draw(LENGTHS) for _ in lengths) if cross else None,
        kv_layout=draw(st.sampled_from(["contiguous", "zigzag", "random"])),
        kernel=draw(st.sampled_from(["auto", "reference"])),
        align=draw(st.sampled_from([1, 1, 4])),
        seed=draw(st.integers(0, 10_000)),
    )


def check_sequences_alone(ranks, tokens, sequences, scheme):
    """A batch of sequences gives the outputs and gradients of each sequence alone."""
    packing = Packing([tokens])
    layout = Layout.zigzag(packing, ranks)
    plan = plan_attention(packing, layout, heads=4, kv_heads=2, head_dim=8, scheme=scheme)
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(tokens, sequences, n, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2)]

    def rank(group):
        def run(*tensors):
            local = [layout.shard(x, group.rank).requires_grad_() for x in tensors]
            out = attention(*local, plan, group)
            out.backward(torch.ones_like(out))
            return [out.detach(), *(x.grad for x in local)]

        batch, singles = run(*whole), [run(*(x[:, b] for x in whole)) for b in range(sequences)]
        return all(
            torch.allclose(batch[i][:, b], singles[b][i], atol=1e-14, rtol=0)
            for b in range(sequences)
            for i in range(4)
        )

    assert run_ranks(rank, ranks) == [True] * ranks
