#!/usr/bin/env bash
# GRPO with slime on one node, its rollout batches balanced by this package.
#
#   scripts/run_rl_slime.sh SLIME MEGATRON MODEL HF_CHECKPOINT TORCH_DIST PROMPTS [SLIME ARGS ...]
#
#   SLIME          a checkout of slime 0.3, with its environment active and this package in it (`pip install .` in a
#                  clone), on every node: Ray's workers import it
#   MEGATRON       a checkout of Megatron-LM
#   MODEL          a file of SLIME/scripts/models without its suffix: qwen3-4B
#   HF_CHECKPOINT  folder of the Hugging Face checkpoint
#   TORCH_DIST     folder of the same checkpoint in Megatron's format
#   PROMPTS        jsonl with `prompt` and `label`
#   SLIME ARGS     anything train.py takes; later ones win
#
# Environment: DRY_RUN=1 prints the commands and runs nothing. NUM_GPUS (8), TP (2), MAX_TOKENS_PER_GPU (9216), OUT (build/run_rl_slime). For several nodes, start Ray on
# all of them before and set RAY_ADDRESS; it is started on this one otherwise.
#
# What is of this package: the launcher in place of `python3 train.py`, and three of slime's own flags.
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 6 ]] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
slime=$(cd "$1" && pwd) megatron=$(cd "$2" && pwd) model=$3 hf_checkpoint=$4 torch_dist=$5 prompts=$6
shift 6
out=${OUT:-$here/build/run_rl_slime}

# Sets MODEL_ARGS: --hidden-size and the others, from which FLOPs are counted.
# shellcheck disable=SC1090
source "$slime/scripts/models/$model.sh"

balance=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-9216}" # never exceeded by a micro-batch of several samples
    --balance-by-flops                                 # turns --balance-data on
)
train=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "${NUM_GPUS:-8}" --colocate
    --hf-checkpoint "$hf_checkpoint" --ref-load "$torch_dist" --load "$out" --save "$out" --save-interval 20
    --prompt-data "$prompts" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0 --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --tensor-model-parallel-size "${TP:-2}" --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine "${TP:-2}" --sglang-mem-fraction-static 0.7
    --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash
)

if [[ -z ${RAY_ADDRESS:-} ]]; then
    (run ray start --head --num-gpus "${NUM_GPUS:-8}" --disable-usage-stats)
    export RAY_ADDRESS=http://127.0.0.1:8265
fi
environment=$(printf '{"env_vars": {"PYTHONPATH": "%s:%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' "$megatron" "$slime")
cd "$slime"
run ray job submit --runtime-env-json "$environment" -- \
    python3 -m megatron_balance.adapters.slime train.py "${MODEL_ARGS[@]}" "${train[@]}" "${balance[@]}" "$@"
