#!/usr/bin/env bash
# All that a machine with a GPU can teach in one call of nine minutes; `--help` says more, and tools/README.md.
#     bash tools/gpu_check.sh [--budget 540] [--only smoke|kernels|one-rank|parity|nccl|train] [OPTIONS]
# The log, the results and a summary go to $OUT, or else to benchmarks/results. The exit status is 1 unless all steps
# passed.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -m tools.gpu_check "$@"
