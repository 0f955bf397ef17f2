"""`--logit-rows`: Megatron's models whose logits are computed a few rows at a time have the losses of all at once."""

import contextlib
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit
from tests.peak_memory import PeakMemory
from tests.shared import once, selected

pytest.importorskip("megatron.core")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how its ranks are used, and how it is trained; see `tiny`.

    Attributes:
        sizes: sizes of Megatron's groups of ranks.
        how: as in `tiny.shards`; "trees" are sequences with a common beginning.
        bound: of the distance of gradients, and of losses.
    """

    kind: str
    sizes: dict = dataclasses.field(default_factory=dict)
    changes: dict = dataclasses.field(default_factory=dict)
    rows: int = 7
    is_tied: bool = False
    how: str = "planned"
    batches: str = "ragged"
    dtype: str = "float64"
    pattern: str | None = None
    optimizes: bool = False
    bound: float = 1e-12

    @property
    def world(self):
        sizes = dict(self.sizes)
        return sizes.pop("dp", 1) * int(np.prod(list(sizes.values())))


CP2, TP2, PP2 = {"cp": 2}, {"tp": 2}, {"pp": 2}
NATIVE = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
MUP = {"use_mup": True, "mup_base_hidden_size": 16}
PARALLEL = {"sequence_parallel": True}
AHEAD = {"mtp_num_layers": 2}
STAGED = {"pipeline_dtype": torch.float64, "variable_seq_lengths": True}
FUSED = {"gradient_accumulation_fusion": True}
MEANS = {"calculate_per_token_loss": False}
BY_MEGATRON = {"cp_packed_order": "document"}
# Gradients of weights are sums over chunks in float32, rounded once; without chunks a product rounds them.
BF16 = {"dtype": "bfloat16", "bound": 2e-2}

CASES = {
    "gpt": Case("gpt"),
    "gpt, tied": Case("gpt", is_tied=True),
    "hybrid": Case("hybrid_both"),
    "hybrid, tied": Case("hybrid_both", is_tied=True),
    "one row": Case("gpt", rows=1, batches="tiny"),
    "more rows than there are": Case("gpt", rows=1000),
    "mup": Case("gpt", changes=MUP),
    "mup, hybrid, tied": Case("hybrid_both", changes=MUP, is_tied=True),
    "native": Case("gpt", changes=NATIVE),
    "native, hybrid": Case("hybrid_both", changes=NATIVE),
    "bf16": Case("gpt", **BF16),
    "bf16, tied": Case("gpt", is_tied=True, **BF16),
    "bf16, native, hybrid": Case("hybrid_both", changes=NATIVE, **BF16),
    "fused gradients": Case("gpt", changes=FUSED, dtype="float32", bound=2e-6),
    "fused gradients, tied": Case("gpt", changes=FUSED, is_tied=True, dtype="float32", bound=2e-6),
    "latents": Case("mla"),
    "sequences side by side": Case("gpt", how="unpacked", batches="even"),
    "recomputed": Case("gpt", changes={"recompute_granularity": "full", "recompute_method": "uniform",
                                       "recompute_num_layers": 1}),
    "mtp": Case("gpt", changes=AHEAD),
    "mtp, detached, tied": Case("gpt", changes={**AHEAD, "mtp_detach_heads": True}, is_tied=True),
    "mtp, mup, hybrid": Case("hybrid_both", changes={**AHEAD, **MUP}, pattern="MG*-/*-/*-"),
    "mtp of Megatron's batch": Case("gpt", changes=AHEAD, how="megatron", batches="aligned"),
    "cp2": Case("hybrid_both", CP2, is_tied=True),
    "cp2, native": Case("gpt", CP2, NATIVE),
    "cp2, means": Case("gpt", CP2, MEANS),
    "cp2, Megatron's batch": Case("gpt", CP2, BY_MEGATRON, how="megatron", batches="aligned"),
    "cp2, sequences side by side": Case("gpt", CP2, how="unpacked", batches="even"),
    "cp2, trees": Case("hybrid_both", CP2, how="trees"),
    "cp2, trees, tied": Case("gpt", CP2, how="trees", is_tied=True),
    "cp2, mtp": Case("gpt", CP2, AHEAD),
    "cp3, tied, no rows on a rank": Case("hybrid_both", {"cp": 3}, batches="tiny", is_tied=True, rows=1),
    "tp2": Case("gpt", TP2),
    "tp2, tied, native": Case("gpt", TP2, NATIVE, is_tied=True),
    "tp2, trees": Case("gpt", TP2, how="trees"),
    "tp2, sequence parallel": Case("gpt", TP2, PARALLEL),
    "tp2, sequence parallel, hybrid, tied": Case("hybrid_both", TP2, PARALLEL, is_tied=True, rows=8),
    "tp2, sequence parallel, native": Case("gpt", TP2, PARALLEL | NATIVE, rows=1, batches="tiny"),
    "tp2, sequence parallel, side by side": Case("gpt", TP2, PARALLEL, how="unpacked", batches="even"),
    "tp2, sequence parallel, mtp": Case("gpt", TP2, PARALLEL | AHEAD, rows=30),
    "pp2": Case("gpt", PP2, STAGED),
    "pp2, tied": Case("hybrid_both", PP2, STAGED, pattern="MG|*-", is_tied=True),
    "dp2, distributed optimizer": Case("gpt", {"dp": 2}, optimizes=True, dtype="float32", bound=2e-6),
    "dp2, distributed optimizer, fused": Case("gpt", {"dp": 2}, FUSED, optimizes=True, dtype="float32", bound=2e-6),
    "tp2 cp2, sequence parallel": Case("hybrid_both", {"tp": 2, "cp": 2}, PARALLEL, is_tied=True),
}  # fmt: skip

WHOLE = {"mtp of Megatron's batch"}  # Megatron counts the right guesses among all logits


def built(case, rows):
    """Returns this rank's model, with a record of how many rows of logits its output layer returned at a time."""
    from megatron.core import parallel_state

    from megatron_cp.megatron import specs

    changes = case.changes | {"logit_rows": rows, "params_dtype": getattr(torch, case.dtype)}
    if case.dtype == "bfloat16":
        changes |= {"bf16": True}
    config = tiny.configure(
        case.kind, **changes, pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size()
    )
    stages = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": case.is_tied,
    }
    if config.mtp_num_layers and case.kind == "gpt":
        stages["mtp_block_spec"] = specs.gpt_mtp_block_spec(config)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", lambda self, *args: self)  # Megatron moves weights that stages share
        model = tiny.build(case.kind, config=config, pattern=case.pattern, arguments=stages)
    if stages["post_process"]:
        stock = model.output_layer.forward

        def recorded(*args, **named):
            logits, bias = stock(*args, **named)
            seen.append(len(logits))
            return logits, bias

        model.output_layer.forward = recorded
    return model, config, seen


