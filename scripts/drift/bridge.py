"""Definitions of Megatron-Bridge that the package relies on, beside the targets of its hooks."""

from __future__ import annotations

from drift.relied import Relied

_TRAINING = "megatron.bridge.training"
_SCHEDULE = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")

BRIDGE = (
    Relied(
        f"{_TRAINING}.train:train",
        "passes train_step the schedule, and looks it up when it is called",
        names=("get_forward_backward_func", "train_step", "forward_backward_func"),
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.train:train_step",
        "passes the schedule what the wrapper replaces, by keyword; the loader `batch` has an iterator for each step",
        names=(*_SCHEDULE, "prepare_finetuning_batch"),
        body=True,
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.eval:evaluate",
        "asks for the schedule, and adds up sums over tokens",
        names=("get_forward_backward_func", *_SCHEDULE, ".eval_iters", ".numel"),
        body=True,
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.eval:evaluate_and_print_results",
        "looks evaluate up when it is called",
        names=("evaluate",),
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.gpt_step:get_batch_from_iterator",
        "reads the keys of a pack, starts of sequences among them",
        names=("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_q"),
        body=True,
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.utils.packed_seq_utils:get_packed_seq_params",
        "makes attention's arguments of the keys",
        parameters=("batch",),
        names=("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q", "max_seqlen_kv"),
        body=True,
        first=(0, 6),
    ),
    Relied(
        f"{_TRAINING}.losses:masked_next_token_loss",
        "returns the sum of losses and the number of tokens",
        names=("num_tokens",),
        body=True,
        first=(0, 6),
    ),
    Relied(
        "megatron.bridge.data.batch_utils:prepare_finetuning_batch",
        "hands out a global batch at a time",
        parameters=("data_iterator", "num_microbatches"),
        body=True,
        first=(0, 6),
    ),
)
