"""Tests of a microbatch's cost on the host in a Megatron model, and of refusals while ranks build or run one."""

import copy
import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.testing.counters import Counters
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

pytest.importorskip("megatron.core")

LAYERS = 4
MICROBATCHES = ((24, 12, 96, 36), (12, 60))
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(observe, 2, kind="processes", timeout=limit(200))


def observe(group):
    tiny.start(cp=2)
    return {
        "plans": {how: count_plans(how) for how in ("planned", "megatron", "unpacked")},
        "phases": {case: count_phases(*case) for case in PHASES},
        "syncs": {kind: count_syncs(kind) for kind in ATTENTIVE},
        "work": {what: count_work(what) for what in RECOMPUTED},
        "trees": {kind: trees_and_documents(kind) for kind in TREES},
        "ahead": mtp_of_megatrons_builder(),
        "refusals": {name: refusal(attempt) for name, (attempt, *_) in REFUSED.items()},
    }


def two_of_each(**changes):
    return tiny.build("hybrid", pattern="GG**", **changes)


TREES = ("hybrid_both", "mla")


def trees_and_documents(kind):
    """Steps of sequences with common beginnings, which are computed once, and of the same as documents."""
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    group, random = parallel_state.get_context_parallel_group(), torch.Generator().manual_seed(3)
    prompt, call, *ends = (torch.randint(tiny.VOCABULARY, (size,), generator=random) for size in (40, 21, 9, 30, 4, 17))
    given = [torch.cat([prompt, ends[0]]), *(torch.cat([prompt, call, end]) for end in ends[1:3]), ends[3], prompt]
    steps = []
    for packing in (Packing.from_sequences(given), Packing([len(each) for each in given])):
        config = tiny.configure(kind, params_dtype=torch.float64)
        model = tiny.build(kind, config=config)
        tokens = torch.cat(given) if packing.branches is None else torch.from_numpy(packing.tokens.copy())
        batch = shard_batch(tokens, Layout.balanced(packing, 2), group, slots=slots_of(model))
        steps.append(tiny.train([model], config, [batch]))
    return steps


@pytest.mark.parametrize("kind", TREES)
def test_sequences_with_common_beginnings_train_as_documents_do(ranks, kind):
    trees, documents = ranks[0]["trees"][kind]
    assert trees.tokens == documents.tokens == 257
    assert abs(trees.loss - documents.loss) < 1e-5 * documents.loss
    assert max(tiny.distances(trees.gradients, documents.gradients).values()) < 1e-5


def forward(model, batch):
    losses = model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed_seq_params
    )
    return (losses * batch.loss_mask).sum()


