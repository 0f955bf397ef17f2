"""Whole Megatron models over ranks are the same model on one rank, through Megatron's own training step.

Loss and every parameter's gradient after data parallelism's reduction and the division by the number of tokens.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.counters import Counters
from tests.covering import covering
from tests.functional_tests import tiny_megatron as tiny
from tests.shared import once, selected

pytest.importorskip("megatron.core")

TIMEOUT = 200.0
# `max|a - b| / max|b|` of a parameter's gradient. Ranks of the same heads differ by 1e-15 in float64; Megatron's loss,
# which is in float32, adds 1e-7 where it is summed over the vocabularies of tensor-parallel ranks. In float32 a single
# rank is 3e-6 from its gradients in float64 already.
FLOAT64, TENSOR_PARALLEL, FLOAT32 = 1e-12, 1e-6, 5e-6


# Options of several ranks. One rank has the heads that Megatron's own up-projection makes of latents.
OF_SEVERAL = ("linear_cp_mode", "cp_head_chunks", "cp_transport", "cp_codec", "cp_latent_mode")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of one model; see `tiny.build` and `tiny.shards`."""

    kind: str
    layout: str = "zigzag"
    batches: str = "ragged"
    dtype: str = "float64"
    how: str = "planned"
    changes: tuple = ()
    recompute: str = ""
    sequence_parallel: bool = False
    without_norm_sum: bool = False

    def __str__(self):
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        words = [name if value is True else value for name, value in values.items() if value and name != "changes"]
        words = [word for word in words if word not in ("zigzag", "ragged", "float64", "planned")]
        return "-".join(words + [f"{name}={value}" for name, value in self.changes])

    def bound(self, tp):
        if self.dtype == "float32":
            return FLOAT32
        return FLOAT64 if tp == 1 else TENSOR_PARALLEL

    @property
    def on_one_rank(self):
        changes = tuple((name, value) for name, value in self.changes if name not in OF_SEVERAL)
        return Case(self.kind, batches=self.batches, dtype=self.dtype, changes=changes)


