#!/usr/bin/env bash
# What a machine with a GPU should check and measure, in steps of less than ten minutes.
#     bash tools/gpu_check.sh [--wheels FOLDER] --only smoke|kernels|parity|one-rank|gloo|symmetric [OPTIONS]
# Wheels (default folder: .whl, if it is there) go to a temporary folder, nothing else is installed or set. Logs and
# results go to $OUT, or else to benchmarks/results. The exit status is 1 if a step failed; --help says more.
set -uo pipefail

python=${PYTHON:-python3}
cd "$(dirname "$0")/.." || exit 2
wheels=.whl
if [[ "${1:-}" = --wheels || "${1:-}" = --wheels=* ]]; then
  if [ "$1" = --wheels ]; then wheels=${2:-} && shift; else wheels=${1#*=}; fi
  shift
  compgen -G "$wheels/*.whl" >/dev/null || { echo "tools/gpu_check.sh: no wheels in '$wheels'" >&2; exit 2; }
fi
site=$(mktemp -d) || exit 1
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# A fresh machine has compiled nothing; a call that follows finds what this one has.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton}

if compgen -G "$wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit 1
fi
"$python" -m tools.gpu_check "$@"
