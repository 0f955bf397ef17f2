"""All layers of a model in a job: parts add up, memory and flags follow the choice, and what cannot be is refused."""

import dataclasses
import itertools

import pytest

from megatron_cp.apps.estimate.job import SHARDINGS, Job
from megatron_cp.apps.estimate.levers import repeated_products, with_levers
from megatron_cp.apps.estimate.mixers import AttentionMixer
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.model_plan import plan_model
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import priced
from tests.refusals import rejects

H100, TINY, LLAMA, NEXT = machine("h100"), read_model("tiny"), read_model("llama3-8b"), read_model("qwen3-next")
MEGATRONS = dataclasses.replace(LLAMA, from_megatron=True)
PACKING = Packing([5000, 1, 3000, 187])
THREE = Layout.zigzag(PACKING, 3)


def planned(model=TINY, cp=4, name="zigzag", **change):
    job = Job(cp, name, **change)
    layout = getattr(Layout, name)(PACKING, cp, align=job.tp)
    return plan_model(model, layout, job, H100, job.topology(H100))


def test_the_time_is_that_of_all_layers():
    found = planned(LLAMA)
    ((plan, count),) = found.plans
    assert count == 32
    assert found.parts["linear"] == 0
    assert found.milliseconds == pytest.approx(32 * priced(plan, H100).total)
    assert found.milliseconds == pytest.approx(sum(found.parts.values()))


def test_sharding_divides_what_it_says():
    memories = {sharding: planned(LLAMA, sharding=sharding).memory for sharding in SHARDINGS}
    count = LLAMA.parameters
    assert memories["none"].parameters == 2 * count
    assert memories["none"].optimizer == 16 * count
    assert memories["zero1"].optimizer == 4 * count + 12 * count / 4
    block, words = max(map(sum, LLAMA.block_parameters)), 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert memories["zero3"].parameters == 2 * (2 * block + words)  # whole: one that is computed, and the next
    assert planned(LLAMA, sharding="zero3", replicas=2).memory.optimizer == 16 * count / 8 + 4 * block
    # Megatron's table for its distributed optimizer: 6 + 12 / d with sums in fp32, 4 + 16 / d with sums in bf16.
    narrow = planned(LLAMA, sharding="zero1", gradients="bf16").memory
    assert narrow.parameters + narrow.optimizer == 4 * count + 16 * count / 4
    assert memories["none"].activations == memories["zero1"].activations
    # PyTorch's loss holds one more copy of the logits in fp32 than Megatron's, which computes in place.
    logits = 4 * 2047 * LLAMA.vocab_size
    assert memories["zero3"].activations - memories["zero1"].activations == pytest.approx(logits, rel=0.02)


def one(model=LLAMA, tokens=8192, **change):
    return plan_model(model, Layout.contiguous(Packing([tokens]), 1), Job(1, "contiguous", **change), H100, ONE)


ONE = H100.topology(1)


def test_checkpoints_of_operations_save_less_and_compute_no_attention_again():
    ops, plain = (one(recompute=how, sharding="zero3") for how in ("ops", "none"))
    assert ops.parts["attention"] == plain.parts["attention"]
    assert ops.memory.activations < plain.memory.activations


def test_memory_is_near_what_torchtitan_measured():
    """Its benchmarks of December 2024: Llama-3.1-8B over 8 GPUs, 77.0 GiB and, with cp 4, 84.0 GiB."""
    found = one(tokens=16384, replicas=8, sharding="zero3", recompute="ops").memory
    assert found.total / 2**30 == pytest.approx(77.0, rel=0.1)
    assert found.fits(84 * 2**30)
    assert not found.fits(77 * 2**30)  # a tenth stays free
    job = Job(4, "zigzag", "p2p", recompute="full", replicas=2, sharding="zero3")
    layout = Layout.zigzag(Packing([131072]), 4)
    found = plan_model(LLAMA, layout, job, H100, job.topology(H100)).memory.total
    assert found / 2**30 == pytest.approx(84.0, rel=0.15)


TOKENS, WORDS, FEATURES = 8192, LLAMA.vocab_size, LLAMA.hidden_size


def test_logits_of_a_few_rows_save_no_probabilities_but_sum_the_weights_gradient():
    found = {rows: one(recompute="none", logit_rows=rows).memory for rows in (None, 1024, 4096, TOKENS)}
    saved = found[None].activations - TOKENS * (4 * FEATURES + (4 + 2) * WORDS)
    for rows, sums in ((1024, 4), (4096, 4), (TOKENS, 0)):  # bytes of a sum; one chunk needs none
        expected = saved + TOKENS * 6 * FEATURES + 12 * rows * WORDS + sums * WORDS * FEATURES
        assert found[rows].activations == pytest.approx(expected, rel=1e-9)
    halves = [one(recompute="none", logit_rows=1, tp=tp).memory.activations for tp in (1, 2)]
    assert halves[1] == pytest.approx(halves[0] / 2, rel=0.01)
    other = [planned(LLAMA, 1, pp=2, logit_rows=rows).memory.total for rows in (None, 1)]
    assert other[1] <= other[0]


