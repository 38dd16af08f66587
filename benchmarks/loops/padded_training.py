"""record_steps with rows that are padded and name no starts of sequences, and a forward step written for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import megatron.core.utils as core_utils
import record_steps
import torch
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

from megatron_balance.devkit import pretrain_sft

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def main() -> None:
    """Train."""
    stock = pretrain_sft.datasets_provider

    @functools.wraps(stock)
    def datasets_provider(*positional: Any, **keywords: Any) -> tuple[Any, ...]:
        return tuple(rows and PaddedRows(rows) for rows in stock(*positional, **keywords))

    pretrain_sft.datasets_provider = datasets_provider
    pretrain_sft.forward_step = forward_step
    record_steps.main()


class PaddedRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows without starts of sequences."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.split = rows.split

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.rows[index].items() if name in KEYS}


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """As pretrain_gpt.py does it for rows."""
    args, batch = get_args(), {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        row = next(data_iterator)
        batch = {name: row[name].cuda() if name in row else None for name in KEYS}
    batch = core_utils.get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, functools.partial(pretrain_sft.loss_func, batch["loss_mask"])
