"""Attention in any scheme against dense softmax attention that is none of ours: what Hypothesis draws in the tests."""

import contextlib
import dataclasses
import warnings

import numpy as np
import torch
from hypothesis import strategies as st

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Mask, Packing
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.softmax.kernels.dropout import kept
from megatron_cp.testing.poison import poisoned
from tests import mask_oracle
from tests.limits import limit

TOLERANCE = 1e-12
SCHEMES = ("a2a", "p2p", "all_gather", "exact", "a2a+p2p", "a2a+all_gather")


@dataclasses.dataclass(frozen=True)
class SchemeCase:
    """One attention over some ranks. `mask` is a name of `mask_oracle` and its arguments."""

    scheme: str
    cp_size: int
    lengths: tuple
    layout: str = "zigzag"
    mask: tuple = ("causal",)
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    value_head_dim: int = 8
    sink: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    scale: float | None = None
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    kv_lengths: tuple | None = None  # of cross-attention
    kv_layout: str = "contiguous"
    kernel: str = "auto"
    align: int = 1
    seed: int = 0

    @property
    def packing(self):
        return Packing(self.lengths)

    @property
    def kv_packing(self):
        return Packing(self.kv_lengths) if self.kv_lengths else self.packing

    def mask_and_pairs(self):
        """The mask, and the pairs that the oracle says are visible."""
        kind, *arguments = self.mask
        if kind in ("window", "first"):
            options = dict(zip(("left", "right", "first"), arguments, strict=False))
            options |= {"kv_packing": self.kv_packing} if self.kv_lengths else {}
            return Mask.window(self.packing, **options), mask_oracle.window(self.packing, **options)
        of = (self.packing, self.kv_packing) if self.kv_lengths else (self.packing, *arguments)
        name = {"slices": "from_slices", "blocks": "from_blocks"}.get(kind, kind)
        return getattr(Mask, name)(*of), getattr(mask_oracle, kind)(*of)

    def plan(self, mask):
        layout = layout_by_name(self.layout, self.packing, self.cp_size, seed=self.seed, align=self.align, mask=mask)
        cross = {}
        if self.kv_lengths:
            keys = layout_by_name(self.kv_layout, self.kv_packing, self.cp_size, seed=self.seed + 1)
            cross = {"kv_packing": self.kv_packing, "kv_layout": keys}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # ranks without heads
            return cp.plan_attention(
                self.packing, layout, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
                value_head_dim=self.value_head_dim, mask=mask, scheme=self.scheme,
                ulysses_degree=self.ulysses_degree, head_chunks=self.head_chunks, **cross,
            )  # fmt: skip

    def problem(self):
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        queries, keys = self.packing.total, self.kv_packing.total
        inputs = {
            "q": normal(queries, self.heads, self.head_dim),
            "k": normal(keys, self.kv_heads, self.head_dim),
            "v": normal(keys, self.kv_heads, self.value_head_dim),
        }
        if self.sink:
            inputs["sink"] = normal(self.heads)
            if self.seed % 3 == 0:
                inputs["sink"][0] = -torch.inf  # a head without one
        return inputs, normal(queries, self.heads, self.value_head_dim)


def run_rank(group, case, plan):
    """This rank's output and gradients; of every eighth case with unwritten memory full of NaN, which takes long."""
    inputs, gradient = case.problem()
    shards = {"q": plan.layout, "k": plan.kv_layout, "v": plan.kv_layout}
    local = {
        name: (shards[name].shard(x, group.rank) if name in shards else x.clone()).requires_grad_()
        for name, x in inputs.items()
    }
    with poisoned() if case.seed % 8 == 0 else contextlib.nullcontext():
        out = cp.attention(
            local["q"], local["k"], local["v"], plan, group, sink=local.get("sink"), softmax_scale=case.scale,
            softcap=case.softcap, dropout=case.dropout, seed=case.seed, kernel=case.kernel,
        )  # fmt: skip
        out.backward(plan.layout.shard(gradient, group.rank))
    return {"out": out.detach(), **{name: x.grad for name, x in local.items()}}


def over_ranks(case, plan):
    """The whole output and gradients."""
    ranks = run_ranks(run_rank, case.cp_size, case, plan, timeout=limit(60))
    layouts = {"out": plan.layout, "q": plan.layout, "k": plan.kv_layout, "v": plan.kv_layout}
    return {
        name: layouts[name].unshard([rank[name] for rank in ranks])
        if name in layouts
        else sum(rank[name] for rank in ranks)
        for name in ranks[0]
    }