FEW_WORDS = dataclasses.replace(LLAMA, vocab_size=1000)


def test_mlps_of_a_few_rows_save_their_input_and_sum_the_gradients_of_weights():
    given = {"recompute": "none", "logit_rows": 1}
    found = {rows: one(FEW_WORDS, mlp_rows=rows, **given).memory.activations for rows in (None, 256, 4096, TOKENS)}
    mlp = LLAMA.blocks[0].mlp
    weights, size, saved = mlp.weights(FEATURES), mlp.intermediate_size, 32 * TOKENS * 6 * mlp.intermediate_size
    # Gated: a row saves three intermediate sizes, and has two of gradients.
    assert found[None] - found[256] == saved + TOKENS * 4 * size - TOKENS * 2 * FEATURES - (2 + 4) * weights
    assert found[4096] - found[256] == 4096 * 10 * size - 2 * weights
    assert found[TOKENS] - found[4096] == 4096 * 10 * size - 4 * weights
    again = [one(FEW_WORDS, recompute="full", logit_rows=1, mlp_rows=rows).memory.activations for rows in (None, 256)]
    assert again[0] - again[1] == found[None] - found[256] - saved * 31 / 32  # of a layer, which is there once


def test_experts_that_run_on_a_few_rows_are_summed_on_the_ranks_that_have_them():
    few_words = dataclasses.replace(NEXT, vocab_size=1000)
    found = [
        one(few_words, recompute="none", logit_rows=1, mlp_rows=1, replicas=8, ep=ep).memory.activations
        for ep in (1, 8)
    ]
    experts = 512 * NEXT.blocks[0].mlp.expert(NEXT.hidden_size)
    assert found[0] - found[1] == pytest.approx((2 + 4) * experts * 7 / 8)


def test_inputs_on_the_host_leave_the_device():
    near, far = (one(recompute="full", logit_rows=1, saved_on_host=host).memory for host in (False, True))
    layer = TOKENS * 2 * FEATURES
    assert near.host == 0
    assert far.host == (32 + 1) * layer  # and the input of the last norm
    assert near.activations - far.activations == 30 * layer  # two are in flight
    assert far.total == far.parameters + far.optimizer + far.activations + far.buffers
    # The first of four stages, which holds four microbatches.
    assert one(FEW_WORDS, recompute="full", pp=4, logit_rows=1, saved_on_host=True).memory.host == 4 * 8 * layer


def test_levers_come_in_the_order_of_their_cost():
    def named(model=LLAMA, **given):
        return [name for name, _ in with_levers(model, Job(1, "contiguous", **given))]

    rows, mlps, full, host = "--logit-rows 1024", "--mlp-rows 1024", "--recompute full", "--saved-on-host"
    assert named() == ["as given", rows, mlps, full, host]
    assert named(logit_rows=8, recompute="full") == ["as given", mlps, host]
    assert named(mlp_rows=8, recompute="full", saved_on_host=True) == ["as given", rows]
    assert named(recompute="ops") == ["as given", rows, full, host]
    assert named(dataclasses.replace(LLAMA, blocks=(Block(FULL),))) == ["as given", rows, full, host]
    jobs = [job for _, job in with_levers(LLAMA, Job(1, "contiguous"))]
    layer, mlp, head = LLAMA.blocks[0].weights(FEATURES), LLAMA.blocks[0].mlp.weights(FEATURES), WORDS * FEATURES
    each = [repeated_products(LLAMA, job) * 3 * (32 * layer + head) for job in jobs]
    assert each == pytest.approx([0, 0, 32 * mlp, 32 * (layer + mlp), 32 * (layer + mlp)])
    assert named(MEGATRONS) == ["as given", rows, full, host]
    jobs = [job for _, job in with_levers(MEGATRONS, Job(1, "contiguous"))]
    each = [repeated_products(MEGATRONS, job) * 3 * (32 * layer + head) for job in jobs]
    assert each == pytest.approx([0, head, head + 32 * layer, head + 32 * layer])


def test_tensor_parallelism_divides_heads_and_memory():
    one, four = planned(LLAMA, 1, replicas=4), planned(LLAMA, 1, tp=4)
    assert four.job.gpus == one.job.gpus
    assert one.parts["attention"] / 4 <= four.parts["attention"] < one.parts["attention"] / 3
    assert four.memory.parameters == pytest.approx(one.memory.parameters / 4, rel=1e-4)
    assert one.memory.activations / 4 <= four.memory.activations < one.memory.activations / 3


