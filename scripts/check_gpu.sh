#!/usr/bin/env bash
# Everything that wants a GPU, in one command: versions and hooks, calibration and replay, equality over NCCL.
#   scripts/check_gpu.sh           about an hour on one machine; results go to benchmarks/results
# Equality runs in the layouts that the machine has a GPU a rank for: two GPUs at least, eight for all.
# It wants transformer-engine[pytorch] in the environment. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import torch; assert torch.cuda.is_available(), "check_gpu.sh: torch finds no GPU"'
status=0
"$python" -m megatron_balance doctor --no-smoke || status=1
scripts/bench_gpu.sh --out benchmarks/results || status=1
scripts/equality_matrix.sh --device cuda --publish || status=1
exit "$status"
