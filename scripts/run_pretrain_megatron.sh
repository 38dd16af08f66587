#!/usr/bin/env bash
# Pre-training of a Qwen3-30B-A3B-sized mixture of experts with Megatron-LM, documents of all lengths, balanced.
#
#   scripts/run_pretrain_megatron.sh MEGATRON DATA TOKENIZER [FLAGS ...]
#
#   MEGATRON    a checkout of Megatron-LM at core_r0.19.0
#   DATA        prefix of an indexed data set (tools/preprocess_data.py)
#   TOKENIZER   a Hugging Face tokenizer: a folder, or a name
#   FLAGS       added at the end, e.g. --save CHECKPOINTS
#
# GPUS=8 GPUs of each node; NODES, NODE_RANK, MASTER as torchrun has them; DRY_RUN=1 prints the command only.
# Attention stays inside a document (--dataloader-inter-document-masking), so documents are what is moved and packed.
# Expert parallelism makes ranks meet in every micro-batch: plans then even out every slot.
set -euo pipefail

source "$(dirname "$0")/launch.sh"
[[ $# -ge 3 ]] || usage
megatron=$1 data=$2 tokenizer=$3
shift 3

model=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --untie-embeddings-and-output-weights     --position-embedding-type rope --rotary-base 1000000 --seq-length 32768 --max-position-embeddings 40960
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
)
parallel=(--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 500 --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --attention-dropout 0 --hidden-dropout 0 --log-interval 10
)
documents=(
    --data-path "$data" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer"
    --dataloader-inter-document-masking
)
balance=(
    --calculate-per-token-loss
    --use-dynamic-batch-size --max-tokens-per-gpu 32768
    --balance-data --balance-by-flops
)

run torchrun --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER:-localhost:29500}" --nproc-per-node "${GPUS:-8}" \
    -m megatron_balance.launch "$megatron/pretrain_gpt.py" "${model[@]}" "${parallel[@]}" "${training[@]}" \
    "${documents[@]}" "${balance[@]}" "$@"
