#!/usr/bin/env bash
# Trains 2,000 steps with everything on and 2,000 without balancing; prints what memory, files and threads did, and what
# balancing adds to a step of the quickstart's model.
#   scripts/soak.sh --out benchmarks/results    what is committed, a quarter of an hour on a quiet machine
#   scripts/soak.sh --steps 600 --pairs 8       for a first look
#   scripts/soak.sh --reuse                     report what the last runs recorded, also of one that was ended early
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.soak "$@"
