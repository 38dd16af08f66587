#!/usr/bin/env bash
# Moves samples of 24 bytes and of 10 kB a token between gloo ranks; prints CPU time, memory and time at stated bandwidths.
#   scripts/bench_payloads.sh --out benchmarks/results    what is committed, a minute or two
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.payloads "$@"
