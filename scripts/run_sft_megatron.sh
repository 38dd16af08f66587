#!/usr/bin/env bash
# Supervised fine-tuning of a Qwen3-4B-sized model with Megatron-LM on one node, balanced.
#
#   scripts/run_sft_megatron.sh MEGATRON DATA TOKENIZER [FLAGS ...]
#
#   MEGATRON    a checkout of Megatron-LM at core_r0.19.0
#   DATA        a jsonl file of conversations, as Megatron's --sft reads them
#   TOKENIZER   a Hugging Face tokenizer: a folder, or a name
#   FLAGS       added at the end, e.g. --tensor-model-parallel-size 2. Weights are random without --load; from Hugging Face:
#               docs/scripts.md
#
# GPUS=8 GPUs of this node. DRY_RUN=1 prints the command and runs nothing.
# Measure the GPU first, once, for seconds in place of FLOPs:
#   scripts/run_sft_megatron.sh … --balance-record record --train-iters 20; megatron-balance fit record
#   scripts/run_sft_megatron.sh … --balance-cost seconds.json
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 3 ]] || usage
megatron=$1 data=$2 tokenizer=$3
shift 3

model=(
    --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 8 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear     --position-embedding-type rope --rotary-base 1000000 --seq-length 16384 --max-position-embeddings 40960
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 1e-5 --min-lr 1e-6
    --lr-decay-style cosine --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1
)
sft=(--sft --data-path "$data" --tokenizer-type SFTTokenizer --tokenizer-model "$tokenizer")
# The loss of every token counts alike, whichever micro-batch it is in: needed for what follows.
balance=(
    --calculate-per-token-loss
    --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --balance-data --balance-by-flops
)

run torchrun --standalone --nproc-per-node "${GPUS:-8}" -m megatron_balance.launch \
    "$megatron/pretrain_gpt.py" "${model[@]}" "${training[@]}" "${sft[@]}" "${balance[@]}" "$@"
