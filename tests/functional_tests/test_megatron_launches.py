"""`doctor --megatron` on the flags of published models, and on those that a real job refuses.

Flags are written from the models' published configurations; sizes are the models' own, and the parallel sizes usual
ones.
"""

import argparse
import re
import shlex
import types

import pytest

pytest.importorskip("megatron.core")

from megatron_cp.cli import megatron_job
from megatron_cp.cli.main import main, parsed
from megatron_cp.errors import ArgumentError
from tests.commands import reported
from tests.megatron_launches import BASE, LINES

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
    "Qwen3-Next 80B-A3B":
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --kv-channels 256"
    " --group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate --rotary-base"
    " 10000000 --rotary-percent 0.25 --seq-length 32768 --max-position-embeddings 262144"
    " --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4"
    " --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads"
    " 32 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512"
    " --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-aux-loss-coeff 0.001"
    f" --mtp-num-layers 1 {_EXPERTS}",
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
        "--reset-attention-mask", "--moe-token-dispatcher-type",
    },
}  # fmt: skip


def judged(flags):
    """The verdicts of the command, by flag, and its exit status."""
    args = parsed(["doctor", "--megatron", *shlex.split(flags)])
    report = args.run(args)
    return {row["flag"]: row["verdict"] for row in report.data["flags"]}, report.status


def test_doctor_shows_a_refused_flag_with_the_value_that_was_typed():
    flags = ["--cp-layout=striped", "--qk-clip", "--cp-comm-type", "a2a", "p3p", "--micro-batch-size", "2"]
    job = [*flags, "--context-parallel-size", "4", *shlex.split(OURS), "--calculate-per-token-loss"]
    text, report = reported(["doctor", "--megatron", *job], status=1)
    assert text.startswith("NOT READY: refused: --cp-comm-type, --cp-layout, --qk-clip\n")
    text = re.sub(" +", " ", text)
    assert "refused --cp-layout=striped got 'striped'; allowed: balanced or" in text
    assert "refused --cp-comm-type a2a p3p got 'p3p'; allowed: a2a or" in text
    assert "refused --qk-clip got True; allowed: off" in text
    assert re.search("proved --micro-batch-size .*: tests/", text)
    typed = {row["flag"]: row["typed"] for row in report["flags"]}
    assert typed["--cp-comm-type"] == "--cp-comm-type a2a p3p"
    assert typed["--micro-batch-size"] == "--micro-batch-size 2"


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--hybrid-context-parallel --micro-batch-size 2", {"--micro-batch-size"}),
        ("--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 --seq-length 1024", {"--max-seqlen-per-dp-cp-rank"}),
        ("--hybrid-context-parallel --context-parallel-size 1", {"--context-parallel-size"}),
        ("--hybrid-context-parallel --min-dynamic-context-parallel-size 0", {"--min-dynamic-context-parallel-size"}),
        ("--num-attention-heads 0 --hidden-size 64", {"--num-attention-heads"}),
        ("--tensor-model-parallel-size 0 --context-parallel-size 0", {
            "--tensor-model-parallel-size", "--context-parallel-size",
        }),
        ("--hybrid-layer-pattern MC|*W/MM --spec megatron_cp.megatron.specs hybrid_stack_spec",
         {"--hybrid-layer-pattern"}),
    ],
)  # fmt: skip
def test_doctor_refuses_sizes_and_layers_of_which_no_model_is_built(flags, refused):
    job = f"--context-parallel-size 4 {OURS} --calculate-per-token-loss {flags}"
    verdicts, status = judged(job)
    assert {flag for flag, verdict in verdicts.items() if verdict == "refused"} == refused
    assert status == 1


def test_doctor_refuses_a_length_that_megatron_does(capsys):
    job = ["--context-parallel-size", "3", "--calculate-per-token-loss", *shlex.split(OURS), "--seq-length"]
    assert main(["doctor", "--megatron", *job, "4098"]) == 0
    assert main(["doctor", "--megatron", *job, "4095"]) == 1
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "refused --seq-length 4095 got 4095; allowed: a multiple of 6, as Megatron asks" in text


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