def test_stages_hold_their_layers_and_the_microbatches_in_flight():
    """The first of four stages holds four microbatches of a quarter of the layers: as much as one of all layers."""
    flat, deep = (planned(LLAMA, 1, recompute="none", **sizes).memory for sizes in ({"replicas": 4}, {"pp": 4}))
    assert deep.parameters == pytest.approx(2 * (sum(map(sum, LLAMA.block_parameters)) / 4 + 128256 * 4096), rel=1e-6)
    assert 0.8 * flat.activations < deep.activations < flat.activations  # without the loss
    model = dataclasses.replace(LLAMA, blocks=LLAMA.blocks[:31])
    assert [len(Job(1, "contiguous", pp=4).layers_of(stage, 31)) for stage in range(4)] == [8, 8, 8, 7]
    for how in ("none", "selective", "full"):
        uneven, even = (planned(each, 1, pp=4, recompute=how).memory for each in (model, LLAMA))
        assert uneven.total <= even.total


def test_expert_parallelism_divides_experts_alone():
    alone, over = (planned(NEXT, 1, replicas=8, ep=ep).memory.parameters for ep in (1, 8))
    dense, routed = (sum(each) for each in zip(*NEXT.block_parameters, strict=True))
    assert alone - over == pytest.approx(2 * routed * 7 / 8)
    assert over > 2 * (dense + routed / 8)


def test_flags_name_what_was_chosen():
    none, selective, full = (planned(LLAMA, recompute=how) for how in ("none", "selective", "full"))
    assert none.memory.activations > selective.memory.activations > 3 * full.memory.activations
    assert full.milliseconds > selective.milliseconds == none.milliseconds
    found = planned(LLAMA, 4, scheme="a2a+exact", ulysses_degree=2)
    words = "--cp-comm-type a2a+exact --hierarchical-context-parallel-sizes 2 2"
    assert found.flags == f"--context-parallel-size 4 --cp-layout zigzag {words}"
    assert planned(LLAMA, logit_rows=64).flags.endswith(" --logit-rows 64")


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("sharding", lambda: planned(sharding="zero2")), ("replicas", lambda: planned(replicas=0)),
        ("scheme", lambda: planned(scheme="nothing")), ("recompute", lambda: planned(recompute="some")),
        ("layout", lambda: plan_model(TINY, THREE, Job(4, "zigzag"), H100, H100.topology(4))),
        ("topology", lambda: plan_model(TINY, THREE, Job(3, "zigzag"), H100, H100.topology(4))),
        ("tp", lambda: planned(LLAMA, 1, tp=3)),
        ("tp", lambda: planned(NEXT, 1, tp=4)),  # two key/value heads
        ("pp", lambda: planned(LLAMA, 1, pp=24)),  # two layers each leave none for the last ones
        ("ep", lambda: planned(LLAMA, 1, ep=2, replicas=2)),
        ("ep", lambda: planned(NEXT, 1, ep=3, replicas=3)),
        ("ep", lambda: planned(NEXT, 1, ep=8, replicas=4)),
        ("sharding", lambda: planned(LLAMA, 1, sharding="zero3", pp=2)),
        ("gradients", lambda: planned(LLAMA, 1, gradients="fp8")),
        ("recompute", lambda: planned(LLAMA, 1, recompute="ops")),
        ("recompute", lambda: planned(NEXT, 1, recompute="ops", sharding="zero3")),
        ("logit_rows", lambda: one(logit_rows=0)),
        ("mlp_rows", lambda: one(mlp_rows=0)),
        ("mlp_rows", lambda: one(mlp_rows=8, recompute="ops", sharding="zero3")),
        ("mlp_rows", lambda: one(MEGATRONS, mlp_rows=8)),
        ("saved_on_host", lambda: one(saved_on_host=True)),
        ("hosts", lambda: Job(2, "contiguous", tp=2).topology(H100, 2)),
    ],
)  # fmt: skip
def test_rejects(argument, call):
    rejects(f"^{argument}: got ", call)


def test_layers_choose_for_the_hosts_that_there_are():
    near, far = (
        plan_model(LLAMA, Layout.zigzag(PACKING, 8), Job(8, "zigzag"), H100, H100.topology(8, hosts))
        for hosts in (1, 8)
    )
    assert far.milliseconds > near.milliseconds
    fixed = min(
        plan_model(LLAMA, Layout.zigzag(PACKING, 8), Job(8, "zigzag", scheme), H100, H100.topology(8, 8)).milliseconds
        for scheme in ("a2a", "p2p", "exact", "all_gather")
    )
    assert far.milliseconds <= 1.05 * fixed


def alternating(*mixers, blocks=4):
    return ModelSpec("mixed", 4096, 1000, True, tuple(Block(mixers[n % len(mixers)], MLP(1024)) for n in range(blocks)))


