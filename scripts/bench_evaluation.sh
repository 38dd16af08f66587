#!/usr/bin/env bash
# Trains and evaluates on the same rows, stock and balanced; prints seconds, CPU seconds and the difference of losses.
#   scripts/bench_evaluation.sh --out benchmarks/results    what is committed, five minutes on two cores
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.evaluation "$@"
