"""One rank of test_schedulers.py: both schedulers of the Megatron on the path, on the same samples."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_shim import enable_cpu

from megatron_balance.mcore.packing_scheduler import NAME, register

enable_cpu()

CAP = 512
NUM_SAMPLES = 12
LONGEST = (500, 60)
"""Of each rank's samples: what the first rank loads is far longer than what the second does."""


def sample(length: int, *, first_token: int, prepacked: bool) -> dict[str, torch.Tensor]:
    tokens = first_token + torch.arange(length)
    row = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(length),
        "position_ids": torch.arange(length),
    }
    if prepacked:
        return row | {"cu_seqlens": torch.tensor([0, length], dtype=torch.int32)}
    return row | {name: torch.tensor([length], dtype=torch.int32) for name in ("original_seq_len", "padded_seq_len")}


def schedule(name: str, samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    from megatron.core.datasets import data_schedule
    from megatron.core.rerun_state_machine import RerunDataIterator

    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=CAP,
        sequence_packing_scheduler=name,
        virtual_pipeline_model_parallel_size=None,
        microbatch_group_size_per_vp_stage=None,
        mtp_num_layers=None,
        mtp_standalone=False,
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=1,
    )
    # Megatron's own takes the batch dimension off in place.
    items = RerunDataIterator(iter([dict(sample) for sample in samples]))
    iterator, num_microbatches, *sums = data_schedule.wrap_data_iterator(items, config, len(samples))
    kept: list[list[int]] = []
    tokens_of: list[int] = []
    for _ in range(num_microbatches):
        batch = data_schedule.get_batch_on_this_rank_for_sequence_packing(iterator)
        tokens, labels, loss_mask, _, position_ids, packed, _ = batch
        starts = packed.cu_seqlens_q.tolist()
        tokens_of.append(starts[-1])
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            if loss_mask[0, start:end].any():
                kept.append(tokens[0, start:end].tolist())
                assert torch.equal(labels[0, start:end], tokens[0, start:end] + 1)
                assert position_ids[0, start:end].tolist() == list(range(end - start))
    return {"num_microbatches": num_microbatches, "samples": kept, "tokens": tokens_of, "sums": sums}


def both_schedulers(*, prepacked: bool) -> dict[str, Any]:
    """What this rank loaded, and what it trains on by Megatron's scheduler and by ours."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    rank = parallel_state.get_data_parallel_rank()
    lengths = random.Random(rank)
    samples: list[dict[str, torch.Tensor]] = []
    for index in range(NUM_SAMPLES):
        first_token = 1000 * (1 + index + NUM_SAMPLES * rank)
        samples.append(sample(lengths.randint(8, LONGEST[rank]), first_token=first_token, prepacked=prepacked))
    registration = register()
    assert registration is not None, "this Megatron has no scheduler_map"
    result: dict[str, Any] = {"loaded": [sample["tokens"].tolist() for sample in samples]}
    result |= {name: schedule(name, samples) for name in ("dp_balanced", NAME)}
    registration.undo()
    with pytest.raises(KeyError):  # Megatron knows the name no longer
        schedule(NAME, samples)
    return result