def dense(case, pairs):
    """The same by one softmax over all keys of the stream, and torch's autograd."""
    inputs, gradient = case.problem()
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    ratio = case.heads // case.kv_heads
    k, v = (leaves[name].repeat_interleave(ratio, 1) for name in "kv")
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = torch.einsum("ihd,jhd->hij", leaves["q"], k) * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~torch.from_numpy(np.asarray(pairs)), -torch.inf)
    if case.sink:
        # -inf would make NaN of 0 * inf in the gradient; so far below the scores it has no weight either.
        sinks = leaves["sink"].clamp(min=-1e3)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.where(seen, scores, 0).softmax(-1) * seen
    weights = weights[..., : k.shape[0]]
    if case.dropout:
        tokens = [torch.arange(n) for n in weights.shape[1:]]
        stays = [kept(*tokens, head=head, seed=case.seed, dropout=case.dropout) for head in range(case.heads)]
        weights = weights * torch.stack(stays) / (1 - case.dropout)
    out = torch.einsum("hij,jhd->ihd", weights, v)
    gradients = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(case):
    """Fails unless the case over its ranks is dense attention, output and every gradient."""
    mask, pairs = case.mask_and_pairs()
    actual, expected = over_ranks(case, case.plan(mask)), dense(case, pairs)
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        if value.numel():
            error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-1)
            assert error <= TOLERANCE, (name, float(error))


# -- what is drawn ---------------------------------------------------------------------------------------------------

LENGTHS = st.integers(0, 1) | st.integers(2, 19)
EVERY_HEADS = ((6, 2), (7, 7), (7, 1), (4, 4), (1, 1), (12, 3))
SIZES = ((8, 8), (24, 16), (5, 3), (2, 9))


@st.composite
def masks(draw, lengths):
    """A kind of mask and its arguments, without the packing."""
    total = sum(lengths)
    kind = draw(
        st.sampled_from(["causal", "full", "window", "first", "prefix", "chunk", "shared_question", "slices", "blocks"])
    )
    if kind in ("causal", "full"):
        return (kind,)
    if kind in ("window", "first"):
        left, right = draw(st.integers(-1, 9)), draw(st.sampled_from([0, 0, 1, 4, -1]))
        return (kind, left, right, *([draw(st.integers(1, 5))] if kind == "first" else []))
    if kind in ("prefix", "chunk"):
        return (kind, draw(st.integers(1, 12)))
    if kind == "shared_question":
        return (kind, tuple(draw(_parts(length)) for length in lengths))
    if kind == "slices":
        return (kind, tuple(draw(st.lists(_slices(total), max_size=5))))
    size = draw(st.integers(1, 9))
    cells = -(-total // size)
    table = draw(st.lists(st.lists(st.booleans(), min_size=cells, max_size=cells), min_size=cells, max_size=cells))
    return (kind, np.array(table, dtype=bool).reshape(cells, cells), size)


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
    schemes = [scheme for scheme in SCHEMES if "+" not in scheme or cp_size in (4, 6, 8)]
    scheme = draw(st.sampled_from(schemes))
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=5)))
    cross = draw(st.integers(0, 7)) == 0
    heads, kv_heads = draw(st.sampled_from(EVERY_HEADS))
    head_dim, value_head_dim = draw(st.sampled_from(SIZES))
    special = draw(st.sampled_from(["", "", "", "sink", "softcap", "dropout", "scale"]))
    return SchemeCase(
        scheme,
        cp_size,
        lengths,
        layout=draw(st.sampled_from(["zigzag", "contiguous", "random", "balanced"])),
        mask=(draw(st.sampled_from(["causal", "full"])),) if cross else draw(masks(lengths)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        sink=special == "sink",
        softcap=1.5 if special == "softcap" else 0.0,
        dropout=0.3 if special == "dropout" else 0.0,
        scale=draw(st.sampled_from([-0.4, 0.0, 2.0])) if special == "scale" else None,
        head_chunks=draw(st.sampled_from([None, 1, 3 if kv_heads >= 3 and "+" not in scheme else 1]))
        if "gather" in scheme or scheme == "exact"
        else None,
        ulysses_degree=draw(st.sampled_from([None, 2])) if "+" in scheme else None,
        kv_lengths=tuple(draw(LENGTHS) for _ in lengths) if cross else None,
        kv_layout=draw(st.sampled_from(["contiguous", "zigzag", "random"])),
        kernel=draw(st.sampled_from(["auto", "reference"])),
        align=draw(st.sampled_from([1, 1, 4])),
        seed=draw(st.integers(0, 10_000)),
    )
