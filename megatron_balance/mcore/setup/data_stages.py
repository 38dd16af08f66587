"""Chooses the pipeline stages that load data: all of them, or the first and the last.

Stages in between need no more than the starts of sequences if the forward step asks for no more. Megatron's own
`get_batch` does not: in pretrain_gpt.py and pretrain_hybrid.py, from 0.18, it returns `cu_seqlens`,
`cu_seqlens_padded` and `max_seqlen` there and None for the rest, under `--sft` and
`--dataloader-inter-document-masking`. Another script may read tokens or labels on every stage (rotary positions of
images, routing by token), so there every stage loads unless a flag says otherwise. `get_batch` of 0.17 and of the dev
branch reads the keys of every micro-batch itself.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def loads_on_every_stage(args: Any) -> bool:
    """`--balance-load-every-stage`, or what is safe where it is not given.

    Args:
        args: Megatron's validated arguments.
    """
    if getattr(args, "mtp_num_layers", None) and getattr(args, "pipeline_model_parallel_layout", None):
        return True  # a layout may put the layers of multi-token prediction, which read tokens, on any stage
    if args.balance_load_every_stage is not None:
        return bool(args.balance_load_every_stage)
    # A hand-written loop has neither flag.
    megatrons = any(getattr(args, flag, False) for flag in ("sft", "dataloader_inter_document_masking"))
    return not megatrons or _get_batch_reads_every_key()


def _get_batch_reads_every_key() -> bool:
    """True if the installed Megatron's function takes the iterator and not the micro-batch: it then reads all keys."""
    utils: Any = importlib.import_module("megatron.training.utils")
    function = getattr(utils, "get_batch_on_this_tp_rank", None)
    return function is not None and "data_iterator" in inspect.signature(function).parameters
