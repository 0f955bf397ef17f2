"""Dynamic context parallelism: the flags, and the schedule beside Megatron's own on the same lengths."""

import argparse
import types
from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core")

from benchmarks.group_schedule import CORPORA, costs, drawn, of_megatron
from megatron_cp.data import group_microbatches
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Packing
from megatron_cp.megatron import dynamic
from megatron_cp.megatron.config import add_arguments
from megatron_cp.megatron.pack import Pack

HELD = 4096  # tokens of a rank at a time


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("corpus", CORPORA)
def test_the_busiest_rank_has_no_more_to_do_than_by_megatrons_scheduler(ranks, corpus):
    """And fewer microbatches; all ranks wait in each."""
    cost, exchange = costs(ranks)
    for seed in range(3):
        lengths = [max(1, length // 8) for length in drawn(corpus, ranks * HELD * 16, seed)]
        theirs = of_megatron(lengths, ranks, cost, exchange, HELD)
        assert not isinstance(theirs, str)
        options = {"ranks": ranks, "tokens_per_rank": HELD, "cost": cost, "exchange": exchange}
        found = group_microbatches(lengths, **options, microbatches=4, barrier=True)
        assert found.seconds <= 1.03 * theirs[0]
        assert theirs[1] > 4


@pytest.mark.parametrize("name", ["--hybrid-context-parallel", "--dynamic-context-parallel"])
def test_flags_set_our_option_and_none_of_megatrons(name):
    parser = argparse.ArgumentParser()
    megatrons = parser.add_argument_group("of Megatron")
    for flag in ("--hybrid-context-parallel", "--dynamic-context-parallel"):
        megatrons.add_argument(flag, action="store_true")
    args = add_arguments(parser).parse_args([name, "--min-dynamic-context-parallel-size", "3"])
    assert (args.cp_dynamic, args.min_dynamic_context_parallel_size) == (True, 3)
    assert (args.hybrid_context_parallel, args.dynamic_context_parallel) == (False, False)


@pytest.mark.parametrize("changes", [{"tokens": 4}, {"labels": 6}, {"loss_mask": 4}])
def test_rows_of_another_number_are_refused_after_all_ranks_have_heard_of_them(changes, monkeypatch):
    heard = []

    def gather(said, own, group):
        heard.append(own)
        said[0] = own

    group = types.SimpleNamespace(size=1, rank=0)
    monkeypatch.setattr(dynamic, "_everyone", lambda groups: (group, None))
    monkeypatch.setattr(dynamic.parallel_state, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(dynamic.dist, "all_gather_object", gather)
    pack = Pack(Packing([2, 3]), torch.arange(5))
    wrong = replace(pack, **{name: torch.ones(number, dtype=torch.int64) for name, number in changes.items()})
    args = types.SimpleNamespace(seq_length=8)
    ((name, number),) = changes.items()
    with pytest.raises(ArgumentError, match=f"{name}: got {number}; allowed: 5"):
        dynamic._read([pack, wrong], None, args)
    assert len(heard) == 1
