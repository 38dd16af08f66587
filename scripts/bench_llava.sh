#!/usr/bin/env bash
# Trains megatron.core's LLaVAModel on image-text samples, stock, planned by tokens and by both parts of the cost.
#   scripts/bench_llava.sh --out benchmarks/results    what is committed, some minutes
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.llava "$@"
