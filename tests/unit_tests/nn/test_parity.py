"""Every layer over n ranks is the layer on one rank: outputs, and the gradients of hidden states and parameters."""

import copy
import warnings

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.layouts import layout_by_name
from tests.covering import covering

HIDDEN = 24
LENGTHS = {"ragged": [37, 1, 13, 0, 22], "fewer tokens than ranks": [1, 1]}
WIDE = {"dtype": torch.float64}
LAYERS = {
    "attention": lambda **how: cp.nn.Attention(HIDDEN, 6, 2, 8, **WIDE, **how),
    "attention, every option": lambda **how: cp.nn.Attention(
        HIDDEN, 6, 3, 8, qk_norm=True, bias=True, rotary_dim=4, rope_theta=500.0, mask="window:5,0", **WIDE, **how
    ),
    "gated delta net": lambda **how: cp.nn.GatedDeltaNet(HIDDEN, 6, 3, head_dim=4, value_head_dim=8, **WIDE, **how),
    "mamba2": lambda **how: cp.nn.Mamba2(HIDDEN, 6, head_dim=4, state=8, groups=2, **WIDE, **how),
    "kimi delta attention": lambda **how: cp.nn.KimiDeltaAttention(HIDDEN, 3, head_dim=8, **WIDE, **how),
}
# Sums run over other pieces where states are exchanged: as much as the operations' own parity allows.
CLOSE = 1e-12


def drawn(name, **how):
    """A layer none of whose parameters is at its initial zero or one."""
    torch.manual_seed(0)
    layer = LAYERS[name](**how)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def trained(layer, layout, hidden, gradient, group=None):
    """Output, and the gradients of hidden states and of each parameter, of this rank."""
    rank = 0 if group is None else group.rank
    tokens = torch.zeros(layout.packing.total, dtype=torch.int64)
    batch = cp.shard_batch(tokens, layout, group, slots=[layer.slot])
    local = layout.shard(hidden, rank).requires_grad_()
    out = layer(local, batch, group)
    assert torch.equal(out, layer(local, batch.plans, group))
    out.backward(layout.shard(gradient, rank))
    if group is not None:
        cp.reduce_gradients(layer, group)
    return out.detach(), local.grad, {name: each.grad for name, each in layer.named_parameters()}


def check(name, size, layout_name, lengths, **how):
    layer, packing = drawn(name, **how), cp.Packing(lengths)
    random = torch.Generator().manual_seed(1)
    hidden, gradient = (torch.randn(packing.total, HIDDEN, generator=random, **WIDE) for _ in range(2))
    expected = trained(copy.deepcopy(layer), cp.Layout.contiguous(packing, 1), hidden, gradient)
    layout = layout_by_name(layout_name, packing, size)
    found = run_ranks(lambda group: trained(copy.deepcopy(layer), layout, hidden, gradient, group), size)
    for place in (0, 1):
        assert off(layout.unshard([each[place] for each in found]), expected[place]) < CLOSE
    for _, _, gradients in found:
        for parameter, of_one in expected[2].items():
            assert off(gradients[parameter], of_one) < CLOSE, parameter


def off(found, expected):
    """The largest difference over the largest element."""
    return (found - expected).abs().max().item() / max(1.0, expected.abs().max().item())


CASES = covering((2, 3, 5), ("contiguous", "zigzag", "balanced"), ("a2a", "p2p", "exact", "all_gather"))


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*")
@pytest.mark.parametrize(("size", "layout", "scheme"), CASES)
def test_every_option_over_ranks_is_what_it_is_on_one(size, layout, scheme):
    """`tests/entries.csv` has the layers without them."""
    check("attention, every option", size, layout, LENGTHS["ragged"], scheme=scheme)


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.few
def test_ranks_without_tokens(name, number):
    is_softmax = name.startswith("attention")
    way = {"scheme": ("a2a", "p2p")[number]} if is_softmax else {"mode": ("headwise", "chunkwise")[number]}
    check(name, 5, "contiguous", LENGTHS["fewer tokens than ranks"], **way)


@pytest.mark.parametrize("name", LAYERS)
def test_documents_do_not_touch_and_pad_rows_change_nothing(name):
    # Also positions start anew in each.
    layer, packing = drawn(name), cp.Packing([5, 9])
    hidden = torch.randn(14, HIDDEN, **WIDE)
    together = layer(hidden, cp.BatchPlan(cp.Layout.contiguous(packing, 1)))
    for start, end in packing.spans():
        alone = cp.BatchPlan(cp.Layout.contiguous(cp.Packing([end - start]), 1))
        assert off(together[start:end], layer(hidden[start:end], alone)) < CLOSE
    layer, packing = drawn(name), cp.Packing([5, 6])
    hidden = torch.randn(11, HIDDEN, **WIDE)
    plain, padded = (cp.Layout.contiguous(packing, 1, align=align) for align in (1, 4))
    out = layer(padded.shard(hidden, 0), cp.BatchPlan(padded))
    assert out.shape == (12, HIDDEN)
    assert off(out[:11], layer(hidden, cp.BatchPlan(plain))) < CLOSE


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_start_anew(name):
    """A model that was made on meta is reset after `to_empty`: the same seed gives the same numbers."""
    layer = drawn(name).to("meta").to_empty(device="cpu")
    for number in (0, 0):
        torch.manual_seed(number)
        layer.reset_parameters()
    torch.manual_seed(0)
    again = copy.deepcopy(layer)
    again.reset_parameters()
    for parameter, other in zip(layer.parameters(), again.parameters(), strict=True):
        assert parameter.isfinite().all()
        assert torch.equal(parameter, other)
        assert parameter.abs().max() > 0 or parameter.ndim == 1


@pytest.mark.parametrize("name", ["attention", "mamba2", "kimi delta attention"])
def test_torch_compile_warns_of_no_cache(name):
    torch.compiler.reset()
    layer, layout = drawn(name), cp.Layout.contiguous(cp.Packing([3, 4]), 1)
    hidden = torch.randn(7, HIDDEN, dtype=torch.float64)
    plans = cp.BatchPlan(layout, [layer.slot])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = torch.compile(layer, backend="eager")(hidden, plans)
    assert torch.allclose(out, layer(hidden, plans))
    assert not [each for each in said if "cache" in str(each.message)]
