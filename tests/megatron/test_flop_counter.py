"""Our FLOPs against torch's own count of what a real GPTModel computes, its shape read from its configuration.

torch's FlopCounterMode sees every GEMM of a forward pass, and all of a score matrix; ours counts the causal half of it.
So of `a*L + b*L²`, solved from two lengths, torch's `a` is ours, and its `b` is twice ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.utils.flop_counter import FlopCounterMode

from megatron_balance import ModelShape, calculate_fwd_flops

LENGTHS = (32, 96)
VOCABULARY = 96
DENSE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 80,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,  # as kv_channels: Megatron's local attention takes its output for that wide
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "grouped queries, output gate": DENSE
    | {"num_query_groups": 2, "gated_linear_unit": False, "attention_output_gate": True},
    "experts in every second layer": DENSE | EXPERTS | {"num_query_groups": 2, "moe_layer_freq": [0, 1]},
    "latent attention": DENSE | LATENT,
    "latent attention without q-LoRA, experts": DENSE | LATENT | EXPERTS | {"q_lora_rank": None},
    "multi-token prediction": DENSE | {"mtp_num_layers": 1},
}


def take_channels(init: Any) -> Any:
    """Megatron's local attention is not told the channels of latent attention, and needs none to multiply."""
    return lambda self, *keywords, k_channels=None, v_channels=None, **arguments: init(self, *keywords, **arguments)


def counts(model: dict[str, Any]) -> dict[str, list[int]]:
    """torch's and our FLOPs of one forward pass over a sequence of each length."""
    kind = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    config = kind(**model)
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp: Any = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    built = GPTModel(
        config, spec, VOCABULARY, max_sequence_length=LENGTHS[-1], position_embedding_type="rope", mtp_block_spec=mtp
    )
    shape = ModelShape.from_transformer_config(config, padded_vocab_size=VOCABULARY)
    counted = []
    for length in LENGTHS:
        tokens = torch.arange(length).unsqueeze(0)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            built(tokens, tokens, mask, labels=tokens)
        counted.append(counter.get_total_flops())
    return {"torch": counted, "ours": [calculate_fwd_flops([length], shape) for length in LENGTHS]}


def counts_of_models() -> dict[str, dict[str, list[int]]]:
    """Each model's counts."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    DotProductAttention.__init__ = take_channels(DotProductAttention.__init__)
    return {name: counts(model) for name, model in MODELS.items()}


def linear_and_quadratic(counts: list[int]) -> tuple[float, float]:
    (short, short_flops), (long, long_flops) = zip(LENGTHS, counts, strict=True)
    quadratic = (long_flops / long - short_flops / short) / (long - short)
    return short_flops / short - quadratic * short, quadratic


def test_torch_counts_the_same() -> None:
    (counted,) = run_ranks(1, "test_flop_counter:counts_of_models", imports=())
    for model, counts in counted.items():
        linear, quadratic = linear_and_quadratic(counts["torch"])
        assert linear_and_quadratic(counts["ours"]) == pytest.approx((linear, quadratic / 2), rel=1e-9), model
