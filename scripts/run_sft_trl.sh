#!/usr/bin/env bash
# Supervised fine-tuning with TRL (train_trl.py), micro-batches balanced over ranks. No Megatron.
#
#   scripts/run_sft_trl.sh MODEL DATA [FLAGS ...]
#
#   MODEL    a Hugging Face model: a folder, or a name
#   DATA     a jsonl file of conversations, as TRL reads them
#   FLAGS    of trl's SFTConfig, e.g. --gradient_accumulation_steps 4 --bf16 true
#
# Environment: GPUS (8) of this node, MAX_TOKENS of a micro-batch (16384), OUT (build/run_sft_trl).
# DRY_RUN=1 prints the command and runs nothing. Needs trl and this package (`pip install .` in a clone).
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 2 ]] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
model=$1 data=$2
shift 2
run env MAX_TOKENS="${MAX_TOKENS:-16384}" torchrun --standalone --nproc-per-node "${GPUS:-8}" "$here/scripts/train_trl.py" \
    --model_name_or_path "$model" --dataset_name "$data" --output_dir "${OUT:-$here/build/run_sft_trl}" \
    --padding_free true --max_length null --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "$@"
