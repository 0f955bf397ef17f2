"""A table of Megatron's flags and their support under context parallelism, with a test or a reason for each row.

`megatron-cp doctor --megatron` and `docs/megatron-features.md` read it. It imports nothing of Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

RELEASES = ("0.19.2", "main", "dev")  # of Megatron-Core, the last two as of August 2026
_NOT_DEV, _DEV, _MAIN = ("0.19.2", "main"), ("dev",), ("main",)
PROVED, EXPECTED, REFUSED, UNTRIED = "proved", "expected", "refused", "untried"
_MATRIX = "tests/functional_tests/test_megatron_matrix.py::test_equals_one_rank"
_MODELS = "tests/functional_tests/test_megatron_models.py::test_equals_one_rank"
_EXAMPLE = "tests/functional_tests/test_pretrain_example.py"
_LOGITS = "tests/functional_tests/test_megatron_logits.py::test_equals_all_logits_at_once"
_FSDP = "tests/functional_tests/test_megatron_fsdp.py::test_equals_one_rank"
_STOCK = (
    "tests/functional_tests/test_megatron_stock.py"
    "::test_a_packed_batch_is_each_document_alone_through_megatrons_modules"
)


@dataclass(frozen=True)
class Feature:
    """A row of the table: flags with the same support, for the same reason.

    Attributes:
        flags: flags of Megatron-Core, without their values.
        verdict: "proved" if a test compares it with one rank; "expected" if nothing here affects it, for the reason in
            the remark; "refused" if a rule of `rules.py` refuses all or some values, or some combinations; "untried" if
            none of these, so that a step should be compared with one rank first.
        remark: what the flags do here, the reason, or an alternative.
        proof: the test, if the verdict is "proved".
        releases: the releases of Megatron that have the flags, of 0.19.2, main and dev.
    """

    group: str
    flags: tuple[str, ...]
    verdict: str
    remark: str
    proof: str = ""
    releases: tuple[str, ...] = RELEASES


def row(
    group: str, verdict: str, remark: str, flags: str, proof: str = "", releases: tuple[str, ...] = RELEASES
) -> Feature:
    """Makes a row of the table; `flags` are separated by spaces and have no dashes."""
    return Feature(group, tuple(f"--{name}" for name in flags.split()), verdict, remark, proof, releases)


FEATURES = (
    row("parallelism", PROVED, "the number of ranks that share each pack", "context-parallel-size", _MODELS),
    row("parallelism", PROVED, "the scheme of each softmax layer", "cp-comm-type", _MODELS),
    row("parallelism", PROVED, "the ranks that exchange heads, and those that exchange keys",
        "hierarchical-context-parallel-sizes", _MODELS),
    row("parallelism", PROVED, "tensor-parallel ranks share the heads first", "tensor-model-parallel-size", _MATRIX),
    row("parallelism", PROVED, "rows are padded to a multiple of the tensor-parallel ranks", "sequence-parallel",
        _MATRIX),
    row("parallelism", PROVED, "experts on other ranks see the tokens of all ranks", "expert-model-parallel-size",
        _MATRIX),
    row("parallelism", PROVED, "stages exchange packs of varying lengths", "pipeline-model-parallel-size"
        " num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"
        " microbatch-group-size-per-virtual-pipeline-stage", _MATRIX),
    row("parallelism", PROVED, "groups of any size, by megatron_cp.megatron.dynamic; without auxiliary losses",
        "hybrid-context-parallel max-seqlen-per-dp-cp-rank", _MATRIX),
    row("parallelism", UNTRIED, "deals documents as --hybrid-context-parallel does; we have not run it in dev",
        "dynamic-context-parallel", releases=_DEV),
    row("parallelism", REFUSED, "another order than zigzag; use --cp-layout contiguous, which moves tokens once",
        "cp-partition-mode", releases=_DEV),
    row("parallelism", UNTRIED, "Megatron makes the packs; we take them as cut by documents",
        "sequence-packing-scheduler", releases=_DEV),
    row("parallelism", EXPECTED, "says where layers lie; each stage plans its own", "pipeline-model-parallel-layout"
        " decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split"
        " account-for-loss-in-pipeline-split"),
    row("parallelism", EXPECTED, "the order of ranks; groups are Megatron's own", "use-tp-pp-dp-mapping"),
    row("parallelism", EXPECTED, "how stages send to each other, which is Megatron's",
        "overlap-p2p-communication-warmup-flush no-overlap-p2p-communication pipeline-model-parallel-comm-backend"
        " use-ring-exchange-p2p"),
    row("parallelism", REFUSED, "not with --logit-rows, where the output layer runs again in backward",
        "defer-embedding-wgrad-compute"),
    row("parallelism", EXPECTED, "read with --defer-embedding-wgrad-compute only", "wgrad-deferral-limit"),
    row("parallelism", REFUSED, "not with --cp-latent-mode, whose weights are used outside of their module",
        "delay-wgrad-compute"),
    row("parallelism", EXPECTED, "concerns tensor-parallel linear layers, which stay Megatron's", "tp-comm-overlap"
        " no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs"
        " tp-comm-overlap-rs-dgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-bootstrap-backend"
        " tp-comm-overlap-cfg"),
    row("parallelism", PROVED, "experts whole on two tensor-parallel ranks, and split over them",
        "expert-tensor-parallel-size", _MATRIX),
    row("parallelism", UNTRIED, "shards weights in another way", "tensor-parallel-num-weight-shards"
        " expert-tensor-parallel-num-weight-shards", releases=_NOT_DEV),
    row("parallelism", UNTRIED, "another schedule, which interleaves layers of two microbatches; not with --logit-rows",
        "overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad"
        " ep-overlap-early-attn-memory-release"),
    row("parallelism", UNTRIED, "multi-token prediction on a stage of its own", "mtp-standalone"),
    row("batch", PROVED, "a microbatch is one pack", "micro-batch-size", _EXAMPLE),
    row("batch", PROVED, "packs of a step; its loss is over all their tokens", "global-batch-size", _EXAMPLE),
    row("batch", PROVED, "the longest pack; documents in it have any lengths", "seq-length", _EXAMPLE),
    row("batch", PROVED, "conversations, whose answers alone are learnt", "sft sft-tokenizer-prompt-format", _EXAMPLE),
    row("batch", PROVED, "packs come from an iterator of ours or from Megatron's loader", "dataloader-type", _EXAMPLE),
    row("batch", PROVED, "documents that packs are made of", "data-path split train-data-path valid-data-path",
        _EXAMPLE),
    row("batch", PROVED, "packs that Megatron cuts are read in its order", "dataloader-inter-document-masking",
        _MODELS),
    row("batch", REFUSED, "masks that are tensors are not read; --dataloader-inter-document-masking, or shard_batch",
        "reset-attention-mask"),
    row("batch", EXPECTED, "what is read from disk; packs are made of it", "test-data-path data-args-path"
        " per-split-data-args-path data-cache-path mock-data no-mmap-bin-files num-dataset-builder-threads"),
    row("batch", EXPECTED, "processes that read samples before they are sharded", "num-workers"),
    row("batch", EXPECTED, "labels of the batch are used as they come", "eod-mask-loss"),
    row("batch", EXPECTED, "the number of steps, or of packs in a step", "rampup-batch-size train-iters train-samples"),
    row("batch", EXPECTED, "rows of the embedding, which every rank has", "vocab-size make-vocab-size-divisible-by"),
    row("batch", EXPECTED, "our attention reads no mask of the loader", "no-create-attention-mask-in-dataloader"),
    row("batch", EXPECTED, "positions are those of the batch", "reset-position-ids max-position-embeddings"),
    row("batch", UNTRIED, "documents whose parts are reordered", "fim-data"),
    row("batch", UNTRIED, "a loss of distillation or reinforcement, not the one for each token", "logits-load-dir"
        " logits-save-dir perform-rl-step rl-use-sequence-packing"),
    row("batch", UNTRIED, "the batch grows in steps; compare the loss where it does", "step-batch-size-schedule"),
    row("loss", PROVED, "a sum over all ranks, divided once, by megatron_cp.megatron.loss", "calculate-per-token-loss",
        _MATRIX),
    row("loss", PROVED, "native, the loss of each token by itself, also with --logit-rows, which refuses dev's linear;"
        " te has not run", "cross-entropy-loss-fusion cross-entropy-fusion-impl", f"{_MODELS} and {_LOGITS}"),
    row("loss", EXPECTED, "the loss of each token by itself", "fp16-lm-cross-entropy"),
    row("loss", PROVED, "the weights of the last layer, the same on every rank; with --logit-rows tied or not",
        "untie-embeddings-and-output-weights", f"{_MODELS} and {_LOGITS}"),
    row("loss", PROVED, "evaluation has the same loss, also with --sft", "eval-iters eval-interval", _EXAMPLE),
    row("loss", EXPECTED, "evaluation has the same loss", "full-validation multiple-validation-sets"
        " eval-global-batch-size eval-micro-batch-size skip-train start-eval-at-iter"),
    row("loss", PROVED, "tokens further ahead are found in the pack, not in a rank's share", "mtp-num-layers"
        " mtp-loss-scaling-factor", _MATRIX),
    row("loss", EXPECTED, "the same layers and loss as without it; checked once by hand", "mtp-use-repeated-layer"
        " mtp-detach-heads mtp-hybrid-override-pattern"),
    row("loss", REFUSED, "hidden states would be rolled in Megatron's own order; leave it out", "mtp-hsm",
        releases=_MAIN),
    row("attention", PROVED, "heads, of any number in each scheme that `plan` lists", "num-attention-heads"
        " group-query-attention num-query-groups kv-channels", _MODELS),
    row("attention", PROVED, "windows in positions of the document", "window-size window-attn-skip-freq", _MODELS),
    row("attention", PROVED, "sinks, which every scheme has; not with an indexer", "softmax-type", _MODELS),
    row("attention", PROVED, "the same elements are dropped for any number of ranks", "attention-dropout", _MODELS),
    row("attention", PROVED, "norms of each token's queries and keys", "qk-layernorm", _MODELS),
    row("attention", PROVED, "our layers are deterministic where their kernels are", "deterministic-mode", _MODELS),
    row("attention", PROVED, "latents, and the sizes of what is made of them", "multi-latent-attention q-lora-rank"
        " kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim", _MODELS),
    row("attention", PROVED, "positions of latent attention, by the batch", "rotary-scaling-factor mscale"
        " mscale-all-dim rope-type", _MODELS),
    row("attention", PROVED, "both projections of latents in one product", "mla-down-proj-fusion", _MODELS),
    row("attention", REFUSED, "no kernel here reports the largest score", "qk-clip"),
    row("attention", REFUSED, "a cache of inference, not of training; leave it out", "cache-mla-latents"),
    row("attention", EXPECTED, "latent attention here needs it; other attention may have it", "no-rope-fusion"),
    row("attention", EXPECTED, "the scale comes to the layer as a number", "apply-query-key-layer-scaling use-mup"
        " mup-attn-scale-power"),
    row("attention", EXPECTED, "scores are in fp32 already", "attention-softmax-in-fp32"),
    row("attention", EXPECTED, "works on each token's heads by itself", "attention-output-gate qk-l2-norm add-qkv-bias"
        " disable-bias-linear"),
    row("attention", EXPECTED, "a kernel of softmax that our attention does not call", "no-masked-softmax-fusion"),
    row("attention", EXPECTED, "kernels are chosen here; `megatron-cp doctor` lists them", "attention-backend"
        " use-flash-attn"),
    row("attention", EXPECTED, "the version of a kernel that is not called here", "flash-attention-version",
        releases=_NOT_DEV),
    row("attention", EXPECTED, "a factor for each head and token, which Megatron's layer applies",
        "head-wise-attn-gate", releases=_DEV),
    row("attention", UNTRIED, "kernels that our attention does not call", "use-kitchen-attention"
        " kitchen-attention-backend batch-invariant-mode"),
    row("attention", PROVED, "the sizes of the indexer that chooses keys", "dsa-indexer-n-heads dsa-indexer-head-dim",
        _MODELS),
    row("attention", PROVED, "the keys that each query may choose, of the whole document", "dsa-indexer-topk", _MODELS),
    row("attention", PROVED, "layers that share a choice; not over stages with recomputation", "dsa-indexer-topk-freq",
        _MODELS),
    row("attention", PROVED, "the indexer's loss, over the tokens of all ranks", "dsa-indexer-loss-coeff"
        " dsa-indexer-use-sparse-loss", _MODELS),
    row("attention", PROVED, "the indexer's scores, the same on every rank", "no-dsa-indexer-scoring-relu", _MODELS),
    row("attention", EXPECTED, "which layers share a choice of keys", "dsa-indexer-skip-topk-offset"),
    row("attention", EXPECTED, "what the indexer does with each token by itself", "dsa-indexer-rope-interleaved"
        " no-dsa-indexer-rotate-activation dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32"),
    row("attention", REFUSED, "kernels that are not called here; none", "dsa-kernel-backend"),
    row("positions", PROVED, "rope and YaRN, by each token's position in its document", "position-embedding-type"
        " rotary-base rotary-percent", _MODELS),
    row("positions", PROVED, "positions of several axes, from the batch", "mrope-section", _STOCK),
    row("positions", REFUSED, "all layers share one table of phases; leave it out", "rotary-base-per-layer",
        releases=_DEV),
    row("positions", EXPECTED, "phases come from one table by position", "rotary-interleaved use-rope-scaling"
        " rope-scaling-factor rotary-seq-len-interpolation-factor use-rotary-position-embeddings"),
    row("positions", EXPECTED, "layers without phases; nothing is looked up for them", "no-rope-freq"
        " no-position-embedding"),
    row("linear layers", PROVED, "Gated DeltaNet, or an indexer that chooses keys", "experimental-attention-variant",
        _MODELS),
    row("linear layers", PROVED, "which layers are linear; each run of them is planned", "linear-attention-freq",
        _MODELS),
    row("linear layers", PROVED, "the convolution reaches into the rank before", "linear-conv-kernel-dim", _MODELS),
    row("linear layers", PROVED, "heads of any number: cp need not divide them", "linear-key-head-dim"
        " linear-value-head-dim linear-num-key-heads linear-num-value-heads", _MODELS),
    row("linear layers", PROVED, "HybridModel's layers: M, G, *, D, - and E", "hybrid-layer-pattern", _MODELS),
    row("linear layers", PROVED, "sizes of Mamba-2's states and heads", "mamba-state-dim mamba-head-dim"
        " mamba-num-groups mamba-num-heads", _MODELS),
    row("linear layers", PROVED, "our layers in Megatron's model", "spec", _MODELS),
    row("linear layers", EXPECTED, "Megatron's kernels of Mamba are not called", "disable-mamba-mem-eff-path"),
    row("linear layers", REFUSED, "states are float32 here", "mamba-training-ssm-states-dtype"),
    row("linear layers", EXPECTED, "an older name of --hybrid-layer-pattern, or of its effect",
        "hybrid-override-pattern is-hybrid-model"),
    row("experts", PROVED, "experts and their sizes; uneven ranks and pad rows too", "num-experts moe-router-topk"
        " moe-ffn-hidden-size", _MATRIX),
    row("experts", PROVED, "losses of routing are those of one rank, without pad rows", "moe-aux-loss-coeff"
        " moe-z-loss-coeff", _MATRIX),
    row("experts", PROVED, "the type in which each token is routed", "moe-router-dtype", _MATRIX),
    row("experts", PROVED, "alltoall; not allgather with --expert-model-parallel-size above 1",
        "moe-token-dispatcher-type", _MATRIX),
    row("experts", PROVED, "none and auxiliary losses; not sinkhorn or quantile_balancing over several ranks",
        "moe-router-load-balancing-type", _MATRIX),
    row("experts", REFUSED, "each of several ranks would drop tokens by its own", "moe-expert-capacity-factor"),
    row("experts", EXPECTED, "read with --moe-expert-capacity-factor only, which several ranks refuse",
        "moe-pad-expert-input-to-capacity moe-token-drop-policy"),
    row("experts", EXPECTED, "counts are summed over all ranks, without pad rows; checked once by hand",
        "moe-router-enable-expert-bias moe-router-bias-update-rate"),
    row("experts", EXPECTED, "how each token by itself is scored and routed", "moe-router-score-function"
        " moe-router-pre-softmax moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk"
        " moe-router-fusion"),
    row("experts", EXPECTED, "which layers have experts", "moe-layer-freq"),
    row("experts", EXPECTED, "an expert that each token has", "moe-shared-expert-gate"
        " moe-shared-expert-intermediate-size moe-shared-expert-overlap"),
    row("experts", EXPECTED, "how experts compute each token, after it was routed", "moe-grouped-gemm"
        " moe-apply-probs-on-input moe-permute-fusion moe-layer-recompute moe-latent-size"),
    row("experts", EXPECTED, "what is logged of losses that are summed already", "moe-per-layer-logging"),
    row("experts", EXPECTED, "noise or a fixed choice, which every rank makes anew", "moe-input-jitter-eps"
        " moe-router-force-load-balancing moe-router-force-biased"),
    row("experts", UNTRIED, "another dispatcher of tokens", "moe-enable-deepep moe-flex-dispatcher-backend"
        " moe-paged-stash"),
    row("experts", UNTRIED, "pads each expert's tokens after they were routed", "moe-router-padding-for-quantization"
        " moe-router-padding-for-fp8"),
    row("experts", UNTRIED, "a limit of tokens for each rank, which ranks may reach differently",
        "moe-expert-rank-capacity-factor"),
    row("experts", UNTRIED, "routes by what an earlier run recorded, rank by rank", "moe-enable-routing-replay"),
    row("experts", UNTRIED, "makes experts of a checkpoint without them", "moe-use-upcycling"),
    row("experts", UNTRIED, "of quantile_balancing, which several ranks refuse", "moe-router-quantile-balancing-ema",
        releases=_NOT_DEV),
    row("experts", UNTRIED, "chooses experts by the hash of a token", "moe-n-hash-layers", releases=_DEV),
    row("optimizer", PROVED, "parameters after a step are those of one rank", "use-distributed-optimizer"
        " overlap-grad-reduce overlap-param-gather optimizer", _MATRIX),
    row("optimizer", EXPECTED, "a step by gradients that are those of one rank", "lr min-lr weight-decay adam-beta1"
        " adam-beta2 adam-eps clip-grad use-precision-aware-optimizer optimizer-cpu-offload"
        " overlap-param-gather-with-optimizer-step num-distributed-optimizer-instances"),
    row("optimizer", EXPECTED, "how Megatron sums gradients over data- and context-parallel ranks",
        "accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 ddp-average-in-collective ddp-bucket-size"
        " ddp-num-buckets no-gradient-accumulation-fusion no-gradient-reduce-div-fusion"),
    row("optimizer", PROVED, "weights after steps, on the CPU with CUDA's names replaced; not with"
        " --hybrid-context-parallel", "use-megatron-fsdp data-parallel-sharding-strategy", _FSDP),
    row("optimizer", REFUSED, "torch's FSDP2 has not run in Megatron over context-parallel ranks; use"
        " --use-megatron-fsdp", "use-torch-fsdp2"),
    row("optimizer", UNTRIED, "concerns parameters in shards", "outer-dp-sharding-strategy"),
    row("recompute", PROVED, "full; core_attn, mla_up_proj and gdn_norm_out: layers run twice by the same plan",
        "recompute-granularity recompute-method recompute-num-layers recompute-modules recompute-activations",
        f"{_MODELS} and {_MATRIX}"),
    row("recompute", UNTRIED, "keeps activations elsewhere", "distribute-saved-activations"
        " fine-grained-activation-offloading offload-modules cpu-offloading-num-layers"),
    row("recompute", UNTRIED, "cuts the rows of a feed-forward layer", "mlp-chunks-for-training"),
    row("graphs", REFUSED, "an older name of --cuda-graph-impl, whose graphs serve one pack; capture a step of your own"
        " over GraphTables", "enable-cuda-graph external-cuda-graph"),
    row("graphs", REFUSED, "graphs of moe_router and moe_preprocess, with transformer_engine also of mlp, for packs of"
        " one length; others are refused by a reason of their own: none, or a step of your own over GraphTables",
        "cuda-graph-impl"),
    row("graphs", EXPECTED, "read with --cuda-graph-impl only, which takes some modules",
        "cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps"),
    row("graphs", UNTRIED, "a graph of the optimizer's step, which reads no batch", "optimizer-cuda-graph"),
    row("precision", EXPECTED, "exchanges keep the type; kernels say which they take", "bf16 fp16"),
    row("precision", EXPECTED, "the type of what layers add to, which no exchange reads", "fp32-residual-connection"),
    row("precision", EXPECTED, "`layout_options(config)` aligns rows, others are refused, as tests show; the products"
        " are Transformer Engine's and have not run", "fp8-format fp8-recipe fp4-format fp4-recipe"),
    row("precision", EXPECTED, "how weights are kept and which layers stay in bf16; products have not run",
        "fp8-param-gather fp4-param-gather first-last-layers-bf16"),
    row("checkpoints", PROVED, "saved on one number of ranks and loaded on another", "save load save-interval"
        " ckpt-format", _EXAMPLE),
    row("checkpoints", EXPECTED, "parameters and their names are Megatron's", "async-save dist-ckpt-strictness"
        " ckpt-fully-parallel-load ckpt-assume-constant-structure pretrained-checkpoint finetune"),
    row("checkpoints", EXPECTED, "the state of the optimizer or of random numbers, which is Megatron's",
        "no-save-optim no-load-optim no-save-rng no-load-rng"),
    row("checkpoints", EXPECTED, "sizes come from the checkpoint; `doctor` does not read it", "use-checkpoint-args"),
    row("inference", UNTRIED, "for training; Mamba's inference goes to Megatron's own, on one rank",
        "inference-dynamic-batching inference-max-requests flash-decode num-speculative-tokens"),
    row("layers", EXPECTED, "the number of layers; each is planned by its kind", "num-layers"),
    row("layers", EXPECTED, "the size of each token's state; exchanges are of heads", "hidden-size ffn-hidden-size"),
    row("layers", EXPECTED, "noise after the layer; each rank draws its own", "hidden-dropout"),
    row("layers", EXPECTED, "works on each token by itself", "normalization norm-epsilon apply-layernorm-1p"
        " no-persist-layer-norm swiglu squared-relu quick-geglu openai-gelu glu-linear-offset"
        " activation-func-clamp-value no-bias-swiglu-fusion no-bias-gelu-fusion no-bias-dropout-fusion"),
    row("layers", EXPECTED, "how weights are drawn, which Megatron does", "init-method-std use-cpu-initialization"),
    row("layers", EXPECTED, "transformer_engine or local, as the spec has it; not inference_optimized",
        "transformer-impl"),
    row("layers", REFUSED, "several residual streams have not run here; leave it out", "enable-hyper-connections",
        releases=_DEV),
    row("layers", REFUSED, "several residual streams have not run here; leave it out", "enable-mhc-connections",
        releases=_MAIN),
    row("layers", REFUSED, "all layers alike, or those of --hybrid-layer-pattern", "heterogeneous-layers-config-path"
        " heterogeneous-layers-config-encoded-json"),
)  # fmt: skip

FEATURE_BY_FLAG = {flag: feature for feature in FEATURES for flag in feature.flags}