def mtp_of_megatrons_builder():
    """The loss of a GPTModel with experts and multi-token prediction, built by Megatron, and classes that are in it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron_cp.megatron.specs import gpt_layer_spec

    experts = {"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    config = tiny.configure("gpt", mtp_num_layers=2, transformer_impl="local", **experts)
    whole = GPTModelConfig(
        transformer=config, transformer_layer_spec=gpt_layer_spec, vocab_size=tiny.VOCABULARY, seq_length=256
    )
    model = GPTModelBuilder(whole).build_model(ProcessGroupCollection.use_mpu_process_groups())
    loss = forward(model, tiny.shards(model, (7, 1, 30), "zigzag", 0))
    loss.backward()
    ours = Counter(type(module).__name__ for module in model.modules() if "megatron_cp" in type(module).__module__)
    return loss.item(), {name: ours[name] for name in ("MultiTokenPredictionLayer", "CoreAttention", "TopKRouter")}


def count_plans(how):
    """BatchPlans made and slots planned in each of some microbatches, with two layers of each kind."""
    from megatron_cp.planner.batch import AttentionSpec, BatchPlan, LinearSpec

    model, counts = two_of_each(cp_packed_order="document"), []
    with pytest.MonkeyPatch.context() as patch:
        for target, method in ((BatchPlan, "__init__"), (AttentionSpec, "plan"), (LinearSpec, "plan")):
            patch.setattr(target, method, counting(getattr(target, method), counts))
        for index, lengths in enumerate(((36, 36),) * 2 if how == "unpacked" else MICROBATCHES):
            counts.append(Counter())
            forward(model, tiny.shards(model, lengths, "zigzag", index, how)).backward()
    return [dict(count) for count in counts]


def counting(function, counts):
    name = function.__qualname__

    def counted(*args, **kwargs):
        counts[-1][name] += 1
        return function(*args, **kwargs)

    return counted


ONE_PLAN_EACH = {"BatchPlan.__init__": 1, "AttentionSpec.plan": 1, "LinearSpec.plan": 1}


@pytest.mark.parametrize("how", ["planned", "megatron"])
def test_a_microbatch_is_planned_once_for_all_layers(ranks, how):
    for rank in ranks:
        assert rank["plans"][how] == [ONE_PLAN_EACH] * 2


def test_unpacked_batches_of_one_length_are_planned_once(ranks):
    each_layer = {name: LAYERS if name.startswith("Batch") else LAYERS // 2 for name in ONE_PLAN_EACH}
    for rank in ranks:
        assert rank["plans"]["unpacked"] == [each_layer, {}]


class RowsOfTables(TorchDispatchMode):
    """Counts gathers of rows from `[length, 1, 1, d]` tables, which rotary phases alone are."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("index_select", "index", "gather", "embedding") and args[0].dim() == 4:
            self.count += tuple(args[0].shape[1:3]) == (1, 1)
        return func(*args, **(kwargs or {}))


PHASES = [(kind, recompute) for kind in ("hybrid", "mla") for recompute in (None, "full")]


def count_phases(kind, recompute):
    changes = FULL if recompute else {}
    model, counts = two_of_each(**changes) if kind == "hybrid" else tiny.build(kind, **changes), []
    for index, lengths in enumerate(MICROBATCHES):
        batch = tiny.shards(model, lengths, "zigzag", index)
        with torch.autograd.set_multithreading_enabled(False), RowsOfTables() as gathers:
            forward(model, batch).backward()
        counts.append(gathers.count)
    return counts


@pytest.mark.parametrize(("kind", "recompute"), PHASES)
def test_rotary_phases_are_gathered_once_a_microbatch(ranks, kind, recompute):
    for rank in ranks:
        assert rank["phases"][kind, recompute] == [1, 1]


ATTENTIVE = ("hybrid", "gpt", "mla")


def count_syncs(kind):
    """Counts waits in the first forward and backward of a microbatch, so that nothing is kept from another."""
    model, counters = two_of_each() if kind == "hybrid" else tiny.build(kind), Counters()
    batch = tiny.shards(model, MICROBATCHES[0], "zigzag", 0)
    with counters:
        forward(model, batch).backward()
    return dict(counters.host_syncs)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_nothing_in_a_model_makes_the_host_wait(ranks, kind):
    for rank in ranks:
        assert rank["syncs"][kind] == {}


def count_work(recompute):
    """Counts calls of the attention and of the norm, and collectives, in a microbatch's forward and backward."""
    from megatron_cp.megatron.layers.attention import CoreAttention
    from megatron_cp.megatron.layers.base import ContextParallelModule
    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet

    changes = {"recompute_granularity": "selective", "recompute_modules": [recompute]} if recompute else {}
    changes = FULL if recompute == "full" else changes
    # GPTModel: Megatron's configuration allows gdn_norm_out there only.
    model = tiny.build("gpt_gdn", **changes)
    batch = tiny.shards(model, MICROBATCHES[0], "zigzag", 0)
    found, calls, counters = [], [], Counters()
    for module in model.modules():
        if isinstance(module, ContextParallelModule):
            module.ranks = counters.watch(module.ranks)

    def measured(step, *arguments):
        calls.append(Counter())
        before = counters.collectives
        with counters:
            result = step(*arguments)
        found.append((calls[-1]["CoreAttention.forward"], calls[-1][NORM], counters.collectives - before))
        return result

    with pytest.MonkeyPatch.context() as patch:
        for target, method in ((CoreAttention, "forward"), (GatedDeltaNet, "_apply_gated_norm")):
            patch.setattr(target, method, counting(getattr(target, method), calls))
        loss = measured(forward, model, batch)
        measured(loss.backward)
    return found


