#!/usr/bin/env bash
# Measures what a step and the start cost as ranks become more, on ranks of this machine, and models up to 10,000.
#   scripts/bench_scale.sh                                       4 to 16 ranks: four minutes
#   scripts/bench_scale.sh --whole --lengths FOLDER --out benchmarks/results    what is committed: ten minutes
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export OMP_NUM_THREADS=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} nice "$python" -m benchmarks.scale "$@"
