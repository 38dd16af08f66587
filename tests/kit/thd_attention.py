"""Packed (thd) attention for Megatron's local layers, where Transformer Engine is not installed, as on a CPU.

Megatron's own `DotProductAttention` refuses packed sequences. `ThdAttention` takes its place, with torch's
scaled_dot_product_attention, one sequence after the other. Use it with

    --transformer-impl local --spec thd_attention thd_block_spec

Shapes: t tokens of the micro-batch on this context-parallel rank, n attention heads and g query groups
of this tensor-parallel rank, d channels a head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def thd_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's local decoder layers with `ThdAttention` and norms that know sequence parallelism.

    Args:
        config: the model's configuration (GPTModelConfig or TransformerConfig).
        vp_stage: the model chunk under a virtual pipeline.
    """
    transformer = getattr(config, "transformer", config)
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization=transformer.normalization, vp_stage=vp_stage
    )
    block.layer_specs = [thd_layer_spec(layer) for layer in block.layer_specs or []]
    block.layer_norm = build_norm
    return block


def thd_layer_spec(layer: ModuleSpec) -> ModuleSpec:
    """One of Megatron's local layers with `ThdAttention` and norms that know sequence parallelism.

    Args:
        layer: spec of a TransformerLayer with self-attention. It is not changed: layers share their specs.
    """
    layer = copy.deepcopy(layer)
    submodules: Any = layer.submodules
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, build_norm)
    submodules.self_attention.submodules.core_attention = ThdAttention
    return layer


def build_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """torch's LayerNorm or RMSNorm, its weights marked for the gradient sum of sequence parallelism.

    Megatron's `WrappedTorchNorm` asserts that sequence parallelism is off because the torch modules do
    not carry the mark. The mark is all they lack (megatron.core.distributed.finalize_model_grads).
    """
    norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    module = norm(hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return module


class ThdAttention(MegatronModule):
    """Causal attention within each sequence of a packed micro-batch, with a sliding window where the layer has one.

    Raises:
        NotImplementedError: the configuration asks for attention dropout.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(f"--attention-dropout is {dropout}: ThdAttention has none; set it to 0.")
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Tokens a query sees, itself included; Megatron's left bound leaves it out and is -1 for none.
        self.window = config.window_size[0] + 1 if windowed else 0
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of a packed micro-batch, or of an ordinary batch where there is none.

        Args:
            query: `[t, n, d]` packed, `[s, b, n, d]` otherwise.
            key: `[t, g, d]` or `[s, b, g, d]`.
            value: as key.
            packed_seq_params: starts of the sequences in the whole micro-batch.

        Returns:
            `[t, n*d]` packed, `[s, b, n*d]` otherwise.
        """
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        # Padding follows the real tokens of its sequence, which do not attend to it.
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens
        cp_group = self._group_of(packed_seq_params)
        if cp_group is not None:
            return self._attend_context_parallel(query, key, value, cu_seqlens.tolist(), cp_group)
        # The last sequence may end before the micro-batch does: what follows is padding, cut off below.
        bounds = [*cu_seqlens.tolist(), query.shape[0]]
        lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True) if end > start]
        pieces = [
            self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in sequence)).squeeze(0).transpose(0, 1)
            for sequence in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(1)

    def _group_of(self, packed_seq_params: PackedSeqParams) -> dist.ProcessGroup | None:
        """The ranks that share this micro-batch, None for one rank; those of the configuration where it names none."""
        if getattr(packed_seq_params, "local_cp_size", None) is None:
            return self.cp_group
        return packed_seq_params.cp_group

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last s positions of `[b, g, k, d]` keys and values: `[b, n, s, d]` of queries and of the result."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        if num_queries == 0:
            return query
        if not self.window and num_queries == num_keys:
            return self._attend_block(query, key, value)
        positions = torch.arange(num_keys, device=query.device)
        distance = positions[num_keys - num_queries :, None] - positions
        mask = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        return self._attend_block(query, key, value, mask)

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[b, n, s, d]` of queries against `[b, g, k, d]` of keys and values: `[b, n, s, d]`."""
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend_context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Every rank gathers all keys and values, and attends with the two chunks of each sequence it holds."""
        cp_size, cp_rank = group.size(), group.rank()
        lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        keys = gather_sequences(key, bounds=bounds, group=group).split(lengths)
        values = gather_sequences(value, bounds=bounds, group=group).split(lengths)
        pieces: list[Tensor] = []
        for chunk_query, index, start in split_sequences(query, bounds=bounds, cp_size=cp_size, cp_rank=cp_rank):
            end = start + chunk_query.shape[0]
            chunk = (chunk_query, keys[index][:end], values[index][:end])
            out = self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in chunk))
            pieces.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(pieces).flatten(1)


def partitioned_indices(bounds: Sequence[int], *, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the micro-batch that a rank holds, in its order.

    Args:
        bounds: `[num_sequences + 1]` starts of the sequences, each a multiple of `2*cp_size` tokens long.
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Returns:
        `[total_tokens / cp_size]` int64.
    """
    pieces: list[Tensor] = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunk = (end - start) // (2 * cp_size)
        assert chunk * 2 * cp_size == end - start, (
            f"a sequence of {end - start} tokens does not split into 2*{cp_size} chunks"
        )
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(pieces)


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """`partitioned_indices` under the name and signature of Transformer Engine's extension."""
    indices = partitioned_indices(cu_seqlens.tolist(), cp_size=cp_size, cp_rank=cp_rank)
    assert indices.numel() * cp_size == total_tokens, f"sequences end at {cu_seqlens[-1]}, not at {total_tokens}"
    return indices.to(cu_seqlens.device)


def split_sequences(
    local: Tensor, *, bounds: Sequence[int], cp_size: int, cp_rank: int
) -> Iterator[tuple[Tensor, int, int]]:
    """The chunks of a rank, one after another.

    Args:
        local: `[total_tokens / cp_size, ...]`, what the rank holds.
        bounds: as in `partitioned_indices`.
        cp_size: context-parallel ranks.
        cp_rank: this rank.

    Yields:
        The chunk, the index of its sequence and where the chunk starts in it.
    """
    chunks = [(end - start) // (2 * cp_size) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    # Split at once: the gradient of each slice by itself would be as long as the whole.
    pieces = iter(local.split([chunk for chunk in chunks for _ in range(2)]))
    for sequence, chunk in enumerate(chunks):
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            yield next(pieces), sequence, index * chunk


def gather_sequences(local: Tensor, *, bounds: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' chunks in the order of the micro-batch; gradients flow back to the rank they came from.

    Args:
        local: `[total_tokens / cp_size, ...]`.
        bounds: as in `partitioned_indices`.
        group: the context-parallel ranks.

    Returns:
        `[total_tokens, ...]`.
    """
    order = torch.cat([partitioned_indices(bounds, cp_size=group.size(), cp_rank=rank) for rank in range(group.size())])
    inverse = torch.argsort(order).to(local.device)
    return _AllGather.apply(local, group).index_select(0, inverse)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    """Concatenation over ranks; the gradient is summed over ranks, and each takes its own part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Not every supported torch has reduce_scatter for gloo; a sum and a slice are equivalent.
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
