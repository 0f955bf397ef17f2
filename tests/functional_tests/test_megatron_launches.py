"""`doctor --megatron` on the flags of published models, and the same models, made small, built with our specs.

Flags are written from the models' published configurations; sizes are the models' own, and the parallel sizes usual
ones. Each model is then built on one rank of the same settings with few, narrow layers: what doctor refuses is refused
when it is built, and the rest is built.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import re
import shlex

import pytest

pytest.importorskip("megatron.core")

from megatron_cp.cli.main import main, parsed
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from tests.commands import reported
from tests.functional_tests import tiny_megatron as tiny
from tests.limits import limit

_USUAL = (
    "--context-parallel-size 4 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer"
    " --overlap-grad-reduce --calculate-per-token-loss --swiglu --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --lr 1e-5 --train-iters 1000"
    " --position-embedding-type rope"
)
_EXPERTS = "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --moe-grouped-gemm"
LAUNCHES = {
    "Llama-3 8B":
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --rotary-base 500000 --seq-length 8192"
    " --max-position-embeddings 8192 --cp-comm-type p2p",
    "Llama-3 70B":
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
    " --group-query-attention --num-query-groups 8 --rotary-base 500000 --seq-length 131072"
    " --max-position-embeddings 131072 --use-rope-scaling --tensor-model-parallel-size 8 --sequence-parallel"
    " --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --recompute-granularity"
    " selective",
    "Mixtral 8x7B":
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --rotary-base 1000000 --seq-length 32768"
    " --max-position-embeddings 32768 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.02"
    f" --moe-router-load-balancing-type aux_loss {_EXPERTS}",
    "Qwen3 30B-A3B":
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128"
    " --group-query-attention --num-query-groups 4 --qk-layernorm --rotary-base 1000000 --seq-length 32768"
    " --max-position-embeddings 40960 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
    f" --moe-aux-loss-coeff 0.001 --moe-router-load-balancing-type global_aux_loss {_EXPERTS}",
    "Qwen3-Next 80B-A3B":
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --kv-channels 256"
    " --group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate --rotary-base"
    " 10000000 --rotary-percent 0.25 --seq-length 32768 --max-position-embeddings 262144"
    " --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4"
    " --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads"
    " 32 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512"
    " --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-aux-loss-coeff 0.001"
    f" --mtp-num-layers 1 {_EXPERTS}",
    "Qwen3.5 with images":
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --kv-channels 256"
    " --group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate"
    " --position-embedding-type mrope --mrope-section 11 11 10 --rotary-percent 0.25 --seq-length 32768"
    " --max-position-embeddings 262144 --experimental-attention-variant gated_delta_net"
    " --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim"
    " 128 --linear-num-key-heads 16 --linear-num-value-heads 32",
    "Nemotron-H 8B":
    "--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096"
    " --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --kv-channels 128 --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8"
    " --squared-relu --position-embedding-type none --seq-length 8192 --max-position-embeddings 8192"
    " --tensor-model-parallel-size 8",
    "DeepSeek-V3":
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
    " --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim"
    " 64 --v-head-dim 128 --qk-layernorm --no-rope-fusion --rotary-scaling-factor 40 --mscale 1.0"
    " --mscale-all-dim 1.0 --seq-length 4096 --max-position-embeddings 163840 --num-experts 256"
    " --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3"
    " --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5"
    " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --mtp-num-layers 1"
    f" --mtp-loss-scaling-factor 0.1 --fp8-format e4m3 {_EXPERTS}",
    "gpt-oss 120B":
    "--num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --kv-channels 64"
    " --group-query-attention --num-query-groups 8 --softmax-type learnable --window-size 128,0"
    " --window-attn-skip-freq 2 --rotary-base 150000 --seq-length 131072 --max-position-embeddings 131072"
    f" --num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --quick-geglu {_EXPERTS} --cp-comm-type exact",
    "DeepSeek-V3.2":
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
    " --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim"
    " 64 --v-head-dim 128 --no-rope-fusion --seq-length 4096 --max-position-embeddings 163840"
    " --experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128"
    " --dsa-indexer-topk 2048 --cp-comm-type all_gather",
    "a job with much that is refused":
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --num-experts 4 --moe-router-load-balancing-type sinkhorn --qk-clip --cuda-graph-impl local"
    " --reset-attention-mask --hybrid-context-parallel --expert-model-parallel-size 2"
    " --moe-token-dispatcher-type allgather",
}  # fmt: skip
REFUSED = {
    "a job with much that is refused": {
        "--moe-router-load-balancing-type", "--qk-clip", "--cuda-graph-impl",
        "--reset-attention-mask", "--hybrid-context-parallel", "--moe-token-dispatcher-type",
    },
}  # fmt: skip
SMALL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
    "linear_attention_freq": 2,
    "moe_shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "mamba_state_dim": 8, "mamba_num_groups": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
    "mrope_section": [2, 1, 1],
}  # fmt: skip


def judged(flags):
    """The verdicts of the command, by flag, and its exit status."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(["doctor", "--json", "--megatron", *shlex.split(flags)])
    rows = json.loads(said.getvalue().splitlines()[-1])["flags"]
    return {row["flag"]: row["verdict"] for row in rows}, status