def batches_of(model, case, config):
    if case.how != "trees":
        align = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return tiny.microbatches(model, case.batches, "zigzag", case.how, align)
    return [tree(model)]


def tree(model, align=1):
    from megatron.core import parallel_state

    from megatron_cp.megatron.batch import shard_batch
    from megatron_cp.megatron.modules import slots_of

    group, random = parallel_state.get_context_parallel_group(), torch.Generator().manual_seed(3)
    prompt, *ends = (torch.randint(tiny.VOCABULARY, (size,), generator=random) for size in (40, 9, 30, 4))
    packing = Packing.from_sequences([torch.cat([prompt, end]) for end in ends])
    layout = Layout.balanced(packing, group.size(), align=align)
    return shard_batch(torch.from_numpy(packing.tokens.copy()), layout, group, slots=slots_of(model))


class Products:
    """Takes the place of Apex's products, which add a weight's gradient to `main_grad`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows, gradient, main_grad):
        main_grad += gradient.T @ rows


@contextlib.contextmanager
def fused_products(case):
    from megatron.core.tensor_parallel import layers

    with pytest.MonkeyPatch.context() as patch:
        if case.changes.get("gradient_accumulation_fusion"):
            patch.setattr(layers, "_grad_accum_fusion_available", True)
            patch.setattr(layers, "fused_weight_gradient_mlp_cuda", Products, raising=False)
        yield


def observe(group, names):
    """Returns, by name, the steps without and with chunks, each with the most rows of logits at a time.

    And with what multi-token prediction logs: losses, right guesses and labels of each depth.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    found = {}
    for name in names:
        case = CASES[name]
        sizes = {size: number for size, number in case.sizes.items() if size != "dp"}
        tiny.start(**sizes)
        found[name] = []
        for rows in (None, case.rows):
            MTPLossLoggingHelper.tracker.clear()
            with fused_products(case):
                model, config, seen = built(case, rows)
                step = tiny.train([model], config, batches_of(model, case, config), optimizes=case.optimizes)
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, max(seen, default=0))
            logged = {name: v.numpy() for name, v in MTPLossLoggingHelper.tracker.items() if torch.is_tensor(v)}
            found[name].append((step, max(everyone), logged))
    return found


