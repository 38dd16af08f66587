"""The model families of 2026 on a CPU: Megatron's own layers, with stand-ins for kernels that need a GPU alone.

`--spec families layers` has gated delta nets, sparse attention, attention with sinks and experts; `--spec families
hybrid_stack` Mamba hybrids. A stand-in computes what the kernel documents, one sequence after the other, so that
whatever leaks from one to the next shows in the loss. `kernels` installs all of them in a rank, before it trains.
"""

import functools
import runpy
import sys
import types

import pretrain_sft
import pytest
import torch
from megatron.core import mpu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.training import get_args
from stand_ins import change_rows
from thd_attention import Norm, ThdAttention, thd_get_partitioned_indices, thd_layer_spec
from torch.nn.functional import conv1d, silu, softplus


def kernels(watch=None):
    """Let all families train on a CPU."""
    stand_in_for_delta_net()
    stand_in_for_mamba()
    stand_in_for_sparse_attention()
    if "--hybrid-layer-pattern" in sys.argv:
        from megatron.training import argument_utils

        # As pretrain_hybrid.py, where pretrain_sft has the configuration of a GPT model.
        argument_utils.gpt_config_from_args = argument_utils.hybrid_config_from_args
        globals()["hybrid_stack"] = hybrid_layers()


def positions_of_three_dimensions(watch):
    """Rows whose positions have three dimensions, and a script that hands them to the model, as for image and text."""
    get_batch = pretrain_sft.get_batch
    divisors = torch.tensor([1, 2, 3])  # as if an image's tokens stood in rows and columns

    def batch_with_positions(data_iterator):
        rows = [next(data_iterator)] if mpu.get_tensor_model_parallel_rank() == 0 else None
        positions = None if rows is None else rows[0].pop("position_ids").movedim(0, 1).contiguous()  # [3, 1, t]
        batch = get_batch(None if rows is None else iter([rows[0] | {"position_ids": positions[0]}]))
        if get_args().tensor_model_parallel_size > 1:
            if positions is None:
                positions = torch.empty(len(divisors), *batch["tokens"].shape, dtype=torch.int64)
            group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
            torch.distributed.broadcast(positions, source, group)
        return batch | {"position_ids": positions}

    change_rows(lambda data, index, row: row | {"position_ids": row["position_ids"] // divisors[:, None]})
    pretrain_sft.get_batch = batch_with_positions


# The layers, by Megatron's own functions.


def layers(config, vp_stage=None):
    """The decoder block of a model with an experimental attention variant, or of an ordinary one."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    transformer = getattr(config, "transformer", config)
    variants._get_self_attention_module_spec = _self_attention
    specs = variants.get_transformer_layer_with_experimental_attention_variant_spec(transformer, backend=CpuBackend())
    first = get_transformer_layer_offset(transformer, vp_stage=vp_stage)
    here = specs[first : first + get_num_layers_to_build(transformer, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(layer_specs=here, layer_norm=Norm)


class CpuBackend(LocalSpecProvider):
    def linear(self):
        return ReplicatedLinear

    def column_parallel_layer_norm_linear(self):
        return NormColumnParallelLinear

    def layer_norm(self, *_, **__):
        return Norm

    def core_attention(self):
        return ThdAttention


def _self_attention(config, backend):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    attention = thd_layer_spec(spec).submodules.self_attention
    for name in ("q_layernorm", "k_layernorm"):
        if config.qk_layernorm:
            setattr(attention.submodules, name, Norm)
    attention.metainfo["fuse_input_layernorm"] = False
    return attention


class NormColumnParallelLinear(ColumnParallelLinear):
    """The norm before a projection, and the projection, as Transformer Engine has them in one module."""

    def __init__(self, input_size, output_size, *, config, **keywords):
        keywords.pop("name", None)
        super().__init__(input_size, output_size, config=config, **keywords)
        self.norm = Norm(config, input_size, eps=config.layernorm_epsilon)

    def forward(self, x, *positional, **keywords):
        return super().forward(self.norm(x), *positional, **keywords)


class ReplicatedLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank holds whole, in the form of Transformer Engine's."""

    def __init__(self, input_size, output_size, *, config, init_method, **_):
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x), None


# The kernels.


def stand_in_for_delta_net():
    """flash-linear-attention's convolution, norm and gated delta rule."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    whole = common.torch_chunk_gated_delta_rule

    def gated_delta_rule(q, k, v, *, cu_seqlens, **keywords):
        g, beta = keywords.pop("g"), keywords.pop("beta")
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        pieces = [
            whole(*(x[:, start:end] for x in (q, k, v)), g=g[:, start:end], beta=beta[:, start:end], **keywords)[0]
            for start, end in zip(bounds[:-1], bounds[1:], strict=True)
            if end > start
        ]
        return torch.cat(pieces, dim=1), None

    def causal_conv1d(x, weight, bias, cu_seqlens, **_):
        bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        pieces = [_convolved(x[:, start:end], weight, bias) for start, end in zip(bounds, bounds[1:], strict=False)]
        return torch.cat(pieces, dim=1), None

    def l2norm(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    for module in (common, gdn):
        module.causal_conv1d = causal_conv1d
        module.chunk_gated_delta_rule = gated_delta_rule
    common.l2norm, common.HAVE_FLA = l2norm, True


def _convolved(x, weight, bias):
    """Causal depthwise convolution of one sequence `[b, s, c]` by weights `[c, w]`, then SiLU."""
    width = weight.shape[1]
    out = conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=weight.shape[0])
    return silu(out[..., : x.shape[1]]).transpose(1, 2)


def stand_in_for_sparse_attention():
    """The Hadamard transform of sparse attention's indexer, in any precision, and scores without ties.

    ReLU gives many keys the score 0, and topk chooses among equal scores by their place in the micro-batch; a leaky one
    ranks them, so that a run is comparable with one of other micro-batches.
    """
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa

    absorbed_mla.TELinear = ReplicatedLinear  # it asks which class a projection is

    @functools.cache
    def hadamard(size):
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix * size**-0.5

    scores = dsa._compute_index_scores

    def scores_without_ties(*positional, **keywords):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dsa.torch, "relu", torch.nn.functional.leaky_relu)
            return scores(*positional, **keywords)

    dsa._compute_index_scores = scores_without_ties
    dsa.rotate_activation = lambda x: x @ hadamard(x.shape[-1]).to(x.dtype)


def stand_in_for_mamba():
    """mamba-ssm's fused convolution and scan, and its norm of groups."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    mamba_context_parallel.tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
    mamba_context_parallel.is_te_min_version = lambda *_, **__: True
    mamba_mixer.mamba_split_conv1d_scan_combined = _mamba_scan
    mamba_mixer.ExtendedRMSNorm = GroupRMSNorm
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)


