"""Packs on the host: from Megatron's samples, and over tensor-parallel ranks."""

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing

pytest.importorskip("megatron.core")

from megatron_cp.megatron.pack import Pack, broadcast_pack
from tests.limits import limit
from tests.refusals import rejects

PAD = 99


def sample(batch=1):
    """Conversations of 3 and 4 tokens and five of filling, as `SFTDataset` and a data loader give them."""
    return {
        "tokens": torch.tensor([[1, 2, 3, 4, 5, 6, 7, *[PAD] * 5]] * batch),
        "labels": torch.tensor([[2, 3, -100, 5, 6, 7, *[PAD] * 6]] * batch),
        "loss_mask": torch.tensor([[0.0, 1, 0, 0, 1, 1, *[0] * 6]] * batch),
        "cu_seqlens": torch.tensor([[0, 3, 12, *[12] * 10]] * batch, dtype=torch.int32),
    }


def test_a_sample_of_megatrons_becomes_a_pack_without_its_filling():
    for given in (sample(), {name: tensor[0] for name, tensor in sample().items()}):
        pack = Pack.from_megatron(given, PAD)
        assert pack.packing == Packing([3, 4])
        assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert pack.labels.tolist() == [2, 3, -100, 5, 6, 7, PAD]
        assert pack.loss_mask.tolist() == [0, 1, 0, 0, 1, 1, 0]
    assert Pack.from_megatron(sample()).packing == Packing([3, 9])


def test_rejects_samples_of_two_packs_and_offsets_beyond_them():
    rejects("micro_batch_size: got 2; allowed: 1", Pack.from_megatron, sample(2), PAD)
    without = {name: tensor for name, tensor in sample().items() if name != "cu_seqlens"}
    rejects("sample: got 'no cu_seqlens'; allowed: a sample of a packed dataset. .*--sft", Pack.from_megatron, without)
    for offsets in ([0, 13], [0, 9, 5, 12], [3, 12], [0.0, 12.0]):
        rejects("cu_seqlens: got", Pack.from_megatron, {**sample(), "cu_seqlens": torch.tensor([offsets])})


def broadcast(group, packs):
    return [broadcast_pack(pack if group.rank == 0 else None, group.group) for pack in packs]


def test_every_rank_gets_the_first_ones_pack():
    lengths, tokens = Packing([2, 0, 3]), torch.arange(5)
    packs = [
        Pack(lengths, tokens),
        Pack(lengths, tokens, tokens - 1, torch.tensor([0.1, 0, 1, 2, -0.5])),
        Pack(lengths, tokens, None, torch.ones(5)),
        Pack(Packing.tree([2, 0, 3], [-1, 0, 0], [1, 2, 1]), tokens),
    ]
    for received in run_ranks(broadcast, 2, packs, kind="processes", timeout=limit(60)):
        for ours, theirs in zip(received, packs, strict=True):
            assert ours.packing == theirs.packing
            for name in ("tokens", "labels", "loss_mask"):
                a, b = getattr(ours, name), getattr(theirs, name)
                assert (a is None and b is None) or torch.equal(a, b)


def nothing(group):
    broadcast_pack(None, group.group)


def test_rejects_a_first_rank_without_a_pack():
    rejects("pack: got None", run_ranks, nothing, 1, kind="processes", timeout=limit(60))
