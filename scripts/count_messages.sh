#!/usr/bin/env bash
# Trains small pipelines with shapes exchanged between stages and with shapes from the plan; prints messages and waits.
#   scripts/count_messages.sh --out benchmarks/results    what is committed, a minute or two
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.messages "$@"
