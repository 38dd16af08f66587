#!/usr/bin/env bash
# A training loop on megatron.core alone (train_core_loop.py), balanced by one line; without a GPU on CPU ranks.
#
#   scripts/run_own_loop.sh RECORD
#
#   RECORD    a folder: each rank writes its steps to rankN.jsonl
#
# GPUS=2 ranks of this node; LOOP='{"balanced": false}' trains without the line. DRY_RUN=1 prints the command only.
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 1 ]] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
run env PYTHONPATH="$here/tests/kit${PYTHONPATH:+:$PYTHONPATH}" LOOP="${LOOP:-{\}}" \
    torchrun --standalone --nproc-per-node "${GPUS:-2}" "$here/scripts/train_core_loop.py" "$1"
