"""Packed (thd) attention for Megatron's local layers, where Transformer Engine is not installed, as on a CPU.

Megatron's own `DotProductAttention` refuses packed sequences. `ThdAttention` takes its place, by torch's
scaled_dot_product_attention of each sequence: `--transformer-impl local --spec thd_attention thd_block_spec`. Shapes: t
tokens of this context-parallel rank, n heads and g query groups of this tensor-parallel rank, d channels a head.
"""

import copy

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import pad, scaled_dot_product_attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def thd_block_spec(config, vp_stage=None):
    """Megatron's local decoder layers with `ThdAttention` and norms that know sequence parallelism."""
    transformer = getattr(config, "transformer", config)
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization=transformer.normalization, vp_stage=vp_stage
    )
    block.layer_specs = [thd_layer_spec(layer) for layer in block.layer_specs or []]
    block.layer_norm = Norm
    return block


def thd_layer_spec(layer):
    """One of them, from Megatron's own."""
    layer = copy.deepcopy(layer)  # layers share their specs
    submodules = layer.submodules
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, Norm)
    submodules.self_attention.submodules.core_attention = ThdAttention
    return layer


class Norm:
    """torch's LayerNorm or RMSNorm, its weights marked for the gradient sum of sequence parallelism.

    Megatron's `WrappedTorchNorm` asserts that sequence parallelism is off because the torch modules do
    not carry the mark. The mark is all they lack (megatron.core.distributed.finalize_model_grads).
    """

    def __new__(cls, config, hidden_size, eps=1e-05, **_):
        norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = norm(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


class ThdAttention(MegatronModule):
    """Causal attention within each sequence of a packed micro-batch, in a sliding window where the layer has one.

    Under `--softmax-type learnable` each head has a logit of its own in the softmax's denominator.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        self.cp_comm_type = cp_comm_type or "p2p"  # as Transformer Engine's; layers name it in a static group alone
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "it has no dropout"
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Tokens a query sees, itself included; Megatron's left bound leaves it out and is -1 for none.
        self.window = config.window_size[0] + 1 if windowed else 0
        self.softmax_scale = softmax_scale
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """`[t, n*d]` for queries `[t, n, d]` and keys `[t, g, d]` that are packed, and `[s, b, n*d]` for a batch."""
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        # Padding follows the real tokens of its sequence, which do not attend to it.
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens
        names_group = getattr(packed_seq_params, "local_cp_size", None) is not None
        cp_group = packed_seq_params.cp_group if names_group else self.cp_group
        if cp_group is not None and cp_group.size() > 1:  # dev names a group of one rank too
            if self.cp_comm_type == "a2a":
                return self._attend_by_heads(query, key, value, cu_seqlens.tolist(), cp_group)
            assert not self.window, f"Transformer Engine takes no window by {self.cp_comm_type}"
            return self._attend_context_parallel(query, key, value, cu_seqlens.tolist(), cp_group)
        return self._attend_each(query, key, value, cu_seqlens.tolist())

    def _attend_each(self, query, key, value, bounds, *, sinks=slice(None)):
        # The last sequence may end before the micro-batch does: what follows is padding, cut off below.
        bounds = [*bounds, query.shape[0]]
        lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True) if end > start]
        pieces = [
            self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in sequence), sinks=sinks).squeeze(0).transpose(0, 1)
            for sequence in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(1)

    def _attend(self, query, key, value, *, sinks=slice(None)):
        """The last s positions of `[b, g, k, d]` keys and values: `[b, n, s, d]` of queries and of the result."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        if num_queries == 0:
            return query
        heads, mask = query.shape[1] // key.shape[1], None
        plain = not self.window and self.softmax_offset is None
        if plain and num_queries < num_keys and query.shape[3] == value.shape[3]:
            key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
            return _AttendLast.apply(query, key, value, self.softmax_scale)
        if not plain or num_queries < num_keys:
            positions = torch.arange(num_keys, device=query.device)
            distance = positions[num_keys - num_queries :, None] - positions
            mask = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        if mask is not None and self.softmax_offset is not None:
            # One more key, of zeros, has the sink's logit and a value of zeros.
            bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            sink = self.softmax_offset[sinks, None, None].expand(-1, num_queries, 1)
            mask = torch.cat([bias.expand(len(sink), -1, -1), sink], dim=-1)[None]
            key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
        options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": heads > 1}
        return scaled_dot_product_attention(query, key, value, scale=self.softmax_scale, **options)

    def _attend_by_heads(self, query, key, value, bounds, group):
        """Every rank attends with all tokens and a part of the heads; in all-gathers what all-to-alls would send."""
        cp_size, cp_rank = group.size(), group.rank()
        parts = [partitioned_indices(bounds, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
        order = torch.argsort(torch.cat(parts)).to(query.device)
        heads = []
        for local in (query, key, value):
            assert local.shape[1] % cp_size == 0, f"{local.shape[1]} heads do not divide by {cp_size} ranks"
            heads.append(_AllGather.apply(local, group).index_select(0, order).chunk(cp_size, dim=1)[cp_rank])
        num_heads = query.shape[1] // cp_size
        out = self._attend_each(*heads, bounds, sinks=slice(cp_rank * num_heads, (cp_rank + 1) * num_heads))
        whole = torch.cat(_AllGather.apply(out, group).chunk(cp_size), dim=1)
        return whole.index_select(0, parts[cp_rank].to(query.device))

    def _attend_context_parallel(self, query, key, value, bounds, group):
        """Every rank gathers all keys and values, and attends with the two chunks of each sequence it holds."""
        cp_size, cp_rank = group.size(), group.rank()
        order = torch.cat([partitioned_indices(bounds, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)])
        lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        keys, values = (
            _AllGather.apply(local, group).index_select(0, torch.argsort(order).to(local.device)).split(lengths)
            for local in (key, value)
        )
        # Split at once: the gradient of each slice by itself would be as long as the whole.
        chunks = iter(query.split([length // (2 * cp_size) for length in lengths for _ in range(2)]))
        pieces = []
        for length, all_keys, all_values in zip(lengths, keys, values, strict=True):
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
                end = (index + 1) * length // (2 * cp_size)
                chunk = (next(chunks), all_keys[:end], all_values[:end])
                out = self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in chunk))
                pieces.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(pieces).flatten(1)


class _AttendLast(torch.autograd.Function):
    """Causal attention of the last queries: all keys before them, then the square with them, as one softmax.

    A mask would cost half as much again as the pairs do: the kernel computes what the mask hides.
    """

    @staticmethod
    def forward(ctx, query, key, value, scale):
        first = key.shape[2] - query.shape[2]
        blocks = ((key[:, :, :first], value[:, :, :first], False), (key[:, :, first:], value[:, :, first:], True))
        parts = [_flash(query, *block[:2], 0.0, block[2], scale=scale) for block in blocks]
        log_sum = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(part * (own_sum - log_sum).exp().unsqueeze(-1).to(part.dtype) for part, own_sum in parts)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        query, key, value, out, log_sum = ctx.saved_tensors
        first = key.shape[2] - query.shape[2]
        (of_query, *before), (of_query_too, *square) = (
            _flash_backward(
                grads[0], query, key[:, :, part], value[:, :, part], out, log_sum, 0.0, causal, scale=ctx.scale
            )
            for part, causal in ((slice(None, first), False), (slice(first, None), True))
        )
        of_key, of_value = (torch.cat(both, dim=2) for both in zip(before, square, strict=True))
        return of_query + of_query_too, of_key, of_value, None


def partitioned_indices(bounds, *, cp_size, cp_rank):
    """Positions in the micro-batch that a rank holds, in its order: chunks r and 2*cp-1-r of each sequence."""
    pieces = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunk, rest = divmod(end - start, 2 * cp_size)
        assert not rest, f"a sequence of {end - start} tokens does not split into 2*{cp_size} chunks"
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(pieces)


def thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank):
    """`partitioned_indices` under the name and signature of Transformer Engine's extension."""
    indices = partitioned_indices(cu_seqlens.tolist(), cp_size=cp_size, cp_rank=cp_rank)
    assert indices.numel() * cp_size == total_tokens, f"sequences end at {cu_seqlens[-1]}, not at {total_tokens}"
    return indices.to(cu_seqlens.device)


class _AllGather(torch.autograd.Function):
    """Concatenation over ranks; the gradient is summed over ranks, and each takes its own part."""

    @staticmethod
    def forward(ctx, local, group):
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, *grads):
        # Not every supported torch has reduce_scatter for gloo; a sum and a slice are equivalent.
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
