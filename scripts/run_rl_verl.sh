#!/usr/bin/env bash
# GRPO with verl on one node or several, its batches, mini-batches and micro-batches balanced by this package.
#
#   scripts/run_rl_verl.sh MODEL TRAIN_FILES VAL_FILES [VERL ARGS ...]
#
#   MODEL        folder of the Hugging Face checkpoint, the same path on every node; its config.json gives the FLOPs
#   TRAIN_FILES  parquet of prompts, as verl's data preprocessing writes it
#   VAL_FILES    parquet of prompts to validate on
#   VERL ARGS    anything verl.trainer.main_ppo takes; later ones win. `--cfg job` prints the configuration and stops.
#
# verl 0.9 must be installed, and this package (`pip install .` in a clone) in the same environment on every node:
# workers load the plug-in themselves.
#
# DRY_RUN=1 prints the command and runs nothing.
# Environment: NNODES (1), NUM_GPUS a node (8), TP of the rollout (2), MAX_TOKENS_PER_GPU (16384), MINI_BATCH prompts
# (64), ENGINE (vllm), OUT (build/run_rl_verl), BALANCE, the plug-in's options (model=MODEL; also cost=tokens;
# spaces between them).
#
# What is of this package: one environment variable, for the driver and for Ray's workers on every node, and four of
# verl's own flags.
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 3 ]] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
model=$1 train_files=$2 val_files=$3
shift 3

options=${BALANCE:-model=$model}
balance=(
    # Raylets of other nodes have an environment of their own.
    "+ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_BALANCE_VERL='$options'"
    trainer.balance_batch=True                                                      # rows to ranks
    actor_rollout_ref.actor.use_dynamic_bsz=True                                    # rows to micro-batches
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU:-16384}" # never exceeded
    actor_rollout_ref.actor.shuffle=False                                           # ranks shuffle apart otherwise
)
train=(
    data.train_files="$train_files" data.val_files="$val_files" data.train_batch_size=256
    data.max_prompt_length=1024 data.max_response_length=8192 data.filter_overlong_prompts=True data.truncation=error
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    actor_rollout_ref.model.path="$model" actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH:-64}"
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.rollout.name="${ENGINE:-vllm}" actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TP:-2}"
    trainer.nnodes="${NNODES:-1}" trainer.n_gpus_per_node="${NUM_GPUS:-8}" trainer.logger='["console"]'
    trainer.default_local_dir="${OUT:-$here/build/run_rl_verl}" trainer.save_freq=20 trainer.test_freq=5
    trainer.total_epochs=1
)
run env MEGATRON_BALANCE_VERL="$options" python3 -m verl.trainer.main_ppo "${train[@]}" "${balance[@]}" "$@"
