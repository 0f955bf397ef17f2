"""Jobs: what each degree divides, what is refused, the search's best, and launches that describe the model."""

import dataclasses
import itertools
import json
import shlex

import pytest

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.launch import launch_of, model_flags
from megatron_cp.apps.estimate.layer_price import AT, layer_seconds, product_seconds
from megatron_cp.apps.estimate.megatron_flags import read_flags
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.search import best_jobs
from megatron_cp.apps.estimate.step import predict_step
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.predict import machine
from tests.refusals import rejects

H100, LLAMA, NEXT = machine("h100"), read_model("llama3-8b"), read_model("qwen3-next")
PACKING = Packing([4096])


def step(model=LLAMA, on=H100, cp=1, **change):
    job = Job(cp, "contiguous", **change)
    layout = Layout.contiguous(PACKING, cp, align=job.tp)
    return predict_step(model, layout, job, on, job.topology(on))


def test_tensor_parallelism_divides_work_and_memory_and_takes_transfers():
    one, four = step(replicas=4), step(tp=4)
    assert four.job.gpus == one.job.gpus
    for part in ("attention", "traffic"):
        assert one.parts[part] / 4 <= four.parts[part] < one.parts[part] / 3
    assert one.parts["products"] / 4 <= four.parts["products"] < one.parts["products"] / 3.9
    assert four.memory.parameters == pytest.approx(one.memory.parameters / 4, rel=1e-4)
    # Two gathers and two sums a layer and direction, and one each for the embedding and the head.
    sent = 2 * LLAMA.hidden_size * 4096 * 3 / 4
    link = H100.within
    each = link.latency + 3 * link.message + sent / link.bandwidth + link.ramp * sent**0.5
    assert four.parts["tensor"] == pytest.approx(1e3 * each * (32 * 4 * 2 + 4))
    assert one.parts["tensor"] == 0


def test_transfers_that_overlap_with_products_leave_a_piece():
    slow = dataclasses.replace(H100, hardware=dataclasses.replace(H100.hardware, matrix=H100.hardware.matrix / 10))
    for on, is_exact in ((slow, True), (H100, False)):
        plain, hidden = step(on=on, tp=4), step(on=on, tp=4, tp_overlap=True)
        ends = 4 / (32 * 4 * 2 + 4) * plain.parts["tensor"]  # of the embedding and the head, beside no product
        piece, left = (plain.parts["tensor"] - ends) / 4, hidden.parts["tensor"] - ends
        assert left == pytest.approx(piece) if is_exact else piece < left < 2 * piece  # some products are shorter
    assert hidden.parts["products"] == plain.parts["products"]
    assert "--tp-comm-overlap" in hidden.flags
    assert "--tp-comm-overlap" not in plain.flags


def test_pipelines_wait_and_hold_microbatches():
    flat, deep = step(replicas=4, microbatches=8), step(pp=4, microbatches=8)
    assert flat.parts["pipeline"] == 0
    even = 3 / 8 * sum(deep.parts[name] for name in ("attention", "products", "traffic"))
    assert 0.7 * even < deep.parts["pipeline"] < 1.1 * even  # the head makes the last stage slower
    spread = step(pp=4, microbatches=8, interleave=4)
    assert spread.parts["pipeline"] < 0.5 * deep.parts["pipeline"]
    assert spread.memory.activations > deep.memory.activations
    assert "--num-virtual-stages-per-pipeline-rank 4" in spread.flags


def test_a_last_stage_may_have_fewer_layers():
    model = dataclasses.replace(LLAMA, blocks=LLAMA.blocks[:31])
    assert Job(1, "contiguous", pp=4).layer_ranges(31) == [(0, 8), (8, 16), (16, 24), (24, 31)]
    even, uneven = step(pp=4, microbatches=8), step(model, pp=4, microbatches=8)
    assert "--decoder-last-pipeline-num-layers 7" in uneven.flags
    assert "--decoder-last" not in even.flags
    # The last stage has the head too: a layer less makes it, and so the step, shorter.
    assert uneven.step < even.step
    parts = step(model, microbatches=8, replicas=4).parts
    assert parts["attention"] / 31 * 8 == pytest.approx(even.parts["attention"])
    for how in ("none", "selective", "full"):
        assert step(model, pp=4, recompute=how).memory.total <= step(pp=4, recompute=how).memory.total


