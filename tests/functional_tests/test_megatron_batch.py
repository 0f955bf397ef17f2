"""Tests of a microbatch's cost on the host in a Megatron model, and of refusals while ranks build or run one."""

import copy
import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.testing.counters import Counters
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

pytest.importorskip("megatron.core")

LAYERS = 4
MICROBATCHES = ((24, 12, 96, 36), (12, 60), (36, 24, 12))


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(observe, 2, kind="processes", timeout=limit(200))


def observe(group):
    tiny.start(cp=2)
    return {
        "plans": {how: count_plans(how) for how in ("planned", "megatron", "unpacked")},
        "phases": {case: count_phases(*case) for case in PHASES},
        "syncs": {kind: count_syncs(kind) for kind in ATTENTIVE},
        "stock syncs": {kind: count_syncs(kind, stock_rotary=True) for kind in ATTENTIVE},
        "work": {what: count_work(what) for what in RECOMPUTED},
        "side by side": side_by_side(),
        "trees": {kind: trees_and_documents(kind) for kind in TREES},
        "ahead": mtp_of_megatrons_builder(),
        "refusals": {name: refusal(attempt) for name, attempt in ATTEMPTS.items()},
    }


def two_of_each(**changes):
    return tiny.build("hybrid", pattern="GG**", **changes)


TREES = ("hybrid_both", "mla")


def trees_and_documents(kind):
    """The loss and the worst error of a gradient of sequences with common beginnings, and their loss as documents."""
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.loss import forward_step
    from megatron_cp.megatron.modules import slots_of

    group, random = parallel_state.get_context_parallel_group(), torch.Generator().manual_seed(3)
    prompt, call, *ends = (torch.randint(tiny.VOCABULARY, (size,), generator=random) for size in (40, 21, 9, 30, 4, 17))
    given = [torch.cat([prompt, ends[0]]), *(torch.cat([prompt, call, end]) for end in ends[1:3]), ends[3], prompt]
    results = []
    for packing in (Packing.from_sequences(given), Packing([len(each) for each in given])):
        model = tiny.build(kind, calculate_per_token_loss=True)
        tokens = torch.cat(given) if packing.branches is None else torch.from_numpy(packing.tokens.copy())
        batch = shard_batch(tokens, Layout.balanced(packing, 2), group, slots=slots_of(model))
        losses, loss_of = forward_step(iter([batch]), model)
        total, count, _ = loss_of(losses)
        total.backward()
        sums = torch.stack([total.detach(), count.float()])
        dist.all_reduce(sums, group=group)
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
        results.append((sums.tolist(), gradients))
    (found, of_trees), (expected, of_documents) = results
    largest = max(float(each.abs().max()) for each in of_documents.values())
    error = max(float((of_trees[name] - each).abs().max()) for name, each in of_documents.items()) / largest
    return found, expected, error


def test_sequences_with_common_beginnings_train_as_documents_do(ranks):
    for rank in ranks:
        for kind, ((loss, count), (expected, expected_count), error) in rank["trees"].items():
            assert count == expected_count == 257, kind
            assert abs(loss - expected) < 1e-5 * expected, kind
            assert error < 1e-5, kind


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
        for index, lengths in enumerate(((36, 36),) * 3 if how == "unpacked" else MICROBATCHES):
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
        assert rank["plans"][how] == [ONE_PLAN_EACH] * 3