@pytest.mark.parametrize(
    ("ranks", "flags", "given", "expected"),
    [
        (2, "--hybrid-layer-pattern M*- --transformer-impl local", "hybrid_stack_spec", "local_hybrid_stack_spec"),
        (1, "--hybrid-layer-pattern M*-", "local_hybrid_stack_spec", "hybrid_stack_spec"),
        (2, "--hybrid-layer-pattern M*-", "gpt_layer_spec", "hybrid_stack_spec"),
        (1, "", "hybrid_stack_spec", "gpt_layer_spec"), (2, "", "nonsense", "gpt_layer_spec"),
        (2, "", "", "gpt_layer_spec"),
    ],
)  # fmt: skip
def test_rejects_specs_of_another_model(ranks, flags, given, expected):
    for name in (given, expected):
        job = f"--calculate-per-token-loss {flags} --spec megatron_cp.megatron.specs {name}"
        words = ["doctor", "--megatron", "--context-parallel-size", str(ranks), *shlex.split(job)]
        text, _ = reported([*words, "--json"], status=int(name != expected))
        assert (f"describe: --spec megatron_cp.megatron.specs {expected}\n" in text) == (name != expected)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-layer", "3"], "--num-layer is no flag of megatron-core 0.19.2 or of megatron_cp."),
        (["--mtp-hsm", "--num-layer", "3"], "--num-layer is no flag of megatron-core 0.19.2 or of megatron_cp."),
        (["stray", "--mtp-hsm"], "stray is no flag of megatron-core 0.19.2 or of megatron_cp."),
        (["--num-layers", "3", "stray"], "stray is no flag of megatron-core 0.19.2 or of megatron_cp."),
        (["--num-layers", "three"], "argument --num-layers: invalid int value: 'three'."),
        (["torchrun pretrain_gpt.py --load it's"], "No closing quotation in torchrun pretrain_gpt.py --load it's"),
    ],
    ids=str,
)
def test_rejects_flags_that_megatron_does_not_have(flags, said, capsys):
    assert main(["doctor", "--megatron", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"megatron-cp doctor: --megatron: {said}")


@pytest.mark.parametrize(
    ("here", "flags", "verdict", "remark"),
    [
        (
            "0.19.2",
            "--mtp-hsm",
            "refused",
            "no flag of megatron-core 0.19.2. In main of Megatron-LM it is refused: hid",
        ),
        (None, "--cp-partition-mode=zigzag", "refused", "no flag of megatron-core 0.19.2. In dev of Megatron-LM it is"),
        ("0.20.0", "--mtp-hsm", "refused", "got True; allowed: off with our layers"),
        ("0.20.0", "--cp-partition-mode zigzag", "expected", "as given; else another order than zigzag"),
        ("0.20.0", "--cp-partition-mode=contiguous", "refused", "got 'contiguous'; allowed: zigzag"),
        ("0.20.0", "--otel-enabled", "unknown", "no flag of megatron-core 0.19.2, whose flags are judged"),
    ],
)
def test_doctor_names_flags_of_other_releases_with_their_reason(here, flags, verdict, remark, monkeypatch):
    monkeypatch.setattr(megatron_job, "version_of", lambda package: here)
    _, report = reported(["doctor", "--megatron", *flags.split(), "--json"], status=int(verdict == "refused"))
    flag = flags.replace("=", " ").split()[0]
    assert [row["verdict"] for row in report["flags"] if row["flag"] == flag] == [verdict]
    assert next(row["remark"] for row in report["flags"] if row["flag"] == flag).startswith(remark)


@pytest.mark.parametrize(("flags", "refused"), LINES, ids=range(len(LINES)))
def test_doctor_refuses_the_flags_that_a_real_job_does(flags, refused):
    verdicts, status = judged(f"{BASE} {flags}")
    assert {flag for flag, verdict in verdicts.items() if verdict == "refused"} == refused
    assert status == bool(refused)


@pytest.fixture
def real(monkeypatch):
    """A function that parses flags as a job does, makes its configuration, and the layers up to their refusals."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    from megatron_cp.executor.groups import ThreadGroup
    from megatron_cp.megatron import specs
    from megatron_cp.megatron.config import TransformerConfig, add_arguments, with_options
    from megatron_cp.megatron.layers import attention, base
    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet
    from megatron_cp.megatron.layers.mamba_mixer import MambaMixer
    from megatron_cp.megatron.layers.multi_latent_attention import MLASelfAttention
    from megatron_cp.megatron.layers.sparse_attention import SparseMLASelfAttention

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    monkeypatch.setattr(arguments, "is_te_min_version", lambda *args: True)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(attention, "cp_ranks", lambda group: ThreadGroup.create(group.size())[0])
    monkeypatch.setattr(base, "agree_on_layer", lambda *args: None)  # the other ranks do not run

    def run(words):
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        arguments.add_megatron_arguments(parser)
        args = add_arguments(parser).parse_args(words)
        parallel = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name: getattr(args, f"{name}_parallel_size") for name in parallel}
        args.rank, args.world_size = 0, sizes["tensor_model"] * sizes["pipeline_model"] * sizes["context"]
        args.world_size *= sizes["expert_model"]
        args._is_global_batch_size_explicitly_specified = False
        arguments.validate_args(args)
        config = with_options(core_transformer_config_from_args(args, TransformerConfig), args)
        groups = types.SimpleNamespace(
            cp=types.SimpleNamespace(size=lambda: sizes["context"], rank=lambda: 0),
            tp=types.SimpleNamespace(size=lambda: sizes["tensor_model"], rank=lambda: 0),
        )
        pattern = args.hybrid_layer_pattern or ""
        if not pattern:
            specs.gpt_layer_spec(config)
        if config.experimental_attention_variant == "dsa":
            refusal_of_layer(SparseMLASelfAttention, config, None)
            return
        if config.experimental_attention_variant == "gated_delta_net":
            refusal_of_layer(GatedDeltaNet, config, None, pg_collection=groups)
        if "M" in pattern:
            refusal_of_layer(MambaMixer, config, None, layer_number=1, pg_collection=groups)
        sizes_of_latents = {}
        if config.multi_latent_attention:
            refusal_of_layer(MLASelfAttention, config, None, layer_number=1)
            keys = config.qk_head_dim + config.qk_pos_emb_head_dim
            sizes_of_latents = {"k_channels": keys, "v_channels": config.v_head_dim}
        for number, scheme in enumerate(args.cp_comm_type, 1):
            attention.CoreAttention(
                config, number, AttnMaskType.causal, "self", scheme, pg_collection=groups, **sizes_of_latents
            )

    return run


def refusal_of_layer(layer, *args, **kwargs):
    """Raises the layer's refusal, which is its first act; without modules it cannot be built beyond that."""
    try:
        layer(*args, **kwargs)
    except ArgumentError:
        raise
    except (AssertionError, AttributeError, TypeError):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize(("flags", "refused"), LINES, ids=range(len(LINES)))
def test_a_real_job_refuses_the_same_flags(flags, refused, real):
    older = dict.fromkeys(("--enable-cuda-graph", "--external-cuda-graph"), "--cuda-graph-impl")
    allowed = {older.get(flag, flag) for flag in refused}
    words = shlex.split(f"{BASE} {flags}")
    if not refused:
        real(words)
        return
    with pytest.raises(ArgumentError) as caught:
        real(words)
    assert caught.value.argument in allowed
