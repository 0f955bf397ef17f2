"""Attention kernels agree with softmax over a boolean matrix; each refuses what it cannot run."""

import sys
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.extras import import_failure
from megatron_cp.layout import Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.mask import Mask
from megatron_cp.softmax.kernels import KERNELS, AttentionCall, Tiles, reference
from megatron_cp.softmax.kernels.common.varlen_calls import segment_calls
from megatron_cp.softmax.kernels.common.varlen_kernel import SegmentedAttention
from megatron_cp.torch_private import varlen_operators
from tests import softmax_oracle
from tests.mask_oracle import pairs_of
from tests.refusals import rejects
from tests.softmax_oracle import kept_by_dropout

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
DRAWN = settings(max_examples=25)


def call_for(head_dim=8, value_head_dim=None, dtype=torch.float64, device="cpu", scale=0.37, **features):
    return AttentionCall(scale, head_dim, value_head_dim or head_dim, dtype, torch.device(device), **features)


def tiles_of(bands, num_queries, num_keys, first_query=0, first_key=0):
    bands = band.shrink(np.array(bands, dtype=np.int64).reshape(-1, 6))
    bands = bands[np.lexsort((bands[:, 2], bands[:, 0]))]
    return Tiles(bands, first_query + np.arange(num_queries), first_key + np.arange(num_keys))


def tiles_of_mask(mask):
    return tiles_of(mask.bands, mask.packing.total, mask.kv_packing.total)


def visible(tiles):
    """`[T, S]` bool; no pair may be in two bands."""
    count = pairs_of(tiles.bands, len(tiles.q_tokens), len(tiles.k_tokens))
    assert count.max(initial=0) <= 1
    return torch.from_numpy(count > 0)


def draw(tiles, call, heads=4, groups=2, dtype=torch.float64, seed=0):
    """q, k, v and dout."""
    random = torch.Generator().manual_seed(seed)
    sizes = [
        (len(tiles.q_tokens), heads, call.head_dim),
        (len(tiles.k_tokens), groups, call.head_dim),
        (len(tiles.k_tokens), groups, call.value_head_dim),
        (len(tiles.q_tokens), heads, call.value_head_dim),
    ]
    return [torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in sizes]


def forward(kernel, q, k, v, tiles, call, first_head=0, out_dtype=None):
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=out_dtype or q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.promote_types(out.dtype, torch.float32))
    kernel.forward(out, lse, q, k, v, tiles, call, first_head)
    return out, lse


def backward(kernel, dout, q, k, v, out, lse, tiles, call, first_head=0, out_dtype=None):
    gradients = [torch.full_like(x, torch.nan, dtype=out_dtype or x.dtype) for x in (q, k, v)]
    kernel.backward(*gradients, dout, q, k, v, out, lse, tiles, call, first_head)
    return gradients


def both(kernel, tensors, tiles, call, first_head=0, out_dtype=None):
    """out, lse, dq, dk and dv."""
    q, k, v, dout = tensors
    out, lse = forward(kernel, q, k, v, tiles, call, first_head, out_dtype)
    return [out, lse, *backward(kernel, dout, q, k, v, out, lse, tiles, call, first_head, out_dtype)]


def oracle(tensors, tiles, call, first_head=0):
    """Returns the five results of a dense softmax that autograd differentiates."""
    q, k, v, dout = tensors
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    kept = None
    if call.dropout:
        places = tiles.q_tokens, tiles.k_tokens
        of_heads = [kept_by_dropout(*places, first_head + n, call.seed, call.dropout) for n in range(q.shape[1])]
        kept = torch.from_numpy(np.array(of_heads))
    out, lse = softmax_oracle.attend(
        q, k, v, visible(tiles), scale=call.scale, softcap=call.softcap, kept=kept, dropout=call.dropout
    )
    out.backward(dout)
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


def check(actual, expected, tolerance):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        nothing = b == -torch.inf
        assert torch.equal(a == -torch.inf, nothing), name
        difference = (a.double() - b.double()).masked_fill(nothing, 0).abs().max()
        assert difference <= tolerance * b.double().masked_fill(nothing, 0).abs().max().clamp(min=1), name


