#!/usr/bin/env bash
# GRPO with AReaL on one node, its ranks balanced by this package.
#
#   scripts/run_rl_areal.sh SCRIPT CONFIG MODEL [AREAL OVERRIDES ...]
#
#   SCRIPT           a training script of AReaL's that makes a PPOTrainer: examples/math/gsm8k_rl.py of its checkout
#   CONFIG           its yaml: examples/math/gsm8k_grpo.yaml
#   MODEL            what FLOPs are counted of: a preset's name, or the path of a Hugging Face config.json
#   AREAL OVERRIDES  anything the configuration takes: actor.path=..., train_dataset.path=...,
#                    actor.mb_spec.max_tokens_per_mb=...
#
# Environment: SINGLE_RANK_LOAD=1 trains with one process a rank (AReaL's local launcher) and lets the first of them roll
# out for all. Else AReaL's single controller deals trajectories out, and this launcher hooks it. Its workers are hooked
# where the configuration starts them so:
#
#   actor:
#     scheduling_spec:
#       - cmd: python3 -m megatron_balance.adapters.areal --model MODEL -m areal.infra.rpc.rpc_server
#
# DRY_RUN=1 prints the command and runs nothing. Run it in the environment that has areal 1.0.4 and this package (`pip install .` in a clone).
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 3 ]] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
script=$1 config=$2 model=$3
shift 3

if [[ ${SINGLE_RANK_LOAD:-0} == 1 ]]; then
    # The local launcher gives torchrun a script and nothing before it, so that what to run goes by the environment.
    run env AREAL_TRAIN_SCRIPT="$script" BALANCE_MODEL="$model" python3 -m areal.infra.launcher.local "$here/scripts/train_areal.py" --config "$config" "$@"
    exit
fi
run python3 -m megatron_balance.adapters.areal --model "$model" "$script" --config "$config" scheduler.type=local "$@"
