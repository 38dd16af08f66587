"""Masks padding, filler and dummies from MoE routers, which then count real tokens only.

Megatron's models take a `padding_mask` and hand it to the routers, through recomputation too, where it is left out of
auxiliary losses, z-loss and the counts for the expert bias. No script passes one, so a forward pre-hook on the model
adds that of the micro-batch. This module works around the errors of Megatron 0.17 to 0.19 with a mask:

* the model expects the tokens of its context-parallel rank, and GPTModel splits them over sequence-parallel ranks on
  the first pipeline stage only;
* `_apply_expert_bias` combines a mask of tokens with a map of tokens × experts, which fails;
* a micro-batch without a real token divides by zero, and ranks with unequal padding weigh their parts unequally
  (`get_tokens_per_expert_and_token_count`);
* multi-token prediction shifts the mask by one with the tokens, which counts the last padding token of a sequence in
  place of its last real one, and takes boundaries of the whole micro-batch for a share of it.

Multi-token prediction layers of 0.17 take no mask: their routers count padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Function
from megatron_balance.mcore.microbatch.model_keywords import called_with, takes_keyword, unwrapped
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.samples.padding import padding_mask
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class RouterPadding:
    """Padding masks for the model chunks of this rank.

    Attributes:
        topology: the ranks.
        leaf: rank of this one among data- and context-parallel ranks, context-parallel ones innermost.
        tp_rank: tensor-parallel rank of this one.
    """

    topology: Topology
    leaf: int
    tp_rank: int

    @classmethod
    def of_this_rank(cls, topology: Topology) -> RouterPadding:
        """The masks of this rank, by Megatron's groups."""
        from megatron.core import parallel_state

        dp_group: Any = parallel_state.get_data_parallel_group()
        return cls(
            topology,
            leaf=dp_group.rank() * topology.cp_size + parallel_state.get_context_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        )

    def masks(self, step: BalancedStep) -> list[Tensor]:
        """True where a token is padding, on the device: `[1, t]` a micro-batch, t tokens of this context-parallel rank.

        One copy to the device serves the step.
        """
        assert step.sequence_lengths is not None, "ranks that read no data are sent them"
        sizes = step.cp_sizes or [self.topology.cp_size] * step.num_microbatches
        masks = [
            padding_mask(
                lengths,
                num_tokens=num_tokens,
                token_multiple=self.topology.at_cp_size(size).token_multiple,
                cp_size=size,
                cp_rank=self.leaf % size,
            )
            for lengths, num_tokens, size in zip(step.sequence_lengths, step.microbatch_tokens, sizes, strict=True)
        ]
        whole = torch.from_numpy(np.concatenate(masks)).pin_memory().cuda(non_blocking=True)
        return list(whole.unsqueeze(0).split([mask.size for mask in masks], dim=1))

    def given(self, mask: Tensor, *, model: Any) -> AbstractContextManager[None]:
        """Have the model called with a mask, one of `masks`, in this context."""
        inner = unwrapped(model)
        share = mask if _splits_sequence(inner) or not self.topology.sequence_parallel else self._share(mask)
        return called_with(inner, padding_mask=share)

    def _share(self, mask: Tensor) -> Tensor:
        """Of this sequence-parallel rank."""
        return mask.chunk(self.topology.tp_size, dim=1)[self.tp_rank]


def check_takes_mask(chunks: Any) -> None:
    """Refuse a model that takes no padding mask.

    Args:
        chunks: the model, or a list of its chunks under a virtual pipeline.

    Raises:
        BalanceError: on every rank; names the class.
    """
    for chunk in chunks if isinstance(chunks, Sequence) else [chunks]:
        inner = unwrapped(chunk)
        if not takes_keyword(inner, "padding_mask"):
            raise BalanceError(
                f"{type(inner).__name__}.forward takes no padding_mask, without which MoE routers count padding in "
                "--moe-aux-loss-coeff, --moe-z-loss-coeff and --moe-router-enable-expert-bias: add the parameter and "
                "hand it to the decoder, train without these flags, or without --balance-*."
            )


def expert_bias_of_real_tokens(apply_expert_bias: Function) -> Function:
    """`TopKRouter._apply_expert_bias` that leaves padding out of a map `[num_tokens, num_experts]`."""

    @functools.wraps(apply_expert_bias)
    def wrapper(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> Any:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        return apply_expert_bias(router, routing_map)

    return wrapper


def counts_of_real_tokens(count: Function) -> Function:
    """`get_tokens_per_expert_and_token_count` with at least one token, and the same number on every rank of the group.

    An auxiliary loss is a sum over the ranks of `reduce_group`, each of which scales its part by its own number of
    tokens. The mean is returned instead of that number, so that all parts weigh the same.
    """

    @functools.wraps(count)
    def wrapper(*positional: Any, with_padding_mask: bool = False, **keywords: Any) -> Any:
        per_expert, own, total = count(*positional, with_padding_mask=with_padding_mask, **keywords)
        if not with_padding_mask:
            return per_expert, own, total
        # Whole: Transformer Engine from 2.18 takes no other count in its fused loss (csrc/extensions/router.cpp).
        total = total.round().to(torch.int64).clamp(min=1)
        return per_expert, total / keywords["reduce_group"].size(), total

    return wrapper


def embeddings_with_mask_in_place(get_embeddings: Function) -> Function:
    """`MultiTokenPredictionLayer._get_embeddings` that shifts tokens and positions, and not the padding mask."""

    @functools.wraps(get_embeddings)
    def wrapper(*positional: Any, padding_mask: Tensor | None = None, **keywords: Any) -> Any:
        if padding_mask is None:
            return get_embeddings(*positional, **keywords)
        input_ids, position_ids, _, *rest = get_embeddings(*positional, **keywords)
        return input_ids, position_ids, padding_mask, *rest

    return wrapper


def _splits_sequence(model: Any) -> bool:
    """True if the model splits a mask over sequence-parallel ranks itself."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    return isinstance(model, GPTModel) and bool(model.pre_process)
