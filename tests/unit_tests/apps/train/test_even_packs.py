"""The packs of a training run, and which of its options decide them."""

from collections import Counter

import numpy as np
import pytest

from megatron_cp.data import GlobalBatch, TokenCorpus

pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")

from megatron_cp.apps.train.loop import packed_stream
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.pack_cost import pack_cost_of
from megatron_cp.planner.predict import machine

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(4, 1.5, 400).astype(int) + 1, 2000)
CORPUS = TokenCorpus("drawn", 256, np.zeros(LENGTHS.sum(), np.uint8), np.append(0, np.cumsum(LENGTHS)))
BATCH = {"seq_length": 2048, "global_batch_size": 8, "seed": 3}


def lengths_of(stream):
    return [tuple(stream.pack(index)[0].lengths.tolist()) for index in range(8)]


def test_packs_are_best_fits_unless_told():
    stream = packed_stream(TrainingOptions(**BATCH), CORPUS, replicas=2)
    assert (stream.even, stream.budget, stream.seed) == (None, 2048, 3)


def test_even_packs_share_a_step_by_what_the_models_flops_take():
    options = TrainingOptions(**BATCH, cp_even_packs=True, hybrid_layer_pattern="G*-")
    stream = packed_stream(options, CORPUS, replicas=2)
    flops = pack_cost_of(options, "G*-", options.padded_vocab_size(256))
    cost = flops.at_rates_of(machine().hardware, options.kv_channels)
    assert cost.pair / cost.token > 1.5 * flops.pair / flops.token
    assert stream.even == GlobalBatch(ranks=2, microbatches=4, cost=cost)
    plain = packed_stream(TrainingOptions(**BATCH), CORPUS, replicas=2)
    even_lengths, plain_lengths = lengths_of(stream), lengths_of(plain)
    assert even_lengths != plain_lengths
    assert Counter(sum(even_lengths, ())) == Counter(sum(plain_lengths, ()))
    even, given = (stream.even.step_time([cost.of(pack) for pack in packs]) for packs in (even_lengths, plain_lengths))
    assert even < given


def test_packs_are_for_the_named_machine_and_not_for_the_context_parallel_size():
    costs = [
        packed_stream(TrainingOptions(**BATCH, cp_even_packs=True, cp_hardware=name), CORPUS, replicas=2).even.cost
        for name in (None, "h100", "a100")
    ]
    assert costs[0] == costs[1] != costs[2]
    # Or a run would not be the same on one rank and on two.
    packs = [
        lengths_of(packed_stream(TrainingOptions(**BATCH, cp_even_packs=True, context_parallel_size=size), CORPUS, 2))
        for size in (1, 2)
    ]
    assert packs[0] == packs[1]