def test_expert_parallelism_fills_products_of_experts_and_takes_an_exchange():
    alone, over = step(NEXT, replicas=8), step(NEXT, replicas=8, ep=8)
    assert over.parts["experts"] < 0.7 * alone.parts["experts"]
    assert over.parts["dispatch"] > 2 * alone.parts["dispatch"]
    assert over.memory.parameters < alone.memory.parameters / 4
    assert over.memory.parameters > alone.memory.parameters / 8
    far = step(NEXT, replicas=16, ep=16)
    assert far.parts["dispatch"] > 2 * over.parts["dispatch"]  # over two hosts


def test_fp8_makes_products_faster_and_adds_casts():
    wide, narrow = step(precision="bf16"), step(precision="fp8")
    assert 0.4 < narrow.parts["products"] / wide.parts["products"] < 0.9
    assert narrow.parts["traffic"] > wide.parts["traffic"]
    assert "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather" in narrow.flags
    # Weights in FP8, along rows and along columns, take as many bytes as in bf16; inputs of products half.
    assert narrow.memory.parameters == wide.memory.parameters
    assert narrow.memory.activations < wide.memory.activations


def test_a_router_and_the_gate_of_shared_experts_stay_in_bf16():
    block = Block(mlp=MLP(128, experts=4096, experts_per_token=1, shared_size=8192, shared_gate=True))
    jobs = [Job(1, "contiguous", precision=precision) for precision in ("bf16", "fp8")]
    priced = [layer_seconds(block, None, 4096, 8192, job, H100).sum(0) for job in jobs]
    products, traffic = ([each[AT[part]] for each in priced] for part in ("products", "traffic"))
    shared, routed = block.mlp.dense_gemms(4096), block.mlp.routed_gemms(4096)
    of_shared = [product_seconds(each, 4096, 8192, job, H100).sum() for job in jobs for each in shared]
    cast = sum(each.products * (each.in_features + each.out_features) for each in (*shared, *routed))
    assert traffic[1] - traffic[0] == pytest.approx(6 * cast * 8192 / (2 * H100.hardware.copy))
    assert products[0] - sum(of_shared[:2]) == pytest.approx(products[1] - sum(of_shared[2:]))
    assert sum(of_shared[:2]) > sum(of_shared[2:])


def test_microbatches_repeat_all_but_the_optimizer():
    one, three = step(replicas=8), step(replicas=8, microbatches=3)
    assert three.tokens == 3 * one.tokens
    for part in ("attention", "products", "traffic"):
        assert three.parts[part] == pytest.approx(3 * one.parts[part])
    assert three.parts["optimizer"] == one.parts["optimizer"]
    # 42 bytes of each parameter of the rank's share, of which a copy moves two for one that it writes.
    assert one.parts["optimizer"] == pytest.approx(LLAMA.parameters / 8 * 42 / (2 * H100.hardware.copy) * 1e3)


@pytest.mark.parametrize(
    ("argument", "model", "change"),
    [
        ("tp", LLAMA, {"tp": 3}),
        ("tp", LLAMA, {"tp": 16}),
        ("tp", NEXT, {"tp": 4}),  # two key/value heads
        ("pp", LLAMA, {"pp": 24}),  # two layers each leave none for the last ones
        ("pp", LLAMA, {"pp": 3, "interleave": 2, "microbatches": 3}),
        ("pp", LLAMA, {"pp": 8, "interleave": 8, "microbatches": 8}),
        ("interleave", LLAMA, {"interleave": 2}),
        ("interleave", LLAMA, {"pp": 4, "interleave": 2, "microbatches": 6}),
        ("ep", LLAMA, {"ep": 2, "replicas": 2}),
        ("ep", NEXT, {"ep": 3, "replicas": 3}),
        ("ep", NEXT, {"ep": 8, "replicas": 4}),
        ("sharding", LLAMA, {"sharding": "zero3", "pp": 2}),
        ("precision", LLAMA, {"precision": "fp4"}),
        ("gradients", LLAMA, {"gradients": "fp8"}),
        ("tp_overlap", LLAMA, {"tp": 2, "tp_overlap": 1}),
        ("recompute_layers", LLAMA, {"recompute_layers": 2}),
        ("recompute_layers", LLAMA, {"recompute": "full", "recompute_layers": -1}),
        ("recompute", LLAMA, {"recompute": "ops"}),
        ("recompute", NEXT, {"recompute": "ops", "sharding": "zero3"}),
        ("microbatches", LLAMA, {"microbatches": 0}),
    ],
)
def test_rejects(argument, model, change):
    rejects(f"^{argument}: got ", lambda: step(model, **change))


