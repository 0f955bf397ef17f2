#!/usr/bin/env bash
# Everything that a machine with a GPU should check and measure. From the repository root:
#     bash tools/gpu_check.sh [FOLDER_OF_WHEELS]
# Wheels (default folder: .whl, if it is there) go to a temporary folder, nothing else is installed or set. Logs and
# results go to $OUT, or else to benchmarks/results. All steps run; the exit status is 1 if any of them failed.
set -uo pipefail

python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
wheels=${1:-.whl}
mkdir -p "$out" || exit 1
site=$(mktemp -d) || exit 1
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if compgen -G "$wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit 1
elif [ $# -gt 0 ]; then
  echo "no wheels in $wheels" >&2
  exit 1
fi

failed=()
step() { # step FILE COMMAND...: what the command prints is kept in $out/FILE
  local file=$1
  shift
  echo "== $*"
  "$@" 2>&1 | tee "$out/$file" || failed+=("$file")
}

versions() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader &&
    "$python" -m megatron_cp.cli.main doctor &&
    "$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
}

step gpu_versions.log versions
step gpu_tests.log timeout 560 "$python" -m pytest -n 4 -p no:cacheprovider --durations 5 tests/functional_tests/test_cuda.py
# Two ranks share the GPU, over gloo.
step gpu_train.log timeout 400 "$python" -m megatron_cp.cli.main train --context-parallel-size 2 --compare --json \
  --train-iters 40 --run-dir "$site/run"
step gpu_linear.md timeout 300 "$python" -m megatron_cp.cli.main bench linear --cp 2 --tokens-per-rank 8192
step gpu_attention.md timeout 300 "$python" -m megatron_cp.cli.main bench attention --cp 4 --tokens-per-rank 8192
step gpu_exchange.md timeout 300 "$python" -m megatron_cp.cli.main bench exchange
step gpu_layer.md timeout 300 "$python" -m megatron_cp.cli.main bench layer
step gpu_wire.md timeout 300 "$python" -m megatron_cp.cli.main bench wire --cp 4

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}; see $out" >&2
  exit 1
fi
echo "passed; see $out"