def test_unpacked_batches_are_planned_once_whatever_their_parameters_say_of_lengths(ranks):
    each_layer = {name: LAYERS if name.startswith("Batch") else LAYERS // 2 for name in ONE_PLAN_EACH}
    for rank in ranks:
        assert rank["plans"]["unpacked"] == [each_layer, {}, {}]
    for rank in ranks:
        without, with_them = rank["side by side"]
        assert without == with_them


def side_by_side():
    """Losses of two sequences without parameters, and with those that Megatron's multimodal models give."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = two_of_each()
    batch = tiny.shards(model, (36, 36), "zigzag", 0, "unpacked")
    ends = torch.tensor([0, 36, 72], dtype=torch.int32)
    params = PackedSeqParams("sbhd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=36, max_seqlen_kv=36)
    with torch.no_grad():
        return [forward(model, dataclasses.replace(batch, packed_seq_params=each)).item() for each in (None, params)]


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
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    changes = full if recompute else {}
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
        assert rank["phases"][kind, recompute] == [1, 1, 1]


ATTENTIVE = ("hybrid", "gpt", "mla")


def count_syncs(kind, stock_rotary=False):
    """Counts waits in the first forward and backward of a microbatch, so that nothing is kept from another."""
    from megatron.core.transformer import attention as megatron_attention
    from megatron.core.transformer import multi_latent_attention as megatron_mla

    from megatron_cp.megatron.layers import multi_latent_attention
    from megatron_cp.megatron.layers.attention import SelfAttention

    forwards, backwards = Counters(), Counters()
    with pytest.MonkeyPatch.context() as patch:
        if stock_rotary:
            patch.setattr(SelfAttention, "forward", megatron_attention.SelfAttention.forward)
            patch.setattr(multi_latent_attention, "PlannedRotary", lambda embedding, config: embedding)
            own, method = multi_latent_attention.MLASelfAttention, "get_query_key_value_tensors"
            patch.setattr(own, method, getattr(megatron_mla.MLASelfAttention, method))
        model = two_of_each() if kind == "hybrid" else tiny.build(kind)
        batch = tiny.shards(model, MICROBATCHES[0], "zigzag", 0)
        with forwards:
            loss = forward(model, batch)
        with backwards:
            loss.backward()
    return dict(forwards.host_syncs), dict(backwards.host_syncs)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_nothing_in_a_model_makes_the_host_wait(ranks, kind):
    for rank in ranks:
        assert rank["syncs"][kind] == ({}, {})
        stock, _ = rank["stock syncs"][kind]  # two attention layers, each of which turns queries and keys
        assert stock["tolist"] == 4
        assert stock["_local_scalar_dense"] >= 4


def count_work(recompute):
    """Counts calls of the attention and of the norm, and collectives, in a microbatch's forward and backward."""
    from megatron_cp.megatron.layers.attention import CoreAttention
    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet

    changes = {"recompute_granularity": "selective", "recompute_modules": [recompute]} if recompute else {}
    if recompute == "full":
        changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # GPTModel: Megatron's configuration allows gdn_norm_out there only.
    model = tiny.build("gpt_gdn", **changes)
    batch = tiny.shards(model, MICROBATCHES[0], "zigzag", 0)
    found, calls, counters = [], [], Counters()
    tiny.watch(model, counters)

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


def run_unaligned():
    model = tiny.build("hybrid", cp_packed_order="document")
    forward(model, tiny.shards(model, (24, 10, 12), "zigzag", 0, "megatron"))


def run_megatrons(kind, how, **changes):
    """Megatron's own batch, through a model whose configuration does not say what was cut."""
    model = tiny.build(kind, **changes)
    forward(model, tiny.shards(model, (23, 41, 8) if how == "pack" else (24, 12), "zigzag", 0, how))


def run_mean_of_means(kind):
    """Runs a loss that does not declare its normalisation: it is the mean of all ranks."""
    model = tiny.build(kind, calculate_per_token_loss=False)
    forward(model, tiny.shards(model, (24, 12), "zigzag", 0))


def run_unaligned_in_fp8(kind, recipe):
    """13 rows on each of two ranks."""
    model = tiny.build(kind, fp8="hybrid", fp8_recipe=recipe, linear_num_value_heads=16)
    forward(model, tiny.shards(model, (12, 14), "zigzag", 0))


def run_other_rows(kind, more, **changes):
    """Parameters of fewer or more tokens than the rows."""
    model = tiny.build(kind, cp_packed_order="document", **changes)
    batch = tiny.shards(model, (24, 12), "zigzag", 0, "megatron")
    params = tiny.shards(model, (24, 12 + more), "zigzag", 0, "megatron").packed_seq_params
    forward(model, dataclasses.replace(batch, packed_seq_params=params))


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


UNTOLD = ("gpt", "hybrid", "hybrid_mamba", "mla")
OTHER_ROWS = {
    "gpt, 4 fewer": (("gpt", -4), {}), "gdn, 4 fewer": (("hybrid", -4), {}), "gdn, 4 more": (("hybrid", 4), {}),
    "mamba, 4 more": (("hybrid_mamba", 4), {}), "mla, 4 fewer": (("mla", -4), {}),
    "redistributed, 4 fewer": (("hybrid", -4), {"linear_cp_mode": "redistribute"}),
}  # fmt: skip
ATTEMPTS = {
    "no scheme": lambda: tiny.build("gpt", cp_comm_type="tiles"),
    "no scheme in one layer": lambda: tiny.build("gpt", cp_comm_type=["a2a", "tiles"]),
    "p2p of a linear layer": lambda: tiny.build("gpt_gdn", cp_comm_type=["p2p", "p2p"]),
    "a product of 2": lambda: tiny.build("gpt", cp_comm_type="a2a+p2p"),
    "sparse": lambda: tiny.build("hybrid", pattern="GD-"),
    "mtp of Megatron's batch": partial(run_mtp, "megatron"),
    "mtp of rows": partial(run_mtp, "unpacked"),
    "mtp of Megatron's layers": partial(run_mtp, "planned", own_layers=False),
    "unaligned": run_unaligned,
    **{f"{how} of {kind}": partial(run_megatrons, kind, how) for kind in UNTOLD for how in ("megatron", "pack")},
    **{name: partial(run_other_rows, *arguments, **changes) for name, (arguments, changes) in OTHER_ROWS.items()},
    **{f"a mean of means in {kind}": partial(run_mean_of_means, kind) for kind in UNTOLD},
    "a mean of means by Megatron": partial(
        run_megatrons, "gpt", "pack", cp_packed_order="pack", calculate_per_token_loss=False
    ),
    "rows for FP8": partial(run_unaligned_in_fp8, "gpt", "delayed"),
    "rows for MXFP8": partial(run_unaligned_in_fp8, "hybrid", "mxfp8"),
    "stages of one length": lambda: tiny.build("hybrid", pipeline_model_parallel_size=2, pipeline_dtype=torch.float32),
    "two packed rows": run_two_packed_rows,
    "bias": lambda: run_with(attention_bias=torch.zeros(1)),
    "other mask": run_other_mask,
    "l2norm": build_without_l2norm,
    "activation": lambda: tiny.build("hybrid", activation_func=torch.nn.functional.gelu),
}


def test_megatrons_builder_gives_multi_token_prediction_our_layers(ranks):
    for rank in ranks:
        loss, ours = rank["ahead"]
        assert 0 < loss < float("inf")
        assert ours == {"MultiTokenPredictionLayer": 2, "CoreAttention": 4, "TopKRouter": 4}


def assert_refused(ranks, name, *words):
    for rank in ranks:
        message = rank["refusals"][name]
        assert all(word in message for word in words), message


REFUSED = {
    "no scheme": ("--cp-comm-type", "'tiles'", "Did you mean tiled?"),
    "no scheme in one layer": ("--cp-comm-type", "'tiles'", "Did you mean tiled?"),
    "p2p of a linear layer": ("--cp-comm-type", "'p2p'", "a2a or auto", "--linear-cp-mode"),
    "a product of 2": ("--cp-comm-type", "'a2a+p2p'", "2 has no other divisor"),
    "sparse": ("--multi-latent-attention", "got False", "an indexer"),
    "mtp of Megatron's batch": ("packed_seq_params", "one of shard_batch's", "megatron_cp.megatron.batch.shard_batch"),
    "mtp of rows": ("packed_seq_params", "one of shard_batch's", "megatron_cp.megatron.batch.shard_batch"),
    "mtp of Megatron's layers": ("mtp_block_spec", "megatron_cp.megatron.specs.gpt_mtp_block_spec"),
    "unaligned": ("packed_seq_params", "[10]", "multiples of 4", "shard_batch"),
    "stages of one length": ("variable_seq_lengths: got False", "TransformerConfig"),
    "two packed rows": ("--micro-batch-size", "got 2", "1 for packed batches"),
    "bias": ("--attention-bias", "None"),
    "other mask": ("--attn-mask-type", "no_mask"),
    "activation": ("--activation-func", "gelu", "silu"),
    "l2norm": ("--use-qk-l2norm", "got False", "allowed: True"),
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_rejects(ranks, attempt):
    assert_refused(ranks, attempt, *REFUSED[attempt])


@pytest.mark.parametrize("kind", UNTOLD)
@pytest.mark.parametrize("how", ["megatron", "pack"])
def test_rejects_megatrons_packs_where_nobody_says_what_was_cut(ranks, how, kind):
    assert_refused(ranks, f"{how} of {kind}", "--cp-packed-order", "got None", "document or pack", "--sft")


@pytest.mark.parametrize("case", OTHER_ROWS)
def test_rejects_documents_of_other_rows_by_megatrons_name(ranks, case):
    total = 32 if "fewer" in case else 40
    assert_refused(ranks, case, "packed_seq_params: got", f"cu_seqlens up to {total}, {total // 2} rows", "18 on this")


@pytest.mark.parametrize("attempt", [f"in {kind}" for kind in UNTOLD] + ["by Megatron"])
def test_rejects_a_loss_that_is_a_mean_of_means(ranks, attempt):
    name = f"a mean of means {attempt}"
    assert_refused(ranks, name, "--calculate-per-token-loss: got False", "megatron_cp.megatron.loss", "loss_of")


@pytest.mark.parametrize(("attempt", "multiple"), [("rows for FP8", 16), ("rows for MXFP8", 32)])
def test_rejects_rows_that_quantized_products_cannot_take(ranks, attempt, multiple):
    assert_refused(
        ranks, attempt, "--fp8-format: got 'hybrid'", f"a multiple of {multiple} rows on every rank, not 13",
        "layout_options",
    )  # fmt: skip
