"""`launch_of`: makes the launch of a job: torchrun, and Megatron's flags of model and job. No torch in here."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.megatron_flags import flags_in, read_flags
from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import StepPrice
from megatron_cp.errors import ArgumentError
from megatron_cp.planner import Machine

_TRAINING = "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --bf16"
_SPEC = "--spec megatron_cp.megatron.specs {}_spec --calculate-per-token-loss"
# Flags that the job decides, whose values in a model's flags were not priced.
_OF_A_JOB = (
    "--account-for-", "--context-parallel", "--cp-", "--data-parallel-sharding", "--decoder-", "--expert-", "--fp8",
    "--grad-reduce-in-bf16", "--hierarchical-context", "--linear-cp-mode", "--num-layers-per-virtual",
    "--num-virtual-stages", "--pipeline-model-parallel", "--recompute", "--sequence-parallel",
    "--tensor-model-parallel", "--tp-comm", "--use-distributed-optimizer", "--use-megatron-fsdp",
)  # fmt: skip
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_LETTERS = {"mamba": "M", "gdn": "G"}


def launch_of(
    row: StepPrice, model: ModelSpec, on: Machine, given: str | None = None, hosts: int | None = None
) -> str:  # fmt: skip
    """Returns the launch of a job; the job's flags alone where it is not one of Megatron.

    Args:
        row: the job with its price.
        model: the model.
        on: the machine.
        given: Megatron's flags of the model, if it was described by them; those of a job are not repeated.
        hosts: hosts of a context-parallel group, if they are not full.
    """
    job = row.job
    described = given if given is not None else model_flags(model)
    if job.sharding == "zero3" or described is None:
        return row.flags
    described = _with_stages_of(job, described)
    most = on.ranks_per_host if hosts is None else job.cp // hosts
    per_host = max(count for count in range(1, most + 1) if job.gpus % count == 0)
    is_hybrid = "--hybrid" in described
    tokens = row.tokens // (job.replicas * job.microbatches)
    multiple = job.tp * (2 * job.cp if job.cp > 1 else 1)  # Megatron wants such a length, which the pack need not have
    tokens = -(-tokens // multiple) * multiple
    batch = f"--micro-batch-size 1 --global-batch-size {job.replicas * job.microbatches} --seq-length {tokens}"
    placed = "--standalone" if job.gpus == per_host else f"--nnodes {job.gpus // per_host}"
    words = [
        f"torchrun {placed} --nproc-per-node {per_host}",
        "pretrain_hybrid.py" if is_hybrid else "pretrain_gpt.py", described, _TRAINING,
        f"{batch} --max-position-embeddings {tokens}", row.flags,
    ]  # fmt: skip
    if job.cp > 1 or row.documents > 1:  # beside which Megatron's own attention lets documents see each other
        words += ["--no-rope-fusion"] * ("--multi-latent-attention" in described)  # they are for one rank
        words.append(_SPEC.format("hybrid_stack" if is_hybrid else "gpt_layer"))
    return " ".join(words)


def _with_stages_of(job: Job, text: str) -> str:
    """Returns a model's flags without those of a job; bars in a pattern end the stages and chunks of this one."""
    found = []
    for flag, values in flags_in(shlex.split(text)):
        if flag in _PATTERNS:
            letters = values[0].replace("|", "")
            values = ["|".join(letters[lo:hi] for lo, hi in job.layer_ranges(len(letters)))]
        if not flag.startswith(_OF_A_JOB):
            found.append(shlex.join([flag, *values]))
    return " ".join(found)


def model_flags(model: ModelSpec) -> str | None:
    """Returns the flags from which Megatron-core 0.19 builds the model; None if it has no such layers.

    Example:
        >>> from megatron_cp.apps.estimate.model_presets import PRESETS
        >>> read_flags(model_flags(PRESETS["llama3-8b"])).parameters == PRESETS["llama3-8b"].parameters
        True
    """
    parts = list(dict.fromkeys(part for block in model.blocks for part in block.parts))
    linear = [part for part in parts if isinstance(part, LinearMixer)]
    attention = [part for part in parts if isinstance(part, AttentionMixer)]
    found = [f"--hidden-size {model.hidden_size} --vocab-size {model.vocab_size} --make-vocab-size-divisible-by 1"]
    found += ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)
    found += [_attention_flags(attention[0])] if attention else [f"--num-attention-heads {linear[0].heads}"]
    for kind in {part.kind: part for part in linear}.values():
        found.append(_linear_flags(kind))
    mlps = [part for part in parts if isinstance(part, MLP)]
    found += [_mlp_flags(mlps)]
    if model.has_pattern:
        found.append(f"--hybrid-layer-pattern {''.join(_letter(block) for block in model.blocks)}")
    else:
        found += [f"--num-layers {len(model.blocks)}", *_pattern_flags(model.blocks)]
    text = " ".join(found)
    try:
        again = read_flags(text)
    except ArgumentError:
        return None
    shapes = [
        [(block.gemms(each.hidden_size), block.mixer and block.mixer.slot()) for block in each.blocks]
        for each in (model, again)
    ]
    return text if shapes[0] == shapes[1] else None


