"""Our exchange of heads against megatron-core's own functions, bit for bit.

Megatron's permutation and its exchange of packed batches are `_build_thd_cp_a2a_perm`, `tensor_a2a_cp2hp` and
`tensor_a2a_hp2cp` of its Gated DeltaNet, called as `GatedDeltaNet.forward` does and, as before that, for every document
and section. They take documents whose lengths are multiples of 2 * cp.
"""

from functools import partial

import pytest

pytest.importorskip("megatron.core")
import torch

from benchmarks.peers.head_exchange import StockExchange
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.executor.head_exchange import to_heads, to_tokens
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.limits import limit

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 4, 8, 3
# In units of 2 * cp tokens: unequal documents, one alone of the shortest length, many.
PACKS = ((1, 5, 2, 8), (1,), (1, 1, 2, 1, 3, 1, 1, 7))
DTYPES = (torch.bfloat16, torch.float32)


def sections(cp_size):
    """q, k, v, gate, beta and alpha of Gated DeltaNet, in Megatron's order."""
    parts = partition_heads(VALUE_HEADS, KEY_HEADS, cp_size)
    return Sections((
        *(Section(name, KEY_HEADS, HEAD_DIM, parts.groups) for name in ("q", "k")),
        *(Section(name, VALUE_HEADS, HEAD_DIM, parts.heads) for name in ("v", "gate")),
        *(Section(name, VALUE_HEADS, 1, parts.heads) for name in ("beta", "alpha")),
    ))  # fmt: skip


def drawn(seed, *shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_gradient(function, tensor, gradient):
    leaf = tensor.clone().requires_grad_()
    out = function(leaf)
    (found,) = torch.autograd.grad(out, leaf, gradient)
    return out.detach(), found


def all_to_heads(exchange, group, local):
    return torch.cat([part.flatten(1) for part in to_heads(exchange, group, local[:, 0])], 1)[:, None]


def one_to_tokens(exchange, group, own):
    (local,) = to_tokens(exchange, group, own.view(len(own), -1, HEAD_DIM))
    return local.flatten(1)[:, None]


def compared(group, cp_size):
    """Returns, by pack and type, True if all of our results have the bits of Megatron's."""
    import torch.distributed as dist

    found = {}
    for pack in PACKS:
        packing = Packing([2 * cp_size * units for units in pack])
        layout, blocks = Layout.zigzag(packing, cp_size), sections(cp_size)
        widths = [block.width for block in blocks.blocks]
        stock = StockExchange(packing, widths, cp_size, dist.group.WORLD, torch.device("cpu"))
        heads = Sections((Section("out", VALUE_HEADS, HEAD_DIM, blocks.blocks[2].ranges),))
        for dtype in DTYPES:
            local = drawn(group.rank, packing.total // cp_size, 1, sum(widths), dtype=dtype)
            back = drawn(group.rank + 50, packing.total, 1, sum(widths) // cp_size, dtype=dtype)
            ours = partial(all_to_heads, Exchange(layout, blocks), group)
            ways = (ours, stock.to_heads, stock.to_heads_in_loops)
            into = [with_gradient(function, local, back) for function in ways]
            own = drawn(group.rank + 90, packing.total, 1, VALUE_HEADS // cp_size * HEAD_DIM, dtype=dtype)
            onward = drawn(group.rank + 140, packing.total // cp_size, 1, VALUE_HEADS * HEAD_DIM, dtype=dtype)
            ours = partial(one_to_tokens, Exchange(layout, heads), group)
            ways = (ours, stock.to_tokens, stock.to_tokens_in_loops)
            out = [with_gradient(function, own, onward) for function in ways]
            found[pack, dtype] = {
                (way, peer, what): torch.equal(results[0][number], results[place][number])
                for way, results in (("to heads", into), ("to tokens", out))
                for place, peer in ((1, "fused"), (2, "in loops"))
                for number, what in ((0, "forward"), (1, "gradient"))
            }
    return found


@pytest.mark.parametrize("cp_size", [2, 4])
def test_has_the_bits_of_megatrons_exchange(cp_size):
    for found in run_ranks(compared, cp_size, cp_size, kind="processes", timeout=limit(120)):
        assert len(found) == len(PACKS) * len(DTYPES)
        for case, results in found.items():
            assert len(results) == 8
            assert [name for name, is_equal in results.items() if not is_equal] == [], case