RECOMPUTE = {
    "": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mla_up_proj": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "all_of_mla": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
    "gdn_norm_out": {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
}

HYBRIDS = ("hybrid", "hybrid_mamba")
KINDS = ("gpt", *HYBRIDS, "hybrid_both")
# What Megatron's own sharding cut, which its parameters do not tell.
CUT = {"megatron": {"cp_packed_order": "document"}, "pack": {"dataloader_inter_document_masking": True}}
SHARDED_BY_MEGATRON = {"megatron": "aligned", "pack": "packs", "unpacked": "even"}
LAYOUTS = ("zigzag", "contiguous", "random", "balanced", "lopsided", "tiny")  # tiny: batches that leave a rank out
MODES = ("", "headwise", "chunkwise", "redistribute")


def spread(mode, kind, layout="zigzag", **more):
    changes = (("linear_cp_mode", mode),) if mode else ()
    where = {"batches": "tiny"} if layout == "tiny" else {"layout": layout}
    return Case(kind, changes=changes, **where, **more)


def has_modes(kind, mode):
    return not mode or kind != "gpt"


# In these any two of place, model, layout and mode, or of place, model, sharding and mode, meet; most on three ranks.
SPREAD = covering(("cp3", "cp2"), KINDS, LAYOUTS, MODES, allowed=lambda place, kind, _, mode: has_modes(kind, mode))
SHARDED = covering(
    ("cp3", "cp2"), (*KINDS, "gpt_gdn"), tuple(SHARDED_BY_MEGATRON), MODES,
    # Megatron refuses three ranks for two key heads, and we hidden states of batches that are not packed.
    allowed=lambda place, kind, how, mode: (
        has_modes(kind, mode) and (place, kind) != ("cp3", "gpt_gdn") and (how, mode) != ("unpacked", "redistribute")
    ),
)  # fmt: skip
SINGLE = [Case(kind, dtype="float32", changes=(("cp_comm_type", None),)) for kind in ("gpt", *HYBRIDS)]
SINGLE += [spread("chunkwise", kind, dtype="float32") for kind in HYBRIDS]


def everywhere(place):
    """Returns the layouts, modes and ways to shard that are run on any number of ranks."""
    found = [spread(mode, kind, layout) for at, kind, layout, mode in SPREAD if at == place]
    found += [
        spread(mode, kind, batches=SHARDED_BY_MEGATRON[how], how=how) for at, kind, how, mode in SHARDED if at == place
    ]
    return [*found, *SINGLE]


# To compare others with that are in the same place.
REDISTRIBUTED = [
    spread(mode, kind, layout)
    for kind in ("hybrid", "hybrid_both")
    for mode, layout in (("redistribute", "zigzag"), ("chunkwise", "contiguous"))
]
REDISTRIBUTED += [
    spread("redistribute", "gpt_gdn"),
    spread("redistribute", "hybrid_both"),
    spread("redistribute", "hybrid_both", recompute="full"),
]
# Heads of which two ranks have two groups each, to travel in two chunks.
GROUPS = (  # by one scheme, since that which auto takes may differ with chunks
    ("cp_comm_type", "a2a"), ("num_query_groups", 4), ("linear_num_key_heads", 4), ("mamba_num_groups", 4),
    ("mamba_num_heads", 8),
)  # fmt: skip
CHUNKED = (("cp_head_chunks", 2), ("cp_transport", "pairwise"), ("linear_cp_mode", "headwise"), *GROUPS)
WHOLE = Case("hybrid_both", changes=(("linear_cp_mode", "headwise"), *GROUPS))
IN_CHUNKS = [
    Case("hybrid_both", changes=CHUNKED, recompute=recompute) for recompute in ("", "full", "core_attn")
]  # fmt: skip
BY_HOSTS = Case("hybrid_both", changes=(("cp_transport", "hierarchical"), *WHOLE.changes))
DETERMINISTIC = Case("hybrid_both", changes=(("deterministic_mode", True),))
ONE_KEY_HEAD = Case("hybrid", changes=(("linear_num_key_heads", 1),))
NORMED = Case("hybrid", changes=(("qk_layernorm", True),))
MIXED = Case("gpt_gdn", changes=(("cp_comm_type", "a2a"),))
# What Megatron's own context parallelism refuses or leaves out, at once: windows in every other layer, sinks, dropout.
FEATURES = (
    ("window_size", (20, 0)), ("window_attn_skip_freq", 2), ("softmax_type", "learnable"), ("attention_dropout", 0.2),
)  # fmt: skip


def schemes(*names, features=(), **more):
    return [Case("gpt", changes=(("cp_comm_type", name), *features), **more) for name in names]


KEYS_TRAVEL = [
    *schemes("p2p", "all_gather", "exact"),
    *schemes("p2p", "all_gather", "exact", features=FEATURES, layout="random"),
    *schemes("p2p", "exact", layout="lopsided"),
    *schemes("p2p", "exact", batches="tiny"),
    *schemes("p2p", "exact", recompute="core_attn", features=FEATURES),
    *schemes("p2p", "exact", features=FEATURES),
    *schemes("p2p", batches="aligned", how="megatron"),
    *schemes("p2p", "exact", batches="packs", how="pack"),
    *schemes("p2p", batches="even", how="unpacked"),
    *schemes("a2a", features=FEATURES),
    Case(
        "gpt", changes=(("cp_comm_type", ("p2p", "a2a")), ("window_size", (20, 0)), ("window_attn_skip_freq", (1, 0)))
    ),
    Case(
        "gpt",
        changes=(("cp_comm_type", ("exact", "auto")), ("window_size", (20, 0)), ("window_attn_skip_freq", (1, 0))),
    ),
    Case("hybrid", changes=(("cp_comm_type", "p2p"), ("softmax_type", "off-by-one"))),
]
PRODUCTS = [
    *schemes("a2a", "p2p", "exact", "a2a+p2p", "a2a+all_gather", layout="balanced"),
    *schemes("a2a+p2p", "a2a+all_gather", features=FEATURES, layout="contiguous"),
]
YARN = (
    ("rope_type", "yarn"),
    ("rotary_scaling_factor", 4.0),
    ("original_max_position_embeddings", 32),
    ("mscale_all_dim", 0.5),
)
UNRANKED = (("q_lora_rank", None), ("qk_layernorm", False))


def latent(*names, features=(), **more):
    return [Case("mla", changes=(("cp_comm_type", name), *features), **more) for name in names]


LATENT_SCHEMES, LATENT_LAYOUTS = ("a2a", "p2p", "exact", "all_gather"), ("zigzag", "contiguous", "random", "lopsided")
LATENT = covering(("cp3", "cp2"), LATENT_SCHEMES, LATENT_LAYOUTS)


def latent_at(place):
    return [one for at, name, layout in LATENT if at == place for one in latent(name, layout=layout)]


LATENT_TWO = [
    *latent("a2a", "p2p", features=YARN), *latent("exact", features=UNRANKED),
    *latent("exact", features=(*FEATURES, *YARN), layout="random"), *latent("p2p", batches="tiny"),
    *latent("a2a", "p2p", batches="aligned", how="megatron"), *latent("a2a", batches="packs", how="pack"),
    *latent("a2a", "p2p", batches="even", how="unpacked"),
    *latent("p2p", features=YARN, batches="aligned", how="megatron"),
    *latent("p2p", features=YARN, batches="even", how="unpacked"), Case("mla", dtype="float32"),
    Case("fused_mla", "random"), Case("hybrid_mla", "random"), Case("hybrid_mla", changes=(("cp_comm_type", "exact"),)),
    Case("hybrid_mla", batches="aligned", how="megatron"),
]  # fmt: skip


def sparse(features=(), **more):
    """Attention whose keys an indexer chooses, with the scheme that Megatron's configuration takes."""
    return Case("dsa_mla", changes=(("cp_comm_type", "all_gather"), *features), **more)


SHARED = ("dsa_indexer_topk_freq", 2)  # the second of three layers takes the choice of the first
MEANS = (("calculate_per_token_loss", False), ("dsa_indexer_use_sparse_loss", True))
SPARSE_TWO = [
    sparse(layout="random"), sparse(MEANS), sparse((SHARED, *YARN)), sparse(batches="tiny"),
    sparse((("dsa_indexer_scoring_relu", False),), batches="aligned", how="megatron"),
    sparse(batches="even", how="unpacked"),
    sparse((SHARED,), batches="even", how="unpacked"), sparse((SHARED, *UNRANKED), recompute="core_attn"),
    sparse(recompute="full"), sparse(recompute="all_of_mla"), Case("hybrid_dsa_mla", changes=MEANS),
    Case("hybrid_dsa_mla", "random"),
]  # fmt: skip
SPARSE_THREE = [sparse((SHARED,), layout="contiguous"), sparse(layout="lopsided"), Case("hybrid_dsa_mla")]


def latents(mode, kind, scheme="auto", layout="zigzag", *more, **others):
    changes = (("cp_comm_type", scheme), ("cp_latent_mode", mode), *more)
    return Case(kind, layout, changes=changes, **others)


# Any two of place, model, mode, scheme and layout meet.
LATENTS = covering(
    ("cp3", "cp2"), ("mla", "fused_mla", "hybrid_mla"), ("expand", "absorb", "auto"), ("a2a", "p2p", "exact"),
    ("zigzag", "random", "lopsided"),
)  # fmt: skip
LATENTS_TWO = [
    *[latents(mode, "mla", "exact", "random", *FEATURES, *YARN) for mode in ("expand", "absorb")],
    *[latents(mode, "mla", "p2p", "zigzag", *UNRANKED, batches="tiny") for mode in ("expand", "absorb")],
    *[latents("expand", "mla", "exact", "zigzag", *YARN, batches=SHARDED_BY_MEGATRON[how], how=how)
      for how in SHARDED_BY_MEGATRON],
    latents("absorb", "mla", "p2p", batches="even", how="unpacked"), latents("expand", "mla", "exact", dtype="float32"),
]  # fmt: skip
LATENTS_RECOMPUTED = [
    latents(mode, "mla", "exact", recompute=what)
    for mode in ("expand", "absorb") for what in ("full", "core_attn", "mla_up_proj", "all_of_mla")
]  # fmt: skip
LATENTS_BY_TENSOR_RANKS = [
    latents(mode, "mla", "exact", sequence_parallel=both) for mode in ("expand", "absorb") for both in (False, True)
]


def latents_at(place):
    return [latents(mode, kind, scheme, layout) for at, kind, mode, scheme, layout in LATENTS if at == place]


RECOMPUTED = [
    spread(mode, "gpt_gdn", recompute=what) for mode in ("headwise", "chunkwise") for what in ("gdn_norm_out", "full")
]
RECOMPUTED += [
    Case(kind, recompute=what)
    for kind, what in (
        ("gpt", "full"), ("gpt", "core_attn"), ("hybrid", "full"), ("hybrid", "core_attn"), ("hybrid_mamba", "full"),
        ("gpt_gdn", "gdn_norm_out"), ("gpt_gdn", "full"),
    )
]  # fmt: skip
RECOMPUTED += [
    one for what in ("full", "core_attn", "mla_up_proj", "all_of_mla") for one in latent("a2a", "p2p", recompute=what)
]
RECOMPUTED += LATENTS_RECOMPUTED
RECOMPUTED += [spread("chunkwise", "hybrid_both", recompute="full")]
RECOMPUTED += [spread("redistribute", "hybrid_both", recompute="full")]
OVER_FOUR = covering(
    ("tp2cp2", "dp2cp2"), ("gpt", *HYBRIDS), LAYOUTS, ("", "chunkwise"), (False, True),
    allowed=lambda place, kind, _, mode, sequence_parallel: (
        has_modes(kind, mode) and (place == "tp2cp2" or not sequence_parallel)
    ),
)  # fmt: skip


MIXED_OVER_FOUR = [spread(mode, "hybrid_both", layout) for mode, layout in (("", "balanced"), ("chunkwise", "zigzag"))]
OF_MAMBA = [spread(mode, "hybrid_mamba", "tiny") for mode in ("headwise", "chunkwise")]
OF_MAMBA += [spread("headwise", "hybrid_mamba", batches="even", how="unpacked")]


def over_four(place):
    """Returns the layouts, modes and sequence parallelism that are run on four ranks."""
    return [
        spread(mode, kind, layout, sequence_parallel=both) for at, kind, layout, mode, both in OVER_FOUR if at == place
    ]


WITHOUT_NORM_SUM = Case("hybrid", without_norm_sum=True)

# Tensor- and context-parallel sizes, and what is run there; the rest of the ranks are data parallel.
PLACES = {
    "cp2": (
        1,
        2,
        [
            *everywhere("cp2"), *RECOMPUTED, *[dataclasses.replace(case, recompute="") for case in RECOMPUTED],
            *REDISTRIBUTED, DETERMINISTIC, ONE_KEY_HEAD, NORMED, MIXED, *KEYS_TRAVEL, *latent_at("cp2"), *LATENT_TWO,
            *SPARSE_TWO, WHOLE, *IN_CHUNKS, *latents_at("cp2"), *LATENTS_TWO,
        ],
    ),
    "cp4": (1, 4, [*PRODUCTS, *latent("a2a+p2p", "a2a+all_gather", "a2a+exact", layout="balanced"), WHOLE, BY_HOSTS]),
    "cp3": (
        1,
        3,
        [
            *everywhere("cp3"), *latent_at("cp3"), *latents_at("cp3"), *OF_MAMBA, *SPARSE_THREE,
            spread("redistribute", "hybrid_both", recompute="full"),
        ],
    ),
    "tp2cp2": (
        2,
        2,
        [
            *over_four("tp2cp2"), *MIXED_OVER_FOUR, *SINGLE, NORMED, Case("mla"), *latent("p2p"),
            Case("mla", sequence_parallel=True), *LATENTS_BY_TENSOR_RANKS,
        ],
    ),
    "dp2cp2": (1, 2, [*over_four("dp2cp2"), *MIXED_OVER_FOUR, *SINGLE]),
}  # fmt: skip
PLACES = {name: (tp, cp, list(dict.fromkeys(cases))) for name, (tp, cp, cases) in PLACES.items()}
EQUAL = [(place, case) for place, (_, _, cases) in PLACES.items() for case in cases]


def run_cases(group, places):
    """Returns, by place and case, this rank's step. All places use all ranks."""
    steps = {}
    for place, (tp, cp, cases) in places.items():
        tiny.start(tp, cp)
        for case in cases:
            steps[place, case] = run_case(case)
    return steps


def run_case(case):
    from megatron.core import parallel_state

    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet

    lists = ("cp_comm_type", "window_attn_skip_freq")  # which Megatron tells from tuples, and no set can hold
    changes = {name: list(v) if name in lists and isinstance(v, tuple) else v for name, v in case.changes}
    changes |= RECOMPUTE[case.recompute] | {"sequence_parallel": case.sequence_parallel} | CUT.get(case.how, {})
    config = tiny.configure(case.kind, params_dtype=getattr(torch, case.dtype), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(dist.get_rank() // 2))  # what torchrun says on two hosts
        if case.without_norm_sum:
            patch.setattr(GatedDeltaNet, "_sum_norm_gradients_over_tp", lambda self: None)
        model = tiny.build(case.kind, config=config)
    align = config.tensor_model_parallel_size if case.sequence_parallel else 1
    batches = tiny.microbatches(model, case.batches, case.layout, case.how, align)
    counted = bool(dict(case.changes).get("linear_cp_mode"))
    group = parallel_state.get_context_parallel_group()
    compare_calls(group, not counted)  # what a plan costs once is not counted
    counters = Counters()  # which counts on the groups that it watches, and is not told of every operator
    if counted:
        tiny.watch(model, counters)
    step = tiny.train(model, config, batches)
    return dataclasses.replace(step, collectives=counters.collectives)


RANKS = {"cp2": 2, "cp3": 3, "tp2cp2": 4, "dp2cp2": 4, "cp4": 4}


@pytest.fixture(scope="module")
def steps(request, tmp_path_factory):
    """Returns, by place and case, each rank's step, of the cases that the selected tests use."""
    needed = {place: {} for place in (*PLACES, "broken")}  # in place of sets, whose order ranks would not share

    def need(place, *cases):
        needed[place].update(dict.fromkeys(cases))

    for chosen in selected(request, test_equals_one_rank):
        need(chosen["place"], chosen["case"])
    for chosen in selected(request, test_hidden_states_are_redistributed_once_around_a_run):
        need("cp2", *redistributed_and_not(chosen["kind"]))
    for chosen in selected(request, test_recomputation_changes_no_bit):
        need("cp2", chosen["case"], dataclasses.replace(chosen["case"], recompute=""))
    for chosen in selected(request, test_chunks_and_transports_change_no_bit):
        need("cp2", chosen["case"], WHOLE)
    for chosen in selected(request, test_recomputing_a_norm_repeats_no_collective):
        need("cp2", *recomputed(chosen["mode"]))
    need("cp4", BY_HOSTS, WHOLE)
    need("broken", WITHOUT_NORM_SUM)
    alone = list(dict.fromkeys(case.on_one_rank for cases in needed.values() for case in cases))

    def launch(size, places):
        return run_ranks(run_cases, size, places, kind="processes", timeout=TIMEOUT)

    def run():
        found = {}
        for size in (2, 3, 4):
            places = {name: (*PLACES[name][:2], list(needed[name])) for name, ranks in RANKS.items() if ranks == size}
            if size == 4:
                places["broken"] = (2, 2, [WITHOUT_NORM_SUM])
            ranks = launch(size, places)
            found |= {key: [steps[key] for steps in ranks] for key in ranks[0]}
        return found | launch(1, {"alone": (1, 1, alone)})[0]

    return once(tmp_path_factory, "megatron_models", run)


OPTIONS = dict.fromkeys(name for _, case in EQUAL for name, _ in case.changes)


def features(place, case):
    """Returns a case's place, fields and options; each kind's way to hold latents, and what sparse attention meets."""
    options, is_sparse = dict(case.changes), "dsa" in case.kind
    fields = dataclasses.astuple(dataclasses.replace(case, changes=()))
    pairs = (case.kind, options.get("cp_latent_mode")), is_sparse and case.recompute, is_sparse and case.batches
    pairs += (is_sparse and (case.kind, options.get("calculate_per_token_loss", True)),)
    return place, *fields, *(options.get(name, "unset") for name in OPTIONS), *pairs


@pytest.mark.few(of=features)
@pytest.mark.parametrize(("place", "case"), EQUAL, ids=str)
def test_equals_one_rank(place, case, steps):
    expected = steps["alone", case.on_one_rank]
    for rank, step in enumerate(steps[place, case]):
        assert step.tokens == expected.tokens
        assert abs(step.loss - expected.loss) <= 1e-5, rank
        errors = tiny.distances(step.gradients, expected.gradients)
        assert max(errors.values()) <= case.bound(PLACES[place][0]), (rank, list(errors.items())[:4])
        assert max(step.drift.values()) == 0, rank


def redistributed_and_not(kind):
    return spread("redistribute", kind), spread("chunkwise", kind, "contiguous")


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_both"])
def test_hidden_states_are_redistributed_once_around_a_run(kind, steps):
    """The run has two layers; states move in and out, forward and backward, for each of two microbatches."""
    for redistributed, in_place in zip(*(steps["cp2", case] for case in redistributed_and_not(kind)), strict=True):
        assert redistributed.collectives - in_place.collectives == 4 * 2


def test_tensor_parallel_ranks_would_drift_apart_without_the_sum_for_the_norm(steps):
    for step in steps["broken", WITHOUT_NORM_SUM]:
        errors = tiny.distances(step.gradients, steps["alone", WITHOUT_NORM_SUM.on_one_rank].gradients)
        assert {name for name, error in errors.items() if error > WITHOUT_NORM_SUM.bound(tp=2)} == {
            f"decoder.layers.{layer}.self_attention.out_norm.weight" for layer in (0, 1)
        }
        assert max(step.drift.values()) > 0.01


def other_bits(steps, place, case, as_in):
    """Yields the parameters whose gradients differ."""
    for found, expected in zip(steps[place, case], steps[place, as_in], strict=True):
        names = expected.gradients
        yield from (name for name in names if not np.array_equal(found.gradients[name], expected.gradients[name]))


@pytest.mark.few(of=lambda case: (case.kind, case.recompute))
@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_recomputation_changes_no_bit(case, steps):
    assert list(other_bits(steps, "cp2", case, dataclasses.replace(case, recompute=""))) == []


@pytest.mark.parametrize("case", IN_CHUNKS, ids=str)
def test_chunks_and_transports_change_no_bit(case, steps):
    assert list(other_bits(steps, "cp2", case, WHOLE)) == []


def test_two_hosts_change_no_bit_and_send_by_messages(steps):
    assert list(other_bits(steps, "cp4", BY_HOSTS, WHOLE)) == []
    for by_hosts, whole in zip(steps["cp4", BY_HOSTS], steps["cp4", WHOLE], strict=True):
        assert by_hosts.collectives != whole.collectives


def recomputed(mode):
    return [spread(mode, "gpt_gdn", recompute=what) for what in ("", "gdn_norm_out", "full")]


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_recomputing_a_norm_repeats_no_collective(mode, steps):
    """Recomputing the whole layer repeats them."""
    for ranks in zip(*(steps["cp2", case] for case in recomputed(mode)), strict=True):
        plain, norm, full = (step.collectives for step in ranks)
        assert plain == norm < full
