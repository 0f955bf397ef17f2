"""A table of Megatron's flags and their support under context parallelism, with a test or a reason for each row.

`megatron-cp doctor --megatron` and `docs/megatron-features.md` read it. It imports nothing of Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

PROVED, EXPECTED, REFUSED, UNTRIED = "proved", "expected", "refused", "untried"
_MATRIX = "tests/functional_tests/test_megatron_matrix.py::test_equals_one_rank"
_MODELS = "tests/functional_tests/test_megatron_models.py::test_equals_one_rank"
_EXAMPLE = "tests/functional_tests/test_pretrain_example.py"
_REFUSALS = "tests/unit_tests/megatron/layers/test_refusals.py"


@dataclass(frozen=True)
class Feature:
    """A row of the table: flags with the same support.

    Attributes:
        flags: flags of Megatron-Core 0.19.2, without their values.
        verdict: "proved" if a test compares it with one rank; "expected" if nothing here affects it, for the reason in
            the remark; "refused" if all or some of the values are; "untried" if none of these, so that a step should be
            compared with one rank first.
        remark: the test, the reason, or an alternative.
        depends: True if only some values are refused.
    """

    group: str
    flags: tuple[str, ...]
    verdict: str
    remark: str
    depends: bool = False


def row(group: str, verdict: str, remark: str, flags: str, *, depends: bool = False) -> Feature:
    """Makes a row of the table; `flags` are separated by spaces and have no dashes."""
    return Feature(group, tuple(f"--{name}" for name in flags.split()), verdict, remark, depends)


FEATURES = (
    row("parallelism", PROVED, _MODELS, "context-parallel-size cp-comm-type hierarchical-context-parallel-sizes"),
    row("parallelism", PROVED, _MATRIX, "tensor-model-parallel-size sequence-parallel expert-model-parallel-size"),
    row("parallelism", PROVED, f"{_MATRIX}: packs of other lengths in flight", "pipeline-model-parallel-size"
        " num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"
        " microbatch-group-size-per-virtual-pipeline-stage"),
    row("parallelism", REFUSED, "Megatron's own loader loses the lengths; give shard_batch a group for each batch",
        "hybrid-context-parallel"),
    row("parallelism", EXPECTED, "of --hybrid-context-parallel alone", "max-seqlen-per-dp-cp-rank"),
    row("parallelism", EXPECTED, "where layers lie; each stage's own are planned", "pipeline-model-parallel-layout"
        " decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split"
        " account-for-loss-in-pipeline-split use-tp-pp-dp-mapping overlap-p2p-communication-warmup-flush"
        " no-overlap-p2p-communication pipeline-model-parallel-comm-backend defer-embedding-wgrad-compute"
        " wgrad-deferral-limit delay-wgrad-compute use-ring-exchange-p2p"),
    row("parallelism", EXPECTED, "of tensor-parallel linear layers, which stay Megatron's", "tp-comm-overlap"
        " no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs"
        " tp-comm-overlap-rs-dgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-bootstrap-backend"
        " tp-comm-overlap-cfg"),
    row("parallelism", PROVED, f"{_MATRIX}: experts whole on two tensor-parallel ranks, and split over them",
        "expert-tensor-parallel-size"),
    row("parallelism", UNTRIED, "other sharding of weights, other schedules of experts",
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards overlap-moe-expert-parallel-comm"
        " overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release mtp-standalone"),
    row("batch", PROVED, f"{_EXAMPLE}: both branches", "micro-batch-size global-batch-size seq-length sft"
        " sft-tokenizer-prompt-format dataloader-type data-path split train-data-path valid-data-path"),
    row("batch", PROVED, f"{_MODELS}: packs that Megatron cuts", "dataloader-inter-document-masking"),
    row("batch", REFUSED, "masks that are tensors are not read; --dataloader-inter-document-masking, or shard_batch",
        "reset-attention-mask"),
    row("batch", EXPECTED, "what is read from disk; packs are made of it", "test-data-path data-args-path"
        " per-split-data-args-path data-cache-path mock-data num-workers"
        " no-mmap-bin-files eod-mask-loss rampup-batch-size num-dataset-builder-threads train-iters train-samples"
        " vocab-size make-vocab-size-divisible-by no-create-attention-mask-in-dataloader"),
    row("batch", EXPECTED, "positions are those of the batch", "reset-position-ids max-position-embeddings"),
    row("batch", UNTRIED, "documents in other parts, or other losses", "fim-data logits-load-dir logits-save-dir"
        " perform-rl-step rl-use-sequence-packing step-batch-size-schedule"),
    row("loss", PROVED, f"{_MATRIX}: with and without it, by megatron_cp.megatron.loss", "calculate-per-token-loss"),
    row("loss", EXPECTED, "works on each token by itself", "cross-entropy-loss-fusion cross-entropy-fusion-impl"
        " fp16-lm-cross-entropy untie-embeddings-and-output-weights"),
    row("loss", PROVED, f"{_EXAMPLE}: evaluation in the same loss, also with --sft", "eval-iters eval-interval"),
    row("loss", EXPECTED, "evaluation in the same loss", "full-validation multiple-validation-sets"
        " eval-global-batch-size eval-micro-batch-size skip-train start-eval-at-iter"),
    row("loss", PROVED, _MATRIX, "mtp-num-layers mtp-loss-scaling-factor"),
    row("loss", EXPECTED, "the same layers and loss; checked once by hand", "mtp-use-repeated-layer mtp-detach-heads"
        " mtp-hybrid-override-pattern"),
    row("attention", PROVED, _MODELS, "num-attention-heads group-query-attention num-query-groups kv-channels"
        " window-size window-attn-skip-freq softmax-type attention-dropout qk-layernorm deterministic-mode"),
    row("attention", PROVED, _MODELS, "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim"
        " qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim rope-type mla-down-proj-fusion"),
    row("attention", REFUSED, "no kernel here reports the largest score", "qk-clip"),
    row("attention", REFUSED, "of inference alone; leave it out", "cache-mla-latents"),
    row("attention", EXPECTED, "what latent attention here takes; others may have it", "no-rope-fusion"),
    row("attention", EXPECTED, "the scale comes to the layer as a number; scores are in fp32 already",
        "apply-query-key-layer-scaling attention-softmax-in-fp32 use-mup mup-attn-scale-power attention-output-gate"
        " qk-l2-norm add-qkv-bias disable-bias-linear no-masked-softmax-fusion"),
    row("attention", EXPECTED, "kernels are chosen here; `megatron-cp doctor` lists them", "attention-backend"
        " flash-attention-version use-flash-attn"),
    row("attention", UNTRIED, "kernels that our attention does not call", "use-kitchen-attention"
        " kitchen-attention-backend batch-invariant-mode"),
    row("attention", PROVED, _MODELS, "dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-topk-freq"
        " dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss no-dsa-indexer-scoring-relu"),
    row("attention", EXPECTED, "what the indexer does with each token by itself, and which layers share a choice",
        "dsa-indexer-skip-topk-offset dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation"
        " dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32"),
    row("attention", REFUSED, "these kernels are not called here; none", "dsa-kernel-backend", depends=True),
    row("positions", PROVED, f"{_MODELS}: rope and YaRN", "position-embedding-type rotary-base rotary-percent"),
    row("positions", PROVED, "tests/functional_tests/test_megatron_stock.py"
        "::test_a_packed_batch_is_each_document_alone_through_megatrons_modules", "mrope-section"),
    row("positions", EXPECTED, "phases come from one table by position", "rotary-interleaved use-rope-scaling"
        " rope-scaling-factor rotary-seq-len-interpolation-factor no-rope-freq no-position-embedding"
        " use-rotary-position-embeddings"),
    row("linear layers", PROVED, _MODELS, "experimental-attention-variant linear-attention-freq linear-conv-kernel-dim"
        " linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads"),
    row("linear layers", PROVED, _MODELS, "hybrid-layer-pattern mamba-state-dim mamba-head-dim mamba-num-groups"
        " mamba-num-heads spec"),
    row("linear layers", EXPECTED, "Megatron's kernels of Mamba are not called", "disable-mamba-mem-eff-path"),
    row("linear layers", REFUSED, "states are float32 here", "mamba-training-ssm-states-dtype", depends=True),
    row("linear layers", EXPECTED, "older names of --hybrid-layer-pattern", "hybrid-override-pattern is-hybrid-model"),
    row("experts", PROVED, f"{_MATRIX}: auxiliary losses, z-loss, uneven ranks, pad rows", "num-experts"
        " moe-router-topk moe-ffn-hidden-size moe-aux-loss-coeff moe-z-loss-coeff moe-router-dtype"),
    row("experts", PROVED, f"{_MATRIX}: alltoall; allgather is refused with --expert-model-parallel-size above 1",
        "moe-token-dispatcher-type"),
    row("experts", PROVED, f"{_MATRIX}: aux_loss, seq_aux_loss, global_aux_loss; {_REFUSALS}: sinkhorn and"
        " quantile_balancing are refused", "moe-router-load-balancing-type"),
    row("experts", REFUSED, "each rank would drop tokens by its own", "moe-expert-capacity-factor"
        " moe-pad-expert-input-to-capacity moe-token-drop-policy"),
    row("experts", EXPECTED, "counts are summed over all ranks, without pad rows; checked once by hand",
        "moe-router-enable-expert-bias moe-router-bias-update-rate"),
    row("experts", EXPECTED, "of each token alone", "moe-layer-freq moe-router-score-function moe-router-pre-softmax"
        " moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk moe-shared-expert-gate"
        " moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-grouped-gemm moe-apply-probs-on-input"
        " moe-permute-fusion moe-router-fusion moe-layer-recompute moe-latent-size moe-per-layer-logging"),
    row("experts", EXPECTED, "noise, drawn anew by every rank", "moe-input-jitter-eps moe-router-force-load-balancing"
        " moe-router-force-biased"),
    row("experts", UNTRIED, "other dispatchers", "moe-enable-deepep moe-flex-dispatcher-backend moe-paged-stash"
        " moe-router-padding-for-quantization moe-router-padding-for-fp8 moe-expert-rank-capacity-factor"
        " moe-enable-routing-replay moe-use-upcycling moe-router-quantile-balancing-ema"),
    row("optimizer", PROVED, f"{_MATRIX}: parameters after a step", "use-distributed-optimizer overlap-grad-reduce"
        " overlap-param-gather optimizer"),
    row("optimizer", EXPECTED, "of gradients that are those of one rank", "lr min-lr weight-decay adam-beta1 adam-beta2"
        " adam-eps clip-grad accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 use-precision-aware-optimizer"
        " ddp-average-in-collective ddp-bucket-size ddp-num-buckets num-distributed-optimizer-instances"
        " overlap-param-gather-with-optimizer-step optimizer-cpu-offload no-gradient-accumulation-fusion"
        " no-gradient-reduce-div-fusion"),
    row("optimizer", REFUSED, "parameters in shards have not run here over context-parallel ranks;"
        " --use-distributed-optimizer", "use-megatron-fsdp use-torch-fsdp2"),
    row("optimizer", UNTRIED, "of parameters in shards", "data-parallel-sharding-strategy outer-dp-sharding-strategy"),
    row("recompute", PROVED, f"{_MODELS}; {_MATRIX}: full; core_attn, mla_up_proj and gdn_norm_out",
        "recompute-granularity recompute-method recompute-num-layers recompute-modules recompute-activations"),
    row("recompute", UNTRIED, "other ways to keep activations", "distribute-saved-activations"
        " fine-grained-activation-offloading offload-modules cpu-offloading-num-layers mlp-chunks-for-training"),
    row("graphs", REFUSED, "they repeat the rows of one pack; capture a step of your own over GraphTables",
        "enable-cuda-graph external-cuda-graph"),
    row("graphs", REFUSED, "likewise, but none", "cuda-graph-impl", depends=True),
    row("precision", EXPECTED, "exchanges keep the type; kernels say which they take", "bf16 fp16"
        " fp32-residual-connection"),
    row("precision", EXPECTED, "`layout_options(config)` aligns rows, others are refused, as tests show; the products"
        " are Transformer Engine's and have not run", "fp8-format fp8-recipe fp8-param-gather fp4-format fp4-recipe"
        " fp4-param-gather first-last-layers-bf16"),
    row("checkpoints", PROVED, f"{_EXAMPLE}: saved and loaded", "save load save-interval ckpt-format"),
    row("checkpoints", EXPECTED, "parameters and their names are Megatron's", "async-save dist-ckpt-strictness"
        " ckpt-fully-parallel-load no-save-optim no-load-optim no-save-rng no-load-rng finetune pretrained-checkpoint"
        " use-checkpoint-args ckpt-assume-constant-structure"),
    row("inference", UNTRIED, "for training; Mamba's inference goes to Megatron's own, on one rank",
        "inference-dynamic-batching inference-max-requests flash-decode num-speculative-tokens"),
    row("layers", EXPECTED, "works on each token by itself",
        "num-layers hidden-size ffn-hidden-size hidden-dropout normalization norm-epsilon"
        " swiglu squared-relu quick-geglu openai-gelu init-method-std transformer-impl"
        " apply-layernorm-1p use-cpu-initialization no-persist-layer-norm no-bias-swiglu-fusion no-bias-gelu-fusion"
        " no-bias-dropout-fusion glu-linear-offset activation-func-clamp-value"),
    row("layers", REFUSED, "all layers alike, of Transformer Engine or local", "heterogeneous-layers-config-path"
        " heterogeneous-layers-config-encoded-json"),
)  # fmt: skip

FEATURE_BY_FLAG = {flag: feature for feature in FEATURES for flag in feature.flags}