class GroupRMSNorm(torch.nn.Module):
    """RMSNorm within groups of channels; gates are applied before it."""

    def __init__(self, size, *, eps, group_size, dtype, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2) * self.weight


def _mamba_scan(zxbcdt, conv_weight, conv_bias, dt_bias, a, *, D, headdim, ngroups, seq_idx, **_):
    """Gated output `[b, s, h*p]` of Mamba 2 for projections `[b, s, z x B C dt]`; no state passes between sequences.

    Source: Dao and Gu, Transformers are SSMs (2024), the quadratic form of section 4. Without `seq_idx` all tokens are
    one sequence, as for the kernel.
    """
    num_heads = len(a)
    inner, num_tokens = num_heads * headdim, zxbcdt.shape[1]
    state = (zxbcdt.shape[2] - 2 * inner - num_heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, num_heads], dim=-1)
    lengths = [num_tokens] if seq_idx is None else torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    if sum(lengths) != num_tokens:
        raise ValueError(f"seq_idx has {sum(lengths)} tokens, the micro-batch {num_tokens}")
    pieces = []
    for one_xbc, one_dt in zip(xbc.split(lengths, dim=1), dt.split(lengths, dim=1), strict=True):
        x, b, c = _convolved(one_xbc, conv_weight, conv_bias).split([inner, ngroups * state, ngroups * state], dim=-1)
        x = x.unflatten(-1, (num_heads, headdim))
        b, c = (t.unflatten(-1, (ngroups, state)).repeat_interleave(num_heads // ngroups, dim=2) for t in (b, c))
        step = softplus(one_dt + dt_bias)  # [b, s, h]
        decay = (step * a).cumsum(1)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        between = (decay[:, :, None] - decay[:, None]).masked_fill(~causal[None, :, :, None], -torch.inf).exp()
        scores = torch.einsum("bqhn,bkhn->bqkh", c, b) * between
        y = torch.einsum("bqkh,bkh,bkhp->bqhp", scores, step, x) + D[:, None] * x
        pieces.append(y.flatten(-2))
    return torch.cat(pieces, dim=1) * silu(z)


def hybrid_layers():
    """Megatron's layers of hybrid models, on the projections, norms and attention of a CPU."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs

    on_cpu = {
        "TENorm": Norm,
        "TELinear": ReplicatedLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TELayerNormColumnParallelLinear": NormColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": ThdAttention,
    }
    experts = functools.partial(
        moe_module_specs.get_moe_module_spec, use_te=False, moe_grouped_gemm=False, num_experts=8
    )
    hybrid_block.TENorm = Norm
    with pytest.MonkeyPatch.context() as patched:
        for name, module in on_cpu.items():
            patched.setattr(transformer_engine, name, module)
        patched.setattr(moe_module_specs, "get_moe_module_spec", lambda **_: experts())
        return runpy.run_path(hybrid_layer_specs.__file__)["hybrid_stack_spec"]


def sequences_not_told_apart(watch):
    """A script whose PackedSeqParams lack `total_tokens`, and so `seq_idx`."""
    complete = pretrain_sft.packed_seq_params

    def without_seq_idx(batch):
        params = complete(batch)
        params.seq_idx = None
        return params

    pretrain_sft.packed_seq_params = without_seq_idx


def positions_of_own_tokens(watch):
    """A script that splits positions of three dimensions as it splits tokens."""
    get_batch = pretrain_sft.get_batch

    def batch_of_rank(data_iterator):
        batch = get_batch(data_iterator)
        return batch | {"position_ids": batch["position_ids"][..., : batch["tokens"].shape[-1]]}

    pretrain_sft.get_batch = batch_of_rank
