"""Lines of a Megatron job's flags, and the flags of each that are refused: by `doctor`, and by the real job."""

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 96 --max-position-embeddings 96"
    " --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 99 --train-iters 1 --lr 1e-4"
    " --calculate-per-token-loss"
)
GPT = "--spec megatron_cp.megatron.specs gpt_layer_spec"
HYBRID = "--spec megatron_cp.megatron.specs hybrid_stack_spec"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
_MLA = f"{GPT} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
_ROPE = "--position-embedding-type rope"
_DSA = (
    f"{_MLA} --q-lora-rank 16 --experimental-attention-variant dsa {_ROPE} --no-rope-fusion --disable-bias-linear"
    " --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8"
)
_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2"
LINES = [
    (f"{CP2} {GPT}", set()),
    (f"{CP4} {GPT} --cp-comm-type a2a", set()),
    (f"{CP4} {GPT} --cp-comm-type a2a p2p all_gather auto", set()),
    (f"{CP4} {GPT} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --cp-codec fp8 --bf16", set()),
    (f"{CP4} {GPT} --cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2",
     {"--hierarchical-context-parallel-sizes"}),
    (f"{CP4} {GPT} --cp-comm-type ring_of_rings", {"--cp-comm-type"}),
    (f"{CP2} {GPT} --cp-head-chunks 2", {"--cp-head-chunks"}),  # Megatron's default is p2p
    (f"{CP2} {GPT} --cp-head-chunks 2 --cp-comm-type a2a", set()),
    (f"{CP2} {GPT} --cp-layout striped", {"--cp-layout"}),
    (f"{CP2} {GPT} --cp-search 1.5", {"--cp-search"}),
    (f"{CP2} {GPT} --logit-rows 16 --cross-entropy-loss-fusion", set()),
    (f"{CP2} {GPT} --logit-rows 0", {"--logit-rows"}),
    (f"--context-parallel-size 1 {GPT} --logit-rows 16 --use-torch-fsdp2 --untie-embeddings-and-output-weights"
     " --no-gradient-accumulation-fusion --ckpt-format torch_dcp", {"--logit-rows"}),
    (f"{CP2} {GPT} --cp-latent-mode expand", {"--cp-latent-mode"}),
    (f"{CP2} {GPT} --cp-codec fp9 --cp-transport pigeon --linear-cp-mode sideways",
     {"--cp-codec", "--cp-transport", "--linear-cp-mode"}),
    (f"{CP2} {GPT} --cp-hardware no_such_machine", {"--cp-hardware"}),
    (f"{CP2} {GPT} --pipeline-model-parallel-size 2 --cp-layout auto", {"--cp-layout"}),
    (f"{CP2} {GPT} --pipeline-model-parallel-size 2", set()),
    (f"{CP2} {GPT} --qk-clip", {"--qk-clip"}),
    (f"{CP2} {GPT} --reset-attention-mask", {"--reset-attention-mask"}),
    (f"--context-parallel-size 1 {GPT} --reset-attention-mask", {"--reset-attention-mask"}),
    (f"{CP2} {GPT} --cuda-graph-impl local", {"--cuda-graph-impl"}),
    (f"{CP2} {GPT} --cuda-graph-impl local --cuda-graph-modules mlp", {"--cuda-graph-impl"}),
    (f"{CP2} {GPT} {_EXPERTS} --cuda-graph-impl local --cuda-graph-modules moe_router moe_preprocess"
     " --cp-layout contiguous", set()),
    (f"{CP2} {GPT} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp --cp-layout contiguous", set()),
    (f"{CP2} {GPT} --cuda-graph-impl transformer_engine --cuda-graph-scope attn", {"--cuda-graph-impl"}),
    (f"{CP2} {GPT} --cuda-graph-impl transformer_engine --cuda-graph-scope mlp --cp-layout contiguous", set()),
    (f"{CP2} {GPT} --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", {"--cuda-graph-impl"}),
    (f"{CP2} {GPT} --enable-cuda-graph", {"--enable-cuda-graph"}),
    (f"{CP2} {GPT} --external-cuda-graph", {"--external-cuda-graph"}),
    (f"{CP2} {GPT} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp --cp-layout contiguous"
     " --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 96", {"--cuda-graph-impl"}),
    (f"{CP2} {GPT} --use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"
     " --ckpt-format torch_dcp", {"--use-torch-fsdp2"}),
    (f"--context-parallel-size 1 {GPT} --use-torch-fsdp2 --untie-embeddings-and-output-weights"
     " --no-gradient-accumulation-fusion --ckpt-format torch_dcp", set()),
    (f"{CP2} {GPT} {_EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
     {"--moe-router-load-balancing-type"}),
    (f"--context-parallel-size 1 {GPT} {_EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
     set()),
    (f"{CP2} {GPT} {_EXPERTS} --moe-expert-capacity-factor 1.5", {"--moe-expert-capacity-factor"}),
    (f"{CP2} {GPT} {_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
     {"--moe-token-dispatcher-type"}),
    (f"{CP2} {GPT} {_EXPERTS} --moe-token-drop-policy position", set()),
    (f"{CP2} {_MLA}", set()),  # Megatron turns the fusion off without these positions
    (f"{CP2} {_MLA} {_ROPE}", {"--apply-rope-fusion"}),
    (f"{CP2} {_MLA} {_ROPE} --no-rope-fusion --cp-comm-type a2a --q-lora-rank 16", set()),
    (f"{CP2} {_MLA} {_ROPE} --no-rope-fusion --cp-latent-mode expand --cp-comm-type p2p", set()),
    (f"{CP2} {_DSA} --cp-comm-type all_gather", {"--dsa-indexer-topk"}),
    (f"{CP2} {_DSA} --dsa-indexer-topk 8 --cp-comm-type all_gather --softmax-type learnable", {"--softmax-type"}),
    (f"{CP2} {_DSA} --dsa-indexer-topk 8 --cp-comm-type all_gather --cp-latent-mode absorb", set()),
    (f"{CP2} {HYBRID} --hybrid-layer-pattern M*-M --position-embedding-type none --cp-comm-type auto", set()),
    (f"{CP2} {HYBRID} --hybrid-layer-pattern M*-M --mamba-training-ssm-states-dtype bf16 --cp-comm-type auto",
     {"--mamba-training-ssm-states-dtype"}),
    (f"{CP2} {GPT} --experimental-attention-variant gated_delta_net --linear-attention-freq 2"
     " --linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 3"
     " --linear-num-value-heads 3 --cp-comm-type auto --swiglu", set()),
]  # fmt: skip