def test_rejects_fp8_on_a_machine_without_a_rate():
    rejects("^precision: got 'fp8'; allowed: bf16 on a100", lambda: step(on=machine("a100"), precision="fp8"))
    rejects("^hosts: got 2", lambda: Job(2, "contiguous", tp=2).topology(H100, 2))


def searched(model, gpus, limit=H100.hardware.memory, batch=16, given=None, **change):
    return best_jobs(
        model, PACKING, H100, limit, Job(1, "contiguous"), gpus=gpus, batch=batch, given=given or {},
        recompute=change.get("recompute"), layout="contiguous", count=change.get("count", 3), most=10_000,
    )  # fmt: skip


def test_the_search_finds_what_pricing_every_job_finds():
    model = dataclasses.replace(LLAMA, blocks=LLAMA.blocks[:4])
    found = searched(model, 4, recompute="none")
    every = []
    for tp, pp, cp, interleave, packs in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        replicas = 4 // (tp * pp * cp)
        if not replicas or 4 % (tp * pp * cp) or 16 // replicas % packs:
            continue
        job = Job(
            cp, "contiguous", recompute="none", tp=tp, pp=pp, interleave=interleave, packs=packs, replicas=replicas,
            microbatches=16 // replicas // packs,
        )  # fmt: skip
        try:
            layout = Layout.contiguous(Packing([4096] * packs), cp, align=tp)
            every.append(predict_step(model, layout, job, H100, job.topology(H100)))
        except ValueError:
            continue
    fitting = [row for row in every if row.memory.total <= H100.hardware.memory]
    assert found.counted == len(every)
    assert found.rows[0].step == pytest.approx(min(row.step for row in fitting))
    assert found.tried < found.counted
    # Most jobs exceed a tight memory, many of them by what they save alone; of the others the fastest is found.
    limit = sorted(row.memory.total for row in every)[len(every) // 4]
    found, fitting = searched(model, 4, limit, recompute="none"), [row for row in every if row.memory.total <= limit]
    assert found.rows[0].step == pytest.approx(min(row.step for row in fitting))
    assert len(every) // 2 < found.too_large <= len(every) - len(fitting)
    assert found.bound >= found.rows[-1].step
    assert all(row.tokens == 16 * 4096 and row.job.gpus == 4 for row in found.rows)


def test_a_job_that_does_not_fit_is_never_among_the_best():
    roomy = searched(LLAMA, 8)
    limit = 0.8 * roomy.rows[0].memory.total
    tight = searched(LLAMA, 8, limit=limit)
    assert all(row.memory.total <= limit for row in tight.rows)
    none = searched(LLAMA, 8, limit=5e9)
    assert len(none.rows) == 1
    assert none.rows[0].memory.total > 5e9
    rejects("^tp: got 3; allowed: a divisor of 8 GPUs", lambda: searched(LLAMA, 8, given={"tp": 3}))


def config(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return read_model(str(path))


def gpt_oss(tmp_path, layers=36):
    return config(
        tmp_path, model_type="gpt_oss", hidden_size=2880, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4,
        sliding_window=128, vocab_size=201088, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip


def deepseek(tmp_path):
    return config(
        tmp_path, model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=8, num_attention_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=3, vocab_size=129280, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*PRESETS, "gpt-oss", "deepseek"])
def test_flags_of_a_model_build_its_products(name, tmp_path):
    model = {"gpt-oss": gpt_oss, "deepseek": deepseek}.get(name, lambda _: PRESETS[name])(tmp_path)
    flags = model_flags(model)
    if name in ("kimi-linear", "tiny"):  # Megatron has no Kimi Delta Attention
        assert flags is None
        return
    again = read_flags(flags)
    assert again.gemms == model.gemms
    assert [getattr(slot, "mask", None) for slot in again.slots()] == [
        getattr(slot, "mask", None) for slot in model.slots()
    ]


def test_a_launch_names_ranks_model_and_job():
    row = step(NEXT, cp=2, replicas=8, ep=8, microbatches=2, sharding="zero1")
    words = launch_of(row, NEXT, H100).split()
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    for flag, value in (
        ("--global-batch-size", "16"), ("--seq-length", "4096"), ("--expert-model-parallel-size", "8"),
        ("--context-parallel-size", "2"), ("--num-experts", "512"), ("--spec", "megatron_cp.megatron.specs"),
    ):  # fmt: skip
        assert words[words.index(flag) + 1] == value
    assert launch_of(step(cp=2, sharding="zero3"), LLAMA, H100).startswith("--context-parallel-size 2")
    assert "--no-rope-fusion" not in words


@pytest.mark.parametrize(
    ("change", "hosts", "nodes", "per_node"),
    [({"cp": 3, "replicas": 4}, None, 2, 6), ({"cp": 5, "replicas": 4}, None, 4, 5), ({"cp": 8}, 4, 4, 2)],
)
def test_a_launch_starts_as_many_processes_as_the_job_has_gpus(change, hosts, nodes, per_node):
    words = launch_of(step(**change), LLAMA, H100, hosts=hosts).split()
    assert words[:5] == ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    assert int(words[words.index("--seq-length") + 1]) == -(-4096 // (2 * change["cp"])) * 2 * change["cp"]


@pytest.mark.parametrize(("lengths", "names_spec"), [([4096], False), ([4096, 0], False), ([4000, 96], True)])
def test_a_launch_on_one_rank_has_layers_that_keep_documents_apart(lengths, names_spec):
    row = predict_step(LLAMA, Layout.contiguous(Packing(lengths), 1), Job(1, "contiguous"), H100, H100.topology(1))
    assert ("--spec megatron_cp.megatron.specs gpt_layer_spec" in launch_of(row, LLAMA, H100)) == names_spec


def test_experts_are_whole_on_tensor_parallel_ranks():
    for tp in (1, 2):
        launch = launch_of(step(NEXT, tp=tp, replicas=8, ep=8), NEXT, H100)
        assert ("--expert-tensor-parallel-size 1" in launch) == (tp > 1)  # as it is priced; Megatron's default is tp


def test_a_launch_has_the_jobs_flags_and_not_those_pasted_with_the_models():
    pasted = "--num-layers 2 --fp8-format hybrid --recompute_granularity full --tensor-model-parallel-size 8 --lr 1e-4"
    pasted += " --num-layers-per-virtual-pipeline-stage 1 --account-for-loss-in-pipeline-split --use-megatron-fsdp"
    launch = launch_of(step(cp=2), LLAMA, H100, pasted)
    assert "--num-layers 2 --lr 1e-4" in launch
    assert not any(
        flag in launch
        for flag in ("fp8", "granularity full", "tensor-model-parallel", "per-virtual", "account-for", "fsdp")
    )


@pytest.mark.parametrize(
    ("interleave", "staged"), [(1, "M-M-M|-M-M"), (2, "MM|M-|-M|M-")], ids=["uneven", "virtual stages"]
)
def test_stages_of_a_hybrid_model_are_the_bars_of_its_pattern(interleave, staged):
    """Megatron refuses flags of virtual stages beside a pattern, and of uneven ones beside bars."""
    letters = staged.replace("|", "")
    pasted = f"--hybrid-layer-pattern '{letters[0]}|{letters[1:]}' --hidden-size 512 --vocab-size 10"
    row = step(read_flags(pasted), pp=2, interleave=interleave, microbatches=2)
    words = shlex.split(launch_of(row, read_flags(pasted), H100, pasted))
    assert words[words.index("--hybrid-layer-pattern") + 1] == staged
    for flags in (words, row.flags.split()):
        assert not {"--num-virtual-stages-per-pipeline-rank", "--decoder-last-pipeline-num-layers"} & set(flags)


def test_a_launch_of_latent_attention_has_positions_of_its_own(tmp_path):
    """`doctor --megatron` refuses fused ones over several ranks."""
    model = deepseek(tmp_path)
    assert "--no-rope-fusion" in launch_of(step(model, cp=2), model, H100).split()
    assert "--no-rope-fusion" not in launch_of(step(model), model, H100).split()
