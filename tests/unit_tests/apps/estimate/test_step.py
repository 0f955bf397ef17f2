"""A whole model's step: its parts add up, memory and flags follow the choice, and what cannot be is refused."""

import dataclasses
import itertools

import pytest

from megatron_cp.apps.estimate.answer import _beside
from megatron_cp.apps.estimate.job import SHARDINGS, Job
from megatron_cp.apps.estimate.mixers import AttentionMixer
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import predict_step, scheme_of
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import priced
from tests.refusals import rejects

H100, TINY, LLAMA = machine("h100"), read_model("tiny"), read_model("llama3-8b")
PACKING = Packing([5000, 1, 3000, 187])
THREE = Layout.zigzag(PACKING, 3)


def step(model=TINY, cp=4, name="zigzag", **change):
    layout = getattr(Layout, name)(PACKING, cp)
    return predict_step(model, layout, Job(cp, name, **change), H100, H100.topology(cp))


def test_a_step_is_the_sum_of_its_layers():
    found = step(LLAMA)
    ((plan, count),) = found.plans
    assert count == 32
    assert found.parts["linear"] == 0
    own = sum(found.parts[name] for name in ("attention", "imbalance", "exposed"))
    assert own == pytest.approx(32 * priced(plan, H100).total)
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second_per_gpu == pytest.approx(8188 / found.step * 1e3 / 4)


