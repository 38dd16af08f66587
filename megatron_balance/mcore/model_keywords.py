"""Keyword arguments of a model's forward that a script's forward step does not give; a forward pre-hook adds them.

Padding masks, for MoE routers, which then count real tokens only (those of multi-token prediction in 0.17 take none),
and PackedSeqParams under `--balance-unpad`, whose scripts name no starts of sequences; every rank knows both.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.layout import Place
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.packs import Slots, pack
from megatron_balance.samples.packing import padding_mask
from megatron_balance.topology import Topology


def router_masks(slots: Slots, *, model: Any, topology: Topology, place: Place) -> list[Tensor]:
    """True where a token is padding, on the device: `[1, t]` a micro-batch, t tokens of this context-parallel rank.

    One copy to the device serves the step. A model of which a chunk takes none is refused, on every rank.
    """
    for chunk in model if isinstance(model, list) else [model]:
        _refuse_without(
            chunk,
            "padding_mask",
            "without which MoE routers count padding in --moe-aux-loss-coeff, --moe-z-loss-coeff and "
            "--moe-router-enable-expert-bias",
            "train without these flags or --balance-*",
        )
    leaf = place.dp * topology.cp_size + place.cp
    masks = [
        padding_mask(
            lengths,
            num_tokens=num_tokens,
            token_multiple=topology.with_cp_size(size).token_multiple,
            cp_size=size,
            cp_rank=leaf % size,
        )
        for lengths, num_tokens, size in zip(slots.sequence_lengths, slots.num_tokens, slots.cp_sizes, strict=True)
    ]
    whole = torch.from_numpy(np.concatenate(masks)).pin_memory().cuda(non_blocking=True)
    return list(whole.unsqueeze(0).split([mask.size for mask in masks], dim=1))


def called_with_mask(mask: Tensor, *, model: Any, topology: Topology, place: Place) -> AbstractContextManager[None]:
    """Have a chunk called with a router mask in this context, or with the share of a sequence-parallel rank.

    GPTModel splits a mask itself, and on the first pipeline stage only.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.utils import unwrap_model

    inner: Any = unwrap_model(model)
    splits = isinstance(inner, GPTModel) and bool(inner.pre_process)
    if topology.sequence_parallel and not splits:
        mask = mask.chunk(topology.tp_size, dim=1)[place.tp]
    return _called_with(model, padding_mask=mask)


def packed_seq_params(microbatch: Mapping[str, Any]) -> Any:
    """Megatron's PackedSeqParams of a packed micro-batch, for the model.

    Args:
        microbatch: `cu_seqlens` int32 `[1, num_sequences + 1]`, under context parallelism `cu_seqlens_padded` too, and
            `max_seqlen` `[1]`; as the iterator hands it out, on the CPU: from a GPU two numbers would be read back, for
            which the host waits.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = microbatch.get("cu_seqlens_padded")
    starts: Tensor = (microbatch["cu_seqlens"] if padded is None else padded).squeeze(0)
    max_seqlen, num_tokens = int(microbatch["max_seqlen"].max()), int(starts[-1])
    starts = starts.cuda(non_blocking=True)
    padded = None if padded is None else starts
    # Mamba layers tell sequences apart by `seq_idx`, which is made from this number; without it their state leaks.
    whole: Any = {"total_tokens": num_tokens} if "total_tokens" in PackedSeqParams.__dataclass_fields__ else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,  # pyright: ignore[reportArgumentType]  # Megatron's hint leaves out None
        cu_seqlens_kv_padded=padded,  # pyright: ignore[reportArgumentType]
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        **whole,
    )


def packed_params_of(slots: Slots, *, settings: Settings) -> list[Any]:
    """Megatron's PackedSeqParams of each micro-batch, on the device; without context parallelism."""
    packs = pack(slots, topology=settings.topology, few_shapes=settings.few_shapes, pin_memory=False)
    return [packed_seq_params(starts) for starts in packs]


def called_with_packs(params: Any, *, model: Any) -> AbstractContextManager[None]:
    """Have a chunk called with PackedSeqParams in this context; one that takes none is refused."""
    reason = "so that samples of a pack would attend to one another"
    _refuse_without(model, "packed_seq_params", reason, "train without --balance-unpad")
    return _called_with(model, packed_seq_params=params)


def _refuse_without(model: Any, name: str, reason: str, instead: str) -> None:
    from megatron.core.utils import unwrap_model

    inner: Any = unwrap_model(model)
    if name not in inspect.signature(inner.forward).parameters:
        raise BalanceError(
            f"{type(inner).__name__}.forward takes no {name}, {reason}: add the parameter and hand it to the decoder, "
            f"or {instead}."
        )


@contextlib.contextmanager
def _called_with(model: Any, **added: Any) -> Iterator[None]:
    from megatron.core.utils import unwrap_model

    def add(_: Any, positional: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return positional, keywords | added

    inner: Any = unwrap_model(model)  # without the wrappers for data parallelism and precision
    handle = inner.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
