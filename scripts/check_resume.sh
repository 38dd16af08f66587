#!/usr/bin/env bash
# Kills training runs at random steps, resumes them, and compares with runs that were not killed; a table, row by row.
#   scripts/check_resume.sh [--only TEXT] [--first N] [--seed N] [--minutes N]
# PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} nice "$python" -m benchmarks.resume "$@"
