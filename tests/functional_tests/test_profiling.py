"""Tests of a profiler's ranges in Megatron models: our layers' steps with the layers' numbers, also in backward."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_cp.executor.launch import run_ranks
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

pytest.importorskip("megatron.core")

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def seen(group):
    """Counts each name in one microbatch of a hybrid model, without recomputation and with it."""
    torch.set_num_threads(1)
    tiny.start(cp=group.size)
    found = []
    for recompute in ({}, RECOMPUTE):
        config = tiny.configure("hybrid_both", linear_cp_mode="redistribute", cp_comm_type="p2p", **recompute)
        model = tiny.build("hybrid_both", config=config)
        batches = tiny.microbatches(model, "ragged")[:1]
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as record:
            tiny.train([model], config, batches)
        names = [event.name for event in record.events() if event.name.startswith("cp ")]
        found.append({name: names.count(name) for name in dict.fromkeys(names)})
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(seen, 2, kind="processes", timeout=limit(120))


LOCAL = ("conv", "gates", "rule")
MOVED = (
    "halo send",
    "halo wait",
    *(f"scan {step}" for step in ("leave", "send", "meanwhile", "wait", "fold", "finish")),
)


def expected(recomputations):
    """Mamba is layer 1, Gated DeltaNet 2, attention 3; the run of linear layers is moved where it begins and ends."""
    steps = {f"chunkwise {step} layer {layer}" for step in (*LOCAL, *MOVED) for layer in (1, 2)}
    steps |= {f"{step} layer {layer}" for step in ("relayout", "relayout wait") for layer in (1, 2)}
    stages = [f"stage {stage}/2" for stage in (1, 2)]
    steps |= {f"p2p {step} {stage} layer 3" for step in ("send k,v", "attend") for stage in stages}
    steps.add("p2p wait k,v stage 2/2 layer 3")
    backward = {step.replace(" layer", " backward layer") for step in steps}
    backward |= {f"p2p {step} backward layer 3" for step in ("send dk,dv stage 1/2", "send dk,dv stage 2/2")}
    own = {"cp p2p wait dk,dv stage 2/2 backward layer 3": 2}  # of the block of keys before, and of own keys
    return {f"cp {step}": 1 + recomputations for step in steps} | {f"cp {step}": 1 for step in backward} | own


def test_steps_have_the_numbers_of_their_layers_recomputed_or_not(ranks):
    assert ranks[0][0] == expected(recomputations=0)
    assert ranks[0][1] == expected(recomputations=1)
    assert ranks[1] == ranks[0]
