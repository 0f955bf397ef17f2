#!/usr/bin/env bash
# Prepares the wheels that travel to a machine with a GPU, in .whl: at most 64 MiB with the working tree.
#     bash tools/gpu_wheels.sh [--built FOLDER] [--limit 64] [--out .whl]
# megatron-core, fla-core and einops by the pins of pyproject.toml; from FOLDER, if it is given, wheels of
# causal-conv1d, mamba-ssm and flash-attn that were built for the GPU and its torch; and tilelang with what it needs, if
# it fits. Prints the size of each, and what was left out.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 2
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -m tools.gpu_check.wheels "$@"