NORM = "_GDNBase._apply_gated_norm"
RECOMPUTED = {None: (0, 0, 0), "core_attn": (1, 0, 2), "gdn_norm_out": (0, 1, 0), "full": (1, 1, 4)}


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_backward_repeats_what_it_is_told_to_and_no_other_collective(ranks, recompute):
    """The model has one layer of each kind, with two collectives in each direction."""
    attention, norm, collectives = RECOMPUTED[recompute]
    for rank in ranks:
        (plain, _), found = rank["work"][None], rank["work"][recompute]
        assert found == [plain, (attention, norm, 4 + collectives)]
        assert plain[:2] == (1, 1)
        assert plain[2] >= 4  # the loss has some, too


def refusal(attempt):
    try:
        attempt()
    except ArgumentError as error:
        return str(error)
    return "nothing was refused"


def run_megatrons(kind, how, **changes):
    """Megatron's own batch, through a model whose configuration does not say what was cut."""
    model = tiny.build(kind, **changes)
    forward(model, tiny.shards(model, (23, 41, 8) if how == "pack" else (24, 12), "zigzag", 0, how))


def run_mean_of_means(kind):
    """Runs a loss that does not declare its normalisation: it is the mean of all ranks."""
    model = tiny.build(kind, calculate_per_token_loss=False)
    forward(model, tiny.shards(model, (24, 12), "zigzag", 0))


def run_unaligned_in_fp8():
    """13 rows on each of two ranks."""
    model = tiny.build("hybrid", fp8="hybrid", fp8_recipe="mxfp8", linear_num_value_heads=16)
    forward(model, tiny.shards(model, (12, 14), "zigzag", 0))


def run_other_rows(kind, more, **changes):
    """Parameters of fewer or more tokens than the rows."""
    model = tiny.build(kind, cp_packed_order="document", **changes)
    batch = tiny.shards(model, (24, 12), "zigzag", 0, "megatron")
    params = tiny.shards(model, (24, 12 + more), "zigzag", 0, "megatron").packed_seq_params
    forward(model, dataclasses.replace(batch, packed_seq_params=params))


def run_unknown_axes():
    """Positions of three axes with parameters that do not know of them."""
    model = tiny.build("gpt", arguments={"position_embedding_type": "mrope"}, mrope_section=[2, 1, 1])
    batch = tiny.shards(model, (24, 12), "zigzag", 0)
    forward(model, dataclasses.replace(batch, position_ids=batch.position_ids.expand(3, 1, -1)))


def run_two_packed_rows():
    model = two_of_each()
    gdn = next(module for module in model.modules() if type(module).__name__ == "GatedDeltaNet")
    batch = tiny.shards(model, (24, 12), "zigzag", 0)
    gdn(torch.zeros(18, 2, 32), packed_seq_params=batch.packed_seq_params)