def test_operations_are_those_of_weights_and_visible_pairs():
    pairs = sum(n * (n + 1) // 2 for n in PACKING.lengths.tolist())
    weights = 6 * LLAMA.active_parameters * PACKING.total
    assert step(LLAMA).operations == pytest.approx(weights + 32 * 32 * 12 * 128 * pairs)
    assert 0 < step(LLAMA).mfu(H100.hardware.matrix_peak) < 1


def test_products_take_their_time_on_the_rank_that_holds_most():
    fast = dataclasses.replace(H100, hardware=dataclasses.replace(H100.hardware, matrix=2 * H100.hardware.matrix))
    layout = Layout.contiguous(PACKING, 4)
    choice = Job(4, "contiguous")
    one, two = (predict_step(LLAMA, layout, choice, on, on.topology(4)).parts["products"] for on in (H100, fast))
    assert one == pytest.approx(2 * two)
    full = predict_step(LLAMA, layout, dataclasses.replace(choice, recompute="full"), H100, H100.topology(4))
    head = 6 * LLAMA.vocab_size * LLAMA.hidden_size * 2047 / H100.hardware.matrix * 1e3  # is not computed again
    assert full.parts["products"] == pytest.approx((one - head) * 4 / 3 + head, rel=0.02)


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h", "kimi-linear", "tiny"])
def test_hybrid_models_have_both_kinds(name):
    model = read_model(name)
    found = step(model)
    kinds = {plan.kind: count for plan, count in found.plans}
    assert "attention" in kinds
    assert len(kinds) >= 2
    assert found.parts["linear"] > 0
    assert found.parts["attention"] > 0
    assert "--linear-cp-mode" in found.flags
    assert "--cp-comm-type" in found.flags


def test_sharding_divides_what_it_says():
    memories = {sharding: step(LLAMA, sharding=sharding).memory for sharding in SHARDINGS}
    count = LLAMA.parameters
    assert memories["none"].parameters == 2 * count
    assert memories["none"].optimizer == 16 * count
    assert memories["zero1"].optimizer == 4 * count + 12 * count / 4
    block, words = max(map(sum, LLAMA.block_parameters)), 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert memories["zero3"].parameters == 2 * (2 * block + words)  # whole: one that is computed, and the next
    assert step(LLAMA, sharding="zero3", replicas=2).memory.optimizer == 16 * count / 8 + 4 * block
    # Megatron's table for its distributed optimizer: 6 + 12 / d with sums in fp32, 4 + 16 / d with sums in bf16.
    narrow = step(LLAMA, sharding="zero1", gradients="bf16").memory
    assert narrow.parameters + narrow.optimizer == 4 * count + 16 * count / 4
    assert memories["none"].activations == memories["zero1"].activations
    # PyTorch's loss holds one more copy of the logits in fp32 than Megatron's, which computes in place.
    logits = 4 * 2047 * LLAMA.vocab_size
    assert memories["zero3"].activations - memories["zero1"].activations == pytest.approx(logits, rel=0.02)


def one(model=LLAMA, tokens=8192, **change):
    return predict_step(model, Layout.contiguous(Packing([tokens]), 1), Job(1, "contiguous", **change), H100, ONE)


ONE = H100.topology(1)


def test_traffic_is_what_operations_beside_products_read_and_write():
    """A block's norms, sums, rotary positions and activation take 2 bytes a feature; the head adds its loss."""
    h, rotated, i, words = 4096, 4096 + 1024, 14336, LLAMA.vocab_size
    forward = 2 * 2 * h + 2 * 3 * h + 2 * rotated + 3 * i
    backward = 2 * 3 * h + 2 * 3 * h + 2 * rotated + 5 * i
    layers = 32 * 2 * (forward + backward) * 8192
    head = (2 * 5 * h + 32 * words) * 8192
    added = 2 * 4 * sum(map(sum, LLAMA.block_parameters))  # sums of gradients
    expected = (layers + head + added) / (2 * H100.hardware.copy)
    assert one(recompute="none").parts["traffic"] == pytest.approx(1e3 * expected)
    less = added / 2 / (2 * H100.hardware.copy)
    assert one(recompute="none", gradients="bf16").parts["traffic"] == pytest.approx(1e3 * (expected - less))


def test_layers_are_computed_again_as_far_as_was_asked():
    none, some, full = one(recompute="none"), one(recompute="full", recompute_layers=8), one(recompute="full")
    for part in ("attention", "products", "traffic"):
        assert some.parts[part] - none.parts[part] == pytest.approx((full.parts[part] - none.parts[part]) / 4)
    assert none.memory.activations > some.memory.activations > full.memory.activations
    assert "--recompute-method block --recompute-num-layers 8" in some.flags
    ops = one(recompute="ops", sharding="zero3")
    plain = one(recompute="none", sharding="zero3")
    again = 4096 * (1024 + 4096 + 14336) / LLAMA.active_parameters
    assert ops.parts["products"] / plain.parts["products"] == pytest.approx(1 + 32 * again / 3, rel=0.03)
    assert ops.parts["attention"] == plain.parts["attention"]
    assert ops.memory.activations < plain.memory.activations


def test_memory_is_near_what_torchtitan_measured():
    """Its benchmarks of December 2024: Llama-3.1-8B over 8 GPUs, 77.0 GiB and, with cp 4, 84.0 GiB."""
    found = one(tokens=16384, replicas=8, sharding="zero3", recompute="ops").memory.total
    assert found / 2**30 == pytest.approx(77.0, rel=0.1)
    job = Job(4, "zigzag", "p2p", recompute="full", replicas=2, sharding="zero3", precision="fp8")
    layout = Layout.zigzag(Packing([131072]), 4)
    found = predict_step(LLAMA, layout, job, H100, job.topology(H100)).memory.total
    assert found / 2**30 == pytest.approx(84.0, rel=0.15)


def test_the_next_job_is_compared_by_its_time():
    fast = one()
    slow = dataclasses.replace(
        fast, job=Job(1, "zigzag"), parts={name: 2 * value for name, value in fast.parts.items()}
    )
    assert "zigzag, which takes 100.0% longer: " in _beside([fast, slow], fast, float("inf"))
    assert _beside([fast, slow], slow, float("inf")) == ""


def test_flags_name_what_was_chosen():
    none, selective, full = (step(LLAMA, recompute=how) for how in ("none", "selective", "full"))
    assert none.memory.activations > selective.memory.activations > 3 * full.memory.activations
    assert full.step > selective.step > none.step
    assert "--recompute-granularity full" in full.flags
    assert "recompute" not in none.flags
    found = step(LLAMA, 4, scheme="a2a+exact", ulysses_degree=2)
    assert "--cp-comm-type a2a+exact --hierarchical-context-parallel-sizes 2 2" in found.flags


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("sharding", lambda: step(sharding="zero2")), ("replicas", lambda: step(replicas=0)),
        ("scheme", lambda: step(scheme="nothing")), ("recompute", lambda: step(recompute="some")),
        ("layout", lambda: predict_step(TINY, THREE, Job(4, "zigzag"), H100, H100.topology(4))),
        ("topology", lambda: predict_step(TINY, THREE, Job(3, "zigzag"), H100, H100.topology(4))),
    ],
)  # fmt: skip
def test_rejects(argument, call):
    rejects(f"^{argument}: got ", call)