def test_doctor_shows_a_refused_flag_with_the_value_that_was_typed():
    flags = ["--cp-layout=striped", "--qk-clip", "--cp-comm-type", "a2a", "p3p", "--micro-batch-size", "2"]
    job = [*flags, "--context-parallel-size", "4", *shlex.split(OURS), "--calculate-per-token-loss"]
    text, report = reported(["doctor", "--megatron", *job], status=1)
    assert text.startswith("NOT READY: refused: --cp-comm-type, --cp-layout, --qk-clip\n")
    text = re.sub(" +", " ", text)
    assert "refused --cp-layout=striped got 'striped'; allowed: balanced or" in text
    assert "refused --cp-comm-type a2a p3p got 'p3p'; allowed: a2a or" in text
    assert "refused --qk-clip got True; allowed: off" in text
    assert "proved --micro-batch-size tests/" in text
    typed = {row["flag"]: row["typed"] for row in report["flags"]}
    assert typed["--cp-comm-type"] == "--cp-comm-type a2a p3p"
    assert typed["--micro-batch-size"] == "--micro-batch-size 2"


def test_doctor_refuses_a_length_that_megatron_does(capsys):
    job = ["--context-parallel-size", "3", "--calculate-per-token-loss", *shlex.split(OURS), "--seq-length"]
    assert main(["doctor", "--megatron", *job, "4098"]) == 0
    assert main(["doctor", "--megatron", *job, "4095"]) == 1
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "refused --seq-length 4095 got 4095; allowed: a multiple of 6, as Megatron asks" in text


def test_doctor_names_a_quotation_that_does_not_end(capsys):
    assert main(["doctor", "--megatron", "torchrun pretrain_gpt.py --load it's"]) == 2
    assert "--megatron: No closing quotation in torchrun pretrain_gpt.py" in capsys.readouterr().err


def test_doctor_shortens_long_values(capsys):
    assert main(["doctor", "--megatron", "--cp-layout", "x" * 200]) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("refused"))
    assert row.startswith(f"refused    --cp-layout {'x' * 44} ...  got 'xxx")


OURS = "--spec megatron_cp.megatron.specs gpt_layer_spec"


@pytest.mark.parametrize("name", LAUNCHES)
def test_doctor_judges_published_launches(name):
    ours = OURS.replace("gpt_layer", "hybrid_stack") if "--hybrid-layer-pattern" in LAUNCHES[name] else OURS
    verdicts, status = judged(f"{_USUAL} {ours} {LAUNCHES[name]}")
    assert {flag for flag, verdict in verdicts.items() if verdict == "refused"} == REFUSED.get(name, set())
    assert status == (1 if name in REFUSED else 0)
    assert [flag for flag, verdict in verdicts.items() if verdict == "unknown"] == []


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama3-8b", "Llama-3 8B"), ("qwen3-next", "Qwen3-Next 80B-A3B"), ("nemotron-h", "Nemotron-H 8B")],
)
def test_doctor_accepts_the_flags_that_plan_names(model, name):
    args = parsed(["plan", "--whole", "--model", model, "--lengths", "8192", "--cp", "4", "--fit", "1000GiB"])
    take_this = args.run(args).data["take_this"]
    ours = OURS.replace("gpt_layer", "hybrid_stack") if "--hybrid-layer-pattern" in LAUNCHES[name] else OURS
    job = f"{_USUAL} {ours} {LAUNCHES[name]} {take_this}"
    verdicts, status = judged(job)
    assert status == 0
    assert judged(shlex.quote(job)) == (verdicts, status)
    assert [flag for flag, verdict in verdicts.items() if verdict == "unknown"] == []
    assert "--cp-comm-type" in verdicts


