#!/usr/bin/env bash
# Measures what other loops gain: padded rows as packs (CPU seconds of training), and the bins of Megatron's RL loop.
#   scripts/bench_loops.sh unpad --out benchmarks/results      what is committed, two minutes
#   scripts/bench_loops.sh rl_bins --out benchmarks/results    seconds
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
name=${1:?give unpad or rl_bins}
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH} "$python" -m "benchmarks.loops.$name" "${@:2}"