def test_sharded_weights_count_where_nothing_hides_them():
    """8 bytes a parameter enter each host over its eight cards; a step of few tokens does not hide that."""
    model, layout = read_model("llama3-70b"), Layout.contiguous(Packing([1024]), 16)
    choice = Job(16, "contiguous", sharding="zero3")
    found = predict_step(model, layout, choice, H100, H100.topology(16))
    wire = 8 * model.parameters / 2 / (8 * H100.between.bandwidth) * 1e3
    assert 0.8 * wire < found.parts["shards"] < wire
    assert step(LLAMA, cp=1).parts["shards"] == 0


def test_experts_have_the_rows_that_are_routed_to_them():
    """Few rows an expert fill no tile; with many all tiles are full."""
    model = read_model("qwen3-next")

    def experts(tokens):
        layout = Layout.contiguous(Packing([tokens]), 1)
        found = predict_step(model, layout, Job(1, "contiguous"), H100, H100.topology(1))
        return found.parts["experts"] / tokens

    assert experts(8192) > 1.2 * experts(1 << 18)
    assert experts(512) > 5 * experts(1 << 18)


def test_layers_choose_for_the_hosts_that_there_are():
    near, far = (
        predict_step(LLAMA, Layout.zigzag(PACKING, 8), Job(8, "zigzag"), H100, H100.topology(8, hosts))
        for hosts in (1, 8)
    )
    assert far.step > near.step
    fixed = min(
        predict_step(LLAMA, Layout.zigzag(PACKING, 8), Job(8, "zigzag", scheme), H100, H100.topology(8, 8)).step
        for scheme in ("a2a", "p2p", "exact", "all_gather")
    )
    assert far.step <= 1.05 * fixed


def alternating(*mixers, blocks=4):
    return ModelSpec("mixed", 4096, 1000, True, tuple(Block(mixers[n % len(mixers)], MLP(1024)) for n in range(blocks)))


FULL = AttentionMixer(32, 8, 128, 128)
WINDOW = AttentionMixer(32, 8, 128, 128, mask="window:127,0")
LONG = Packing([40000, 30000, 20000, 30000, 11072])


def stepped(model, cp=16, name="zigzag", packing=LONG, **change):
    layout = getattr(Layout, name)(packing, cp)
    return predict_step(model, layout, Job(cp, name, **change), H100, H100.topology(cp))


def given(flags, name):
    """The values of a flag; none if it is left out."""
    words = flags.split()
    after = words[words.index(name) + 1 :] if name in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), after))


def test_layers_whose_best_schemes_differ_have_a_value_each():
    found = stepped(alternating(WINDOW, FULL))
    (windowed, _), (full, _) = found.plans
    assert windowed.scheme != full.scheme
    assert given(found.flags, "--cp-comm-type") == [windowed.scheme, full.scheme] * 2
    assert given(stepped(alternating(FULL)).flags, "--cp-comm-type") == [full.scheme]


def test_linear_layers_and_mlps_of_a_list_have_the_value_that_they_take():
    linear = read_model("qwen3-next").blocks[0].mixer
    model = alternating(linear, WINDOW, None, FULL)
    found = stepped(model)
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
    found = stepped(model, cp, name)
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
    alone = [stepped(alternating(mixer), 32) for mixer in (few, many)]
    degrees = {plan.ulysses_degree for found in alone for plan, _ in found.plans}
    assert len(degrees) == 2
    both = stepped(alternating(few, many), 32)
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
    found = stepped(TINY)
    plans = [plan for plan, _ in found.plans if plan.attend is None]
    other = dataclasses.replace(plans[0], scheme="headwise", redistribution=None)
    assert scheme_of(plans[0]) != "headwise"
    choice = dataclasses.replace(found.job, hardware="h200")
    mixed = dataclasses.replace(found, plans=(*found.plans, (other, 1)), job=choice)
    assert given(found.flags, "--linear-cp-mode") == [scheme_of(plans[0])]
    assert given(mixed.flags, "--linear-cp-mode") == ["auto"]
    assert given(mixed.flags, "--cp-hardware") == ["h200"]


def test_recomputing_a_layer_waits_for_its_transfers_again():
    layout, topology = Layout.zigzag(PACKING, 8), H100.topology(8, 8)
    once, again = (
        predict_step(LLAMA, layout, Job(8, "zigzag", "a2a", recompute=how), H100, topology) for how in ("none", "full")
    )
    assert again.parts["exposed"] > 1.3 * once.parts["exposed"]
    assert once.parts["attention"] < again.parts["attention"] < 1.6 * once.parts["attention"]
