"""Gets the next packed micro-batch on this rank, by the functions of the installed Megatron.

One rank of a tensor-parallel group reads it and sends it to the others; it is split over context-parallel ranks. The
releases differ:

* 0.17 reads the iterator itself and leaves out `cu_seqlens_padded`, and `cu_seqlens` after the first stage;
* 0.18 takes a batch and calls packed sequences `is_sft`;
* from 0.19 the parameter is `has_cu_seqlens`, and rows are joined by `flatten_batch_for_packed_sequences`.

The functions' parameters, not a version, decide which form is used.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import megatron.core.utils as core_utils
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

from megatron_balance.errors import BalanceError

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)


def get_batch(data_iterator: Iterator[dict[str, Tensor]] | None) -> dict[str, Any]:
    """The next micro-batch on this rank.

    Args:
        data_iterator: None where this rank reads no data.

    Returns:
        dict: BATCH_KEYS, `[1, t]` with the tokens of this context-parallel rank, None where a pipeline stage has no
        use for a key; `cu_seqlens` and `max_seqlen` are of the whole micro-batch.

    Raises:
        BalanceError: Megatron 0.17 cannot pass packed sequences on in this layout.
    """
    args = get_args()
    if not hasattr(core_utils, "get_batch_on_this_tp_rank"):
        return _get_batch_of_0_17(data_iterator, args=args)
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        row = next(data_iterator)
        batch = {key: row[key].cuda(non_blocking=True) if row.get(key) is not None else None for key in BATCH_KEYS}
    on_this_tp_rank = core_utils.get_batch_on_this_tp_rank
    packed = "has_cu_seqlens" if "has_cu_seqlens" in inspect.signature(on_this_tp_rank).parameters else "is_sft"
    batch = on_this_tp_rank(
        batch,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further_tokens(args),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **{packed: True},
    )
    if hasattr(core_utils, "flatten_batch_for_packed_sequences"):
        batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if batch["tokens"] is None and batch["labels"] is None:
        return batch  # a middle pipeline stage: it needs nothing but the starts of sequences
    # As Megatron's own scripts ask for it; 0.18 has neither the option nor the parameter.
    documents = getattr(args, "dataloader_inter_document_masking", False) and not args.sft
    whole_row = {"use_per_sequence_balancing": True} if documents else {}
    return core_utils.get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group(), **whole_row
    )


def _get_batch_of_0_17(data_iterator: Iterator[dict[str, Tensor]] | None, *, args: Any) -> dict[str, Any]:
    from megatron.training.utils import get_batch_on_this_tp_rank

    tp_and_pp = args.tensor_model_parallel_size > 1 and args.pipeline_model_parallel_size > 1
    if args.context_parallel_size > 1 or tp_and_pp:
        raise BalanceError(
            "Megatron 0.17 does not send every rank where packed sequences start when --context-parallel-size is "
            f"{args.context_parallel_size}, --tensor-model-parallel-size {args.tensor_model_parallel_size} and "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: use one of TP or PP alone, or "
            "Megatron 0.18 or newer."
        )
    batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=_predicts_further_tokens(args))
    return {key: batch.get(key) for key in BATCH_KEYS}


def _predicts_further_tokens(args: Any) -> bool:
    """True if this rank has the layers of multi-token prediction: on the last stage, which reads tokens for them."""
    return bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage()