@pytest.mark.parametrize(
    ("flags", "undecided", "remark"),
    [
        ("--calculate-per-token-loss", {"--spec"}, "Megatron's own: --spec megatron_cp.megatron.specs gpt_layer_spec"),
        (
            "--calculate-per-token-loss --hybrid-layer-pattern M*-", {"--spec"},
            "Megatron's own: --spec megatron_cp.megatron.specs hybrid_stack_spec",
        ),
        ("--calculate-per-token-loss --spec my.specs mine", {"--spec"}, "not from megatron_cp.megatron.specs"),
        (OURS, {"--calculate-per-token-loss"}, "a mean of the ranks' means, which the layers refuse"),
        ("", {"--spec", "--calculate-per-token-loss"}, "megatron_cp.megatron.loss (forward_step or loss_of)"),
        (f"--calculate-per-token-loss {OURS}", set(), ""),
    ],
)  # fmt: skip
def test_rejects_launches_that_leave_context_parallelism_or_the_loss_open(flags, undecided, remark):
    """With several context-parallel ranks; and --json is ours behind Megatron's flags too."""
    for ranks in (2, 1):
        words = ["doctor", "--megatron", "--context-parallel-size", str(ranks), *shlex.split(flags), "--json"]
        is_ready = ranks == 1 or not undecided
        text, report = reported(words, status=0 if is_ready else 1)
        rows = {row["flag"]: row for row in report["flags"] if row["verdict"] == "undecided"}
        assert rows.keys() == (undecided if ranks > 1 else set())
        missing = ", ".join(sorted(undecided))
        first = "READY: no flag is refused" if is_ready else f"NOT READY: missing or undecided: {missing}"
        assert text.startswith(f"{first}\n")
        assert report["ready"] == is_ready
        assert ("nothing is spread over ranks" in text) == (ranks == 1)
        if rows:
            assert any(remark in row["remark"] for row in rows.values())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("--hybrid-layer-pattern M*- --transformer-impl local", "hybrid_stack_spec", "local_hybrid_stack_spec"),
        ("--hybrid-layer-pattern M*-", "local_hybrid_stack_spec", "hybrid_stack_spec"),
        ("--hybrid-layer-pattern M*-", "gpt_layer_spec", "hybrid_stack_spec"),
        ("", "hybrid_stack_spec", "gpt_layer_spec"), ("", "nonsense", "gpt_layer_spec"), ("", "", "gpt_layer_spec"),
    ],
)  # fmt: skip
def test_rejects_specs_of_another_model(flags, given, expected, ranks):
    for name in (given, expected):
        job = f"--calculate-per-token-loss {flags} --spec megatron_cp.megatron.specs {name}"
        words = ["doctor", "--megatron", "--context-parallel-size", str(ranks), *shlex.split(job)]
        text, _ = reported([*words, "--json"], status=int(name != expected))
        assert (f"describe: --spec megatron_cp.megatron.specs {expected}\n" in text) == (name != expected)


def settings_of(flags):
    """Returns Megatron's parsed flags, and the fields of the configuration that they give a small model."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    from megatron_cp.megatron.config import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_arguments(parser)
    args = parser.parse_args(shlex.split(flags))
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    args.num_moe_experts = args.num_experts
    settings = {}
    for name in SHAPES & {field.name for field in dataclasses.fields(kind)}:
        value = getattr(args, name, None)
        if value is not None:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            settings[name] = SMALL.get(name, value)
    return args, settings


def build_all(group):
    """Returns, by launch, the error that refused the model, or None."""
    tiny.start()
    return {name: build(f"{_USUAL} {flags}") for name, flags in LAUNCHES.items()}


def build(flags):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_cp.megatron import specs

    args, settings = settings_of(flags)
    config = tiny.configure("mla" if args.multi_latent_attention else "gpt", **settings)
    # As many context-parallel ranks as the job has, in what is asked of the configuration alone.
    config.context_parallel_size = args.context_parallel_size
    for name in ("qk_clip", "hybrid_context_parallel", "expert_model_parallel_size"):  # graphs need a GPU to be built
        if getattr(args, name, None):
            setattr(config, name, getattr(args, name))
    config.reset_attention_mask = args.reset_attention_mask
    common = {"vocab_size": 64, "max_sequence_length": 128, "position_embedding_type": args.position_embedding_type}
    try:
        if args.hybrid_layer_pattern:
            HybridModel(config, specs.hybrid_stack_spec, hybrid_layer_pattern="M*-M", **common)
        else:
            spec = specs.gpt_layer_spec(config)
            ahead = specs.gpt_mtp_block_spec(config) if config.mtp_num_layers else None
            GPTModel(config, spec, mtp_block_spec=ahead, **common)
    except ArgumentError as error:
        return error.argument
    return None


# Of the flags, those that shape a model or are looked at while it is built.
SHAPES = {
    *SMALL, "experimental_attention_variant", "linear_conv_kernel_dim", "qk_layernorm", "attention_output_gate",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate", "mtp_num_layers", "mtp_loss_scaling_factor", "softmax_type", "window_size",
    "window_attn_skip_freq", "moe_expert_capacity_factor", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
}  # fmt: skip


def test_a_model_is_built_where_doctor_refuses_nothing_and_refused_by_the_same_flag_elsewhere():
    (built,) = run_ranks(build_all, 1, kind="processes", timeout=limit(180))
    for name, refused_by in built.items():
        assert refused_by is None if name not in REFUSED else refused_by in REFUSED[name], (name, refused_by)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-layer", "3"], "--num-layer is no flag of megatron-core 0.19 or of megatron_cp."),
        (["--num-layers", "3", "stray"], "stray is no flag of megatron-core 0.19 or of megatron_cp."),
        (["--num-layers", "three"], "argument --num-layers: invalid int value: 'three'."),
    ],
    ids=str,
)
def test_rejects_flags_that_megatron_does_not_have(flags, said, capsys):
    assert main(["doctor", "--megatron", *flags]) == 2
    assert capsys.readouterr().err == f"megatron-cp doctor: --megatron: {said}\n"
