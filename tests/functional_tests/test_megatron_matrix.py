"""Tests of Megatron's features beside context parallelism: each model and kind of parallelism against one rank.

There losses of experts and of multi-token prediction are Megatron's own, over rows in the order of the documents.
"""

import dataclasses
import itertools

import pytest

pytest.importorskip("megatron.core")
import torch
import torch.distributed as dist

from megatron_cp.executor.launch import run_ranks
from megatron_cp.megatron.batch import layout_options
from megatron_cp.megatron.groups import BatchGroups
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
    optimizes: bool = False


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
PLACES = {
    "tp2 cp2 sp": Place(4, {"tp": 2, "cp": 2}, {"sequence_parallel": True}),
    "tp2 cp2 sp ep2, experts whole": Place(4, {"tp": 2, "cp": 2, "ep": 2, "etp": 1}, {"sequence_parallel": True}),
    "pp2 cp2": Place(4, {"pp": 2, "cp": 2}, SEVERAL, patterns=STAGES),
    "interleaved pp2 cp2": Place(4, {"pp": 2, "cp": 2, "vpp": 2}, INTERLEAVED, patterns=VIRTUAL),
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


def own_batches(model, config, place):
    """This rank's shares of its microbatches; alone they do not say what lies ahead, which Megatron then looks up."""
    from megatron.core import parallel_state

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
            batches = own_batches(chunks[0], config, place if sizes else None)
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
@pytest.mark.parametrize(("place", "model"), [(place, model) for place in PLACES for model in models_in(place)])
def test_equals_one_rank(place, model, steps):
    alone, spread = steps[place, model]
    assert abs(spread.loss - alone.loss) <= 1e-5
    errors = tiny.distances(spread.gradients, alone.gradients)
    assert all(error <= 1e-5 for error in errors.values()), list(errors.items())[:4]
    assert max(spread.drift.values()) == 0