FULL = AttentionMixer(32, 8, 128, 128)
WINDOW = AttentionMixer(32, 8, 128, 128, mask="window:127,0")
LONG = Packing([40000, 30000, 20000, 30000, 11072])


def over_long(model, cp=16, name="zigzag", packing=LONG, **change):
    layout = getattr(Layout, name)(packing, cp)
    return plan_model(model, layout, Job(cp, name, **change), H100, H100.topology(cp))


def given(flags, name):
    """The values of a flag; none if it is left out."""
    words = flags.split()
    after = words[words.index(name) + 1 :] if name in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), after))


def test_linear_layers_and_mlps_of_a_list_have_the_value_that_they_take():
    linear = read_model("qwen3-next").blocks[0].mixer
    model = alternating(linear, WINDOW, None, FULL)
    found = over_long(model)
    of = {plan.mask.describe(): plan.scheme for plan, _ in found.plans if plan.attend}
    windowed, full = list(of.values())
    assert windowed != full
    assert given(found.flags, "--cp-comm-type") == ["a2a", windowed, "a2a", full]


@pytest.mark.parametrize("cp", [4, 8, 16, 32])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced"])
@pytest.mark.few
def test_flags_ask_for_the_plans_that_were_priced(cp, name):
    """Megatron's layers derive from the flags a scheme each, one degree of products, one number of chunks."""
    model = alternating(WINDOW, FULL, AttentionMixer(64, 8, 64, 64))
    found = over_long(model, cp, name)
    schemes, degrees, chunks = (
        given(found.flags, f"--{flag}")
        for flag in ("cp-comm-type", "hierarchical-context-parallel-sizes", "cp-head-chunks")
    )
    layout = getattr(Layout, name)(LONG, cp)
    for number, (mixer, (plan, _)) in enumerate(zip([WINDOW, FULL, model.blocks[2].mixer], found.plans, strict=True)):
        way = SCHEMES[(schemes * 4)[number] if len(schemes) == 1 else schemes[number]]
        slot = dataclasses.replace(
            mixer.slot(), scheme=way.name, ulysses_degree=int(degrees[0]) if way.is_product and degrees else None,
            head_chunks=int(chunks[0]) if way.takes_chunks and chunks else None,
        )  # fmt: skip
        assert slot.plan(layout).describe() == plan.describe()
        assert slot.plan(layout).attend.head_chunks == plan.attend.head_chunks


def test_kinds_that_want_other_degrees_share_the_cheaper_one():
    """Four and sixteen key/value heads: each by itself takes a product of its own degree."""
    few, many = AttentionMixer(32, 4, 128, 128), AttentionMixer(16, 16, 128, 128)
    alone = [over_long(alternating(mixer), 32) for mixer in (few, many)]
    degrees = {plan.ulysses_degree for found in alone for plan, _ in found.plans}
    assert len(degrees) == 2
    both = over_long(alternating(few, many), 32)
    assert len({plan.ulysses_degree for plan, _ in both.plans}) == 1
    assert len(given(both.flags, "--hierarchical-context-parallel-sizes")) == 2
    slots = [mixer.slot() for mixer in (few, many)]
    layout = Layout.zigzag(LONG, 32)

    def total(degree):
        ways = zip(slots, both.plans, strict=True)
        plans = [
            dataclasses.replace(slot, scheme=plan.scheme, ulysses_degree=degree).plan(layout)
            for slot, (plan, _) in ways
        ]
        return sum(priced(plan, H100).total for plan in plans)

    taken = both.plans[0][0].ulysses_degree
    assert total(taken) == min(map(total, degrees))


def test_runs_that_want_other_modes_are_left_to_auto_on_the_machine_that_was_named():
    found = over_long(TINY)
    plans = [plan for plan, _ in found.plans if plan.attend is None]
    other = dataclasses.replace(plans[0], scheme="headwise", redistribution=None)
    assert plans[0].strategy != "headwise"
    choice = dataclasses.replace(found.job, hardware="h200")
    mixed = dataclasses.replace(found, plans=(*found.plans, (other, 1)), job=choice)
    assert given(found.flags, "--linear-cp-mode") == [plans[0].strategy]
    assert given(mixed.flags, "--linear-cp-mode") == ["auto"]
    assert given(mixed.flags, "--cp-hardware") == ["h200"]


def test_recomputing_a_layer_waits_for_its_transfers_again():
    layout, topology = Layout.zigzag(PACKING, 8), H100.topology(8, 8)
    once, again = (
        plan_model(LLAMA, layout, Job(8, "zigzag", "a2a", recompute=how), H100, topology) for how in ("none", "full")
    )
    assert again.parts["exposed"] > 1.3 * once.parts["exposed"]
    assert once.parts["attention"] < again.parts["attention"] < 1.6 * once.parts["attention"]
