#!/usr/bin/env bash
# Faults in real training runs: bad data, ranks started differently, ranks that die or hang. Prints a table.
#   scripts/check_faults.sh            all
#   scripts/check_faults.sh --help
# PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
export PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-$folder/.venv/bin/python}" -m benchmarks.faults "$@"
