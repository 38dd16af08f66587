"""Calls models with `packed_seq_params` under `--balance-unpad`.

The script's forward step was written for padded rows and names no starts of sequences. A forward pre-hook on the model
adds them, on every rank: those that read no data know the lengths of their micro-batches too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.microbatch.model_keywords import called_with, takes_keyword, unwrapped
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.samples.packing import lengths_as_packed
from megatron_balance.topology import Topology


def packed_params_of(step: BalancedStep, *, topology: Topology) -> list[Any]:
    """Megatron's PackedSeqParams of each micro-batch, on the device.

    Args:
        step: with `sequence_lengths`.
        topology: the ranks; without context parallelism.
    """
    from megatron_balance.mcore.packed_params import packed_seq_params

    assert step.sequence_lengths is not None, "ranks that read no data are sent them"
    result: list[Any] = []
    for lengths, num_tokens in zip(step.sequence_lengths, step.microbatch_tokens, strict=True):
        packed = lengths_as_packed(lengths, num_tokens=num_tokens, token_multiple=topology.token_multiple)
        starts = torch.tensor([[0, *accumulate(packed)]], dtype=torch.int32)
        result.append(
            packed_seq_params({"cu_seqlens": starts.cuda(non_blocking=True), "max_seqlen": torch.tensor([max(packed)])})
        )
    return result


def called_with_packs(params: Any, *, model: Any) -> AbstractContextManager[None]:
    """Have the model called with PackedSeqParams in this context.

    Args:
        params: of the micro-batch.
        model: a chunk.

    Raises:
        BalanceError: the model takes no packed sequences.
    """
    inner = unwrapped(model)
    if not takes_keyword(inner, "packed_seq_params"):
        raise BalanceError(
            f"{type(inner).__name__}.forward takes no packed_seq_params, so that samples of a pack would attend to one "
            "another: add the parameter and hand it to the decoder, or train without --balance-unpad."
        )
    return called_with(inner, packed_seq_params=params)
