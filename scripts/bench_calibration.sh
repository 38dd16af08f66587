#!/usr/bin/env bash
# Trains the quickstart's model planned by FLOPs, by a calibration and by online calibration, in turn.
#   scripts/bench_calibration.sh --out benchmarks/results  what is committed, a quarter of an hour on a quiet machine
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.calibration "$@"