@st.composite
def tiles_strategy(draw_one, longest=40):
    """Disjoint bands over a few ranges of keys: several a query, and none for some."""
    num_queries, num_keys = draw_one(st.integers(1, longest)), draw_one(st.integers(1, longest))
    bands = []
    for k0, k1 in draw_one(_ranges(num_keys)):
        for q0, q1 in draw_one(_ranges(num_queries)):
            lo = draw_one(st.sampled_from([-UNBOUNDED, None]))
            hi = draw_one(st.sampled_from([UNBOUNDED, None]))
            near, wide = draw_one(st.integers(-longest, longest)), draw_one(st.integers(0, longest))
            lo, hi = near if lo is None else lo, near + wide if hi is None else hi
            if lo < near + wide // 2 < hi and draw_one(st.booleans()):  # two bands beside each other in one box
                bands += [(q0, q1, k0, k1, lo, near + wide // 2), (q0, q1, k0, k1, near + wide // 2 + 1, hi)]
            else:
                bands.append((q0, q1, k0, k1, lo, hi))
    tiles = tiles_of(bands, num_queries, num_keys)
    return tiles if len(tiles.bands) else tiles_of([(0, 1, 0, 1, -UNBOUNDED, UNBOUNDED)], num_queries, num_keys)


def _ranges(total):
    """Disjoint ranges within [0, total), in rising order."""
    cuts = st.lists(st.integers(0, total), min_size=2, max_size=6, unique=True).map(sorted)
    return cuts.map(lambda at: list(pairwise(at))[:: 1 if len(at) % 2 else 2])


@pytest.mark.any_cpu
@pytest.mark.parametrize(("heads", "groups"), [(32, 4), (8, 1), (6, 3)])
def test_gradients_of_grouped_heads_in_16_bits_are_those_of_keys_that_are_repeated(heads, groups):
    """torch adds the gradients of repeated keys in fp32, if a key is repeated before its attention."""
    packing = Packing([192])
    tiles, call = tiles_of_mask(Mask.causal(packing)), call_for(64, dtype=torch.bfloat16, scale=0.125)
    drawn = draw(tiles, call, heads, groups, torch.bfloat16)
    exact = oracle([x.double() for x in drawn], tiles, call)
    q, k, v, dout = [*drawn[:3], drawn[3]]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    repeated = [leaves[0], *(x.repeat_interleave(heads // groups, 1) for x in leaves[1:])]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in repeated), is_causal=True, scale=0.125
    )
    out.backward(dout.transpose(0, 1)[None])
    found = both(BY_NAME["cpu"], drawn, tiles, call)
    for name, gradient, theirs, right in zip("qkv", found[2:], leaves, exact[2:], strict=True):
        ours, plain = ((x.double() - right).abs().max() for x in (gradient, theirs.grad))
        assert ours <= 1.05 * plain, (name, float(ours), float(plain))


NAMED = {
    "causal": tiles_of_mask(Mask.causal(Packing([7, 1, 0, 30, 12]))),
    "full": tiles_of_mask(Mask.full(Packing([7, 1, 30, 12]))),
    "cross": tiles_of_mask(Mask.full(Packing([7, 1, 30]), Packing([2, 11, 5]))),
    "window": tiles_of_mask(Mask.window(Packing([7, 1, 300, 12]), 70)),
    "two-sided": tiles_of_mask(Mask.window(Packing([7, 150, 12]), 5, 9)),
    "more keys": tiles_of([(0, 4, 0, 30, -UNBOUNDED, 26), (4, 5, 2, 9, -UNBOUNDED, UNBOUNDED)], 5, 30),
    "inverse": tiles_of([(0, 90, 0, 130, 3, UNBOUNDED), (0, 50, 130, 160, -UNBOUNDED, UNBOUNDED)], 100, 160),
    "two bands": tiles_of(
        [(0, 200, 0, 9, -UNBOUNDED, UNBOUNDED), (9, 200, 9, 200, -80, 0), (0, 9, 9, 200, -UNBOUNDED, 0)], 200, 200
    ),
    "one pair": tiles_of([(2, 3, 4, 5, -UNBOUNDED, UNBOUNDED)], 5, 6),
}
named = pytest.mark.parametrize("tiles", NAMED.values(), ids=NAMED)


@given(
    tiles=tiles_strategy(longest=12), scale=st.sampled_from([0.37, 0.0, -0.5]), softcap=st.sampled_from([0.0, 0.8]),
    rate=st.sampled_from([0.0, 0.3]), heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
)  # fmt: skip
@settings(parent=DRAWN, max_examples=60)
def test_reference_is_a_dense_softmax_and_its_derivative(tiles, scale, softcap, rate, heads):
    call = call_for(5, 3, scale=scale, softcap=softcap, dropout=rate, seed=11)
    tensors = draw(tiles, call, *heads)
    check(both(BY_NAME["reference"], tensors, tiles, call, 7), oracle(tensors, tiles, call, 7), 1e-12)


@named
def test_the_reference_in_blocks_is_the_reference_at_once(tiles, monkeypatch):
    call = call_for(dropout=0.2, softcap=2.0)
    tensors = draw(tiles, call)
    whole = both(BY_NAME["reference"], tensors, tiles, call)
    monkeypatch.setattr(reference, "_MAX_SCORES", 400)
    blocks = Tiles(tiles.bands, tiles.q_tokens, tiles.k_tokens)
    check(both(BY_NAME["reference"], tensors, blocks, call), whole, 1e-13)
    assert len(blocks.memo("reference", lambda: None)) >= len(tiles.memo("reference", lambda: None))


@given(tiles=tiles_strategy(), sizes=st.sampled_from([(8, 8), (6, 3), (3, 6)]), groups=st.sampled_from([1, 2, 4]))
@DRAWN
def test_cpu_kernel_agrees_with_the_reference_on_any_bands(tiles, sizes, groups):
    call = call_for(*sizes)
    tensors = draw(tiles, call, groups=groups)
    check(both(BY_NAME["cpu"], tensors, tiles, call), both(BY_NAME["reference"], tensors, tiles, call), 1e-12)


@pytest.mark.any_cpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@named
def test_cpu_kernel_agrees_with_the_reference_in_every_type(dtype, tiles):
    exact, call = call_for(16), call_for(16, dtype=dtype)
    tensors = [x.to(dtype) for x in draw(tiles, exact)]
    expected = both(BY_NAME["reference"], [x.double() for x in tensors], tiles, exact)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    check(both(BY_NAME["cpu"], tensors, tiles, call), expected, tolerance)


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_parts_of_short_types_are_added_up_before_they_are_rounded(name):
    # Sums over 40 parts cancel here and there, where what each part was rounded by does not.
    assert BY_NAME[name].unrounded_partials
    tiles = tiles_of([(5 * n, 5 * n + 5, 0, 8, -UNBOUNDED, UNBOUNDED) for n in range(40)], 200, 8)
    exact, call = call_for(16), call_for(16, dtype=torch.bfloat16)
    tensors = [x.bfloat16() for x in draw(tiles, exact)]
    wide = [x.double() for x in tensors]
    out, lse = forward(BY_NAME["reference"], *wide[:3], tiles, exact)
    out = out.bfloat16()
    q, k, v, dout = wide
    expected = backward(BY_NAME["reference"], dout, q, k, v, out.double(), lse, tiles, exact)
    q, k, v, dout = tensors
    actual = backward(BY_NAME[name], dout, q, k, v, out, lse.float(), tiles, call)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=2**-8, atol=1e-4)


class EmulatedFlash(SegmentedAttention):
    """flash-attn's variable-length operator, with its habit of taking some limits for none, over the oracle."""

    name = package = "emulated"

    def refusal(self, call):
        return None

    def segment_tiles(self, segments):
        queries, keys = segments.queries, segments.keys
        assert queries.offsets.dtype == torch.int32
        left, right = (-1 if limit >= keys.longest else limit for limit in segments.window)
        if left >= 0 > right:
            right = keys.longest
        if right >= 0 > left:
            left = keys.longest
        bands = []
        for (q0, q1), (k0, k1) in zip(*(x.offsets.unfold(0, 2, 1).tolist() for x in (queries, keys)), strict=True):
            corner = k1 - q1
            bands.append(
                (q0, q1, k0, k1, -UNBOUNDED if left < 0 else corner - left, UNBOUNDED if right < 0 else corner + right)
            )
        seen = visible(Tiles(np.array(bands), *(np.arange(int(x.offsets[-1])) for x in (queries, keys))))
        assert seen.any(1).all()  # flash-attn answers 0 and inf for a query that sees nothing
        return tiles_of(bands, *seen.shape)

    def attend(self, q, k, v, segments, call):
        assert q.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        return forward(BY_NAME["reference"], q, k, v, self.segment_tiles(segments), call)

    def attend_backward(self, dout, q, k, v, out, lse, segments, call):
        assert lse.is_contiguous()
        tiles = self.segment_tiles(segments)
        return backward(BY_NAME["reference"], dout, q, k, v, out, lse.to(q.dtype), tiles, call)


@pytest.mark.parametrize(("sizes", "padded"), [((8, 8), 8), ((20, 12), 24), ((12, 64), 64), ((64, 65), 72)])
def test_heads_are_padded_to_the_operators_next_size(sizes, padded):
    assert EmulatedFlash().head_sizes(call_for(*sizes)) == (padded, padded)


@given(tiles=tiles_strategy(), sizes=st.sampled_from([(8, 8), (6, 3), (3, 12)]))
@DRAWN
def test_segment_calls_see_what_the_bands_see(tiles, sizes):
    call = call_for(*sizes)
    tensors = draw(tiles, call, heads=2, groups=1)
    emulated, expected = (both(kernel, tensors, tiles, call) for kernel in (EmulatedFlash(), BY_NAME["reference"]))
    for a, b, tolerance in zip(emulated, expected, (1e-12, 1e-12, 1e-5, 1e-5, 1e-5), strict=True):
        assert torch.allclose(a, b, atol=tolerance, rtol=0)  # lse goes into the operator in fp32


@pytest.mark.parametrize(
    ("mask", "window"),
    [(Mask.causal, (-1, 0)), (Mask.full, (-1, -1)), (lambda p: Mask.window(p, 7, 0), (7, 0))],
    ids=["causal", "full", "window"],
)
def test_self_attention_over_documents_is_one_call_on_rows_where_they_lie(mask, window):
    (call,) = segment_calls(mask(Packing([30, 1, 5, 9])).bands)
    assert call.window == window
    for axis in (call.queries, call.keys):
        assert axis.rows.tolist() == list(range(45))
        assert axis.offsets.tolist() == [0, 30, 31, 36, 45]
        assert len(axis.rounds) == 1


def test_a_window_cut_in_pieces_is_one_call():
    pieces, _ = band.cut(
        Mask.window(Packing([90, 20]), 7).bands, np.array([0, 33, 61]), np.array([33, 61, 110]), queries=True
    )
    (call,) = segment_calls(pieces)
    assert call.window == (7, 0)
    assert len(call.queries.rounds) == 1
    assert len(call.keys.rounds) > 1  # a piece's first queries see the last keys of the piece before


@pytest.mark.parametrize("name", ["cpu", "reference", "emulated"])
@named
def test_rows_that_no_band_touches_are_not_read(name, tiles):
    kernel = BY_NAME.get(name, EmulatedFlash())
    call = call_for(dtype=torch.float32)
    tensors = draw(tiles, call, dtype=torch.float32)
    expected = both(kernel, tensors, tiles, call)
    seen = visible(tiles)
    for tensor, untouched in zip(tensors, (~seen.any(1), ~seen.any(0), ~seen.any(0), ~seen.any(1)), strict=True):
        tensor[untouched] = torch.nan
    for a, b in zip(both(kernel, tensors, tiles, call), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", ["cpu", "reference"])
@named
def test_strides_and_other_heads_change_no_bit(name, tiles):
    call = call_for(12, dtype=torch.float32)
    tensors = draw(tiles, call, 6, 3, dtype=torch.float32)
    expected = both(BY_NAME[name], tensors, tiles, call)
    strided = [torch.full((x.shape[0], x.shape[1], 37), torch.nan)[..., 1:13] for x in tensors]
    for target, x in zip(strided, tensors, strict=True):
        target.copy_(x)
    for a, b in zip(both(BY_NAME[name], strided, tiles, call), expected, strict=True):
        assert torch.equal(a, b)
    heads = [x[:, n : 2 * n] for x, n in zip(tensors, (2, 1, 1, 2), strict=True)]
    some = [x.movedim(0, 1)[n : 2 * n].movedim(1, 0) for x, n in zip(expected[2:], (2, 1, 1), strict=True)]
    some = [expected[0][:, 2:4], expected[1][2:4], *some]
    for a, b in zip(both(BY_NAME[name], heads, tiles, call), some, strict=True):
        assert torch.equal(a, b)


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("mask", [Mask.causal, lambda p: Mask.window(p, 70)], ids=["causal", "window"])
def test_a_document_changes_no_bit_of_another(name, mask):
    packing = Packing([50, 201, 3])
    tiles, call = tiles_of_mask(mask(packing)), call_for(16, dtype=torch.float32)
    tensors = draw(tiles, call, dtype=torch.float32)
    expected = both(BY_NAME[name], tensors, tiles, call)
    for tensor in tensors:
        tensor[50:251] *= 1.5
    for a, b in zip(both(BY_NAME[name], tensors, tiles, call), expected, strict=True):
        rows = 1 if a.ndim == 2 else 0
        for first, last in ((0, 50), (251, 254)):
            assert torch.equal(a.narrow(rows, first, last - first), b.narrow(rows, first, last - first))


@pytest.mark.parametrize(
    ("name", "call", "says"),
    [
        ("cpu", call_for(device="cuda"), "cuda"), ("cpu", call_for(scale=0.0), "above 0"),
        ("cpu", call_for(softcap=5.0), "soft cap"), ("cpu", call_for(dropout=0.1), "dropout"),
        ("cpu", call_for(dtype=torch.float8_e5m2), "float8"), ("varlen", call_for(), "CUDA"),
        ("varlen", call_for(device="cuda"), "float64"),
        ("varlen", call_for(device="cuda", dtype=torch.bfloat16, head_dim=264), "256"),
        ("varlen", call_for(device="cuda", dtype=torch.bfloat16, value_head_dim=512), "512"),
        ("varlen", call_for(device="cuda", dtype=torch.bfloat16, scale=-1.0), "above 0"),
        ("varlen", call_for(device="cuda", dtype=torch.bfloat16, softcap=1.0), "soft cap"),
        ("varlen", call_for(device="cuda", dtype=torch.bfloat16, dropout=0.5), "dropout"),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_what_a_kernel_cannot_run(name, call, says):
    with pytest.raises(ArgumentError, match=says) as error:
        choose_kernel(KERNELS, name, call)
    assert error.value.argument == "kernel"
    assert "use " in str(error.value)
    assert error.value.allowed.startswith("auto or ")
    assert name not in error.value.allowed.split(" or ")
    for other in error.value.allowed.split(" or ")[1:]:
        choose_kernel(KERNELS, other, call)


ON_CUDA = call_for(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "says"), [("flash_attn", "pip install"), ("flash_attn_3", "build it"), ("flash_attn_4", "pip install")]
)
def test_rejects_flash_attn_where_it_is_not_installed(name, says, monkeypatch):
    module = "megatron_cp.softmax.kernels.flash_attn"
    monkeypatch.setattr(f"{module}.installed_version", lambda package: None)
    monkeypatch.setattr(f"{module}_4.installed_version", lambda package: None)
    monkeypatch.setattr(f"{module}.find_spec", lambda package: None)
    rejects(f"not installed.*{says}", choose_kernel, KERNELS, name, ON_CUDA)


class OtherVersion:
    """A module of other functions."""

    _flash_attn_fwd = _flash_attn_bwd = staticmethod(lambda q, k, v: None)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "cannot be imported: ModuleNotFoundError"),
        (OtherVersion, "of a version without .*deterministic.*pip install"),
    ],
    ids=["broken", "of another version"],
)
def test_rejects_a_flash_attn_4_that_is_broken_or_another(module, says, monkeypatch):
    monkeypatch.setattr("megatron_cp.softmax.kernels.flash_attn_4.installed_version", lambda package: (4, 0))
    monkeypatch.setattr("megatron_cp.softmax.kernels.flash_attn_4.import_failure", import_failure.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    rejects(says, choose_kernel, KERNELS, "flash_attn_4", ON_CUDA)


def test_rejects_varlen_while_torchs_flash_attention_is_another(monkeypatch):
    monkeypatch.setattr("megatron_cp.softmax.kernels.varlen.current_flash_attention_impl", lambda: "FA4")
    rejects("FA4 is active; use flash_attn_4, or call restore", choose_kernel, KERNELS, "varlen", ON_CUDA)


def test_auto_takes_the_fastest_that_can_and_says_why():
    assert choose_kernel(KERNELS, "auto", call_for()).name == "cpu"
    assert choose_kernel(KERNELS, "auto", call_for(softcap=1.0)).name == "reference"
    has_varlen = varlen_operators() is not None  # not before torch 2.11
    assert has_varlen == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11))
    with nullcontext() if has_varlen else pytest.warns(UserWarning, match="reference, not on varlen .needs operators"):
        fastest = choose_kernel(KERNELS, "auto", ON_CUDA)
    assert fastest.name == ("varlen" if has_varlen else "reference")
    with pytest.warns(UserWarning, match="reference, not on varlen .*float64"):
        assert choose_kernel(KERNELS, "auto", call_for(device="cuda")).name == "reference"
    with pytest.raises(ArgumentError, match="auto or varlen or flash_attn or flash_attn_3 or flash_attn_4 or flex"):
        choose_kernel(KERNELS, "flash", call_for())