def run_mtp(how, own_layers=True):
    """Multi-token prediction of a batch that does not know what is ahead, or by layers that do not ask it."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from megatron_cp.megatron import specs

    config = tiny.configure("gpt", mtp_num_layers=1, cp_packed_order="document")
    block = specs.gpt_mtp_block_spec(config)
    if not own_layers:
        block.layer_specs[0].module = MultiTokenPredictionLayer
    model = tiny.build("gpt", config=config, arguments={"mtp_block_spec": block})
    forward(model, tiny.shards(model, (24, 24) if how == "unpacked" else (24, 12), "zigzag", 0, how))


def run_with(**extra):
    model = tiny.build("gpt")
    core = next(module for module in model.modules() if type(module).__name__ == "CoreAttention")
    batch = tiny.shards(model, (24, 12), "zigzag", 0)
    q, kv = torch.zeros(18, 4, 8), torch.zeros(18, 2, 8)
    core(q, kv, kv, None, packed_seq_params=batch.packed_seq_params, **extra)


def run_other_mask():
    from megatron.core.transformer.enums import AttnMaskType

    run_with(attn_mask_type=AttnMaskType.no_mask)


def build_without_l2norm():
    from megatron_cp.megatron.specs import hybrid_stack_spec

    spec = copy.deepcopy(hybrid_stack_spec)
    spec.submodules.gdn_layer.submodules.self_attention.params = {"use_qk_l2norm": False}
    tiny.build("hybrid", spec=spec)


UNTOLD = ("gpt", "hybrid", "mla")
AHEAD = ("packed_seq_params", "one of shard_batch's", "megatron_cp.megatron.batch.shard_batch")
MEAN = ("--calculate-per-token-loss: got False", "megatron_cp.megatron.loss", "loss_of")
FEWER, MORE = (
    ("packed_seq_params: got", f"cu_seqlens up to {total}, {total // 2} rows", "18 on this") for total in (32, 40)
)
# By name: what is tried, and words of the refusal.
REFUSED = {
    "no scheme": (lambda: tiny.build("gpt", cp_comm_type=["a2a", "tiles"]),
                  "--cp-comm-type", "'tiles'", "Did you mean tiled?"),
    "p2p of a linear layer": (lambda: tiny.build("gpt_gdn", cp_comm_type=["p2p", "p2p"]),
                              "--cp-comm-type", "'p2p'", "a2a or auto", "--linear-cp-mode"),
    "mtp of Megatron's batch": (partial(run_mtp, "megatron"), *AHEAD),
    "mtp of rows": (partial(run_mtp, "unpacked"), *AHEAD),
    "mtp of Megatron's layers": (partial(run_mtp, "planned", own_layers=False),
                                 "mtp_block_spec", "megatron_cp.megatron.specs.gpt_mtp_block_spec"),
    **{f"a batch for {kind}, whose cut is not known": (
        partial(run_megatrons, kind, "megatron"), "--cp-packed-order", "got None", "document or pack", "--sft",
    ) for kind in UNTOLD},
    "gpt, 4 fewer": (partial(run_other_rows, "gpt", -4), *FEWER),
    "gdn, 4 more": (partial(run_other_rows, "hybrid", 4), *MORE),
    "mla, 4 fewer": (partial(run_other_rows, "mla", -4), *FEWER),
    "redistributed, 4 fewer": (partial(run_other_rows, "hybrid", -4, linear_cp_mode="redistribute"), *FEWER),
    **{f"a mean of means in {kind}": (partial(run_mean_of_means, kind), *MEAN) for kind in UNTOLD},
    "a mean of means by Megatron": (
        partial(run_megatrons, "gpt", "pack", cp_packed_order="pack", calculate_per_token_loss=False), *MEAN,
    ),
    "rows for MXFP8": (run_unaligned_in_fp8, "--fp8-format: got 'hybrid'",
                       "a multiple of 32 rows on every rank, not 13", "layout_options"),
    "positions of axes": (run_unknown_axes, "--mrope-section", "position_ids"),
    "two packed rows": (run_two_packed_rows, "--micro-batch-size", "got 2", "1 for packed batches"),
    "bias": (lambda: run_with(attention_bias=torch.zeros(1)), "--attention-bias", "None"),
    "other mask": (run_other_mask, "--attn-mask-type", "no_mask"),
    "l2norm": (build_without_l2norm, "--use-qk-l2norm", "got False", "allowed: True"),
    "activation": (lambda: tiny.build("hybrid", activation_func=torch.nn.functional.gelu),
                   "--activation-func", "gelu", "silu"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rejects(ranks, name):
    for rank in ranks:
        message = rank["refusals"][name]
        assert all(word in message for word in REFUSED[name][1:]), message


def test_megatrons_builder_gives_multi_token_prediction_our_layers(ranks):
    for rank in ranks:
        loss, ours = rank["ahead"]
        assert 0 < loss < float("inf")
        assert ours == {"MultiTokenPredictionLayer": 2, "CoreAttention": 4, "TopKRouter": 4}
