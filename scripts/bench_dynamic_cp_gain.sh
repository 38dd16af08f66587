#!/usr/bin/env bash
# Step times with dynamic context-parallel sizes against one size, on four CPU ranks: measured, and as planned.
#   scripts/bench_dynamic_cp_gain.sh --rounds 2                                a first look
#   scripts/bench_dynamic_cp_gain.sh --out benchmarks/results                  what is committed, ten minutes
# PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.dynamic_cp.gain "$@"
