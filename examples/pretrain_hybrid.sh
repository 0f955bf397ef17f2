#!/usr/bin/env bash
# One node: pretrain_hybrid.py on every GPU of this machine.
#
#   examples/pretrain_hybrid.sh DATA_PREFIX CHECKPOINTS [more of Megatron's flags]
#
# DATA_PREFIX.bin and DATA_PREFIX.idx come from Megatron's tools/preprocess_data.py with the tokenizer named below.
# CP and TP set the sizes of context and tensor parallelism; what remains of the GPUs is data parallel.
set -euo pipefail
data=${1:?the prefix of a .bin/.idx pair}
checkpoints=${2:?a folder for checkpoints}
shift 2
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it before Blackwell

model=( # about 1 B parameters and the embeddings, shaped as Qwen3-Next: three linear layers to each softmax layer
  --spec megatron_cp.megatron.specs hybrid_stack_spec
  --hybrid-layer-pattern G-G-G-*-G-G-G-*-G-G-G-*-G-G-G-*-
  --hidden-size 2048 --ffn-hidden-size 5632
  --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256 --qk-layernorm
  --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128
  --linear-conv-kernel-dim 4
  --position-embedding-type rope --rotary-base 10000000
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
)
data_flags=(
  --data-path "$data" --dataloader-type external --split 99,1,0
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?a tokenizer that Megatron can load}"
  --seq-length "${SEQ_LENGTH:-131072}" --max-position-embeddings "${SEQ_LENGTH:-131072}"
)
parallel=(
  --context-parallel-size "${CP:-8}" --cp-comm-type a2a
  --tensor-model-parallel-size "${TP:-1}"
)
training=(
  --micro-batch-size 1 --global-batch-size "${BATCH:-16}" --calculate-per-token-loss
  --train-iters "${ITERS:-10000}" --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 200 --lr-decay-style cosine
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --use-distributed-optimizer
  --eval-interval 500 --eval-iters 10 --log-interval 10
  --save "$checkpoints" --load "$checkpoints" --save-interval 500
)

exec torchrun --standalone --nproc-per-node "$gpus" "$(dirname "$0")/pretrain_hybrid.py" \
  "${model[@]}" "${data_flags[@]}" "${parallel[@]}" "${training[@]}" "$@"
