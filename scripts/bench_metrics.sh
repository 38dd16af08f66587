#!/usr/bin/env bash
# Trains the quickstart's model, in turn with and without figures, log line and record; prints the ratio of CPU seconds.
#   scripts/bench_metrics.sh --out benchmarks/results    what is committed, minutes on a quiet machine
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.metrics "$@"
