"""Parallelism: who holds which part of the model, and what ranks send each other."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import given
from megatron_balance.mcore.options.option import Option, Support

PARALLELISM = (
    Option(
        names=("dataloader_inter_document_masking", "context_parallel_size"),
        case="above 1: micro-batches are then split by document, not by row",
        support=Support.SUPPORTED,
        test="tests/megatron/test_equality.py::test_model_parallel",
        first=(0, 19),
    ),
    Option(
        names=("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
        support=Support.STOCK,
        when=given("hybrid_context_parallel"),
        because="it has a scheduler of its own",
        remedy="drop it to balance, with --context-parallel-size for long samples",
    ),
)
