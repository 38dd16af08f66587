#!/usr/bin/env bash
# Plans with dynamic context-parallel sizes, beside Megatron dev's scheduler and a perfect plan at one size.
#   scripts/bench_dynamic_cp.sh --quick                                                   seconds
#   MEGATRON_DEV_CHECKOUT=DIR scripts/bench_dynamic_cp.sh --out benchmarks/results        what is committed, minutes
# MEGATRON_DEV_CHECKOUT is a checkout of Megatron-LM's dev branch; without it its rows are left out. Results go to
# build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.dynamic_cp "$@"