@pytest.fixture(scope="module")
def steps(request, tmp_path_factory):
    names = [chosen["name"] for chosen in selected(request, test_equals_all_logits_at_once)]

    def run():
        found = {}
        for world in sorted({CASES[name].world for name in names}):
            own = [name for name in names if CASES[name].world == world]
            found |= run_ranks(observe, world, own, kind="processes", timeout=limit(300))[0]
        return found

    return once(tmp_path_factory, "megatron_logits", run)


LARGEST = "tp2 cp2, sequence parallel"  # other cases have its parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == LARGEST)) for name in CASES]
)
def test_equals_all_logits_at_once(name, steps):
    case = CASES[name]
    (whole, all_rows, expected), (step, most_rows, logged) = steps[name]
    if case.rows < all_rows and name not in WHOLE:
        assert most_rows <= max(case.rows, 2 if case.changes.get("sequence_parallel") else 1)
    assert step.tokens == whole.tokens
    assert abs(step.loss - whole.loss) <= case.bound * abs(whole.loss)
    errors = tiny.distances(step.gradients, whole.gradients)
    assert all(error <= case.bound for error in errors.values()), list(errors.items())[:4]
    assert max(step.drift.values()) == 0
    assert logged.keys() == expected.keys()
    assert bool(logged) == ("mtp" in name)
    for what, values in expected.items():
        assert np.abs(values).max() > 0
        assert logged[what] == pytest.approx(values, rel=1e-6), what


def inputs(batch, labels):
    given = {"labels": labels, "loss_mask": batch.loss_mask, "packed_seq_params": batch.packed_seq_params}
    return (batch.tokens, batch.position_ids, None), given


def run_apart(
    kind, rows, *, labels=True, is_prepared=True, is_tree=False, pattern=None, output_processor=None, **changes
):
    """Returns what a model returns, as numpy's array, and the types that its output layer returned."""
    from megatron_cp.megatron.logits import chunk_logits

    model, config, _ = built(Case(kind, changes=changes, pattern=pattern), rows)
    if is_prepared:
        chunk_logits(model)
        chunk_logits(model)  # changes nothing
    types = []
    model.output_layer.register_forward_hook(lambda *given: types.append(type(given[-1][0]).__name__))
    align = config.tensor_model_parallel_size
    batch = tree(model, align) if is_tree else tiny.shards(model, tiny.RAGGED, "zigzag", 0, align=align)
    given, named = inputs(batch, (batch.targets if is_tree else batch.labels) if labels else None)
    if output_processor is not None:
        named["output_processor"] = output_processor
    return model(*given, **named).detach().numpy(), types