def _letter(block: Block) -> str:
    if isinstance(block.mixer, LinearMixer):
        return _LETTERS.get(block.mixer.kind, "?")
    if block.mixer is not None:
        return "?" if block.mlp is not None else "+" if block.mixer.kv_rank else "*"
    return "E" if block.mlp is not None and block.mlp.experts else "-"


def _attention_flags(mixer: AttentionMixer) -> str:
    found = [f"--num-attention-heads {mixer.heads}"]
    if mixer.kv_rank:
        found.append(
            f"--multi-latent-attention --kv-lora-rank {mixer.kv_rank} --v-head-dim {mixer.value_head_dim} "
            f"--qk-head-dim {mixer.head_dim - mixer.shared_key_dim} --qk-pos-emb-head-dim {mixer.shared_key_dim}"
        )
        found += [f"--q-lora-rank {mixer.query_rank}"] * bool(mixer.query_rank)
    else:
        found.append(f"--kv-channels {mixer.head_dim}")
        found += [f"--group-query-attention --num-query-groups {mixer.kv_heads}"] * (mixer.kv_heads != mixer.heads)
    found += ["--qk-layernorm"] * mixer.qk_norm + ["--attention-output-gate"] * mixer.output_gate
    found += ["--softmax-type learnable"] * mixer.sink
    if not mixer.output_bias:
        found += ["--disable-bias-linear"] + ["--add-qkv-bias"] * mixer.bias
    return " ".join(found)


def _linear_flags(mixer: LinearMixer) -> str:
    if _LETTERS.get(mixer.kind) == "M":
        return (
            f"--mamba-num-heads {mixer.heads} --mamba-num-groups {mixer.key_heads} "
            f"--mamba-state-dim {mixer.head_dim} --mamba-head-dim {mixer.value_head_dim}"
        )
    return (
        f"--linear-num-value-heads {mixer.heads} --linear-num-key-heads {mixer.key_heads} "
        f"--linear-key-head-dim {mixer.head_dim} --linear-value-head-dim {mixer.value_head_dim} "
        f"--linear-conv-kernel-dim {mixer.conv_width}"
    )


def _mlp_flags(mlps: Sequence[MLP]) -> str:
    found = []
    for mlp in mlps:
        if mlp.experts:
            found.append(
                f"--num-experts {mlp.experts} --moe-router-topk {mlp.experts_per_token} --moe-ffn-hidden-size "
                f"{mlp.intermediate_size} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
            )
            found += [f"--moe-shared-expert-intermediate-size {mlp.shared_size}"] * (mlp.shared_size > 0)
            found += ["--moe-shared-expert-gate"] * mlp.shared_gate
        else:
            found.append(f"--ffn-hidden-size {mlp.intermediate_size}")
    return " ".join([*found, *(["--swiglu"] if any(mlp.gated for mlp in mlps) else ["--squared-relu"])])


def _pattern_flags(blocks: Sequence[Block]) -> list[str]:
    """Returns the flags of layers that differ: linear ones, windows and mixtures."""
    found, mixers = [], [block.mixer for block in blocks]
    if any(isinstance(mixer, LinearMixer) for mixer in mixers):
        pattern = _runs([isinstance(mixer, LinearMixer) for mixer in mixers])
        found.append(f"--experimental-attention-variant gated_delta_net --linear-attention-freq {pattern}")
    masks = [mixer.mask if isinstance(mixer, AttentionMixer) else "causal" for mixer in mixers]
    windows = [mask for mask in dict.fromkeys(masks) if mask.startswith("window:")]
    if windows:
        found.append(f"--window-size {windows[0].removeprefix('window:')}")
        found += [f"--window-attn-skip-freq {_runs([mask == windows[0] for mask in masks])}"] * ("causal" in masks)
    sparse = [block.mlp is not None and block.mlp.experts > 0 for block in blocks]
    if any(sparse) and not all(sparse):
        found.append(f"--moe-layer-freq {_runs(sparse)}")
    return found


def _runs(values: Sequence[bool]) -> str:
    """Returns a list of 0 and 1 as Megatron reads it: a sum of repeated lists, or a period that is repeated."""
    bits = [int(value) for value in values]
    for period in range(1, len(bits) // 2 + 1):
        if len(bits) % period == 0 and bits == bits[:period] * (len(bits) // period):
            return f"[{','.join(map(str, bits[:period]))}]*{len(bits) // period}"
    return "+".join(f"[{bit}]*{len(list(group))}" for bit, group in itertools.groupby(bits))
