#!/usr/bin/env bash
# Trains a small model with and without balancing in every layout of ranks, precision and optimizer, and compares.
#   scripts/equality_matrix.sh --whole --publish    what is committed, hours on two cores; goes on where it was interrupted
# Runs are kept in build/bench/equality. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} nice "$python" -m benchmarks.equality "$@"