def refusal(attempt):
    try:
        attempt()
    except ArgumentError as error:
        return str(error)
    return None


KINDS = ("gpt", "hybrid_both")
UNPREPARED = (("gpt", None), ("hybrid", "GG--"), ("hybrid_mamba", "MM--"), ("hybrid_both", None), ("mla", None))
IN_TREES = {"sequence_parallel": True, "is_tree": True}


def whole_logits(*, hidden_states, output_layer, output_weight, **others):
    """Takes the place of the loss in a GPTModel."""
    return output_layer(hidden_states, weight=output_weight)[0]


def observe_apart(group):
    tiny.start(tp=2)
    return {
        "losses": {kind: [run_apart(kind, rows) for rows in (None, 7)] for kind in KINDS},
        "logits": {kind: [run_apart(kind, rows, labels=False) for rows in (None, 7)] for kind in KINDS},
        "processed": [run_apart("gpt", rows, output_processor=whole_logits) for rows in (None, 7)],
        "unprepared": [
            refusal(partial(run_apart, kind, 7, is_prepared=False, pattern=pattern)) for kind, pattern in UNPREPARED
        ],
        "trees": [refusal(partial(run_apart, kind, 7, **IN_TREES)) for kind in KINDS],
    }


@pytest.fixture(scope="module")
def apart():
    return run_ranks(observe_apart, 2, kind="processes", timeout=limit(200))


@pytest.mark.parametrize("what", ["losses", "logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_returns_what_it_returned(kind, what, apart):
    for rank in apart:
        (whole, _), (found, types) = rank[what][kind]
        assert types == ["ChunkedLogits" if what == "losses" else "Tensor"]
        assert whole.shape == found.shape
        assert np.abs(found - whole).max() <= 1e-12 * np.abs(whole).max()


def test_an_output_processor_gets_logits(apart):
    for rank in apart:
        (whole, _), (found, types) = rank["processed"]
        assert types == ["Tensor"]
        assert np.array_equal(whole, found)


@pytest.mark.parametrize("number", range(len(UNPREPARED)))
def test_rejects_a_step_that_would_compute_all_logits(number, apart):
    for rank in apart:
        found = rank["unprepared"][number]
        assert found is not None
        assert found.startswith("--logit-rows: got 7; allowed: none for a model that chunk_logits did not change")


def test_rejects_trees_with_sequence_parallelism(apart):
    for rank in apart:
        for found in rank["trees"]:
            assert found is not None
            assert found.startswith("--logit-rows: got 7; allowed: none with --sequence-parallel and trees.")


VOCABULARY, LENGTH = 20_000, 1024
LOGITS = VOCABULARY * LENGTH * 4  # bytes in float32


def peaks_of(group, kind, dtype):
    """Returns the most bytes that a step's tensors take, forward and backward, with all logits and with 64 rows."""
    from megatron_cp.megatron.logits import chunk_logits

    tiny.start()
    found = []
    for rows in (None, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "VOCABULARY", VOCABULARY)
            model, *_ = built(Case(kind, dtype=dtype), rows)
        chunk_logits(model)
        batch = tiny.shards(model, (LENGTH // 2,) * 2, "zigzag", 0)
        given, named = inputs(batch, batch.labels)
        with PeakMemory() as memory:
            (model(*given, **named) * batch.loss_mask).sum().backward()
        found.append(memory.peak)
    return found


@pytest.mark.parametrize(("kind", "dtype"), [("gpt", "float32"), ("hybrid_both", "bfloat16")])
def test_a_step_never_has_all_logits(kind, dtype):
    ((whole, found),) = run_ranks(peaks_of, 1, kind, dtype, kind="processes")
    assert whole > LOGITS
    assert found < LOGITS / 2, (whole, found)
