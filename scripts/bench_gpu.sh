#!/usr/bin/env bash
# Calibrates a GPU and replays on it every data-parallel rank of the four setups of slime's pull request 2017.
#   scripts/bench_gpu.sh --out benchmarks/results  what is committed, half an hour on one GPU
#   scripts/bench_gpu.sh --toy                      tiny models on the CPU, the same code, under a minute
#   scripts/bench_gpu.sh --gains-only               which lengths the published gains need: predicted, no device
# Results go to build/bench, or to the folder of --out. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
shown="scripts/bench_gpu.sh${*:+ $*}"
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}

# Run from the caller's folder, so that --out and --lengths mean what they say.
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.replay --command "$shown" "$@"
