"""Tests of Megatron's features beside context parallelism: each model and kind of parallelism against one rank.

There losses of experts and of multi-token prediction are Megatron's own, over rows in the order of the documents.
"""

import dataclasses
import itertools
import types

import pytest

pytest.importorskip("megatron.core")
import torch
import torch.distributed as dist

from megatron_cp.data import group_microbatches
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.megatron import dynamic
from megatron_cp.megatron.batch import layout_options, shard_batch
from megatron_cp.megatron.groups import BatchGroups
from megatron_cp.megatron.modules import slots_of
from megatron_cp.megatron.pack import Pack, broadcast_pack
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict.pack_cost import PackCost
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.shared import once, selected

TIMEOUT = 300
PACKS = ((7, 1, 130, 2), (5, 67, 16), (33, 0, 1), (40, 3, 3, 21))
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp64", "moe_permute_fusion": False, "moe_router_load_balancing_type": "none",
}  # fmt: skip
BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.2], "moe_z_loss_coeff": 0.1,
}  # fmt: skip
# The global loss counts the tokens of all replicas so far, so it is another loss with other replicas.
BALANCED_BY_PACKS = BALANCED | {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.5, 0.3],
}  # fmt: skip
# By name: the model of `tiny`, its layers, and other settings.
MODELS = {
    "gpt": ("gpt", None, {}), "gpt with experts": ("gpt", None, EXPERTS), "GG*-": ("hybrid", "GG*-", {}),
    "MM*-": ("hybrid_mamba", "MM*-", {}), "mla": ("mla", None, {}),
}  # fmt: skip
STAGES = {"GG*-": "GG|*-", "MM*-": "MM|*-"}
VIRTUAL = {"GG*-": "G|G|*|-", "MM*-": "M|M|*|-"}
WITH_EXPERTS = {"GG*-": "GG*E", "MM*-": "MM*E"}
IN_RUNS = {"GG*-": "GEG*", "MM*-": "MEM*"}
AHEAD = {"GG*-": "GG*-/*-", "MM*-": "MM*-/M-"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Sizes of groups, what else is asked of Megatron `there` alone, and how the model is another (`changes`).

    Attributes:
        with_experts: further changes of models that have experts.
        align: rows of every rank are a multiple of it, if not of what the configuration asks for.
        groups: ranks that share a batch, if not those of Megatron's groups.
        dynamic: flags beside `--dynamic-context-parallel`; None without it. One rank then has each document alone.
    """

    world: int
    sizes: dict
    there: dict = dataclasses.field(default_factory=dict)
    changes: dict = dataclasses.field(default_factory=dict)
    patterns: dict = dataclasses.field(default_factory=dict)
    mtp: bool = False
    with_experts: dict = dataclasses.field(default_factory=dict)
    align: int | None = None
    groups: tuple = ()
    dynamic: dict | None = None
    optimizes: bool = False


COST = PackCost(0.0, 1.0, 0.05), 4.0  # of a document, and of a token that is exchanged

REDISTRIBUTED = {"linear_cp_mode": "redistribute"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEVERAL = {"variable_seq_lengths": True, "pipeline_dtype": torch.float32, "moe_token_dispatcher_type": "alltoall"}
# Without Transformer Engine Megatron computes as without it: what is left are the rows that it wants, and sizes.
MXFP8 = {"fp8": "hybrid", "fp8_recipe": "mxfp8"}
FOR_MXFP8 = {"linear_num_value_heads": 16, "mamba_num_heads": 16, "mamba_state_dim": 8}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
INTERLEAVED = {**SEVERAL, "overlap_p2p_comm": True, "batch_p2p_comm": False}  # as Megatron demands of two stages
MEANS = {
    "changes": {"mtp_num_layers": 1, "calculate_per_token_loss": False}, "with_experts": BALANCED_BY_PACKS,
    "patterns": AHEAD, "mtp": True,
}  # fmt: skip
CP4 = {"min_dynamic_context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 60}
PLACES = {
    "tp2 cp2 sp": Place(4, {"tp": 2, "cp": 2}, {"sequence_parallel": True}),
    "tp2 cp2 sp ep2, experts whole": Place(4, {"tp": 2, "cp": 2, "ep": 2, "etp": 1}, {"sequence_parallel": True}),
    "pp2 cp2": Place(4, {"pp": 2, "cp": 2}, SEVERAL, patterns=STAGES),
    "interleaved pp2 cp2": Place(4, {"pp": 2, "cp": 2, "vpp": 2}, INTERLEAVED, patterns=VIRTUAL),
    "interleaved pp2 cp2, logits of a few rows": Place(
        4, {"pp": 2, "cp": 2, "vpp": 2}, {**INTERLEAVED, "logit_rows": 7}, patterns=VIRTUAL
    ),
    "dp2 cp2, distributed optimizer": Place(4, {"cp": 2}, optimizes=True),
    "ep2 cp2, auxiliary losses": Place(2, {"cp": 2, "ep": 2}, changes={**EXPERTS, **BALANCED}, patterns=WITH_EXPERTS),
    "dp2 ep2 cp2, auxiliary losses": Place(
        4, {"cp": 2, "ep": 2}, changes={**EXPERTS, **BALANCED_BY_PACKS}, patterns=WITH_EXPERTS
    ),
    # Experts are inside a run of linear layers, whose rows have another layout than the batch's.
    "cp2 with pad rows, auxiliary losses and expert bias": Place(
        2, {"cp": 2}, REDISTRIBUTED, changes={**EXPERTS, **BALANCED, **BIAS}, patterns=IN_RUNS, align=8
    ),
    "cp2 with rows for MXFP8": Place(2, {"cp": 2}, MXFP8, changes=FOR_MXFP8),
    "dp2 cp2, means of microbatches": Place(4, {"cp": 2}, **MEANS),
    "cp3, means of microbatches": Place(3, {"cp": 3}, **MEANS),
    "mtp cp2": Place(2, {"cp": 2}, REDISTRIBUTED, changes={"mtp_num_layers": 1}, patterns=AHEAD, mtp=True),
    "recompute cp2": Place(2, {"cp": 2}, FULL),
    "groups of 2 and 3": Place(5, {"cp": 1}, REDISTRIBUTED, groups=(2, 3)),
    "dynamic cp2": Place(2, {"cp": 2}, REDISTRIBUTED, dynamic={"max_seqlen_per_dp_cp_rank": 90}),
    "dynamic cp3": Place(3, {"cp": 3}, dynamic={"max_seqlen_per_dp_cp_rank": 60}),
    "dynamic dp2 cp2": Place(4, {"cp": 2}, dynamic={"max_seqlen_per_dp_cp_rank": 70}),
    "dynamic cp4, groups of at least 2": Place(4, {"cp": 4}, dynamic=CP4),
    "dynamic tp2 cp2 sp": Place(4, {"tp": 2, "cp": 2}, {"sequence_parallel": True}, dynamic={}),
    "dynamic pp2 cp2": Place(4, {"pp": 2, "cp": 2}, SEVERAL, patterns=STAGES, dynamic={}),
    "dynamic interleaved pp2 cp2": Place(4, {"pp": 2, "cp": 2, "vpp": 2}, INTERLEAVED, patterns=VIRTUAL, dynamic={}),
    "dynamic dp2 ep2 cp2, expert bias": Place(
        4, {"cp": 2, "ep": 2}, changes={**EXPERTS, **BIAS}, patterns=WITH_EXPERTS, dynamic={}
    ),
    "dynamic dp2 cp2, distributed optimizer": Place(4, {"cp": 2}, optimizes=True, dynamic={}),
    "dynamic mtp cp2": Place(2, {"cp": 2}, changes={"mtp_num_layers": 1}, patterns=AHEAD, mtp=True, dynamic={}),
}


def configured(model, place, sizes):
    kind, pattern, changes = MODELS[model]
    changes = changes | place.changes | (place.there if sizes else {})
    if "num_moe_experts" in changes:
        changes |= place.with_experts
    if kind in ("gpt", "mla"):
        changes["num_layers"] = 4
    parallel = {
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "expert_tensor_parallel_size": sizes.get("etp"),
    }
    config = tiny.configure(kind, **changes, **parallel)
    return kind, config, place.patterns.get(model, pattern)


def models_in(place):
    """Returns the models to run: with experts in every model, one of both GPTs; FP8 experts need Transformer Engine."""
    if "etp" in PLACES[place].sizes:
        return ["gpt with experts"]
    skipped = {"num_moe_experts": "gpt", "fp8": "gpt with experts"}
    asked = PLACES[place].changes | PLACES[place].there
    return [model for model in MODELS if not any(option in asked and name == model for option, name in skipped.items())]


def own_batches(model, config, place, *, is_alone):
    """This rank's shares of its microbatches; alone they do not say what lies ahead, which Megatron then looks up."""
    from megatron.core import parallel_state

    if place is not None and place.dynamic is not None:
        return dealt_batches(model, config, place, is_alone=is_alone)
    place = None if is_alone else place
    first, step, group = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size(), None
    if place is not None and place.groups:
        first, step, group = own_group(place.groups)
    align = place.align if place is not None and place.align else layout_options(config)["align"]
    batches = [
        tiny.shards(model, lengths, "zigzag", index, align=align, group=group)
        for index, lengths in list(enumerate(PACKS))[first::step]
    ]
    if place is None:
        for batch in batches:
            batch.packed_seq_params.stream = None
    return batches


def dealt_batches(model, config, place, *, is_alone):
    """This rank's shares of the packs that `grouped_packs` deals; alone, each document.

    With multi-token prediction, a depth's loss is a mean over its microbatch, so that one rank has the same packs.
    """
    from megatron.core import parallel_state

    packs = []
    for index, lengths in enumerate(PACKS):
        tokens, mask = tiny.stream(index, sum(lengths))
        packs.append(Pack(Packing(lengths), tokens, None, mask))
    sizes = {"tp": 1, "pp": 1, "ep": 1, "cp": 1} | place.sizes
    # The packs are as long as a rank holds.
    flags = {"max_seqlen_per_dp_cp_rank": None, "min_dynamic_context_parallel_size": 1} | place.dynamic
    args = types.SimpleNamespace(
        cp_dynamic=True, seq_length=max(map(sum, PACKS)), context_parallel_size=sizes["cp"],
        pipeline_model_parallel_size=sizes["pp"], expert_model_parallel_size=sizes["ep"], **flags,
    )  # fmt: skip
    if is_alone:
        if not place.mtp:
            packs = [document for pack in packs for document in documents_of(pack)]
        else:
            packs = dealt(packs, place.world, args)
        groups = None
    else:
        first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        groups = BatchGroups.make()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dynamic, "step_cost", lambda args: COST)
            patch.setattr(dynamic, "get_num_microbatches", lambda: len(PACKS) // step)
            reads = parallel_state.get_tensor_model_parallel_rank() == 0
            own = dynamic.grouped_packs(iter(packs[first::step]), groups, args) if reads else None
            packs = [
                broadcast_pack(None if own is None else next(own), groups.tp_host) for _ in range(len(PACKS) // step)
            ]
            assert own is None or not list(own)
        assert all(pack.ranks is not None for pack in packs)
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, [len(pack.ranks) for pack in packs])
        assert len({size for sizes in seen for size in sizes}) > 1, seen  # else nothing is shown
    batches = []
    for pack in packs:
        ranks = None if groups is None else groups.of(pack)
        size = 1 if ranks is None else ranks.size
        layout = layout_by_name("zigzag", pack.packing, size, **layout_options(config))
        given = {"labels": pack.labels, "loss_mask": pack.loss_mask}
        batches.append(shard_batch(pack.tokens, layout, ranks, slots=slots_of(model), **given))
        if is_alone:
            batches[-1].packed_seq_params.stream = None
    return batches


def documents_of(pack):
    """Each document of a pack as a pack."""
    parts = [
        None if rows is None else rows.split(pack.packing.lengths.tolist()) for rows in (pack.tokens, pack.loss_mask)
    ]
    tokens, masks = parts
    return [
        Pack(Packing([len(one)]), one, None, None if masks is None else masks[number])
        for number, one in enumerate(tokens)
        if len(one)
    ]


def dealt(packs, world, args):
    """The packs of all groups, as a rank that is alone finds them."""
    held = [document for pack in packs for document in documents_of(pack)]
    cost, exchange = COST
    schedule = group_microbatches(
        [document.packing.total for document in held], ranks=world, microbatches=len(packs),
        tokens_per_rank=dynamic.tokens_per_rank(args), cost=cost, exchange=exchange,
    )  # fmt: skip
    found = []
    for batch in schedule.batches:
        own = [held[number] for number in batch.documents]
        masks = [torch.ones(len(one.tokens)) if one.loss_mask is None else one.loss_mask for one in own]
        packing = Packing([one.packing.total for one in own])
        found.append(Pack(packing, torch.cat([one.tokens for one in own]), None, torch.cat(masks)))
    return found


def own_group(sizes):
    """Returns the index of this rank's group, the number of groups, and the group; creates all groups in rank order."""
    ends = list(itertools.accumulate(sizes))
    mine = next(number for number, end in enumerate(ends) if dist.get_rank() < end)
    return mine, len(sizes), BatchGroups.make().part(range(ends[mine] - sizes[mine], ends[mine]))


def run(group, places):
    """Returns the step of each place and model, whole on rank 0; all places have as many ranks.

    Args:
        places: each with its sizes of groups and the models to run there.
    """
    found = {}
    for name, (sizes, models) in places.items():
        place = PLACES[name]
        tiny.start(**sizes)
        for model in models:
            kind, config, pattern = configured(model, place, sizes)
            if "pp" not in sizes and pattern is not None:
                pattern = pattern.replace("|", "")
            chunks = tiny.build_stages(kind, config, pattern=pattern, mtp=place.mtp)
            batches = own_batches(chunks[0], config, place, is_alone=not sizes)
            found[name, model] = tiny.train(chunks, config, batches, optimizes=place.optimizes)
    return found


@pytest.fixture(scope="module")
def steps(request, tmp_path_factory):
    """Returns, by place and selected model, the step alone and that of the ranks."""
    models = {}
    for case in selected(request, test_equals_one_rank):
        models.setdefault(case["place"], []).append(case["model"])

    def launched(world, places):
        return run_ranks(run, world, places, kind="processes", timeout=limit(TIMEOUT))[0]

    def compute():
        alone, spread = launched(1, {name: ({}, models[name]) for name in models}), {}
        for world in sorted({PLACES[name].world for name in models}):
            spread |= launched(world, {n: (PLACES[n].sizes, models[n]) for n in models if PLACES[n].world == world})
        return {key: (alone[key], spread[key]) for key in alone}

    return once(tmp_path_factory, "megatron_matrix", compute)


@pytest.mark.few
@pytest.mark.parametrize(
    ("place", "model"),
    [
        pytest.param(place, model, marks=[pytest.mark.thorough] * bool(PLACES[place].groups))  # "dynamic cp3" has such
        for place in PLACES
        for model in models_in(place)
    ],
)
def test_equals_one_rank(place, model, steps):
    alone, spread = steps[place, model]
    assert abs(spread.loss - alone.loss) <= 1e-5
    errors = tiny.distances(spread.gradients, alone.gradients)
    assert all(error <= 1e-5 for error in errors.values()), list(errors.items())[:4]
    assert max(spread.drift.values()) == 0
