"""Resets Transformer Engine's attention modules to the static context-parallel group.

Megatron's TEDotProductAttention switches to the group in PackedSeqParams, and keeps it if they have none, as in
evaluation. It creates its stream for context parallelism only if `--context-parallel-size` is above 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.mcore.dynamic_cp.groups import ContextGroups


def prepare_engine_attention() -> None:
    """Create the stream for context-parallel exchanges, before the first step."""
    engine_class = _engine_class()
    if engine_class is not None and engine_class.cp_stream is None:
        engine_class.cp_stream = torch.cuda.Stream()


def restore_engine_attention(model: Any, *, groups: ContextGroups) -> None:
    """Set every attention module back to the static group.

    Args:
        model: Megatron's module, or a list of its chunks.
        groups: of this rank.
    """
    size = groups.static_size
    group = groups.of_attention(size)
    for module in _engine_modules(model):
        if group is None:
            module.set_context_parallel_group(None, None, None, module.cp_comm_type)
        else:
            ranks = dist.get_process_group_ranks(group)
            module.set_context_parallel_group(group, ranks, type(module).cp_stream, module.cp_comm_type)


def _engine_modules(model: Any) -> Iterator[Any]:
    engine_class = _engine_class()
    if engine_class is None:
        return
    for chunk in model if isinstance(model, list) else [model]:
        yield from (module for module in chunk.modules() if isinstance(module, engine_class))


def _engine_class() -> Any:
    """Megatron's class, None without Transformer Engine."""
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    except ImportError:
        return None
    return TEDotProductAttention if HAVE_TE else None
