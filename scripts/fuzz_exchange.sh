#!/usr/bin/env bash
# Random schedules and exchanges over four gloo ranks: no sample may be lost, doubled or altered.
#   scripts/fuzz_exchange.sh [COUNT [SEED]]      10000 rounds by default
# PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
export OMP_NUM_THREADS=1 PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-$folder/.venv/bin/python}" -m torch.distributed.run --standalone --nproc-per-node 4 \
    -m benchmarks.fuzz_exchange "${1:-10000}" "${2:-1}"
