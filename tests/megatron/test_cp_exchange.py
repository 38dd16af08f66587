"""Numbers that two context-parallel ranks exchange in Megatron's own mixers, against those that plans count.

Messages are counted where Megatron hands them to torch, on real groups of CPU ranks, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gloo_ranks import run_ranks

from megatron_balance import ModelShape
from megatron_balance.model.exchange import exchange_numbers
from megatron_balance.model.flops import Layer

TOKENS = 8
"""Of each rank."""

SHAPE = ModelShape(
    hidden_size=16,
    num_layers=1,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=8,
    padded_vocab_size=16,
    gated_linear_unit=False,
    linear_key_head_dim=4,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=2,
    mamba_state_dim=4,
    mamba_head_dim=2,
    mamba_num_groups=2,
    mamba_num_heads=4,
    multi_latent_attention=True,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    dsa_indexer_topk=4,
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=8,
    dsa_indexer_loss=True,
)


def counted(run: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Numbers for each token of this rank that it hands to all-to-alls and gathers in a forward and backward pass."""
    from megatron.core.tensor_parallel import mappings

    places = {
        "all_to_all_single": torch.distributed,
        "dist_all_gather_func": mappings,
        "dist_reduce_scatter_func": mappings,
    }
    numbers, stock = dict.fromkeys(places, 0), {name: getattr(module, name) for name, module in places.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(output: torch.Tensor, source: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
            numbers[name] += min(output.numel(), source.numel())  # the part of one rank
            return stock[name](output, source, *rest, **keywords)

        return call

    for name, module in places.items():
        setattr(module, name, counting(name))
    run().sum().backward()
    for name, module in places.items():
        setattr(module, name, stock[name])
    return {name: number / TOKENS for name, number in numbers.items()}


def exchanged() -> dict[str, dict[str, float]]:
    """Counts by mixer, on each of two ranks."""
    from families import NormColumnParallelLinear, stand_in_for_delta_net
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
    from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
    from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from thd_attention import Norm

    stand_in_for_delta_net()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    group: Any = parallel_state.get_context_parallel_group()
    names = [name for name in vars(SHAPE) if name.startswith("linear_") and not name.endswith("freq")]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SHAPE.hidden_size,
        num_attention_heads=2,
        context_parallel_size=2,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        **{name: getattr(SHAPE, name) for name in names},
    )
    parts = GatedDeltaNetSubmodules(in_proj=NormColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    net = GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    hidden = torch.ones(TOKENS, 1, SHAPE.hidden_size, requires_grad=True)

    heads, inner = SHAPE.mamba_num_heads, SHAPE.mamba_num_heads * SHAPE.mamba_head_dim
    states = SHAPE.mamba_num_groups * SHAPE.mamba_state_dim
    empty = torch.empty(0)
    mamba = MambaContextParallel(
        group,
        d_inner_local_tp=inner,
        nheads_local_tp=heads,
        ngroups_local_tp=SHAPE.mamba_num_groups,
        d_state=SHAPE.mamba_state_dim,
        conv1d_weight_cp1=empty,
        conv1d_bias_cp1=empty,
        conv1d_padding=0,
        dt_bias_cp1=empty,
        A_log_cp1=empty,
        D_cp1=empty,
        D_has_hdim=False,
    )
    projected = torch.ones(TOKENS, 1, 2 * inner + 2 * states + heads, requires_grad=True)

    def run_mamba() -> torch.Tensor:
        z, x, *_ = mamba.pre_conv_ssm(projected).split([inner // 2, inner // 2, states + heads // 2], dim=-1)
        return mamba.post_conv_ssm(z * x)

    # DSAttention needs kernels of a GPU; it gathers its one latent key and the indexer's by this function.
    latent = torch.ones(TOKENS, 1, SHAPE.kv_lora_rank + SHAPE.qk_pos_emb_head_dim, requires_grad=True)
    indexer = torch.ones(TOKENS, 1, SHAPE.dsa_indexer_head_dim, requires_grad=True)

    def run_sparse() -> torch.Tensor:
        return sum((gather_from_sequence_parallel_region(key, group=group).sum() for key in (latent, indexer)), latent)

    return {
        "gated_delta_net": counted(lambda: net(hidden, None)[0]),
        "mamba": counted(run_mamba),
        "dsa": counted(run_sparse),
    }


def test_mixers_exchange_what_plans_count() -> None:
    for rank in run_ranks(2, "test_cp_exchange:exchanged", imports=()):
        for mixer, numbers in rank.items():
            ours = exchange_numbers(SHAPE, [Layer(mixer, None)])
            assert ours["cp_exchange"] == 0
            assert ours["cp_all_to_all"] == numbers["all_to_all_single"], mixer
            gathered = numbers["dist_all_gather_func"] + numbers["dist_reduce_scatter_func"]
            assert ours["cp_all_gather"] == gathered, mixer
