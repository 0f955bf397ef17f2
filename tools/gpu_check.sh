#!/usr/bin/env bash
# All that a machine with a GPU can teach in one call of nine minutes; `--help` says more, and tools/README.md.
#     bash tools/gpu_check.sh [--budget 540] [--only smoke|kernels|one-rank|parity|nccl|train] [OPTIONS]
# Wheels in .whl (see tools/gpu_wheels.sh) go to a temporary folder, nothing else is installed or set. The log, the
# results and a summary go to $OUT, or else to benchmarks/results. The exit status is 1 unless all steps passed.
set -uo pipefail

began=$(date +%s)
cd "$(dirname "$0")/.." || exit 2
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -m tools.gpu_check --began "$began" "$@"
